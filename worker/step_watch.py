"""Whether the engine's loop hangs: learned from how long its steps took so far.

One thread works and says so, another one asks. A step of a large model on a slow device may take a minute where that
of a small one takes milliseconds, so that no fixed limit tells a hang from work within seconds. What steps take is
learned before the first request comes (`warm_up.py`), and from then on from each of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from worker.steps import Decode, Prefill, Step, SwapIn, SwapOut

LEAST_SECONDS = 3.5  # what a machine that is short of memory may add to any step
# What any work may take: a step of which nothing is known, or what the loop does between steps.
MOST_SECONDS = 60.0
COPY_SECONDS = 10.0  # what a piece of a copy between tiers may take where steps are quick: memory may be new to it
_LIMIT_IN_LONGEST = 4  # what a machine with much else to do, and pages of memory that are new, may make of a step
_DEAD_IN_LIMITS = 4  # a step that takes so many times its limit does not come back
_FORGOTTEN_IN_STEP = 0.01  # one step that took long, as where kernels are compiled, does not count for ever


class Verdict(NamedTuple):
    """`failed`: nothing but the end of the process helps."""

    state: Literal["hung", "failed"]
    cause: str


class _Work(NamedTuple):
    """What the loop does. `limit` and `longest`: seconds it may take, and what such a step took, if it has run."""

    name: str
    since: float
    starved: float  # by then
    limit: float = MOST_SECONDS
    longest: float | None = None


class StepWatch:
    """`turned` and `step` belong to the loop's thread, `age` and `verdict` to any."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        starved: Callable[[], float] = lambda: 0.0,
        row_keys: float = math.inf,
    ) -> None:
        """`starved`: seconds so far in which there was no processor to work on. They count for `MOST_SECONDS` only.

        `row_keys`: a row that attends to so many keys takes twice the time of one that attends to none, or less.
        """
        self._clock = clock
        self._starved = starved
        self._row_keys = row_keys
        self._longest: dict[tuple[str, int], float] = {}  # seconds, by kind and size class
        self._work = _Work("the engine's loop", clock(), starved())

    def turned(self) -> None:
        """The loop begins a turn."""
        self._work = _Work("the engine's loop", self._clock(), self._starved())

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """While a step runs. Its time counts from now on, unless it fails."""
        kind, rows, keys = _size(step)
        size = int(rows + keys / self._row_keys).bit_length()
        longest = self._expected(kind, size)
        limit = MOST_SECONDS if longest is None else max(LEAST_SECONDS, _LIMIT_IN_LONGEST * longest)
        started, starved = self._clock(), self._starved()
        self._work = _Work(f"a {kind} step of {rows}", started, starved, min(limit, MOST_SECONDS), longest)
        try:
            yield
            seconds = self._clock() - started
            self._longest[kind, size] = max(
                seconds, self._longest.get((kind, size), 0.0) * (1 - _FORGOTTEN_IN_STEP)
            )
        finally:
            self.turned()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """While a piece of a snapshot goes to another tier, or comes from one: behind a step that the device runs."""
        longest = max(self._longest.values(), default=MOST_SECONDS)
        limit = min(max(COPY_SECONDS, _LIMIT_IN_LONGEST * longest), MOST_SECONDS)
        self._work = _Work("a copy between tiers", self._clock(), self._starved(), limit)
        try:
            yield
        finally:
            self.turned()

    def age(self) -> float:
        """Seconds since the loop last came round, or ended a step."""
        return self._clock() - self._work.since

    def verdict(self) -> Verdict | None:
        """None while the loop takes no longer than it may."""
        work = self._work
        seconds = self._clock() - work.since
        worked = seconds - (self._starved() - work.starved)
        if worked <= work.limit and seconds <= MOST_SECONDS:
            return None
        cause = f"{work.name} has been running for {seconds:.0f} s"
        if work.longest is not None:
            cause += f", where such a step took {work.longest:.2g} s at most"
        is_dead = worked > _DEAD_IN_LIMITS * work.limit or seconds > MOST_SECONDS
        return Verdict("failed" if is_dead else "hung", cause)

    def _expected(self, kind: str, size: int) -> float | None:
        """Seconds that a step of this size class took at most; None where none of its kind has run.

        More work never takes less time. Where none of so much has run, the most that did is taken for its share: a
        row of few takes longer than a row of many.
        """
        known = [(each, seconds) for (name, each), seconds in self._longest.items() if name == kind]
        larger = [seconds for each, seconds in known if each >= size]
        if larger or not known:
            return min(larger, default=None)
        most, seconds = max(known)
        return float(seconds * 2 ** (size - most))


def _size(step: Step) -> tuple[str, int, int]:
    """Its kind, its rows or blocks, and the keys that all its rows together attend to."""
    match step:
        case Prefill(_, start, end):
            return "prefill", end - start, (end - start) * (start + end) // 2
        case Decode(choices):
            return "decode", len(choices), sum(choice.length for choice in choices)
        case SwapOut(_, blocks) | SwapIn(_, blocks):
            return "swap", len(blocks), 0
