"""A daemon whose worker does wrong on command: `faulty_daemon.py serve FLAGS` is `prefixd serve` otherwise.

What no request can bring about from outside is brought about by one more verb of the control socket, `fault`.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gateway import serve
from worker import main as worker

log = logging.getLogger(__name__)

HANGS = "hangs"  # a file in the run directory: while it is there, no worker comes through its warm-up
HELD = "an absorption waits in its pass for a request"


class Faults:
    """What can go wrong in an engine, each by a method. Runs on the engine's thread, between two steps."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._store, self._runner, self._scheduler = engine._store, engine._runner, engine._scheduler
        self._finding = self._scheduler._admission._finding
        answer = engine._control._data
        engine._control._data = lambda verb, args: self._bring(**args) if verb == "fault" else answer(verb, args)
        self._noted: list[tuple[str, int, int]] = []

    def _bring(self, what: str, **details: Any) -> Any:
        data = getattr(self, what)(**details)
        self._engine._checked = (
            True  # the accounts, which may be wrong now, are not looked at before the next event
        )
        return data

    def put_into(self, slot: int, source: int) -> None:
        """The slot holds what another one does: its own entry still names it."""
        store, pool = self._store, self._store.pool
        victim, other = store.known(slot), store.known(source)
        pool.share(other.blocks)
        pool.release(victim.blocks)
        for blocks, change in ((other.blocks, 1), (victim.blocks, -1)):
            for block in blocks:
                store.held[block] += change
        victim.blocks, victim.tokens = other.blocks, other.tokens
        store.held_count = sum(1 for count in store.held if count)
        if victim.state is not None:
            self._runner.states.copy(other.state, victim.state)

    def write_again(self, slot: int) -> None:
        """The slot has been written since its entry was made."""
        self._store.slots[slot].generation += 1

    def believe(self, slot: int) -> None:
        """The next lookup finds this slot's snapshot, whatever was asked for."""
        snapshot, generation = self._store.known(slot), self._store.slots[slot].generation
        wrong = {"slot": slot, "generation": generation, "depth": snapshot.tokens, "outcome": "hit"}
        lookup = self._finding.lookup
        self._once(self._finding, "lookup", lambda *asked, **options: replace(lookup(*asked, **options), **wrong))

    def refuse_restore(self) -> None:
        """What the next lookup finds cannot be restored."""
        self._once(self._finding, "begin_restore", lambda *_, **__: None)

    def collide(self, on: bool) -> None:
        """The digest of a boundary says which one of its prompt it is, and nothing else."""

        def add(sender: bytes, message: Any) -> None:
            alike = (replace(b, digest=bytes([n + 1]) * 16) for n, b in enumerate(message.boundaries))
            type(self._scheduler).add(self._scheduler, sender, replace(message, boundaries=tuple(alike)))

        if on:
            self._scheduler.add = add
        else:
            del self._scheduler.add

    def spoil(self, slot: int) -> None:
        """What the slot alone holds is no numbers."""
        snapshot = self._store.known(slot)
        own = [block for block in snapshot.blocks if self._store.pool.refcount(block) == 1]
        for memory in self._runner.cache.memories:
            memory[:, :, :, own] = float("nan")
        if snapshot.state is not None:
            self._runner.states.memory[snapshot.state] = float("nan")

    def fail_prefill(self, after: int, memory: bool) -> None:
        """A prefill pass fails, after some that do not."""
        prefill, left = self._runner.prefill, [after]

        def failing(*asked: Any) -> Any:
            if left[0]:
                left[0] -= 1
                return prefill(*asked)
            del self._runner.prefill
            raise MemoryError("no memory, on command") if memory else RuntimeError("a fault, on command")

        self._runner.prefill = failing

    def hang(self, step: str = "prefill") -> None:
        """The next step of this kind never ends, as where a device does not come back."""
        self._once(self._runner, step, _never_end)

    def hold_absorption(self, after: int) -> None:
        """From now on prefill passes are noted. The absorption's pass after so many ends once a request has come."""
        prefill, left = self._runner.prefill, [after]

        def noting(ids: Any, blocks: Any, start: int, *rest: Any) -> Any:
            kind = self._kind_of_pass()
            self._noted.append((kind, start, start + len(ids)))
            if kind == "absorb":
                left[0] -= 1
                if left[0] == -1:
                    log.warning("%s", HELD)
                    self._wait_for_a_request()
            return prefill(ids, blocks, start, *rest)

        self._noted.clear()
        self._runner.prefill = noting

    def passes(self) -> list[tuple[str, int, int]]:
        """Of what kind the passes noted were, and from where to where they went. No more are noted."""
        del self._runner.prefill
        return self._noted

    def _kind_of_pass(self) -> str:
        if not self._scheduler.is_idle:
            return "request"
        return "absorb" if self._scheduler.background._verifying is None else "verify"

    def _wait_for_a_request(self) -> None:
        """Or for anything else that comes in: it is taken between two steps, as ever."""
        while self._engine._sockets.inbox.empty():
            time.sleep(0.001)

    @staticmethod
    def _once(where: Any, name: str, instead: Callable[..., Any]) -> None:
        def wrong(*asked: Any, **options: Any) -> Any:
            delattr(where, name)
            return instead(*asked, **options)

        setattr(where, name, wrong)


def _never_end(*_: Any) -> None:
    threading.Event().wait()


class FaultyWorker(worker.Worker):
    def loading(self, detail: str) -> None:
        super().loading(detail)
        if detail == "warming up" and (self.settings.run_dir / HANGS).exists():
            from worker.model_runner import ModelRunner  # it is loaded by now

            worker.STAGE_SECONDS = 1.0  # not ten minutes
            ModelRunner.prefill = _never_end  # type: ignore[assignment, method-assign]

    def ready(self, engine: Any, model: Any) -> None:
        Faults(engine)
        super().ready(engine, model)


def main(argv: Sequence[str]) -> int:
    command, *flags = argv
    if command == "worker":
        worker.Worker = FaultyWorker  # type: ignore[misc]
        return worker.main(flags)
    child = serve.Child

    def with_faults(name: str, started: Sequence[str], *rest: Any, **options: Any) -> Any:
        if name == "worker":
            started = [sys.executable, __file__, *started[started.index("worker") :]]
        return child(name, started, *rest, **options)

    serve.Child = with_faults  # type: ignore[assignment,misc]
    return serve.main(flags)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
