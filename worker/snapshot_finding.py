"""Finding: the deepest snapshot on a request's verified chain, and references to what it holds.

Nothing that is found is consumed, moved or changed by it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from protocol.messages import Boundary, Reason
from worker.lookup import Lookup, explain
from worker.slots import SlotState
from worker.snapshot_index import NOTHING_COMMON, Part
from worker.snapshot_keeping import Keeping
from worker.snapshots import SnapshotStore

INSIDE_TOKENS = 64  # worth starting inside a message for; all prompts of one template share some tokens


class Restored(NamedTuple):
    """References taken for a sequence: the blocks of its first `tokens` tokens, the last one perhaps half full.

    `state`: the entry to copy its recurrent state from, where models have one. `exact` as that of the snapshot.
    """

    blocks: list[int]
    tokens: int
    state: int | None
    exact: bool


class Finding:
    """What a request may start from. See the module."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._keeping = Keeping(store)

    def lookup(
        self,
        tenant: str,
        token_ids: array[int],
        boundaries: Sequence[Boundary],
        *,
        peek: bool = False,
        apart: bool = False,
    ) -> Lookup:
        """The deepest snapshot on the request's verified chain, and why it is not deeper.

        Marks the chain as used and drops entries that prove stale, unless it only peeks. Where states are divisible,
        a boundary that a deeper snapshot passes gets one of its own first. `apart`: beyond its chain the prompt is
        compared with nothing, as what is stored there may be others'.
        """
        store = self._store
        if not len(store.slots):
            return Lookup(None, 0, 0, "miss", "disabled", 0, None, None)
        data = token_ids.tobytes()
        chain, clash = store.index.walk(tenant, data, boundaries)
        refused = 0
        if clash is not None:
            refused = boundaries[len(chain)].end
            if not peek:
                store.drop_clash(clash)
        found = None
        most = store.index.most_stored(tenant, data, chain) if store.divisible and not apart else None
        may_cut = store.divisible and not peek
        for node in reversed(chain):
            if (node.stored or node.end) >= len(token_ids):
                continue
            if node.slot is None:
                needed = most.node if most and most.tokens >= node.end + INSIDE_TOKENS else None
                if not may_cut or not self._keeping.cut_out(node, needed):
                    may_cut = may_cut and not node.snapshots_below  # no room now is none for a shallower one
                    continue
            fault = store.fault(node)
            if fault is None:
                found = node
                break
            refused = max(refused, node.end)
            if not peek:
                store.drop_stale(node, fault)
        part = Part(found, found.stored) if found else None
        if most is not None and most.node.slot is not None:  # nor was it dropped just now
            part = self._inside(most, len(token_ids), part, drop=not peek)
        depth = part.tokens if part else 0
        common = NOTHING_COMMON if apart else store.index.common_prefix(tenant, data, chain)
        refusal: Reason = "stale"
        if store.tiers is not None:
            elsewhere = store.tiers.refused(tenant, token_ids, boundaries, max(refused, depth))
            refused, refusal = elsewhere or (refused, refusal)
        result = explain(boundaries, len(token_ids), chain, part, refused, common, refusal)
        if not peek:
            if chain:
                store.index.touch(chain[-1], store.clock())
            store.index.trim()
        return result

    def _inside(self, most: Part, length: int, found: Part | None, *, drop: bool) -> Part | None:
        """`most` where that is clearly more of a prompt of this length than `found`, which it is otherwise."""
        store = self._store
        tokens = min(most.tokens, length - 1)  # at least one token must be computed
        if tokens < (found.tokens if found else 0) + INSIDE_TOKENS:
            return found
        fault = store.fault(most.node)
        if fault is None:
            return Part(most.node, tokens)
        if drop:
            store.drop_stale(most.node, fault)
        return found

    def begin_restore(
        self,
        slot: int,
        generation: int,
        *,
        token_ids: array[int] | None = None,
        tokens: int | None = None,
        asked: bool = True,
    ) -> Restored | None:
        """Take references for a sequence and pin the slot until `end_restore`.

        `token_ids`: the prompt that was looked up; without it the slot's word is taken. `tokens`: how many of its
        first ones; without it all that the slot holds. `asked` counts it as a hit; work of our own is none.

        None, and nothing taken, where the slot does not hold what was looked up: start from cleared state.
        """
        store = self._store
        snapshot = store.snapshot_in(slot)
        if snapshot is None or snapshot.leaving or store.slots[slot].generation != generation:
            return None
        if snapshot.node.slot != slot:
            store.count_stale(snapshot.node, "generation")
            return None
        fault = store.fault(snapshot.node)
        if fault is not None:
            store.drop_stale(snapshot.node, fault)
            return None
        tokens = snapshot.tokens if tokens is None else tokens
        if tokens > snapshot.tokens or (tokens < snapshot.tokens and not store.divisible):
            return None
        if token_ids is not None and not (
            tokens < len(token_ids) and snapshot.node.spells(token_ids.tobytes(), tokens)
        ):
            return None
        blocks = snapshot.blocks[: store.pool.blocks_for(tokens)]
        store.slots.acquire(slot)
        store.pool.share(blocks)
        if asked:
            snapshot.node.hits += 1
            if tokens == snapshot.tokens:  # or the prompt went another way, and what lies beyond was not used
                snapshot.node.asked_at = now = store.clock()
                store.index.touch(snapshot.node, now)
        if store.states is not None and snapshot.state is not None:
            store.states.share([snapshot.state])
        return Restored(list(blocks), tokens, snapshot.state, snapshot.exact)

    def end_restore(self, slot: int) -> None:
        """The sequence has what it needs. Its references stay its own."""
        store = self._store
        store.slots.release(slot)
        snapshot = store.snapshot_in(slot)
        assert snapshot is not None
        if snapshot.leaving and store.slots[slot].state is SlotState.READY:
            store.free(snapshot)
            store.index.trim()
