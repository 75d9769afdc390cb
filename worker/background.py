"""Work for idle moments: answers are absorbed, and hits are computed again from nothing to be verified.

One job at a time runs, as a prefill without an answer. It takes turns with nobody: it goes on only while no request
is open, one pass at a time, and gives its blocks up as soon as a request needs room.
"""

from __future__ import annotations

import logging
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

from protocol.messages import Absorb, Boundary, Generate, Sampling
from worker.commits import Commits
from worker.metrics import WorkerMetrics
from worker.retention import Retention
from worker.returns import PAUSE_SECONDS
from worker.sequence_memory import SequenceMemory
from worker.sequence_states import SequenceStates
from worker.sequences import Request, pass_end
from worker.snapshot_clearing import Clearing
from worker.snapshot_finding import Finding
from worker.snapshots import SnapshotStore
from worker.steps import Copies, Prefill

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)

PASS_ROWS = 32  # a request that comes meanwhile waits for one such pass at most
STALE_PAUSES = 8  # what nobody has used for so many pauses of a conversation may go for a verification
MOST_JOBS = 64  # of either kind; the oldest absorption is forgotten, further verifications are skipped
_NOBODY = b""


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """A hit to compute again: the logits of its first token, restored `depth` tokens deep from a slot.

    `boundaries` are those that are not deeper.
    """

    message: Generate
    boundaries: tuple[Boundary, ...]
    depth: int
    slot: int
    generation: int
    logits: Tensor


