"""What each command of `cachectl` asks of the worker and shows. True means done, False means refused."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from cachectl import render
from protocol.control import Difference, Explanation, Removed, SlotInfo, Stats, TreeNode, Verifications
from protocol.control_client import ControlClient
from protocol.errors import WorkerUnavailable

PAGE_SLOTS = 500
WATCH_SECONDS = 1.0
POLL_SECONDS = 0.1

Answer = TypeVar("Answer")


class Asked(argparse.Namespace):
    """The command line. From `slot` on, which are set depends on the command."""

    run_dir: Path
    json: bool
    timeout: float
    command: str
    slot: int
    slots: list[int]
    request_id: str
    a: str
    b: str
    dry_run: bool
    wait: bool


@dataclass(frozen=True, slots=True)
class CommandLine:
    """One command: what it is for, what it takes and what it does."""

    summary: str
    run: Callable[[ControlClient, Asked], bool]
    add_arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None


def stats(client: ControlClient, asked: Asked) -> bool:
    answer = _ask(client, Stats, "stats")
    _show(asked, asdict(answer), lambda: render.stats(answer))
    return True


def list_slots(client: ControlClient, asked: Asked) -> bool:
    slots = list(_all_slots(client))
    _show(asked, [asdict(slot) for slot in slots], lambda: render.slots(slots))
    return True


def tree(client: ControlClient, asked: Asked) -> bool:
    data = client.ask("tree")
    nodes = _parsed(list[TreeNode], "tree", data.get("nodes") if isinstance(data, dict) else None)
    _show(asked, [asdict(node) for node in nodes], lambda: render.tree(nodes))
    return True


def show(client: ControlClient, asked: Asked) -> bool:
    slot = _ask(client, SlotInfo, "show", slot=asked.slot)
    _show(asked, asdict(slot), lambda: render.slot(slot))
    return True


def explain(client: ControlClient, asked: Asked) -> bool:
    answer = _ask(client, Explanation, "explain", request_id=asked.request_id)
    _show(asked, asdict(answer), lambda: render.explanation(answer))
    return True


def diff(client: ControlClient, asked: Asked) -> bool:
    answer = _ask(client, Difference, "diff", a=_conversation(asked.a), b=_conversation(asked.b))
    _show(asked, asdict(answer), lambda: render.difference(answer, asked.a, asked.b))
    return True


def evict(client: ControlClient, asked: Asked) -> bool:
    """Refused as a whole for an unknown slot; busy and pinned ones stay, and are named."""
    answer = _ask(client, Removed, "evict", slots=asked.slots, dry_run=asked.dry_run)
    _show(asked, asdict(answer), lambda: render.evicted(answer))
    return set(asked.slots) <= set(answer.removed)


def flush(client: ControlClient, asked: Asked) -> bool:
    answer = _ask(client, Removed, "flush", dry_run=asked.dry_run)
    _show(asked, asdict(answer), lambda: render.flushed(answer))
    return True


def verify(client: ControlClient, asked: Asked) -> bool:
    """Refused if a hit had other bits than a cold run. `--wait` first lets the worker finish those to come."""
    while True:
        answer = _ask(client, Verifications, "verify")
        if not asked.wait or not answer.pending:
            break
        time.sleep(POLL_SECONDS)
    _show(asked, asdict(answer), lambda: render.verifications(answer))
    return not answer.mismatched


def pin(client: ControlClient, asked: Asked) -> bool:
    """`pin` and `unpin`."""
    slot = _ask(client, SlotInfo, asked.command, slot=asked.slot)
    _show(asked, asdict(slot), lambda: f"{asked.command}ned slot {slot.slot} ({slot.tokens} tokens)")
    return True


def watch(client: ControlClient, asked: Asked) -> bool:
    """One line a second until interrupted; counts are those of that second."""
    before: Stats | None = None
    while True:
        now = _ask(client, Stats, "stats")
        if asked.json:
            print(json.dumps(asdict(now)), flush=True)
        else:
            if before is None:
                print(render.WATCH_HEADER)
            print(render.watch_line(now, before or now), flush=True)
        before = now
        time.sleep(WATCH_SECONDS)


def _takes_slot(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slot", type=int, metavar="SLOT")


def _takes_slots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("slots", type=int, nargs="+", metavar="SLOT")
    _takes_dry_run(parser)


def _takes_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and leave it")


def _takes_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="until none is pending")


def _takes_request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="as in the response header x-request-id")


def _takes_two(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a slot, or a request id (digits alone are a slot)")


COMMANDS = {
    "stats": CommandLine("what is held and what happened since the worker started", stats),
    "list": CommandLine("all snapshots, one a line", list_slots),
    "show": CommandLine("all there is to know of one slot", show, _takes_slot),
    "tree": CommandLine("snapshots under those that they extend", tree),
    "explain": CommandLine("why a request started where it did", explain, _takes_request),
    "diff": CommandLine("where two stored conversations part", diff, _takes_two),
    "evict": CommandLine("remove the snapshots of some slots", evict, _takes_slots),
    "flush": CommandLine("remove all snapshots that are not pinned", flush, _takes_dry_run),
    "verify": CommandLine("hits that were computed again and compared", verify, _takes_wait),
    "pin": CommandLine("keep a snapshot whatever happens", pin, _takes_slot),
    "unpin": CommandLine("let a pinned snapshot be evicted again", pin, _takes_slot),
    "watch": CommandLine("one line a second until interrupted", watch),
}


def _conversation(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _ask(client: ControlClient, kind: type[Answer], verb: str, **args: object) -> Answer:
    return _parsed(kind, verb, client.ask(verb, **args))


def _parsed(kind: type[Answer], verb: str, data: object) -> Answer:
    try:
        answer: Answer = TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise WorkerUnavailable(
            f"the worker's answer to {verb} is not understood: is it another version?"
        ) from error
    return answer


def _all_slots(client: ControlClient) -> Iterator[SlotInfo]:
    """Every slot in use, page by page, so that the worker never has to answer in one long breath."""
    cursor: int | None = 0
    while cursor is not None:
        page = client.ask("list", cursor=cursor, limit=PAGE_SLOTS)
        if not isinstance(page, dict):
            raise WorkerUnavailable("the worker's answer to list is not understood: is it another version?")
        yield from _parsed(list[SlotInfo], "list", page.get("slots"))
        following = page.get("next_cursor")
        cursor = following if isinstance(following, int) else None


def _show(asked: Asked, data: Any, text: Callable[[], str]) -> None:
    print(json.dumps(data, indent=2) if asked.json else text())
