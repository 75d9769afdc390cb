"""A fake engine for the snapshot store: KV memory that remembers what was written, and requests played on it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol.digest import link_digest, root_digest
from protocol.messages import Boundary
from worker import snapshot_finding
from worker.block_pool import BlockPool, OutOfBlocks
from worker.lookup import Lookup
from worker.slots import Reservation
from worker.snapshot_clearing import Clearing
from worker.snapshot_finding import Finding
from worker.snapshot_index import Node
from worker.snapshot_keeping import Keeping
from worker.snapshots import SnapshotStore

BLOCK_TOKENS = 4


@dataclass(frozen=True)
class Prompt:
    """Token ids and boundaries of one request of one tenant."""

    ids: array[int]
    boundaries: tuple[Boundary, ...]
    tenant: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def last(self) -> Boundary:
        return self.boundaries[-1]

    def at(self, end: int) -> Boundary:
        return next(boundary for boundary in self.boundaries if boundary.end == end)


def strong(digest: bytes) -> bytes:
    return digest


def weak(digest: bytes) -> bytes:
    """One of four values, so that different prefixes get equal digests all the time."""
    return bytes([digest[0] % 4]) * len(digest)


def prompt(
    *messages: Sequence[int],
    tail: Sequence[int] = (9,),
    head: bool = True,
    tenant: str = "",
    shape: Callable[[bytes], bytes] = strong,
) -> Prompt:
    """The messages with a boundary after each, the first one being a head, and a generation suffix."""
    ids, boundaries = array("i"), []
    digest = root_digest("model", tenant)
    for index, message in enumerate(messages):
        part = array("i", message)
        ids.extend(part)
        digest = shape(link_digest(digest, part))
        kind = "head" if head and index == 0 else "message"
        boundaries.append(Boundary(len(ids), digest, kind, index + 1))
    ids.extend(array("i", tail))
    return Prompt(ids, tuple(boundaries), tenant)


class StartsAnywhere:
    """For state machines: every token more is worth starting inside a message for."""

    divisible = True

    def __init__(self) -> None:
        super().__init__()
        self._inside = snapshot_finding.INSIDE_TOKENS
        snapshot_finding.INSIDE_TOKENS = 1

    def teardown(self) -> None:
        snapshot_finding.INSIDE_TOKENS = self._inside
        super().teardown()  # type: ignore[misc]


def words(start: int, count: int) -> list[int]:
    """`count` ids that no other start within 100,000 shares."""
    return list(range(start * 100_000, start * 100_000 + count))


HEAD = words(1, 30)
SYSTEM = words(2, 40)


def chat(turns: int, size: int = 20, head: list[int] | None = None, who: int = 10) -> Prompt:
    """A head and `turns` messages of one conversation."""
    return prompt(head or HEAD, *(words(who + turn, size) for turn in range(turns)))


def one_shot(who: int, size: int = 12) -> Prompt:
    return prompt(words(who, size), head=False)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class WrongState(AssertionError):
    """A sequence or a snapshot holds the state of other tokens than it should."""


def states(ids: Sequence[int]) -> list[int]:
    """What attention memory holds at each position: a value that depends on all tokens up to it."""
    state, out = 0, []
    for token in ids:
        state = hash((state, token))
        out.append(state)
    return out


@dataclass(eq=False)
class Run:
    """One request on the fake engine: [0, computed) of the prompt is in `blocks`."""

    prompt: Prompt
    lookup: Lookup
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    wanted: list[Boundary] = field(default_factory=list)
    slot: int | None = None
    restoring: bool = False
    committed: list[int] = field(default_factory=list)


class Engine:
    """Plays requests as the scheduler does, and checks every restored and every kept state."""

    def __init__(self, slots: int, blocks: int = 4096, block_tokens: int = BLOCK_TOKENS, **options: int) -> None:
        self.clock = Clock()
        self.pool = BlockPool(blocks + 1, block_tokens)
        self.store = SnapshotStore(slots, self.pool, block_bytes=100, clock=self.clock, **options)
        self.finding = Finding(self.store)
        self.keeping = Keeping(self.store)
        self.clearing = Clearing(self.store)
        self.memory: dict[int, list[int | None]] = {}
        self.keys: dict[tuple[int, int], array[int]] = {}  # by slot and generation, as it was committed
        self.running: list[Run] = []

    # One request in steps

    def start(self, request: Prompt, hold: bool = False, asked: bool = True) -> Run:
        """Look up and restore. With `hold` the source stays pinned until `release_source`."""
        self.clock.now += 1
        finding = self.finding
        run = Run(request, finding.lookup(request.tenant, request.ids, request.boundaries))
        if run.lookup.slot is not None:
            kept = self.kept()
            restored = finding.begin_restore(
                run.lookup.slot, run.lookup.generation, token_ids=request.ids, tokens=run.lookup.depth, asked=asked
            )
            assert restored is not None
            assert self.kept() == kept, "a hit consumed what it found"
            assert restored.tokens == run.lookup.depth < len(request)
            run.blocks, run.computed, run.slot = restored.blocks, restored.tokens, run.lookup.slot
            run.restoring = True
            if not hold:
                self.release_source(run)
        self.running.append(run)
        run.wanted = self.keeping.wanted(request.tenant, request.ids, request.boundaries, run.computed)
        self.verify_run(run)
        return run

    def release_source(self, run: Run) -> None:
        assert run.slot is not None
        self.finding.end_restore(run.slot)
        run.restoring = False

    def compute(self, run: Run, to: int) -> None:
        """Prefill up to `to`, committing what is wanted on the way. Raises `OutOfBlocks`, the run left as it was."""
        size = self.pool.block_tokens
        expected = states(run.prompt.ids[:to])
        for position in range(run.computed, to):
            self._own(run, position // size)
            self.memory[run.blocks[position // size]][position % size] = expected[position]
            run.computed = position + 1
        while run.wanted and run.wanted[0].end <= run.computed:
            self.keep(run, run.wanted.pop(0))

    def keep(self, run: Run, boundary: Boundary, absorbed: bool = False) -> int | None:
        protect = frozenset() if run.slot is None or not absorbed else frozenset({run.slot})
        reservation = self.keeping.reserve(protect)
        if reservation is None:
            return None
        return self.commit(reservation, run, boundary, absorbed=absorbed)

    def commit(
        self,
        reservation: Reservation,
        run: Run,
        boundary: Boundary,
        stored_tokens: int | None = None,
        absorbed: bool = False,
    ) -> int | None:
        request = run.prompt
        slot = self.keeping.commit(
            reservation,
            request.tenant,
            request.ids,
            boundary,
            request.boundaries,
            run.blocks[: self.pool.blocks_for(boundary.end)],
            stored_tokens=boundary.end if stored_tokens is None else stored_tokens,
            absorbed=absorbed,
            begins=not run.lookup.depth,
        )
        if slot is not None:
            run.committed.append(boundary.end)
            self.keys[slot, self.store.slots[slot].generation] = request.ids[: boundary.end]
        return slot

    def finish(self, run: Run) -> None:
        """The request is over, for whatever reason: what was computed is remembered, references go back."""
        request = run.prompt
        self.keeping.note(request.tenant, request.ids, request.boundaries, run.computed)
        if run.restoring:
            self.release_source(run)
        self.pool.release(run.blocks)
        self.running.remove(run)

    # One request as a whole

    def play(self, request: Prompt) -> Run:
        run = self.start(request)
        self.compute(run, len(request))
        self.verify_run(run)
        self.finish(run)
        self.check()
        return run

    def absorb(self, request: Prompt) -> Run:
        """Compute a conversation to the end of its last message in idle time, and keep that boundary alone."""
        run = self.start(request, asked=False)
        run.wanted.clear()
        self.compute(run, request.last.end)
        self.keep(run, request.last, absorbed=True)
        self.finish(run)
        self.check()
        return run

    # Checks

    def check(self) -> None:
        self.store.check_invariants([run.blocks for run in self.running])
        for snapshot in self.store.slots.snapshots():
            place = (snapshot.slot, self.store.slots[snapshot.slot].generation)
            if self.store.divisible:  # the store may have made it itself, from a part of another
                self.keys.setdefault(place, spelled(snapshot.node)[: snapshot.tokens])
            key = self.keys[place]
            self.verify(snapshot.blocks, key, f"slot {snapshot.slot}")
            assert snapshot.leaving or spelled(snapshot.node)[: snapshot.tokens] == key

    def verify_run(self, run: Run) -> None:
        self.verify(run.blocks, run.prompt.ids[: run.computed], "a sequence")

    def slots_at(self, *ends: int) -> list[int]:
        """The slots that keep these positions, where only one conversation has them."""
        by_end = {s.node.end: s.slot for s in self.store.slots.snapshots() if not s.leaving}
        return [by_end[end] for end in ends]

    def kept(self) -> list[int]:
        """The positions kept, rising."""
        return sorted(s.tokens for s in self.store.slots.snapshots() if not s.leaving)

    def verify(self, blocks: Sequence[int], ids: Sequence[int], whose: str) -> None:
        size = self.pool.block_tokens
        held = [self.memory[blocks[i // size]][i % size] for i in range(len(ids))]
        if held != states(ids):
            raise WrongState(f"{whose} does not hold the state of its {len(ids)} tokens")

    def _own(self, run: Run, index: int) -> None:
        """Make one block of the run writable: new, or copied where others hold it too."""
        if index < len(run.blocks) and self.pool.refcount(run.blocks[index]) == 1:
            return
        protect = frozenset() if run.slot is None else frozenset({run.slot})
        if not self.clearing.make_room(1, protect):
            raise OutOfBlocks(1, self.pool.free_count)
        (fresh,) = self.pool.allocate(1)
        if index < len(run.blocks):
            self.memory[fresh] = list(self.memory[run.blocks[index]])
            self.pool.release([run.blocks[index]])
            run.blocks[index] = fresh
        else:
            self.memory[fresh] = [None] * self.pool.block_tokens
            run.blocks.append(fresh)


def spelled(node: Node) -> array[int]:
    """The ids that the path to a node spells."""
    parts = [node.ids]
    parts.extend(above.ids for above in node.ancestors())
    ids = array("i")
    for part in reversed(parts):
        ids.frombytes(part)
    return ids


def depths(engine: Engine, *requests: Prompt) -> list[int]:
    return [engine.play(request).lookup.depth for request in requests]


def found(run: Run) -> tuple[int, str, str]:
    return run.lookup.depth, run.lookup.outcome, run.lookup.reason
