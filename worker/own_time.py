"""How much time this process had: neither stopping it nor a lack of processors makes its work hang.

A container that is paused, a virtual machine that is moved, a signal to stop: everything stands still, and goes on as
if nothing had been. On a machine with more to do than it can, threads wait for a processor. No clock tells of either.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

TICK_SECONDS = 0.5
STILL_SECONDS = 1.5  # after a tick: a thread with so little to do is late by more only if nothing can run

_THREADS = Path("/proc/self/task")


def seconds_in_line() -> float:
    """How long the threads of this process have waited for a processor, added up; 0 where the system does not say."""
    nanoseconds = 0
    for thread in _THREADS.glob("*/schedstat"):
        try:
            nanoseconds += int(thread.read_bytes().split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it has just ended
    return nanoseconds / 1e9


class OwnTime:
    """`tick` belongs to one thread, which calls it every `TICK_SECONDS`; the others may be called by any."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, in_line: Callable[[], float] = seconds_in_line
    ) -> None:
        self._clock = clock
        self._in_line = in_line
        self._ticked = clock()
        self._line = in_line()
        self._stood = 0.0
        self._starved = 0.0

    def tick(self) -> None:
        now, line = self._clock(), self._in_line()
        passed = now - self._ticked
        still = max(passed - STILL_SECONDS, 0.0)
        self._stood += still
        self._starved += min(max(line - self._line, 0.0), passed - still)  # less in line where a thread has ended
        self._ticked, self._line = now, line

    def awake(self) -> float:
        """Seconds on a clock that stops `STILL_SECONDS` after the last tick."""
        return min(self._clock(), self._ticked + STILL_SECONDS) - self._stood

    def starved(self) -> float:
        """Seconds so far in which threads waited for a processor: those of several add up, but not beyond the time."""
        return self._starved
