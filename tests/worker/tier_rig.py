"""Tiers below the engine on plain Python (`scheduler_rig`): its memory as tensors, and threads that can be held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import torch
from scheduler_rig import Rig, text
from snapshot_rig import Prompt, prompt

from worker.tiers.disk import DiskTier
from worker.tiers.host import HostTier
from worker.tiers.part_file import Identity
from worker.tiers.tier import Tier
from worker.tiers.tiers import Tiers

HERE = Identity("f" * 32, "n" * 16)
ENTRIES = [0, 12]  # of recurrent state: of models that have none, and of those that do


class AtOnce(Executor):
    """Runs what is submitted at once, or while it is held, when it is let go."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        self.is_held = False
        self._waiting: list[Callable[[], None]] = []

    def submit(self, work: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work(*args, **options))
            except Exception as error:
                future.set_exception(error)

        self._waiting.append(run)
        if not self.is_held:
            self.let_go()
        return future

    def let_go(self) -> None:
        self.is_held = False
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            run()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._waiting.clear()


class RigMemory:
    """Stands in for `PagedMemory`: a position's keys and values are the one number that the rig has there."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def empty(self, kind: str, tokens: int) -> dict[str, torch.Tensor]:
        return {kind: torch.zeros(tokens if kind == "kv" else 1, dtype=torch.int64)}

    def read(self, blocks: Sequence[int], start: int, end: int, to: dict[str, torch.Tensor], at: int) -> None:
        held = self._rig.runner.cache.read(blocks, end)[start:]
        to["kv"][at : at + end - start] = torch.tensor(held, dtype=torch.int64)

    def write(self, blocks: Sequence[int], start: int, end: int, source: dict[str, torch.Tensor], at: int) -> None:
        for position in range(start, end):
            self._rig.runner.cache.write(blocks, position, int(source["kv"][at + position - start]))

    def read_state(self, entry: int, to: dict[str, torch.Tensor]) -> None:
        state = self._rig.runner.entries[entry]
        assert state is not None, "a state that is none is copied"
        to["state"][0] = state

    def write_state(self, entry: int, source: dict[str, torch.Tensor]) -> None:
        self._rig.runner.entries[entry] = int(source["state"][0])

    def copy_block(self, source: int, target: int) -> None:
        self._rig.runner.cache.copy_block(source, target)


class TierRig(Rig):
    """A worker with a disk tier in `folder`, and a host tier if that has bytes."""

    def __init__(
        self,
        folder: Path,
        *,
        disk_bytes: int = 1 << 30,
        host_bytes: int = 0,
        identity: Identity = HERE,
        foreign_numerics: bool = False,
        **options: Any,
    ) -> None:
        self._host_bytes = host_bytes
        self._disk: dict[str, Any] = {
            "folder": folder,
            "limit": disk_bytes,
            "identity": identity,
            "foreign_numerics": foreign_numerics,
        }
        super().__init__(tiers=self._make_tiers, **options)

    def _make_tiers(self, rig: Rig) -> Tiers:
        self.disk = DiskTier(
            index=rig.store.index,
            events=rig.store.events,
            clock=rig.clock,
            recurs=rig.store.states is not None,
            executor=AtOnce,
            **self._disk,
        )
        tiers: list[Tier] = [self.disk]
        if self._host_bytes:
            self.host = HostTier(
                self._host_bytes, rig.store.index, rig.store.events, rig.clock, recurs=rig.store.states is not None
            )
            tiers.insert(0, self.host)
        return Tiers(rig.store, RigMemory(rig), tiers)

    def check(self) -> None:
        super().check()
        assert folder_bytes(self.disk.folder) <= self.disk.ledger.limit
        assert not self._host_bytes or self.host.ledger.held <= self._host_bytes

    def settle(self) -> None:
        """Turn until everything is idle and written, and see that the disk holds what is counted."""
        self.rest()
        assert self.tiers is not None
        self.turn_until(lambda: not (self.tiers.pending or self.tiers.is_loading or self.disk.is_writing))
        self.check_disk()
        if self._host_bytes:
            held = sum(tensor.nbytes for part in self.host.ledger.parts for tensor in part.place.values())
            assert held == self.host.ledger.held <= self._host_bytes

    def check_disk(self) -> None:
        files = list(self.disk.folder.glob("*.safetensors"))
        ledger = self.disk.ledger
        assert {part.place.path for part in ledger.parts} == set(files)
        assert ledger.held == sum(file.stat().st_size for file in files) <= ledger.limit
        assert not ledger.busy
        assert ledger.promised == 0
        assert not list(self.disk.folder.glob("*.tmp"))

    def close(self) -> None:
        """As a worker that is killed: nothing more is written, the folder is let go."""
        assert self.tiers is not None
        self.tiers.close()

    def depth(self, request_id: str) -> tuple[int, str, str]:
        accepted = self.accepted(request_id)
        return accepted.depth, accepted.outcome, accepted.reason


Start = Callable[..., TierRig]


def folder_bytes(folder: Path) -> int:
    """Of all files of parts, those under way too."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors*"))


def chat(turns: int, who: int = 0, size: int = 9, head: int = 17) -> Prompt:
    """A head that all share and `turns` messages."""
    return prompt(text(1, head), *(text(100 * who + turn + 2, size) for turn in range(turns)))


def break_file(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "flipped":
            tensors_start = 8 + int.from_bytes(data[:8], "little")
            data[tensors_start + 3] ^= 16
        case "truncated":
            del data[len(data) * 2 // 3 :]
        case "empty":
            data.clear()
        case "grown":
            data += b"\0"
        case "header":
            data[40] ^= 1
        case "zeros":  # as a power cut leaves what was not written in time
            data[:] = bytes(len(data))
        case "zeros_behind":
            tensors_start = 8 + int.from_bytes(data[:8], "little")
            data[tensors_start:-40] = bytes(len(data) - tensors_start - 40)
    path.write_bytes(data)
