"""Requests that wait, and what lets them in: a place, room, and nobody ahead who computes what they need."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from protocol.messages import Absorb, FailureCode, Generate, Reason
from worker.block_pool import BlockPool
from worker.lookup import Lookup
from worker.metrics import WorkerMetrics
from worker.sampling import unusable
from worker.sequence_memory import SequenceMemory
from worker.sequence_states import SequenceStates
from worker.sequences import Request, Running
from worker.snapshot_finding import Finding, Restored
from worker.snapshot_keeping import Keeping
from worker.snapshots import SnapshotStore
from worker.tiers.loading import NoRoom
from worker.tiers.tiers import Tiers
from worker.turns import Turns, taker

DECODE_MARGIN_TOKENS = 64  # room for new tokens that admission asks for
MAX_CHOICES = 256

_NOT_ASKED = Lookup(None, 0, 0, "miss", "disabled", 0, None, None)


class NeverFits(Exception):
    """Nothing else runs, and still there is no room: pinned snapshots hold it."""

    def __init__(self, request: Request) -> None:
        super().__init__(request.request_id)
        self.request = request


class Admission:
    """The queue. Tenants take turns; followers let those behind them pass.

    A tenant may fill as many places as it leaves free, so that there is one for others; the nameless one may fill all.
    """

    def __init__(
        self,
        running: Running,
        store: SnapshotStore,
        memory: SequenceMemory,
        states: SequenceStates,
        metrics: WorkerMetrics,
        tiers: Tiers | None,
        *,
        max_model_len: int,
        vocab_size: int,
        max_running: int,
        max_waiting: int,
    ) -> None:
        self.waiting: list[Request] = []
        self._turns = Turns()
        self._running = running
        self._finding = Finding(store)
        self._keeping = Keeping(store)
        self._pool: BlockPool = store.pool
        self._memory = memory
        self._states = states
        self._metrics = metrics
        self._tiers = tiers
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_running = max_running
        self._max_waiting = max_waiting

    @property
    def context_tokens(self) -> int:
        """Longest prompt and answer together: the model's, or what all of the pool holds."""
        return min(self._max_model_len, self._pool.total_count * self._pool.block_tokens)

    def refusal(self, message: Generate) -> tuple[FailureCode, str] | None:
        """Why a request cannot be taken in at all, or not now."""
        ids = message.token_ids
        if problem := self.unsound(message):
            return "invalid", problem
        if not 1 <= message.n <= MAX_CHOICES:
            return "invalid", f"n must be at least 1 and at most {MAX_CHOICES}"
        if self._states.most is not None and message.n > self._states.most:
            return "invalid", f"n must be at most {self._states.most}: kv_memory holds no more recurrent states"
        if message.sampling.max_tokens < 1:
            return "invalid", "max_tokens must be at least 1"
        if problem := unusable(message.sampling):
            return "invalid", problem
        if len(ids) >= self.context_tokens:
            limit = "the context" if self.context_tokens == self._max_model_len else "kv_memory"
            # The wording by which clients know that they must compact, as the gateway has it.
            return "too_long", (
                f"prompt is too long: {len(ids)} tokens > {self.context_tokens - 1} maximum; "
                f"{limit} holds {self.context_tokens} tokens, and the answer needs at least one"
            )
        if len(self.waiting) >= self._max_waiting:
            return "queue_full", f"{len(self.waiting)} requests are waiting already"
        name = taker(message)
        own = sum(taker(request.message) == name for request in self.waiting) if name else 0
        if own and own >= self._max_waiting - len(self.waiting):
            return "queue_full", f"{own} requests of this tenant are waiting already"
        return None

    def unsound(self, message: Generate | Absorb) -> str | None:
        """Why its tokens and boundaries cannot be those of a prompt; None if they can."""
        ids = message.token_ids
        ends = [boundary.end for boundary in message.boundaries]
        if not len(ids):
            return "token_ids is empty"
        values = np.frombuffer(ids, dtype=np.int32)  # 40 times as quick as Python's own search
        if values.min() < 0 or values.max() >= self._vocab_size:
            return f"token_ids holds an id outside [0, {self._vocab_size})"
        if any(a >= b for a, b in zip([0, *ends], ends, strict=False)) or (ends and ends[-1] > len(ids)):
            return "boundaries do not rise within the prompt"
        return None

    def next(self) -> Request | None:
        """The next request that starts now, its prefix restored and its blocks reserved: it is in prefill.

        Raises `NeverFits`, that request still waiting.
        """
        running = self._running
        for request in self._turns.order(self.waiting):
            if running.swapped:
                return None
            if not self._is_alone:
                full = running.choice_count + request.message.n > self._max_running
                if full or request.no_room_at == self._releases:
                    return None
            leader = request.follows
            if leader is not None and leader.state == "prefill" and leader.computed < request.follow_until:
                continue
            request.follows = None
            if request.is_compiling:
                continue
            if self._start(request):
                self.waiting.remove(request)
                self._turns.took(request, self.waiting)
                running.prefilling.append(request)
                request.state = "prefill"
                return request
            is_loading = request.load is not None and request.load.is_open
            if request.follows is None and not is_loading:
                request.no_room_at = self._releases
                return None
        return None

    @property
    def _is_alone(self) -> bool:
        """Whether nothing else holds memory that it will give back."""
        return self._running.is_empty and not (self._tiers and self._tiers.is_loading)

    @property
    def _releases(self) -> int:
        return self._pool.releases + self._states.releases

    def _start(self, request: Request) -> bool:
        """Look up, restore and reserve. False if it waits for a leader or a load now, or there is no room yet."""
        message = request.message
        if request.load is not None and request.load.is_open:
            return False
        if not request.caching:
            return self._reserve(request, _NOT_ASKED)
        found = self._finding.lookup(
            message.tenant, message.token_ids, message.boundaries, apart=bool(message.member)
        )
        self._follow(request, found.depth)
        if request.follows is not None or not self._promote(request, found) or not self._reserve(request, found):
            return False
        request.deepest_known = found.deepest_known
        request.diverged_message, request.diverged_token = found.diverged_message, found.diverged_token
        request.wanted = self._keeping.wanted(message.tenant, message.token_ids, message.boundaries, request.depth)
        return True

    def _promote(self, request: Request, found: Lookup) -> bool:
        """Have what slower tiers hold brought to the device, once. False if that is to be waited for."""
        before = request.load
        if self._tiers is None or (before is not None and before.has_tried(request.message)):
            return True
        try:
            request.load = self._tiers.promote(request.message, found)
        except NoRoom:
            return self._is_alone  # then it goes without
        return request.load is None

    def _follow(self, request: Request, depth: int) -> None:
        """Wait for a request in prefill that will materialise a boundary this one needs, deeper than `depth`.

        The leader is made to commit there: the boundary is a branch point. If it ends early, what it had finished
        is found by the next lookup.
        """
        message = request.message
        needed = {boundary.digest for boundary in message.boundaries if boundary.end < request.total}
        for leader in self._running.prefilling:
            other = leader.message
            if other.tenant != message.tenant or not leader.caching:
                continue
            shared = [b for b in other.boundaries if b.digest in needed and b.end > leader.computed]
            if shared and shared[-1].end > depth:
                branch = shared[-1]
                if all(wanted.end != branch.end for wanted in leader.wanted):
                    leader.wanted = sorted([*leader.wanted, branch], key=lambda b: b.end)
                request.follows, request.follow_until = leader, branch.end
                return

    def _reserve(self, request: Request, found: Lookup) -> bool:
        """Restore what was found and take blocks for the rest of the prompt, all or nothing.

        While others run there must be room for a decode margin, for the tails of further choices, and a block for
        each choice that decodes, or it would be swapped out before its next token. Alone, a request gets by with
        less, and at last with the place of the very snapshot it starts from.
        """
        pool, room = self._pool, self._memory.room
        margin = min(request.message.sampling.max_tokens, DECODE_MARGIN_TOKENS)
        held = pool.blocks_for(found.depth)
        # A partly filled last block is copied by the first pass, as the snapshot's own must stay as it is.
        tail = int(found.depth % pool.block_tokens > 0)
        least = pool.blocks_for(request.total) - held + tail
        most = pool.blocks_for(min(request.total + margin, self.context_tokens)) - held + tail
        further = (request.message.n - 1) * (1 + pool.blocks_for(margin)) + len(self._running.decoding)
        source = frozenset() if found.slot is None else frozenset({found.slot})
        alone = self._is_alone
        if not self._states.room(request.message.n, source):
            if not alone:
                return False
            if found.slot is not None:  # what it would start from has to make room for it
                return self._reserve(request, _lost(found, "evicted"))
            raise NeverFits(request)
        if room(most + further, source):
            taken = most
        elif alone and room(least, source):
            taken = least
        elif alone:
            taken = least - tail
        else:
            return False
        state = None
        if found.slot is not None:
            started = time.perf_counter()
            restored = self._restore(request, found.slot, found)
            if restored is None:
                return self._reserve(request, _lost(found, "restore_failed"))
            request.exact = restored.exact
            # References are all a restore takes, so the source is released as soon as they are held.
            self._finding.end_restore(found.slot)
            request.blocks, state = restored.blocks, restored.state
            self._metrics.restore_seconds.observe(time.perf_counter() - started)
        if not room(taken):
            pool.release(request.blocks)
            request.blocks = []
            self._states.release(state)
            raise NeverFits(request)
        self._states.take(request, state)
        fresh = pool.allocate(taken)
        if tail and taken >= least:
            request.tail_source, request.blocks[-1] = request.blocks[-1], fresh.pop(0)
        request.blocks.extend(fresh)
        request.slot, request.generation = found.slot, found.generation
        request.depth = request.computed = found.depth
        request.outcome, request.reason = found.outcome, found.reason
        if request.load is not None:
            request.sources = request.load.sources(request.message, request.depth)
        return True

    def _restore(self, request: Request, slot: int, found: Lookup) -> Restored | None:
        """What was found, if it is still there and what the prompt begins with: a lookup is not taken at its word."""
        ids = request.message.token_ids
        return self._finding.begin_restore(slot, found.generation, token_ids=ids, tokens=found.depth)


def _lost(found: Lookup, reason: Reason) -> Lookup:
    """The same lookup, had nothing been found."""
    return replace(found, slot=None, depth=0, outcome="miss", reason=reason)
