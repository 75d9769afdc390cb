"""What a soak watches from outside: memory of the processes, counters of every worker, and when it was away."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from protocol.control_client import CommandRefused, ControlClient
from protocol.errors import WorkerUnavailable

PERIOD_SECONDS = 1.0
READY_POLL_SECONDS = 0.1
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(slots=True)
class Away:
    """A time in which the worker was gone: from its killing until requests were served again."""

    killed: float
    back: float = float("inf")

    def touches(self, began: float, ended: float) -> bool:
        """Whether a request of that time may have failed of it. What was on its way may end a little later."""
        return began <= self.back + PERIOD_SECONDS and ended >= self.killed


@dataclass(slots=True)
class Series:
    """Resident memory of one process over time, in MiB."""

    began: float
    times: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)


class Watch:
    """Samples once a second until cancelled. Times are of the monotonic clock."""

    def __init__(self, run_dir: Path) -> None:
        self.memory: dict[str, dict[int, Series]] = {"worker": {}, "gateway": {}}  # role -> process id
        self.away: list[Away] = []
        self.workers: dict[str, dict[str, Any]] = {}  # the last figures of each epoch
        self._run_dir = run_dir

    async def keep(self) -> None:
        while True:
            # A worker that does not answer is still loading, and grows for good reason.
            serving = await asyncio.to_thread(self.ask) is not None
            self._sample_memory(time.monotonic(), ("worker", "gateway") if serving else ("gateway",))
            await asyncio.sleep(PERIOD_SECONDS)

    def ask(self) -> dict[str, Any] | None:
        """The worker's figures now; None where it is away."""
        try:
            with ControlClient(self._run_dir, 5.0) as control:
                stats: Any = control.ask("stats")
                counts: Any = control.ask("verify")
        except (WorkerUnavailable, CommandRefused):
            return None
        figures: dict[str, Any] = {**stats, "verify": counts}
        self.workers[stats["epoch"]] = figures
        return figures

    async def kill_at_random(self, session: aiohttp.ClientSession, url: str, every: float, until: float) -> None:
        """SIGKILL the worker again and again, `every` seconds in the mean, and wait for the next one to serve."""
        dice = random.Random(every)
        while (at := time.monotonic() + every * dice.uniform(0.5, 1.5)) < until:
            await asyncio.sleep(at - time.monotonic())
            [process_id] = self._processes()["worker"]
            self.away.append(Away(time.monotonic()))
            os.kill(process_id, signal.SIGKILL)
            dead = set(self.workers)
            while not await self._is_replaced(dead) or not await _is_ready(session, url):  # noqa: ASYNC110
                await asyncio.sleep(READY_POLL_SECONDS)
            self.away[-1].back = time.monotonic()

    async def _is_replaced(self, dead: set[str]) -> bool:
        """Whether a worker serves that is none of these epochs: the gateway may still believe in one of them."""
        figures = await asyncio.to_thread(self.ask)
        return figures is not None and figures["epoch"] not in dead

    def slope(self, role: str, warm_up: float) -> tuple[float, float]:
        """Of all lives of a role together, each without its first `warm_up` seconds: growth in MiB an hour by least
        squares, and the seconds of the longest life that was looked at.
        """
        lives = [_after(series, warm_up) for series in self.memory[role].values()]
        return pooled_slope(lives) * 3600, max((times[-1] - times[0] for times, _ in lives if times), default=0.0)

    def last_mib(self, role: str) -> float:
        """Of the process of that role that was seen last."""
        return max(self.memory[role].values(), key=lambda series: series.times[-1]).sizes[-1]

    def _sample_memory(self, now: float, roles: Sequence[str]) -> None:
        processes = self._processes()
        for role in roles:
            for process_id in processes[role]:
                try:
                    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
                except (OSError, IndexError):
                    continue  # it has just ended
                series = self.memory[role].setdefault(process_id, Series(now))
                series.times.append(now)
                series.sizes.append(pages * _PAGE_MIB)

    def _processes(self) -> dict[str, list[int]]:
        """The daemon's processes by role, known by their command lines."""
        found: dict[str, list[int]] = defaultdict(list)
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                except OSError:
                    continue
                if any(str(self._run_dir) in word for word in words):
                    for role in self.memory:
                        if role in words:
                            found[role].append(int(entry.name))
        return found


def pooled_slope(lives: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """The one slope that fits all series best, each with a level of its own; 0 where there is nothing to fit."""
    above = below = 0.0
    for times, sizes in lives:
        if len(times) > 1:
            middle, level = sum(times) / len(times), sum(sizes) / len(sizes)
            above += sum((t - middle) * (size - level) for t, size in zip(times, sizes, strict=True))
            below += sum((t - middle) ** 2 for t in times)
    return above / below if below else 0.0


def _after(series: Series, warm_up: float) -> tuple[list[float], list[float]]:
    kept = [pair for pair in zip(series.times, series.sizes, strict=True) if pair[0] >= series.began + warm_up]
    return [time for time, _ in kept], [size for _, size in kept]


async def _is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/ready") as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False
