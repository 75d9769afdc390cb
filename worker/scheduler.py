"""Requests in, steps out: admission, the order of work, commits and memory pressure. No sockets, no tensors.

The engine asks for a step, carries it out and reports it done. A snapshot is committed when its tokens are
materialised, whatever happens to the request afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from protocol.messages import (
    Accepted,
    Boundary,
    Cancel,
    Completed,
    Failed,
    FailureCode,
    Finished,
    FinishReason,
    Generate,
    Message,
    Progress,
)
from worker.block_pool import BlockPool
from worker.journal import Journal
from worker.metrics import WorkerMetrics
from worker.sampling import Sampler
from worker.sequences import Choice, Request, State
from worker.snapshots import SnapshotStore
from worker.steps import Copies, Decode, Prefill, Step, SwapIn, SwapOut

DECODE_MARGIN_TOKENS = 64  # room for new tokens that admission asks for
SHARED_PREFILL_ROWS = 64  # rows of a prefill pass while others decode, so that their streams do not stutter
_OLDEST_EVERY = 4  # one prefill pass in four goes to the oldest request, the others to the nearly finished

Emit = Callable[[bytes, Message], None]


class Scheduler:
    """Owns all open requests and every block they hold."""

    def __init__(
        self,
        *,
        epoch: str,
        store: SnapshotStore,
        pool: BlockPool,
        metrics: WorkerMetrics,
        journal: Journal,
        emit: Emit,
        max_model_len: int,
        vocab_size: int,
        max_prefill_rows: int,
        max_running: int,
        max_waiting: int,
        caching: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch = epoch
        self.store = store
        self.pool = pool
        self.waiting: list[Request] = []
        self.prefilling: list[Request] = []
        self.decoding: list[Choice] = []
        self.swapped: list[Choice] = []
        self._requests: dict[tuple[bytes, str], Request] = {}
        self._metrics = metrics
        self._journal = journal
        self._emit = emit
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._max_prefill_rows = max_prefill_rows
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._caching = caching
        self._clock = clock
        self._prefill_turns = 0
        self._decoded_last = False

    # Events from outside

    def add(self, sender: bytes, message: Generate) -> None:
        """Take a request in, and admit it at once where there is room."""
        refusal = self._refusal(sender, message)
        if refusal is not None:
            code, text = refusal
            self._metrics.requests.labels(result=f"refused_{code}").inc()
            self._emit(sender, Failed(self.epoch, message.request_id, code, text))
            return
        request = Request(sender, message, self._clock())
        self._requests[sender, message.request_id] = request
        self.waiting.append(request)
        self._journal.add(request)
        self._admit()

    def _refusal(self, sender: bytes, message: Generate) -> tuple[FailureCode, str] | None:
        ids = message.token_ids
        ends = [boundary.end for boundary in message.boundaries]
        if (sender, message.request_id) in self._requests:
            return "invalid", f"request_id {message.request_id} is in use"
        if not len(ids):
            return "invalid", "token_ids is empty"
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            return "invalid", f"token_ids holds an id outside [0, {self._vocab_size})"
        if any(a >= b for a, b in zip([0, *ends], ends, strict=False)) or (ends and ends[-1] > len(ids)):
            return "invalid", "boundaries do not rise within the prompt"
        if message.n < 1 or message.sampling.max_tokens < 1:
            return "invalid", "n and max_tokens must be at least 1"
        if len(ids) >= self._max_model_len:
            return "too_long", f"prompt of {len(ids)} tokens leaves no room in a context of {self._max_model_len}"
        blocks = self._blocks_for(len(ids) + 1) + message.n
        if blocks > self.pool.total_count:
            return "too_long", (
                f"prompt of {len(ids)} tokens needs {blocks} KV blocks, kv_memory holds {self.pool.total_count}"
            )
        if len(self.waiting) >= self._max_waiting:
            return "queue_full", f"{len(self.waiting)} requests are waiting already"
        return None

    def cancel(self, sender: bytes, message: Cancel) -> None:
        """Stop a request or one choice. Unknown ones are no error: they ended meanwhile."""
        request = self._requests.get((sender, message.request_id))
        if request is None:
            return
        reason: FinishReason = "stop" if message.cause == "stop" else "cancelled"
        for choice in request.choices:
            if message.choice in (None, choice.index) and choice.finished is None:
                self.finish_choice(choice, reason)
        if request.is_open and message.choice is None:
            self._end(request, "cancelled", message.cause)

    def drop_sender(self, sender: bytes) -> None:
        """A gateway is gone: its requests are orphans."""
        for request in [request for key, request in self._requests.items() if key[0] == sender]:
            self._end(request, "cancelled", "gateway_lost")

    def fail(self, request: Request, code: FailureCode, text: str) -> None:
        """End one request with an error; the others go on."""
        if request.is_open:
            self._emit(request.sender, Failed(self.epoch, request.request_id, code, text))
            self._end(request, "failed", code)

    def fail_all(self, code: FailureCode, text: str) -> None:
        for request in list(self._requests.values()):
            self.fail(request, code, text)

    @property
    def running_count(self) -> int:
        return len(self._requests) - len(self.waiting)

    @property
    def is_idle(self) -> bool:
        return not self._requests

    # Admission

    def _admit(self) -> None:
        """Start waiting requests in order. One that follows a leader lets those behind it pass."""
        for request in list(self.waiting):
            running = self._running_choices()
            if self.swapped or (running and running + request.message.n > self._max_running):
                return
            leader = request.follows
            if leader is not None and leader.state == "prefill" and leader.computed < request.follow_until:
                continue
            request.follows = None
            if not self._start(request):
                return

    def _running_choices(self) -> int:
        return sum(request.message.n for request in self.prefilling) + len(self.decoding) + len(self.swapped)

    def _start(self, request: Request) -> bool:
        """Look up, restore and reserve. False if there is no room yet; the request stays where it is."""
        message = request.message
        caching = self._caching and message.cache_prompt
        found = self.store.lookup(message.tenant, message.token_ids, message.boundaries) if caching else None
        if caching and found is not None:
            self._follow(request, found.depth)
            if request.follows is not None:
                return True
        blocks: list[int] = []
        depth = 0
        reason = found.reason if found else "disabled"
        outcome = found.outcome if found else "miss"
        slot = None
        if found is not None and found.slot is not None:
            restored = self.store.begin_restore(found.slot, found.generation)
            if restored is None:
                outcome, reason = "miss", "restore_failed"
            else:
                # References are all a restore takes, so the source is released as soon as they are held.
                blocks, depth, slot = list(restored.blocks), restored.tokens, found.slot
                self.store.end_restore(found.slot)
        if not self._reserve(request, blocks, depth, slot):
            self.pool.release(blocks)
            if not self.prefilling and not self.decoding and not self.swapped:
                self._out_of_memory(request)
                return True
            return False
        self.waiting.remove(request)
        self.prefilling.append(request)
        request.state = "prefill"
        request.admitted_at = self._clock()
        request.follows = None
        request.outcome, request.reason, request.depth, request.slot = outcome, reason, depth, slot
        request.blocks, request.computed = blocks, depth
        if found is not None:
            request.deepest_known = found.deepest_known
            request.diverged_message, request.diverged_token = found.diverged_message, found.diverged_token
            request.wanted = self.store.wanted(message.tenant, message.token_ids, message.boundaries, depth)
        self._metrics.count_lookup(outcome, reason, depth)
        self._metrics.queue_seconds.observe(request.admitted_at - request.arrived)
        self._emit(
            request.sender,
            Accepted(
                self.epoch,
                request.request_id,
                outcome,
                depth,
                reason,
                request.diverged_message,
                request.diverged_token,
            ),
        )
        return True

    def _reserve(self, request: Request, blocks: list[int], depth: int, slot: int | None) -> bool:
        """Extend `blocks` to the prompt and a decode margin, all or nothing."""
        message = request.message
        margin = min(message.sampling.max_tokens, DECODE_MARGIN_TOKENS)
        length = min(request.total + margin, self._max_model_len)
        missing = self._blocks_for(length) - len(blocks)
        # A partly filled restored block is copied before it is written; other choices need tails of their own.
        spare = int(depth % self.pool.block_tokens > 0) + (message.n - 1) * (1 + self._blocks_for(margin))
        protect = frozenset() if slot is None else frozenset({slot})
        if not self._room(missing + spare, protect):
            return False
        blocks.extend(self.pool.allocate(missing))
        return True

    def _follow(self, request: Request, depth: int) -> None:
        """Wait for a request in prefill that will materialise a boundary this one needs, deeper than `depth`.

        The leader is made to commit there: the boundary is a branch point.
        """
        message = request.message
        needed = {boundary.digest for boundary in message.boundaries if boundary.end < request.total}
        for leader in self.prefilling:
            other = leader.message
            if other.tenant != message.tenant or not other.cache_prompt:
                continue
            shared = [b for b in other.boundaries if b.digest in needed and b.end > leader.computed]
            if shared and shared[-1].end > depth:
                branch = shared[-1]
                if all(wanted.end != branch.end for wanted in leader.wanted):
                    leader.wanted = sorted([*leader.wanted, branch], key=lambda b: b.end)
                request.follows, request.follow_until = leader, branch.end
                return

    # Steps

    def next_step(self) -> Step | None:
        """What to do now; None when there is nothing to do."""
        if self.waiting:
            self._admit()
        if self.swapped:
            step = self._swap_in()
            if step is not None:
                return step
        if self.prefilling and (not self.decoding or self._decoded_last):
            prefill = self._prefill()
            if prefill is not None:
                self._decoded_last = False
                return prefill
        if self.decoding:
            self._decoded_last = True
            return self._decode()
        return self._prefill() if self.prefilling else None

    def _prefill(self) -> Step | None:
        self._prefill_turns += 1
        if self._prefill_turns % _OLDEST_EVERY:
            request = min(self.prefilling, key=lambda r: r.total - r.computed)
        else:
            request = min(self.prefilling, key=lambda r: r.arrived)
        rows = min(self._max_prefill_rows, SHARED_PREFILL_ROWS) if self.decoding else self._max_prefill_rows
        end = min(request.computed + rows, request.total)
        copies = self._own(request.blocks, request.computed, end)
        if copies is None:
            self._out_of_memory(request)
            return self.next_step()
        return Prefill(request, request.computed, end, copies)

    def _decode(self) -> Step | None:
        copies: list[tuple[int, int]] = []
        chosen: list[Choice] = []
        for choice in self.decoding[: self._max_running]:
            own = self._own(choice.blocks, choice.length, choice.length + 1)
            if own is None:
                if chosen:
                    break
                return self._swap_out()
            copies.extend(own)
            chosen.append(choice)
        # Choices past the widest pass take turns.
        if len(chosen) < len(self.decoding):
            self.decoding = self.decoding[len(chosen) :] + self.decoding[: len(chosen)]
        return Decode(tuple(chosen), tuple(copies))

    def _swap_out(self) -> Step | None:
        """The pool is dry and no snapshot can go: the youngest choice waits on the host."""
        victim = max(self.decoding, key=lambda c: (c.request.arrived, c.index))
        if len(self.decoding) == 1 and not self.prefilling:
            self._out_of_memory(victim.request)
            return self.next_step()
        used = tuple(victim.blocks[: self._blocks_for(victim.length)])
        self.decoding.remove(victim)
        self.swapped.append(victim)
        self.pool.release(victim.blocks)
        victim.blocks = []
        self._metrics.swaps.labels(direction="out").inc()
        return SwapOut(victim, used)

    def _swap_in(self) -> Step | None:
        choice = min(self.swapped, key=lambda c: (c.request.arrived, c.index))
        needed = self._blocks_for(choice.length + 1)
        # Room for the others to grow as well, or this choice would be thrown out again by the next step.
        others = len(self.decoding) + len(self.prefilling)
        if not self._room(needed + 2 * others):
            if not others:
                self._out_of_memory(choice.request)
            return None
        choice.blocks = self.pool.allocate(needed)
        self.swapped.remove(choice)
        self.decoding.append(choice)
        self._metrics.swaps.labels(direction="in").inc()
        return SwapIn(choice)

    # Steps done

    def prefill_done(self, step: Prefill) -> bool:
        """The pass has run: commit what materialised. True if the prompt is complete and wants first tokens."""
        request = step.request
        if not request.is_open:
            return False
        request.computed = step.end
        self._metrics.cache_tokens.labels(source="computed").inc(step.end - step.start)
        self._commit_materialised(request)
        if request.computed < request.total:
            self._emit(request.sender, Progress(self.epoch, request.request_id, request.computed))
            return False
        self._note(request)
        self.prefilling.remove(request)
        request.state = "decode"
        request.prefilled_at = self._clock()
        self._metrics.count_prefill(request)
        self._fork(request)
        return True

    def _fork(self, request: Request) -> None:
        """Give every choice the prompt's blocks: the first takes them over, the others share them."""
        message = request.message
        used = request.blocks[: self._blocks_for(request.total)]
        for index in range(message.n):
            choice = Choice(request, index, Sampler(message.sampling, index, message.token_ids))
            if index:
                self.pool.share(used)
                choice.blocks = list(used)
            else:
                choice.blocks = request.blocks
            choice.length = request.total
            request.choices.append(choice)
            self.decoding.append(choice)
        request.blocks = []

    def token_chosen(self, choice: Choice, token: int) -> bool:
        """Take a sampled token in. True if it is part of the answer, false if it ended the choice unseen."""
        sampling = choice.request.message.sampling
        choice.generated += 1
        choice.next_token = token
        choice.sampler.accept(token)
        if token in sampling.stop_token_ids:
            self.finish_choice(choice, "stop")
            return False
        return True

    def check_length(self, choice: Choice) -> None:
        """End a choice that has all the tokens it may have. Called after its last token was sent."""
        limit = min(choice.request.message.sampling.max_tokens, self._max_model_len - choice.request.total)
        if choice.finished is None and choice.generated >= limit:
            self.finish_choice(choice, "length")

    def finish_choice(self, choice: Choice, reason: FinishReason) -> None:
        request = choice.request
        choice.finished = reason
        self._drop_choice(choice)
        self._emit(
            request.sender, Finished(self.epoch, request.request_id, choice.index, reason, choice.generated)
        )
        if all(other.finished for other in request.choices):
            cancelled = all(other.finished == "cancelled" for other in request.choices)
            self._end(request, "cancelled" if cancelled else "finished", "disconnect" if cancelled else "")

    def _drop_choice(self, choice: Choice) -> None:
        if choice in self.decoding:
            self.decoding.remove(choice)
        if choice in self.swapped:
            self.swapped.remove(choice)
        self.pool.release(choice.blocks)
        choice.blocks, choice.saved = [], None

    # Commits

    def _commit_materialised(self, request: Request) -> None:
        while request.wanted and request.wanted[0].end <= request.computed:
            self._commit(request, request.wanted.pop(0))

    def _commit(self, request: Request, boundary: Boundary) -> None:
        """Publish [0, boundary.end): the position is exact, whatever pass it was computed in."""
        started = time.perf_counter()
        protect = frozenset() if request.slot is None else frozenset({request.slot})
        reservation = self.store.reserve(protect=protect)
        if reservation is None:
            return
        message = request.message
        slot = self.store.commit(
            reservation,
            message.tenant,
            message.token_ids,
            boundary,
            message.boundaries,
            request.blocks[: self._blocks_for(boundary.end)],
            stored_tokens=boundary.end,
        )
        if slot is not None:
            request.committed.append(boundary.end)
            self._metrics.commit_seconds.observe(time.perf_counter() - started)

    def _note(self, request: Request) -> None:
        message = request.message
        if self._caching and message.cache_prompt:
            self.store.note(message.tenant, message.token_ids, message.boundaries, request.computed)

    # Ends and memory

    def _end(self, request: Request, state: State, cause: str) -> None:
        """Last act of a request: everything it holds goes back."""
        if not request.is_open:
            return
        if request.state == "prefill":
            self._keep_partial(request)
            self.prefilling.remove(request)
        elif request.state == "queued":
            self.waiting.remove(request)
        for choice in request.choices:
            self._drop_choice(choice)
        self.pool.release(request.blocks)
        request.blocks = []
        request.state = state
        request.ended_at = self._clock()
        del self._requests[request.sender, request.request_id]
        queue, prefill, decode = request.seconds(request.ended_at)
        if state != "failed":
            self._emit(
                request.sender,
                Completed(
                    self.epoch,
                    request.request_id,
                    request.outcome,
                    request.depth,
                    request.reason,
                    request.total,
                    request.generated,
                    queue,
                    prefill,
                    decode,
                ),
            )
        self._metrics.count_end(request, state, cause)
        self._journal.log_end(request, cause)

    def _keep_partial(self, request: Request) -> None:
        """A cancelled prefill leaves its deepest finished boundary, so that a retry does not start from zero."""
        if not (self._caching and request.message.cache_prompt):
            return
        done = [b for b in request.message.boundaries if request.depth < b.end <= request.computed]
        if done and done[-1].end not in request.committed:
            self._commit(request, done[-1])
        self._note(request)

    def _out_of_memory(self, request: Request) -> None:
        self.fail(
            request,
            "out_of_memory",
            f"kv_memory is full: {self.pool.total_count} blocks of {self.pool.block_tokens} tokens, "
            f"{self.pool.free_count} free, and this request at {request.computed} of {request.total} tokens "
            "needs more",
        )

    def _room(self, blocks: int, protect: frozenset[int] = frozenset()) -> bool:
        return self.pool.free_count >= blocks or self.store.make_room(blocks, protect)

    def _own(self, blocks: list[int], start: int, end: int) -> Copies | None:
        """Make [start, end) writable: append missing blocks, replace shared ones. None without room: no change.

        Nothing a snapshot refers to is ever written: a block with other holders is copied first.
        """
        size = self.pool.block_tokens
        span = range(start // size, -(-end // size))
        while True:
            shared = [i for i in span if i < len(blocks) and self.pool.refcount(blocks[i]) > 1]
            missing = max(span.stop - len(blocks), 0)
            if self.pool.free_count >= len(shared) + missing:
                break
            # Making room may free the very snapshots that share these blocks, so the need is counted again.
            if not self.store.make_room(len(shared) + missing):
                return None
        copies: list[tuple[int, int]] = []
        for i, fresh in zip(shared, self.pool.allocate(len(shared)), strict=True):
            if i * size < start:
                copies.append((blocks[i], fresh))
            self.pool.release([blocks[i]])
            blocks[i] = fresh
        blocks.extend(self.pool.allocate(missing))
        return tuple(copies)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_tokens)
