"""What a store must say of lookups, known from what was kept and what was computed alone."""

from __future__ import annotations

from array import array

from hypothesis.stateful import RuleBasedStateMachine
from snapshot_rig import Engine, Prompt, Run, prompt, spelled, strong

from worker.lookup import Lookup
from worker.slots import Reservation, SlotState, Snapshot

SLOTS = 3
BLOCKS = 14
END = 9  # no other token of a message is that
History = tuple[tuple[int, ...], ...]


class StoreModel(RuleBasedStateMachine):
    """A store and what is known of it; what happens to it is left to subclasses."""

    shape = staticmethod(strong)
    divisible = False

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine(SLOTS, BLOCKS, divisible=self.divisible)
        self.store = self.engine.store
        self.finding, self.keeping, self.clearing = self.engine.finding, self.engine.keeping, self.engine.clearing
        self.reservations: list[Reservation] = []
        self.histories: list[tuple[str, History]] = []
        # What the model knows: the key of each slot's snapshot by slot and generation, and all keys ever computed.
        self.published: dict[tuple[int, int], tuple[str, History]] = {}
        self.pinned: list[Snapshot] = []
        self.generations = [0] * SLOTS  # of each slot, as they were
        self.waiting: tuple[Prompt, Lookup] | None = None
        self.computed: set[tuple[str, History]] = set()

    def _start(self, tenant: str, history: History, hold: bool) -> Run:
        history = history[:6]
        if self.divisible:  # as templates end messages: none is the beginning of another
            history = tuple(part if part[-1] == END else (*part, END) for part in history)
        self.histories.append((tenant, history))
        request = self._prompt(tenant, history)
        self._learn_cuts()
        depth, deepest, known = self._expected(request, tenant, history)
        self.histories = self.histories[-6:]
        run = self.engine.start(request, hold)
        found = run.lookup
        self._learn_cuts()
        self._check_depth(found.depth, depth)
        if self.shape is strong:
            assert found.deepest_known == deepest
            within = [end for end in known if end < len(request)]
            complete = found.depth >= max(known, default=0)
            assert (found.outcome == "hit") == (found.depth > 0 and complete and deepest > 0)
            assert (found.reason == "none") == (found.outcome == "hit")
            assert (found.outcome == "miss") == (found.depth == 0)
            if known and not complete:
                longer = not within or max(within) <= found.depth
                assert (found.reason == "longer_than_prompt") == longer
            if not known and not found.depth:
                assert found.reason in ("cold", "diverged", "longer_than_prompt")
        return run

    def _check_depth(self, found: int, expected: int) -> None:
        if self.shape is strong:
            assert found == expected, f"restored {found}, {expected} was kept"
        else:
            assert found >= expected if self.divisible else found <= expected

    def _prompt(self, tenant: str, history: History) -> Prompt:
        return prompt(*history, tail=(8,) if len(history) % 2 else (), tenant=tenant, shape=self.shape)

    def _expected(self, request: Prompt, tenant: str, history) -> tuple[int, int, list[int]]:
        """The deepest kept position below the last token, the deepest one computed, and all computed ones.

        Where states are divisible the first is no boundary: of any snapshot, what begins like the request.
        """
        live = {}
        for snapshot in self.store.slots.snapshots():
            if not snapshot.leaving:
                row = self.store.slots[snapshot.slot]
                live[self.published[snapshot.slot, row.generation]] = snapshot
        ends = [boundary.end for boundary in request.boundaries]
        prefixes = [(tenant, history[: i + 1]) for i in range(len(history))]
        kept = [end for end, key in zip(ends, prefixes, strict=True) if key in live and end < len(request)]
        known = [end for end, key in zip(ends, prefixes, strict=True) if key in self.computed]
        if self.divisible and self.shape is strong:
            kept = [self._alike(request, snapshot) for (owner, _), snapshot in live.items() if owner == tenant]
        return max(kept, default=0), max(known, default=0), known

    def _alike(self, request: Prompt, snapshot: Snapshot) -> int:
        """How many tokens a snapshot holds of a prompt, but for its last one."""
        stored = spelled(snapshot.node)[: snapshot.tokens]
        pairs = zip(stored, request.ids[:-1], strict=False)
        return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(stored), len(request) - 1))

    def _learn(self, run: Run) -> None:
        """Boundaries count as computed once noted, which the engine does at the end of a run."""
        if run not in self.engine.running:
            self._learn_computed(run, run.computed)

    def _learn_commits(self, run: Run, ends: set[int]) -> None:
        for end in ends:
            self._learn_computed(run, end)
        self._learn_cuts()
        for snapshot in self.store.slots.snapshots():
            key = (snapshot.slot, self.store.slots[snapshot.slot].generation)
            if key not in self.published:
                assert snapshot.node.end in ends
                self.published[key] = self._key(run, snapshot.node.end)

    def _learn_cuts(self) -> None:
        """Where states are divisible the store keeps some by itself: parts of others, up to what was computed once."""
        for snapshot in self.store.slots.snapshots() if self.divisible else ():
            place = (snapshot.slot, self.store.slots[snapshot.slot].generation)
            if place not in self.published:
                path = [snapshot.node, *snapshot.node.ancestors()]
                key = snapshot.node.tenant, tuple(tuple(array("i", node.ids)) for node in reversed(path))
                assert key in self.computed
                part = (key[0], (*key[1], ("part", snapshot.tokens)))  # of that, which is no boundary
                self.published[place] = key if snapshot.tokens == snapshot.node.end else part

    def _learn_computed(self, run: Run, end: int) -> None:
        for boundary in run.prompt.boundaries:
            if boundary.end <= end:
                self.computed.add(self._key(run, boundary.end))

    def _key(self, run: Run, end: int) -> tuple[str, History]:
        parts, start = [], 0
        for boundary in run.prompt.boundaries:
            if boundary.end <= end:
                parts.append(tuple(run.prompt.ids[start : boundary.end]))
                start = boundary.end
        return run.prompt.tenant, tuple(parts)

    def _most_free(self, fixed: set[int]) -> int:
        """Blocks that could be free at most: all but those of sequences, of readers' sources and of fixed slots."""
        stays = {block for run in self.engine.running for block in run.blocks}
        for snapshot in self.store.slots.snapshots():
            busy = self.store.slots[snapshot.slot].state is SlotState.RESTORING
            if busy or snapshot.slot in fixed:
                stays.update(snapshot.blocks)
        return self.engine.pool.total_count - len(stays)

    def _states(self, but: Reservation | None = None) -> dict[int, tuple[object, ...]]:
        table = self.store.slots
        return {
            slot: (table[slot].state, table[slot].generation, table[slot].readers, table[slot].snapshot)
            for slot in range(SLOTS)
            if self._not_of(but, slot)
        }

    def _not_of(self, reservation: Reservation | None, slot: int) -> bool:
        return reservation is None or reservation.slot != slot

    def _recency(self) -> list[tuple[object, ...]]:
        nodes = [node for root in self.store.index.roots for node in root.subtree()]
        return [(id(node), node.last_used, node.used_at, node.hits, node.slot) for node in nodes]
