"""Whether the engine's loop hangs: learned from how long its steps took so far.

One thread works and says so, another one asks. A step of a large model on a slow device may take a minute where that
of a small one takes milliseconds, so that no fixed limit tells a hang from work within seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

from worker.steps import Decode, Prefill, Step, SwapIn, SwapOut

LEAST_SECONDS = 3.5  # what a machine that is short of memory may add to any step
# What any work may take: a step of which nothing is known, or what the loop does between steps.
MOST_SECONDS = 60.0
_LIMIT_IN_LONGEST = 4  # over a longer context, the same rows take a few times what they took before
_DEAD_IN_LIMITS = 4  # a step that takes so many times its limit does not come back
_FORGOTTEN_IN_STEP = 0.01  # one step that took long, as where kernels are compiled, does not count for ever


class Verdict(NamedTuple):
    """`failed`: nothing but the end of the process helps."""

    state: Literal["hung", "failed"]
    cause: str


class _Work(NamedTuple):
    """What the loop does. `limit` and `longest`: seconds it may take, and 0 or what such a step took so far."""

    name: str
    since: float
    starved: float  # by then
    limit: float = MOST_SECONDS
    longest: float = 0.0


class StepWatch:
    """`turned` and `step` belong to the loop's thread, `age` and `verdict` to any."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, starved: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`starved`: seconds so far in which there was no processor to work on. They count for `MOST_SECONDS` only."""
        self._clock = clock
        self._starved = starved
        self._longest: dict[tuple[str, int], float] = {}  # seconds, by kind and size class
        self._work = _Work("the engine's loop", clock(), starved())

    def turned(self) -> None:
        """The loop begins a turn."""
        self._work = _Work("the engine's loop", self._clock(), self._starved())

    @contextmanager
    def step(self, step: Step) -> Iterator[None]:
        """While a step runs. Its time counts from now on, unless it fails."""
        kind, rows = _size(step)
        longest = self._expected(kind, rows)
        limit = max(LEAST_SECONDS, _LIMIT_IN_LONGEST * longest) if longest else MOST_SECONDS
        started, starved = self._clock(), self._starved()
        self._work = _Work(f"a {kind} step of {rows}", started, starved, min(limit, MOST_SECONDS), longest)
        try:
            yield
            seconds, key = self._clock() - started, (kind, rows.bit_length())
            self._longest[key] = max(seconds, self._longest.get(key, 0.0) * (1 - _FORGOTTEN_IN_STEP))
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
        if work.longest:
            cause += f", where such a step took {work.longest:.2g} s at most"
        is_dead = worked > _DEAD_IN_LIMITS * work.limit or seconds > MOST_SECONDS
        return Verdict("failed" if is_dead else "hung", cause)

    def _expected(self, kind: str, rows: int) -> float:
        """Seconds that a step of so many rows took at most; 0 where none of its kind has run.

        More rows never take less time. Where none of so many has run, the most that did are taken for their share: a
        row of few takes longer than a row of many.
        """
        size = rows.bit_length()
        known = [(each, seconds) for (name, each), seconds in self._longest.items() if name == kind]
        larger = [seconds for each, seconds in known if each >= size]
        if larger or not known:
            return min(larger, default=0.0)
        most, seconds = max(known)
        return float(seconds * 2 ** (size - most))


def _size(step: Step) -> tuple[str, int]:
    match step:
        case Prefill(_, start, end):
            return "prefill", end - start
        case Decode(choices):
            return "decode", len(choices)
        case SwapOut(_, blocks) | SwapIn(_, blocks):
            return "swap", len(blocks)
