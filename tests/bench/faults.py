"""Bring about one fault after another in daemons of our own, and print what clients of each dialect saw of it.

    faults.py
    faults.py --only "worker killed" --only SIGTERM

Each daemon is the installed `prefixd serve`, except where a fault has to be made inside the worker. Six requests are
open in it, three dialects, streamed and whole. The table says how they ended, how long after the fault, and after how
long the next request was answered. The exit status is 1 where a client was left without an end, or service stayed away.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from client_bench import say
from fault_clients import DIALECTS, Seen, ask
from fault_kinds import FAULTS, Fault, NotHere, Stage, staged

from protocol.model_path import EMBEDDED_MODEL

BACK_SECONDS = 180.0  # in which a fault must be mended
LATE_SECONDS = 5.0  # in which who has an open request must hear that the worker is dead
_COLUMNS = ("fault", "streams", "whole answers", "told after", "next answer after", "besides")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `bad` says what should not be."""

    fault: str
    seen: tuple[Seen, ...] = ()
    told: tuple[float, ...] = ()
    back: float | None = None
    remark: str = ""
    bad: str = ""

    def cells(self) -> list[str]:
        ended = "" if self.back is None else f"{self.back:.1f} s"
        streams, whole = ([seen for seen in self.seen if seen.streamed is streamed] for streamed in (True, False))
        remark = "; ".join(filter(None, (self.remark, self.bad and f"**{self.bad}**")))
        return [self.fault, _ends(streams), _ends(whole), _span(self.told), ended, remark]


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(argv)
    wanted = [fault for fault in FAULTS if not asked.only or any(word in fault.name for word in asked.only)]
    rows = []
    for fault in wanted:
        say(f"{fault.name} ...")
        try:
            rows.append(play(fault, asked.model, asked.tokens))
        except NotHere as why:
            rows.append(Row(fault.name, remark=f"not tried here: {why}"))
        say(" | ".join(rows[-1].cells()))
    print(table(rows))
    return any(row.bad for row in rows)


def play(fault: Fault, model: str, tokens: int) -> Row:
    """One fault, in a daemon of its own."""
    with ExitStack() as ends:
        stage = ends.enter_context(staged(fault, model))
        threads = ends.enter_context(ThreadPoolExecutor(len(DIALECTS) * 2))
        if fault.when == "each":
            seen, brought, back = _each(fault, stage, tokens)
        else:
            seen, brought, back = _all(fault, stage, threads, tokens)
        remark = fault.after(stage)
    told = tuple(each.ended - (brought or each.began) for each in seen)
    return Row(fault.name, seen, told, back, remark, _bad(fault, seen, told, back))


def _all(
    fault: Fault, stage: Stage, threads: ThreadPoolExecutor, tokens: int
) -> tuple[tuple[Seen, ...], float, float | None]:
    """Six requests at once, begun before or after the fault. What they saw, when it came, how long it lasted."""
    if fault.when == "before":
        fault.bring(stage)
    url = stage.url or stage.client.url
    seen = [Seen(dialect.name, streamed) for dialect in DIALECTS for streamed in (True, False)]
    dialects = {dialect.name: dialect for dialect in DIALECTS}
    asked = [threads.submit(ask, url, dialects[each.dialect], each, tokens) for each in seen]
    brought = time.monotonic()
    if fault.when == "during":
        stage.wait_begun(seen)
        brought = time.monotonic()
        brought = fault.bring(stage) or brought
    back = _next_answer(stage, brought) if fault.lives else None
    return tuple(each.result() for each in asked), brought, back


def _each(fault: Fault, stage: Stage, tokens: int) -> tuple[tuple[Seen, ...], float, float | None]:
    """One request after the other, each with a fault of its own."""
    seen = []
    for dialect in DIALECTS:
        for streamed in (True, False):
            fault.bring(stage)
            seen.append(ask(stage.client.url, dialect, Seen(dialect.name, streamed), tokens))
    return tuple(seen), 0.0, _next_answer(stage, time.monotonic())


def _next_answer(stage: Stage, since: float) -> float | None:
    """The seconds until a request was answered; None if none was."""
    while time.monotonic() < since + BACK_SECONDS:
        if stage.is_answered():
            return time.monotonic() - since
        time.sleep(0.05)
    return None


def _bad(fault: Fault, seen: Sequence[Seen], told: Sequence[float], back: float | None) -> str:
    """What is wrong with what was seen."""
    untold = ("hung",) if fault.cuts else ("hung", "stream broken off", "connection")
    if silent := [each for each in seen if each.end.startswith(untold)]:
        return f"{len(silent)} clients were told nothing"
    if fault.kills_worker and max(told) > LATE_SECONDS:
        return f"told later than {LATE_SECONDS:g} s"
    if fault.lives and back is None:
        return "service did not come back"
    return ""


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = [list(_COLUMNS), ["---"] * len(_COLUMNS), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _ends(seen: Sequence[Seen]) -> str:
    """How these ended; by dialect where they differ."""
    found: dict[str, list[str]] = {}
    for each in seen:
        found.setdefault(each.end, []).append(each.dialect)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(dialects)}: {end}" for end, dialects in found.items())


def _span(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    low, high = f"{min(seconds):.1f}", f"{max(seconds):.1f}"
    return f"{low} s" if low == high else f"{low} to {high} s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="default: the embedded one")
    parser.add_argument(
        "--only", action="append", metavar="WORD", help="faults whose name has this in it; repeatable"
    )
    parser.add_argument(
        "--tokens", type=int, default=600, help="of an answer that nothing ends (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
