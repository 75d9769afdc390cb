"""When the work of a request becomes snapshots: as soon as it is materialised, whatever happens to it afterwards."""

from __future__ import annotations

import time

from protocol.messages import Boundary
from worker.metrics import WorkerMetrics
from worker.retention import Retention
from worker.sequence_states import SequenceStates
from worker.sequences import Request
from worker.slots import Reservation
from worker.snapshot_keeping import Keeping
from worker.snapshots import SnapshotStore


class Commits:
    """Publishes [0, boundary.end) of requests in prefill. The position is exact, whatever pass it came in.

    A recurrent state is kept by the pass that crosses its position, into an entry that was taken before it. What a
    state has moved past cannot be kept any more.
    """

    def __init__(self, store: SnapshotStore, metrics: WorkerMetrics, *, absorbed: bool = False) -> None:
        """`absorbed`: what is published here are answers that no request has asked for yet."""
        self._store = store
        self._states = SequenceStates(store)
        self._keeping = Keeping(store)
        self._retention = Retention(store)
        self._metrics = metrics
        self._absorbed = absorbed

    def capture(self, request: Request, end: int) -> None:
        """Before a pass up to `end`: take entries for the states it will cross; without one, none is kept there."""
        if not request.entries:
            return
        crossed = [b for b in request.message.boundaries if request.computed < b.end <= end]
        if request.caching and crossed:
            wanted = crossed[-1] in request.wanted
            self._states.checkpoint(request, None if wanted else crossed[-1])
        while request.wanted and request.wanted[0].end <= end:
            boundary = request.wanted.pop(0)
            reservation = self._prepare(request, boundary)
            if reservation is not None:
                request.captures.append((boundary, reservation))

    def materialised(self, request: Request) -> None:
        """Commit the wanted boundaries that have been reached."""
        captures, request.captures = request.captures, []
        for boundary, reservation in captures:
            self._publish(request, boundary, reservation)
        while request.wanted and request.wanted[0].end <= request.computed:
            self._commit(request, request.wanted.pop(0))

    def lost(self, request: Request) -> None:
        """The pass failed: what it was to capture is no state, and its own is none any more."""
        for _, reservation in request.captures:
            self._keeping.abort(reservation, "failed")
        request.captures = []
        self._states.drop(request)

    def prompt_complete(self, request: Request) -> None:
        """Remember what was computed, kept or not, so that later requests may branch there."""
        if request.caching:
            message = request.message
            self._keeping.note(
                message.tenant, message.token_ids, message.boundaries, request.computed, absorbed=self._absorbed
            )
            self._retention.note(message)

    def cut_off(self, request: Request) -> None:
        """A prefill ends early: keep its deepest finished boundary, so that a retry does not start from zero."""
        done = [b for b in request.message.boundaries if request.depth < b.end <= request.computed]
        if request.caching and done and done[-1].end not in request.committed:
            self._commit(request, done[-1])
        self.prompt_complete(request)

    def _commit(self, request: Request, boundary: Boundary) -> None:
        """Where the model recurs, a request that ends hands its state over, if it is of exactly that boundary."""
        if self._store.states is None:
            # An answer that nobody has asked for takes the place of nothing, least of all of what it was built on.
            reservation = self._keeping.reserve(self._source(request) if self._absorbed else frozenset())
        elif request.entries and request.entry_source is None and request.computed == boundary.end:
            reservation = self._prepare(request, boundary, request.entries[0])
            if reservation is not None:
                del request.entries[0]
        elif request.checkpoint is not None and request.checkpoint[0] == boundary:
            reservation = self._prepare(request, boundary, request.checkpoint[1])
            if reservation is not None:
                request.checkpoint = None
        else:
            return
        if reservation is not None:
            self._publish(request, boundary, reservation)

    def _prepare(self, request: Request, boundary: Boundary, state: int | None = None) -> Reservation | None:
        message = request.message
        return self._keeping.prepare(
            message.tenant,
            message.token_ids,
            boundary,
            message.boundaries,
            self._source(request),
            state=state,
            absorbed=self._absorbed,
            begins=not request.depth,
        )

    def _publish(self, request: Request, boundary: Boundary, reservation: Reservation) -> None:
        started = time.perf_counter()
        message = request.message
        reservation.exact = request.exact
        slot = self._keeping.commit(
            reservation,
            message.tenant,
            message.token_ids,
            boundary,
            message.boundaries,
            request.blocks[: self._store.pool.blocks_for(boundary.end)],
            stored_tokens=boundary.end,
            absorbed=self._absorbed,
            begins=not request.depth,
        )
        if slot is not None:
            request.committed.append(boundary.end)
            self._metrics.commit_seconds.observe(time.perf_counter() - started)

    def _source(self, request: Request) -> frozenset[int]:
        """The snapshot that the request was restored from, which must not go before what is built on it is there."""
        slot = request.slot
        if slot is None or self._store.slots[slot].generation != request.generation:
            return frozenset()
        return frozenset({slot})
