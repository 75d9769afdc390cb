"""Keeping: which boundaries are worth a snapshot, and the way of one from a reserved slot into the index.

Nothing is copied: a snapshot takes references to blocks that are filled already.

What a snapshot extends, the source of its restore among that, is not its victim, with one exception: where nothing else
was passed and all other conversations are worth more, the commit takes that one. All that the former snapshot held is
held by the new one or needed by nobody at that time. Else an only slot would stay with the first conversation's
beginning for ever, and each conversation would hold two slots: that of its end and that of the end before.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from itertools import pairwise

from protocol.messages import Boundary
from worker.eviction import recompute_cost
from worker.placement import worth_keeping
from worker.returns import Standing, added, has_come_back, standing
from worker.slots import Reservation
from worker.snapshot_clearing import Clearing
from worker.snapshot_index import Node
from worker.snapshots import AbortCause, SnapshotStore

REWRITTEN_SHARE = 1 / 10  # from here on it is worth keeping what stands before the last messages of prompts


class Keeping:
    """Reservations and commits. See the module."""

    def __init__(self, store: SnapshotStore) -> None:
        self._store = store
        self._clearing = Clearing(store)

    def wanted(
        self, tenant: str, token_ids: array[int], boundaries: Sequence[Boundary], depth: int
    ) -> list[Boundary]:
        """The boundaries deeper than `depth` that are worth a snapshot. Ask once, before the request is noted.

        Counts the deepest boundary that was computed before as asked for.
        """
        if not len(self._store.slots):
            return []
        chain = self._store.index.walk(tenant, token_ids.tobytes(), boundaries).chain
        asked = [node for node in chain if node.end < len(token_ids)]
        if asked:
            goes_on = len(chain) < len(boundaries)
            self._store.returns.ask(asked[-1], self._store.clock(), goes_on=goes_on)
        rewritten = self._store.returns.share("before_last") > REWRITTEN_SHARE
        return worth_keeping(boundaries, len(token_ids), depth, chain, before_last=rewritten)

    def note(
        self,
        tenant: str,
        token_ids: array[int],
        boundaries: Sequence[Boundary],
        computed_to: int,
        *,
        absorbed: bool = False,
    ) -> None:
        """Remember the boundaries up to `computed_to` as computed, so that later requests may branch there.

        `absorbed`: no request had them all, the last one was its answer.
        """
        store = self._store
        if not len(store.slots):
            return
        data = token_ids.tobytes()
        done = [boundary for boundary in boundaries if boundary.end <= computed_to]
        chain, clash = store.index.walk(tenant, data, done)
        if clash is None:
            now = store.clock()
            size = added(chain, done, absorbed=absorbed) if done else None
            node = store.index.extend(tenant, data, done, chain, now, size)
            if node is not None:
                node.left_at = now
            before_last = boundaries[-2].end if len(boundaries) > 1 else 0
            while node is not None and node.parent is not None:
                if not absorbed:
                    node.before_last = node.end == before_last and node.kind != "head"
                store.returns.see(node)
                node = node.parent
            store.index.trim()

    def reserve(self, protect: Collection[int] = frozenset()) -> Reservation | None:
        """The right to a slot; None, counted as an abort, where all are in use, pinned, protected or reserved.

        Changes nothing but the free list: what must go stays until the write begins, and may be hit meanwhile.
        `protect` are slots that must not go.
        """
        reservation = self._reserve(protect)
        if reservation is None:
            self._store.aborts["no_slot"] += 1
        return reservation

    def _reserve(self, protect: Collection[int]) -> Reservation | None:
        store = self._store
        slot = store.slots.reserve()
        if slot is None:
            promised = sum(1 for other in store.reservations if other.slot is None and not other.late)
            can_go = sum(1 for s in store.slots.snapshots() if s.slot not in protect and not store.stays(s))
            if can_go <= promised:
                return None
        reservation = Reservation(slot, frozenset(protect))
        store.reservations.add(reservation)
        return reservation

    def _reserve_late(self, chain: Sequence[Node]) -> Reservation | None:
        """No slot yet, but what this one is built on will be in one that may be had when it is committed.

        Its state is captured beside that one's, which nobody needs any more by then: who goes on from it has copied
        it. None where that has to stay.
        """
        store = self._store
        above = next((store.snapshot_in(node.slot) for node in reversed(chain) if node.slot is not None), None)
        if not any(other.written for other in store.reservations) and (above is None or store.stays(above)):
            return None
        reservation = Reservation(None, frozenset(), late=True)
        store.reservations.add(reservation)
        return reservation

    def prepare(
        self,
        tenant: str,
        token_ids: array[int],
        boundary: Boundary,
        boundaries: Sequence[Boundary],
        protect: Collection[int] = frozenset(),
        *,
        state: int | None = None,
        absorbed: bool = False,
        begins: bool = False,
    ) -> Reservation | None:
        """A reservation for whose `state` a pass can leave a recurrent state.

        Its write has begun, unless no slot but a protected one, that of the snapshot it extends, could or should be
        had: then it is a late one, and the commit takes that slot, or a conversation would not go forward in it.
        `state`: an entry that holds the state already; it is the reservation's from then on. None, and counted as an
        abort, where the snapshot exists or there is nothing to have. The others as in `commit`.
        """
        store = self._store
        path = [known for known in boundaries if known.end <= boundary.end]
        chain, clash = store.index.walk(tenant, token_ids[: boundary.end].tobytes(), path)
        exists = clash is None and len(chain) == len(path) and chain[-1].slot is not None and chain[-1].is_whole
        if exists and store.fault(chain[-1]) is None:
            store.aborts["duplicate"] += 1
            return None
        reservation = self._reserve(protect)
        if reservation is not None:
            self._weigh(reservation, chain, path, boundaries, begins)
            reservation.absorbed, reservation.state = absorbed, state
            if self.begin_write(reservation) is not None:
                return reservation
        # An answer that nobody has asked for takes the place of nothing, least of all of what it was built on.
        late = None if absorbed else self._reserve_late(chain)
        if late is None:
            store.aborts["no_slot"] += reservation is None
            return None
        self._weigh(late, chain, path, boundaries, begins)
        late.state = state
        if late.state is None:
            assert store.states is not None
            if not store.states.free_count:
                self.abort(late, "no_state")
                return None
            (late.state,) = store.states.allocate(1)
        return late

    def begin_write(self, reservation: Reservation) -> int | None:
        """The slot to write to, its former snapshot gone and its generation new. None: aborted, nothing to have.

        For state that is copied into the slot before `commit`, which otherwise does this itself.
        """
        store = self._store
        self._require_open(reservation)
        if reservation.written:
            return reservation.slot
        if reservation.slot is None:
            reservation.slot = store.slots.reserve()
        if reservation.slot is None:
            reservation.slot = self._clearing.slot_for(reservation)
        if reservation.slot is None:
            store.reservations.remove(reservation)
            return None
        if store.states is not None and reservation.state is None:
            reservation.state = self._clearing.state_for(reservation)
            if reservation.state is None:
                store.slots.give_back(reservation.slot)
                store.reservations.remove(reservation)
                return None
        store.slots.begin_write(reservation.slot)
        reservation.written = True
        return reservation.slot

    def commit(
        self,
        reservation: Reservation,
        tenant: str,
        token_ids: array[int],
        boundary: Boundary,
        boundaries: Sequence[Boundary],
        blocks: Sequence[int],
        *,
        stored_tokens: int,
        absorbed: bool = False,
        begins: bool = False,
    ) -> int | None:
        """Publish a snapshot of token_ids[:boundary.end], whose KV is in `blocks`; returns its slot.

        The store takes references of its own. None where it is refused, and counted as an abort: `stored_tokens`
        (what the layers hold) or `blocks` do not match the key, the snapshot exists, or no slot is to be had.
        `boundaries` are those of the request, rising, `boundary` among them, or `ValueError` is raised. `absorbed`:
        no request asked for this one, see `Snapshot`. `begins`: its request found nothing to start from. Where models
        recur the reservation comes from `prepare`, or there is no state: that is a `ValueError` too.
        """
        store = self._store
        self._require_open(reservation)
        path = [known for known in boundaries if known.end <= boundary.end]
        if not path or path[-1] != boundary:
            raise ValueError("the boundary is not one of the request's")
        if any(before.end >= after.end for before, after in pairwise(path)):
            raise ValueError("the boundaries do not rise")
        if store.states is not None and reservation.state is None:
            raise ValueError("the recurrent state was not captured")
        exact = boundary.end == stored_tokens <= len(token_ids)
        if not exact or len(blocks) != store.pool.blocks_for(stored_tokens):
            self.abort(reservation, "length")
            return None
        data = memoryview(token_ids)[: boundary.end].tobytes()
        chain, clash = store.index.walk(tenant, data, path)
        if clash is not None and not store.drop_clash(clash):
            self.abort(reservation, "collision")
            return None
        if len(chain) == len(path) and chain[-1].slot is not None and chain[-1].is_whole:
            fault = store.fault(chain[-1])
            if fault is None:
                self.abort(reservation, "duplicate")
                return None
            store.drop_stale(chain[-1], fault)
        reservation.absorbed = absorbed
        self._weigh(reservation, chain, path, boundaries, begins)
        reservation.source = next((node.slot for node in reversed(chain) if node.slot is not None), None)
        kept = tuple(blocks)
        store.pool.share(kept)
        slot = self.begin_write(reservation)
        if slot is None:
            store.pool.release(kept)
            if store.states is not None and reservation.state is not None:
                store.states.release([reservation.state])
            return None
        size = added(chain, boundaries, absorbed=absorbed)
        node = store.index.extend(tenant, data, path, chain, store.clock(), size)
        assert node is not None
        node.inner = boundary != boundaries[-1]
        store.publish(reservation, node, slot, kept)
        store.index.trim()
        return slot

    def abort(self, reservation: Reservation, cause: AbortCause) -> None:
        """Give the slot back. If nothing was written, nothing else has changed."""
        store = self._store
        self._require_open(reservation)
        store.reservations.remove(reservation)
        store.aborts[cause] += 1
        slot = reservation.slot
        if store.states is not None and reservation.state is not None:
            store.states.release([reservation.state])
            reservation.state = None
        if slot is None:
            return
        if reservation.written:
            store.slots.begin_evict(slot)
            store.slots.finish_evict(slot)
        else:
            store.slots.give_back(slot)

    def cut_out(self, node: Node, needed: Node | None) -> bool:
        """Keep a known boundary by sharing the first blocks of a deeper snapshot, if there is one, and a slot.

        Where states are divisible. The snapshot of `needed` does not go for it.
        """
        store = self._store
        if not node.snapshots_below:
            return False
        # A deepest one: what lies between has been passed, and may have to go for the new one.
        deeper = next(below for below in node.subtree() if below.slot is not None and not below.snapshots_below)
        if store.fault(deeper) is not None:
            return False
        assert deeper.slot is not None
        protect = {deeper.slot} if needed is None or needed.slot is None else {deeper.slot, needed.slot}
        reservation = self.reserve(protect)
        if reservation is None:
            return False
        above = node.snapshot_above()
        start = above.end if above else 0
        reservation.newcomer, reservation.extends = recompute_cost(start, node.end), start > 0
        reservation.node = node
        reservation.exact = store.known(deeper.slot).exact
        kept = store.known(deeper.slot).blocks[: store.pool.blocks_for(node.end)]
        store.pool.share(kept)
        slot = self.begin_write(reservation)
        if slot is None:
            store.pool.release(kept)
            return False
        store.publish(reservation, node, slot, kept)
        return True

    def _weigh(
        self,
        reservation: Reservation,
        chain: Sequence[Node],
        path: Sequence[Boundary],
        boundaries: Sequence[Boundary],
        begins: bool,
    ) -> None:
        """Tell what computing `path` costs from the deepest snapshot of `chain` on, and how many come again.

        `begins`: the request has restored nothing.
        """
        end, newest = path[-1].end, len(path) == len(boundaries)
        reservation.node = chain[-1] if len(chain) == len(path) else None
        is_now: Standing
        if reservation.node is not None:
            is_now = standing(reservation.node, goes_on=not newest)
        elif newest:
            is_now = "going_on" if has_come_back(chain) else "new"
        elif path[-1].kind == "head":
            is_now = "head"
        elif path[-1].kind == "interior":
            is_now = "cut"
        else:
            is_now = "before_last" if len(path) == len(boundaries) - 1 else "inner"
        size = reservation.node.added if reservation.node else added(chain, boundaries)
        reservation.share = self._store.returns.share(is_now, size)
        start = max((node.stored for node in chain if node.stored < end), default=0)
        if begins and newest:
            start = 0  # what its request has left inside the prompt may go for it
        reservation.newcomer = recompute_cost(start, end)
        # A new conversation gets a slot for its end without being worth as much as what goes, not one for each part.
        reservation.extends = start > 0 or not newest

    def _require_open(self, reservation: Reservation) -> None:
        if reservation not in self._store.reservations:
            raise ValueError("this reservation was committed or aborted before")
