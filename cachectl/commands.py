"""What each command of `cachectl` asks of the worker and shows. True means done, False means refused."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from cachectl import render
from cachectl.asking import Asked, all_slots, ask, parsed, show
from cachectl.choosing import chosen
from cachectl.events import events
from cachectl.live import top, watch
from cachectl.warm import APIS, warm
from protocol.control import (
    Difference,
    Explanation,
    Removed,
    SlotInfo,
    Stats,
    Transferred,
    TreeNode,
    Verifications,
)
from protocol.control_client import ControlClient
from protocol.sizes import parse_size

POLL_SECONDS = 0.1
DEFAULT_URL = "http://127.0.0.1:8080"
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True, slots=True)
class CommandLine:
    """One command: what it is for, what it takes and what it does."""

    summary: str
    run: Callable[[ControlClient, Asked], bool]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def stats(client: ControlClient, asked: Asked) -> bool:
    answer = ask(client, Stats, "stats")
    show(asked, asdict(answer), lambda: render.stats(answer))
    return True


def list_slots(client: ControlClient, asked: Asked) -> bool:
    slots = list(all_slots(client))
    show(asked, [asdict(slot) for slot in slots], lambda: render.slots(slots))
    return True


def tree(client: ControlClient, asked: Asked) -> bool:
    data = client.ask("tree")
    nodes = parsed(list[TreeNode], "tree", data.get("nodes") if isinstance(data, dict) else None)
    show(asked, [asdict(node) for node in nodes], lambda: render.tree(nodes))
    return True


def show_slot(client: ControlClient, asked: Asked) -> bool:
    slot = ask(client, SlotInfo, "show", slot=asked.slot)
    show(asked, asdict(slot), lambda: render.slot(slot))
    return True


def explain(client: ControlClient, asked: Asked) -> bool:
    answer = ask(client, Explanation, "explain", request_id=asked.request_id)
    show(asked, asdict(answer), lambda: render.explanation(answer))
    return True


def diff(client: ControlClient, asked: Asked) -> bool:
    answer = ask(client, Difference, "diff", a=_conversation(asked.a), b=_conversation(asked.b))
    show(asked, asdict(answer), lambda: render.difference(answer, asked.a, asked.b))
    return True


def evict(client: ControlClient, asked: Asked) -> bool:
    """Refused as a whole for an unknown slot; busy and pinned ones stay, and are named."""
    which = chosen(client, asked)
    answer = ask(client, Removed, "evict", **which, dry_run=asked.dry_run)
    show(asked, asdict(answer), lambda: render.evicted(answer))
    named = which["slots"] if asked.digest is not None else asked.slots
    return set(named) <= set(answer.removed)


def flush(client: ControlClient, asked: Asked) -> bool:
    answer = ask(client, Removed, "flush", dry_run=asked.dry_run)
    show(asked, asdict(answer), lambda: render.flushed(answer))
    return True


def verify(client: ControlClient, asked: Asked) -> bool:
    """Refused if a hit had other bits than a cold run. `--wait` first lets the worker finish those to come."""
    while True:
        answer = ask(client, Verifications, "verify")
        if not asked.wait or not answer.pending:
            break
        time.sleep(POLL_SECONDS)
    show(asked, asdict(answer), lambda: render.verifications(answer))
    return not answer.mismatched


def pin(client: ControlClient, asked: Asked) -> bool:
    """`pin` and `unpin`."""
    slot = ask(client, SlotInfo, asked.command, slot=asked.slot)
    show(asked, asdict(slot), lambda: f"{asked.command}ned slot {slot.slot} ({slot.tokens} tokens)")
    return True


def export(client: ControlClient, asked: Asked) -> bool:
    """The worker writes the files, as its own user."""
    answer = ask(client, Transferred, "export", folder=str(asked.folder.absolute()), slots=asked.slots)
    show(asked, asdict(answer), lambda: render.transferred(answer, "exported"))
    return True


def import_files(client: ControlClient, asked: Asked) -> bool:
    """Refused if a file was left that is not there already."""
    answer = ask(client, Transferred, "import", folder=str(asked.folder.absolute()))
    show(asked, asdict(answer), lambda: render.transferred(answer, "imported"))
    return not set(answer.refused) - {"known"}


def _takes_slot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slot", type=int, metavar="SLOT")


def _takes_slots(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    # Without a default of its own an empty list counts as given, and the group as satisfied.
    which.add_argument("slots", type=int, nargs="*", metavar="SLOT", default=())
    which.add_argument("--digest", metavar="D", help="the one whose digest begins like this")
    which.add_argument(
        "--older", type=_span, metavar="AGE", help="all not used for so long, such as 90s, 1h or 2d"
    )
    which.add_argument("--tenant", metavar="T", help="all of one tenant")
    which.add_argument("--to", type=_size, metavar="SIZE", help="those used longest ago, until the rest hold SIZE")
    _takes_dry_run(parser)


def _takes_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="on the worker's machine")


def _takes_folder_and_slots(parser: argparse.ArgumentParser) -> None:
    _takes_folder(parser)
    parser.add_argument("slots", type=int, nargs="+", metavar="SLOT")


def _takes_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and leave it")


def _takes_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="until none is pending")


def _takes_past(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--past", type=_count, default=0, metavar="N", help="begin with the last N (default: %(default)d)"
    )


def _takes_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="as in the response header x-request-id")


def _takes_two(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a slot, or a request id (digits alone are a slot)")


def _takes_prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a request or messages as JSON, or a system text")
    parser.add_argument(
        "--url", default=DEFAULT_URL, metavar="URL", help="where the gateway listens (default: %(default)s)"
    )
    parser.add_argument("--api", choices=APIS, help="of a request (default: what its fields look like)")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="holds the key of the tenant to warm for"
    )


def _span(text: str) -> float:
    """Seconds of `90s`, `1h`; of a bare number too."""
    unit = text[-1:] if text[-1:] in _SPANS else "s"
    seconds = float(text.removesuffix(unit)) * _SPANS[unit]
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be an age, such as 90s, 1h or 2d")
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return count


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    assert isinstance(size, int)
    return size


COMMANDS = {
    "stats": CommandLine("what is held and what happened since the worker started", stats),
    "list": CommandLine("all snapshots, one a line", list_slots),
    "show": CommandLine("all there is to know of one slot", show_slot, _takes_slot),
    "tree": CommandLine("snapshots under those that they extend", tree),
    "explain": CommandLine("why a request started where it did", explain, _takes_request),
    "diff": CommandLine("where two stored conversations part", diff, _takes_two),
    "evict": CommandLine("remove snapshots, named or described", evict, _takes_slots),
    "flush": CommandLine("remove all snapshots that are not pinned", flush, _takes_dry_run),
    "verify": CommandLine("hits that were computed again and compared", verify, _takes_wait),
    "pin": CommandLine("keep a snapshot whatever happens", pin, _takes_slot),
    "unpin": CommandLine("let a pinned snapshot be evicted again", pin, _takes_slot),
    "export": CommandLine("write snapshots to a directory, from the disk cache", export, _takes_folder_and_slots),
    "import": CommandLine("take snapshots of a directory into the disk cache", import_files, _takes_folder),
    "warm": CommandLine("compute a prompt in advance and pin it", warm, _takes_prompt),
    "watch": CommandLine("one line a second until interrupted", watch),
    "events": CommandLine("what happens to the cache, one line each, until interrupted", events, _takes_past),
    "top": CommandLine("how full, how fast and what was used last, on the whole screen", top),
}


def _conversation(text: str) -> int | str:
    return int(text) if text.isdecimal() else text