class Background:
    """Queues the jobs and runs one. `differ` compares two rows of logits bit for bit."""

    def __init__(
        self,
        store: SnapshotStore,
        memory: SequenceMemory,
        states: SequenceStates,
        metrics: WorkerMetrics,
        verify_hits: float,
        differ: Callable[[Tensor, Tensor], bool],
        chance: Callable[[], float] = random.random,
        state_chunk: int = 1,
    ) -> None:
        self.verified = self.mismatched = self.skipped = 0
        self._store = store
        self._pool = store.pool
        self._retention = Retention(store)
        self._finding = Finding(store)
        self._clearing = Clearing(store)
        self._memory = memory
        self._states = states
        self._metrics = metrics
        self._commits = Commits(store, metrics, absorbed=True)
        self._verify_hits = verify_hits
        self._differ = differ
        self._chance = chance
        self._state_chunk = state_chunk
        self._absorptions: deque[Absorb] = deque(maxlen=MOST_JOBS)
        self._verifications: deque[Verification] = deque()
        self._running: Request | None = None
        self._verifying: Verification | None = None

    @property
    def is_empty(self) -> bool:
        return not (self._running or self._absorptions or self._verifications)

    @property
    def pending_verifications(self) -> int:
        return len(self._verifications) + (self._verifying is not None)

    @property
    def running(self) -> Request | None:
        """The job under way, as the prefill that it is."""
        return self._running

    # What to do

    def absorb(self, message: Absorb) -> None:
        """Compute this when there is time. A newer turn of the same conversation makes it moot."""
        self._absorptions.append(message)

    def overtaken(self, boundaries: Sequence[Boundary]) -> None:
        """A request has come that computes these boundaries itself: absorbing them would be in vain."""
        digests = {boundary.digest for boundary in boundaries}
        kept = [job for job in self._absorptions if job.boundaries[-1].digest not in digests]
        if len(kept) < len(self._absorptions):
            self._absorptions = deque(kept, maxlen=MOST_JOBS)
        running = self._running
        if running is not None and self._verifying is None and running.message.boundaries[-1].digest in digests:
            self._drop()

    def hit(self, request: Request, logits: Tensor) -> None:
        """A hit has its first logits: verify the share of them that was asked for. Of one that is not exact nobody has
        said that a cold run gives the same.
        """
        if not self._verify_hits or self._chance() >= self._verify_hits or request.slot is None:
            return
        if len(self._verifications) >= MOST_JOBS or not request.exact:
            self._count_verification("skipped")
            return
        restored = tuple(b for b in request.message.boundaries if b.end <= request.depth)
        self._verifications.append(
            Verification(
                request.message, restored, request.depth, request.slot, request.generation, logits.clone()
            )
        )

    def give_way(self) -> bool:
        """A request needs room: the running job's blocks go. False if it holds none."""
        if self._running is None:
            return False
        if self._verifying is not None:
            self._count_verification("skipped")
        self._drop()
        return True

    # Doing it

    def next_pass(self) -> Prefill | None:
        """The next pass of the running job, or of the next one that can run."""
        if self._verifying is not None and self._absorptions:
            self._begin_again_later()
        while True:
            request = self._running or self._start()
            if request is None:
                return None
            end = pass_end(request, PASS_ROWS, self._state_chunk)
            copies = self._own(request, end)
            if copies is not None:
                return Prefill(request, request.computed, end, copies, self._states.use(request, end))
            self.give_way()

    def _begin_again_later(self) -> None:
        """The next turn of a conversation may come any moment, and nobody waits for a verification."""
        assert self._verifying is not None
        self._verifications.appendleft(self._verifying)
        self._drop()

    def _own(self, request: Request, end: int) -> Copies | None:
        """As `SequenceMemory.own`. A verification has made room when it began: of what requests have taken since then
        it takes nothing back.
        """
        missing = self._pool.blocks_for(end) - len(request.blocks)
        if self._verifying is not None and missing > self._pool.free_count:
            return None
        return self._memory.own(request.blocks, request.computed, end)

    def _has_room(self, job: Verification) -> bool:
        """A verification is worth no snapshot that anybody may still want: it runs in memory that is free, or is held
        by what has not been used for long. In time a pool is full of that. However fast others go on, a session that
        rests for minutes stays, and so does what is to be verified.
        """
        store, message = self._store, job.message
        since = store.clock() - max(STALE_PAUSES * store.returns.pause, PAUSE_SECONDS)
        stay = self._retention.held() | {s.slot for s in store.slots.snapshots() if s.node.used_at > since}
        own = store.index.walk(message.tenant, message.token_ids.tobytes(), job.boundaries).chain
        stay |= {node.slot for node in own if node.slot is not None}
        if store.slots[job.slot].generation == job.generation:
            stay |= {job.slot}  # which inside a message is another's
        blocks = self._pool.blocks_for(len(message.token_ids))
        # In this order: what goes for its blocks leaves a recurrent state, and where it cannot nothing has gone.
        return self._clearing.make_room(blocks, stay) and self._states.room(1, stay)

    def _start(self) -> Request | None:
        """Absorptions first: their conversation goes on any moment."""
        while self._absorptions:
            request = self._absorption(self._absorptions.popleft())
            if request is not None:
                self._running = request
                return request
        while self._verifications:
            job = self._verifications.popleft()
            if not self._has_room(job):
                self._count_verification("skipped")
                continue
            self._verifying = job
            message = replace(job.message, n=1)
            self._running = Request(_NOBODY, message, time.monotonic(), caching=False, state="prefill")
            self._states.take(self._running, None)
            return self._running
        return None

    def _absorption(self, job: Absorb) -> Request | None:
        """A prefill from the deepest snapshot to the end of the answer; None where it is known already.

        Then a request has computed it: the conversation has gone on, and only deeper boundaries will be asked for.
        """
        message = Generate(job.request_id, job.token_ids, job.boundaries, Sampling(1), tenant=job.tenant)
        request = Request(_NOBODY, message, time.monotonic(), caching=True, state="prefill")
        last = job.boundaries[-1]
        # One id more, so that the end of the answer itself may be found.
        found = self._finding.lookup(job.tenant, job.token_ids + array("i", [0]), job.boundaries)
        if found.deepest_known >= last.end:
            return None
        if not self._states.room(1, frozenset() if found.slot is None else frozenset({found.slot})):
            return None
        state = None
        if found.slot is not None:
            # A pass computes something, even where a message that is stored goes on from here.
            depth = min(found.depth, request.total - 1)
            restored = self._finding.begin_restore(
                found.slot, found.generation, token_ids=message.token_ids, tokens=depth, asked=False
            )
            if restored is not None:
                self._finding.end_restore(found.slot)
                request.blocks, request.depth, state, request.exact = restored
                request.slot, request.generation = found.slot, found.generation
        self._states.take(request, state)
        request.computed = request.depth
        request.wanted = [last]
        return request

    def is_mine(self, request: Request) -> bool:
        return request is self._running

    def done(self, step: Prefill, logits: Tensor | None) -> None:
        """The pass has run; `logits` of the last row where it completes the job."""
        request = step.request
        request.computed = step.end
        if self._verifying is None:
            self._metrics.absorbed_tokens.inc(step.end - step.start)
        if request.computed < request.total:
            return
        if self._verifying is None:
            self._commits.materialised(request)
            self._commits.prompt_complete(request)
        else:
            assert logits is not None
            self._compare(self._verifying, logits)
        self._drop()

    def failed(self) -> None:
        """The pass could not run: the job is given up."""
        if self._verifying is not None:
            self._count_verification("skipped")
        self._drop()

    def _compare(self, job: Verification, logits: Tensor) -> None:
        if not self._differ(job.logits, logits):
            self._count_verification("verified")
            return
        self._count_verification("mismatched")
        log.error(
            "request=%s: the hit at depth %d (digest %s) differs from a cold run: its logits have digest %s, those of "
            "the cold run %s; all that holds these tokens goes",
            job.message.request_id,
            job.depth,
            job.boundaries[-1].digest.hex() if job.boundaries else "none",
            _digest(job.logits),
            _digest(logits),
        )
        self._clearing.distrust(job.message.tenant, job.message.token_ids, job.depth)

    def _count_verification(self, result: str) -> None:
        setattr(self, result, getattr(self, result) + 1)
        self._metrics.verifications.labels(result=result).inc()

    def _drop(self) -> None:
        if self._running is not None:
            self._pool.release(self._running.blocks)
            self._running.blocks = []
            self._states.drop(self._running)
        self._running = self._verifying = None


def _digest(logits: Tensor) -> str:
    """A name for the bits of a row, by which two of them can be told apart in a log."""
    return blake2b(logits.cpu().numpy().tobytes(), digest_size=8).hexdigest()
