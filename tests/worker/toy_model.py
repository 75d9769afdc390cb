"""A model and its memory in plain Python, where every mistake of an engine shows.

A position of this memory holds a state that depends on all tokens up to it, as attention memory does, and the next
token follows from the state alone. Every pass looks whether what it reads is the state of its own tokens. Where the
model recurs, it also has entries that hold the state of one position and that passes move on in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from snapshot_rig import states

from worker.block_pool import BlockPool
from worker.sequences import Choice, Request
from worker.steps import Copies, StateUse

if TYPE_CHECKING:
    from scheduler_rig import Rig

VOCAB = 64
EMPTY = 0  # the recurrent state before any token


class WrongState(AssertionError):
    """A pass read or wrote what is not its own."""


def next_token(state: int) -> int:
    return state % VOCAB


def answer(ids: Sequence[int], max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """What the model answers to a prompt."""
    state, tokens = states(ids)[-1], []
    while len(tokens) < max_tokens:
        token = next_token(state)
        if token in stop:
            break
        tokens.append(token)
        state = hash((state, token))
    return tokens


class Memory:
    """Stands in for `KVCache`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: dict[int, list[int | None]] = {}
        self.wrong: list[WrongState] = []  # the engine takes what is raised for the fault of one step

    def refuse(self, text: str) -> NoReturn:
        self.wrong.append(WrongState(text))
        raise self.wrong[-1]

    def read(self, blocks: Sequence[int], count: int) -> list[int | None]:
        size = self._pool.block_tokens
        return [self._block(blocks[p // size])[p % size] for p in range(count)]

    def write(self, blocks: Sequence[int], position: int, state: int) -> None:
        block = blocks[position // self._pool.block_tokens]
        if self._pool.refcount(block) != 1:
            self.refuse(f"block {block} of {self._pool.refcount(block)} holders is written")
        self._block(block)[position % self._pool.block_tokens] = state

    def copy_block(self, source: int, target: int) -> None:
        self._blocks[target] = list(self._block(source))

    def wipe(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if self._pool.refcount(block):
                self.refuse(f"block {block} is wiped while it is held")
            self._blocks.pop(block, None)

    def save(self, blocks: Sequence[int]) -> Any:
        return [list(self._block(block)) for block in blocks]

    def load(self, blocks: Sequence[int], saved: Any) -> None:
        for block, content in zip(blocks, saved, strict=True):
            if self._pool.refcount(block) != 1:
                self.refuse(f"block {block} of {self._pool.refcount(block)} holders is loaded")
            self._blocks[block] = list(content)

    def _block(self, block: int) -> list[int | None]:
        return self._blocks.setdefault(block, [None] * self._pool.block_tokens)


class Runner:
    """Stands in for `ModelRunner`. `faults` are raised, first one first, when a pass of their kind has half run."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.cache = Memory(rig.pool)
        self.entries: dict[int, int | None] = {0: EMPTY}  # recurrent states; None after a pass that failed
        self.faults: list[tuple[str, BaseException]] = []
        self.prefilled: list[tuple[str, int, int]] = []  # request, start, end
        self.decoded: list[list[tuple[str, int]]] = []  # request and choice of each row
        self.logits: Callable[[int], torch.Tensor] = one_hot

    def prefill(
        self,
        token_ids: Sequence[int],
        blocks: list[int],
        start: int,
        use: StateUse | None = None,
        copies: Copies = (),
    ) -> list[int]:
        for source, target in copies:
            self.cache.copy_block(source, target)
        scheduler = self._rig.scheduler
        candidates = [*scheduler.running.prefilling, scheduler.background.running]
        found = [request for request in candidates if request is not None and request.blocks is blocks]
        if len(found) != 1:
            self.cache.refuse("a pass prefills what does not run")
        request = found[0]
        end = start + len(token_ids)
        if list(token_ids) != list(request.message.token_ids[start:end]) or not token_ids:
            self.cache.refuse(f"{request.request_id} is given other tokens than its own at {start}")
        expected = states(request.message.token_ids[:end])
        self._expect(blocks, expected[:start], request)
        written = self._recur(use, start, request)
        self._fault("prefill")
        for position in range(start, end):
            self.cache.write(blocks, position, expected[position])
        for entry, rows in written.items():
            self.entries[entry] = expected[start + rows - 1]
        if use is not None:
            self.entries[use.entry] = expected[-1]
        self.prefilled.append((request.request_id, start, end))
        return expected[start:]

    def _recur(self, use: StateUse | None, start: int, request: Request) -> dict[int, int]:
        """Check and begin what a pass does with recurrent states: what it will write to is none until it ends."""
        if (use is None) != (self._rig.store.states is None):
            self.cache.refuse("a pass has a state, or has none")
        if use is None:
            return {}
        if use.source is not None:
            self.entries[use.entry] = self.entries[use.source]
        before = states(request.message.token_ids[:start])[-1] if start else EMPTY
        if self.entries.get(use.entry) != before:
            self.cache.refuse(f"{request.request_id} goes on at {start} from the state of another position")
        written = {target: rows for rows, target in use.captures}
        for entry in (use.entry, *written):
            self._own(entry)
            self.entries[entry] = None
        if len(written) < len(use.captures) or use.entry in written:
            self.cache.refuse("a state is written twice")
        return written

    def _own(self, entry: int) -> None:
        pool = self._rig.store.states
        assert pool is not None
        if pool.refcount(entry) != 1:
            self.cache.refuse(f"state {entry} of {pool.refcount(entry)} holders is written")

    def save(self, blocks: Sequence[int], entry: int | None) -> Any:
        return self.cache.save(blocks), None if entry is None else self.entries[entry]

    def load(self, blocks: Sequence[int], entry: int | None, saved: Any) -> None:
        self.cache.load(blocks, saved[0])
        if entry is not None:
            self._own(entry)
            self.entries[entry] = saved[1]

    def largest(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        most, best = logits.max(dim=-1)
        return best.tolist(), most.tolist()

    def head_row(self, hidden: int) -> torch.Tensor:
        self._fault("head")
        return self.logits(hidden)

    def decode(
        self, token_ids: list[int], tables: list[list[int]], lengths: list[int], entries: Sequence[int] = ()
    ) -> torch.Tensor:
        rows = []
        if len(entries) != (len(tables) if self._rig.store.states else 0) or len(set(entries)) < len(entries):
            self.cache.refuse("a pass decodes with too few states")
        chosen = [self._choice(table) for table in tables]
        if len(chosen) > self._rig.max_running:
            self.cache.refuse(f"a pass of {len(chosen)} rows")
        for choice, token, table, length in zip(chosen, token_ids, tables, lengths, strict=True):
            request = choice.request
            ids = [*request.message.token_ids, *self._rig.tokens(request.request_id, choice.index)]
            if token != ids[-1] or length != len(ids) - 1:
                self.cache.refuse(f"{request.request_id} is given token {token} at {length}")
            expected = states(ids)
            self._expect(table, expected[:-1], request)
            self.cache.write(table, length, expected[-1])
            if entries:
                entry = entries[len(rows)]
                if self.entries[entry] != expected[-2]:
                    self.cache.refuse(f"{request.request_id} decodes from the state of another position")
                self._own(entry)
                self.entries[entry] = expected[-1]
            rows.append(self.logits(expected[-1]))
        self._fault("decode")
        self.decoded.append([(choice.request.request_id, choice.index) for choice in chosen])
        return torch.stack(rows)

    def _choice(self, table: list[int]) -> Choice:
        found = [choice for choice in self._rig.scheduler.running.decoding if choice.blocks is table]
        if len(found) != 1:
            self.cache.refuse("a pass decodes what does not run")
        return found[0]

    def _expect(self, blocks: list[int], expected: list[int], request: Request) -> None:
        if self.cache.read(blocks, len(expected)) != expected:
            self.cache.refuse(f"{request.request_id} reads state that is not of its tokens")

    def _fault(self, kind: str) -> None:
        if self.faults and self.faults[0][0] == kind:
            raise self.faults.pop(0)[1]


def one_hot(state: int) -> torch.Tensor:
    row = torch.zeros(VOCAB)
    row[next_token(state)] = 1.0
    return row
