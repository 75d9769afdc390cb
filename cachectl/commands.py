"""What each command of `cachectl` asks of the worker and shows. True means done, False means refused."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from cachectl import arguments as takes
from cachectl import render
from cachectl.asking import Asked, all_slots, all_stored, ask, parsed, show
from cachectl.choosing import chosen, exported, named, place
from cachectl.events import events
from cachectl.live import top, watch
from cachectl.warm import warm
from protocol.control import (
    Difference,
    Explanation,
    Removed,
    SlotInfo,
    Stats,
    StoredInfo,
    Transferred,
    TreeNode,
    Verifications,
)
from protocol.control_client import ControlClient

POLL_SECONDS = 0.1


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
    alone = sorted(all_stored(client), key=lambda row: (row.tenant, row.tokens))
    rows: list[SlotInfo | StoredInfo] = [*all_slots(client), *alone]
    show(asked, [asdict(row) for row in rows], lambda: render.slots(rows))
    return True


def tree(client: ControlClient, asked: Asked) -> bool:
    data = client.ask("tree", stored=True)
    nodes = parsed(list[TreeNode], "tree", data.get("nodes") if isinstance(data, dict) else None)
    show(asked, [asdict(node) for node in nodes], lambda: render.tree(nodes))
    return True


def show_slot(client: ControlClient, asked: Asked) -> bool:
    row = _one(client, asked, "show")
    show(asked, asdict(row), lambda: render.slot(row) if isinstance(row, SlotInfo) else render.stored(row))
    return True


def _one(client: ControlClient, asked: Asked, verb: str) -> SlotInfo | StoredInfo:
    """What the worker says of the one snapshot that a command is about."""
    if asked.digest is None:
        return ask(client, SlotInfo, verb, slot=asked.slot)
    row = named(client, asked.digest)
    return ask(client, type(row), verb, **place(row))


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
    if asked.digest is not None:
        return bool(answer.removed or answer.names)
    return set(asked.slots) <= set(answer.removed)


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
    row = _one(client, asked, asked.command)
    what = f"slot {row.slot}" if isinstance(row, SlotInfo) else f"{row.digest} in {' and '.join(row.tiers)}"
    show(asked, asdict(row), lambda: f"{asked.command}ned {what} ({row.tokens} tokens)")
    return True


def export(client: ControlClient, asked: Asked) -> bool:
    """The worker writes the files, as its own user."""
    which = exported(client, asked)
    answer = _waited(client, ask(client, Transferred, "export", folder=str(asked.folder.absolute()), **which))
    show(asked, asdict(answer), lambda: render.transferred(answer, "exported"))
    return True


def import_files(client: ControlClient, asked: Asked) -> bool:
    """Refused if a file was left that is not there already."""
    answer = _waited(client, ask(client, Transferred, "import", folder=str(asked.folder.absolute())))
    show(asked, asdict(answer), lambda: render.transferred(answer, "imported"))
    return not set(answer.refused) - {"known"}


def _waited(client: ControlClient, answer: Transferred) -> Transferred:
    """Wait until a transfer is done, however long it takes."""
    while answer.pending:
        time.sleep(POLL_SECONDS)
        answer = ask(client, Transferred, "transfer")
    return answer


def _conversation(text: str) -> int | str:
    return int(text) if text.isdecimal() else takes.request_id(text)


COMMANDS = {
    "stats": CommandLine("what is held and what happened since the worker started", stats),
    "list": CommandLine("all snapshots, one a line", list_slots),
    "show": CommandLine("all there is to know of one snapshot", show_slot, takes.slot),
    "tree": CommandLine("snapshots under those that they extend", tree),
    "explain": CommandLine("why a request started where it did", explain, takes.request),
    "diff": CommandLine("where two stored conversations part", diff, takes.two),
    "evict": CommandLine("remove snapshots, named or described", evict, takes.slots),
    "flush": CommandLine("remove all snapshots that are not pinned", flush, takes.dry_run),
    "verify": CommandLine("hits that were computed again and compared", verify, takes.wait),
    "pin": CommandLine("keep a snapshot whatever happens", pin, takes.slot),
    "unpin": CommandLine("let a pinned snapshot be evicted again", pin, takes.slot),
    "export": CommandLine("write snapshots to a directory, from the disk cache", export, takes.folder_and_slots),
    "import": CommandLine("take snapshots of a directory into the disk cache", import_files, takes.folder),
    "warm": CommandLine("compute a prompt in advance and pin it", warm, takes.prompt),
    "watch": CommandLine("one line a second until interrupted", watch),
    "events": CommandLine("what happens to the cache, one line each, until interrupted", events, takes.past),
    "top": CommandLine("how full, how fast and what was used last, on the whole screen", top),
}
