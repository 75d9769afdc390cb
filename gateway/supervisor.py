"""Keeps the processes of one daemon alive: starts them in order, restarts them, stops them in order."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

MAX_FAILED_STARTS = 3
FIRST_DELAY_SECONDS = 0.5
MAX_DELAY_SECONDS = 30.0
STEADY_SECONDS = 60.0  # a child that lived this long is restarted without a longer delay
PROBE_SECONDS = 0.1
WATCH_SECONDS = 1.0  # between two looks at a child that was ready
HURRY_SECONDS = 5.0  # for a child to end after a second signal: longer than the gateway's last words take
FAILED_SECONDS = 2.0  # for a child that has owned up to a failure to end by itself
EXIT_REFUSED = 2  # a child that refuses its settings: trying again cannot help

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


class ChildFailed(Exception):
    """A child cannot be brought up. The message says which one and why."""


@dataclass(frozen=True, slots=True)
class Health:
    """What a probe found. `cause` is that of a failure, or what makes a living child count as hung."""

    state: Literal["starting", "ready", "failed", "hung"]
    cause: str = ""


class Probe(Protocol):
    """Looks at one child, over all its lives."""

    def begin(self) -> None:
        """A new process takes the place of the last one."""

    async def __call__(self) -> Health: ...


@dataclass(slots=True)
class Child:
    """One of the daemon's processes. By contract the last line on its standard error is the cause when it dies."""

    name: str
    command: Sequence[str]
    probe: Probe
    stop_seconds: float  # from SIGTERM to SIGKILL
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    process: Process | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    last_line: str = ""
    relay: asyncio.Task[None] | None = None


class Supervisor:
    """Runs all children together until a signal says stop.

    They are stopped group by group, those of a group together. `on_ready` is called once, when all are ready for the
    first time.
    """

    def __init__(
        self, groups: Sequence[Sequence[Child]], report: Callable[[str], None], on_ready: Callable[[], None]
    ) -> None:
        self._groups = groups
        self._children = [child for group in groups for child in group]
        self._report = report
        self._on_ready = on_ready
        self._announced = False
        self.was_told = False  # to stop, by a signal
        self.killed: list[str] = []  # as they did not stop in the time that a first signal leaves them
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> None:
        """Return when stopped, by SIGTERM, SIGINT or `stop`. Raises `ChildFailed`. Either way no child is left."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._stop.wait())]
        tasks += [asyncio.create_task(self._keep(child)) for child in self._children]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for group in self._groups:
                await asyncio.gather(*map(self._end, group))
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Let `run` end, as one signal does."""
        self._stop.set()

    def _on_signal(self) -> None:
        self.was_told = True
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _keep(self, child: Child) -> NoReturn:
        """Start a child again whenever it dies or hangs. Raises `ChildFailed` once it is hopeless."""
        failed_starts, delay = 0, FIRST_DELAY_SECONDS
        while True:
            started = time.monotonic()
            cause = await self._live(child)
            if child.ready.is_set():
                child.ready.clear()
                failed_starts = 0
                if time.monotonic() - started > STEADY_SECONDS:
                    delay = FIRST_DELAY_SECONDS
            else:
                failed_starts += 1
                assert child.process is not None
                if child.process.returncode == EXIT_REFUSED or failed_starts == MAX_FAILED_STARTS:
                    raise ChildFailed(f"the {child.name} does not start: {cause}")
            self._report(f"the {child.name} died ({cause}): starting it again in {delay:g} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY_SECONDS)

    async def _live(self, child: Child) -> str:
        """One life of a child, from its start to its death: the cause of that."""
        child.last_line = ""
        child.probe.begin()
        child.process = process = await asyncio.create_subprocess_exec(
            *child.command,
            env=child.environment,
            stdin=asyncio.subprocess.DEVNULL,
            stderr=PIPE,
            process_group=0,  # a terminal's Ctrl-C reaches us alone, so that the gateway drains first
            preexec_fn=_die_with_parent(os.getpid()),
        )
        child.relay = asyncio.create_task(_relay(child, process))
        failure = await self._watch(child, process)
        await _gone(child, process)
        assert process.returncode is not None
        if failure:
            return failure
        if process.returncode < 0:
            return f"killed by {signal.Signals(-process.returncode).name}"
        return f"exit code {process.returncode}: {child.last_line or 'it said nothing'}"

    async def _watch(self, child: Child, process: Process) -> str:
        """Probe a child until its death, which is brought about if it hangs. What it owned up to or hangs in, or ''."""
        death = asyncio.create_task(process.wait())
        try:
            while not death.done():
                health = await child.probe()
                if health.state == "failed":
                    await asyncio.wait({death}, timeout=FAILED_SECONDS)
                    if not death.done():
                        process.kill()
                    return health.cause
                if health.state == "hung" and not death.done():
                    process.kill()  # one that is stopped, or waits for a device, hears nothing else
                    return f"killed, as {health.cause}"
                if health.state == "ready" and not child.ready.is_set() and not death.done():
                    child.ready.set()
                    self._announce(child)
                await asyncio.wait({death}, timeout=WATCH_SECONDS if child.ready.is_set() else PROBE_SECONDS)
        finally:
            death.cancel()
        return ""

    def _announce(self, child: Child) -> None:
        if self._announced:
            self._report(f"the {child.name} is ready again")
        elif all(each.ready.is_set() for each in self._children):
            self._announced = True
            self._on_ready()

    async def _end(self, child: Child) -> None:
        """Stop a child: kindly, after a second signal within `HURRY_SECONDS`, and after its time without asking."""
        process = child.process
        if process is None or process.returncode is not None:
            return
        hurried = self._hurry.is_set()
        process.terminate()
        waits = [asyncio.create_task(process.wait()), asyncio.create_task(self._hurry.wait())]
        if not hurried:
            await asyncio.wait(waits, timeout=child.stop_seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._hurry.is_set() and process.returncode is None:
                process.terminate()  # to the gateway: end what is open with an error, now
        if self._hurry.is_set():
            await asyncio.wait(waits[:1], timeout=HURRY_SECONDS)
        if process.returncode is None:
            self._report(f"the {child.name} did not stop in time: killing it")
            if not self._hurry.is_set():
                self.killed.append(child.name)
            process.kill()
        await _gone(child, process)
        for task in waits:
            task.cancel()


async def _gone(child: Child, process: Process) -> None:
    """Wait for a child's end and for its last words, but not for a grandchild that holds its standard error."""
    await process.wait()
    if child.relay is not None:
        await asyncio.wait({child.relay}, timeout=1.0)


async def _relay(child: Child, process: Process) -> None:
    """Copy a child's standard error to ours and remember its last line that says something."""
    assert process.stderr is not None
    tail = b""
    while chunk := await process.stderr.read(1 << 16):
        sys.stderr.buffer.write(chunk)
        sys.stderr.buffer.flush()
        tail = (tail + chunk)[-4096:]
    lines = [line.strip() for line in tail.decode(errors="replace").splitlines()]
    child.last_line = next((line for line in reversed(lines) if line), "")


def _die_with_parent(parent_id: int) -> Callable[[], None] | None:
    """What a child must run before it becomes itself, so that not even our SIGKILL leaves it behind (Linux)."""
    libc = _LIBC
    if libc is None:
        return None

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_id:  # it died between fork and prctl
            os._exit(1)

    return prepare
