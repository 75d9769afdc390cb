"""Requests in, steps out: who runs next, and how every request ends. No sockets, no tensors.

The engine asks for a step, carries it out and reports it done. Every request gets exactly one last message, `Completed`
or `Failed`, and gives back all it holds before that.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections.abc import Callable
from typing import Any, Literal

from protocol.messages import (
    Absorb,
    Accepted,
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
from worker.admission import Admission, NeverFits
from worker.background import Background
from worker.block_pool import BlockPool
from worker.commits import Commits
from worker.grammars import Grammars
from worker.journal import Journal
from worker.metrics import WorkerMetrics
from worker.passes import Passes
from worker.sampling import Sampler
from worker.sequence_memory import SequenceMemory
from worker.sequence_states import SequenceStates
from worker.sequences import Choice, Request, Running
from worker.snapshot_clearing import Clearing
from worker.snapshots import SnapshotStore
from worker.steps import Decode, Prefill, Step
from worker.swapping import Swapping
from worker.tiers.tiers import Tiers

log = logging.getLogger(__name__)

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
        shared_prefill_rows: int,
        max_running: int,
        max_waiting: int,
        caching: bool,
        max_queue_seconds: float = math.inf,
        verify_hits: float = 0.0,
        differ: Callable[[Any, Any], bool] = operator.ne,
        clock: Callable[[], float] = time.monotonic,
        state_chunk: int = 1,
        tiers: Tiers | None = None,
        wake: Callable[[], None] | None = None,
    ) -> None:
        """`wake` ends the engine's waiting, from any thread. Without it grammars are compiled on the engine's own."""
        self.epoch = epoch
        self.running = Running()
        self._max_queue_seconds = max_queue_seconds
        self.grammars = Grammars(vocab_size, lambda source: metrics.grammars.labels(source=source).inc(), wake)
        self._requests: dict[tuple[bytes, str], Request] = {}
        self._pool = pool
        self._metrics = metrics
        self._events = store.events
        self._journal = journal
        self._emit = emit
        self._caching = caching
        self._clock = clock
        self._commits = Commits(store, metrics)
        self._clearing = Clearing(store)
        self.background = Background(
            store,
            SequenceMemory(pool, store),
            SequenceStates(store),
            metrics,
            verify_hits,
            differ,
            state_chunk=state_chunk,
        )
        self._tiers = tiers
        memory = SequenceMemory(pool, store, self._give_way)
        self._states = SequenceStates(store, self._give_way)
        swapping = Swapping(self.running, pool, memory, self._states, metrics)
        self._passes = Passes(
            self.running,
            memory,
            self._states,
            swapping,
            self._commits,
            max_prefill_rows,
            shared_prefill_rows,
            max_running,
            state_chunk,
        )
        self._admission = Admission(
            self.running,
            store,
            memory,
            self._states,
            metrics,
            tiers,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_running=max_running,
            max_waiting=max_waiting,
        )

    # Events from outside

    def add(self, sender: bytes, message: Generate) -> None:
        """Take a request in, and admit it at once where there is room."""
        request = Request(sender, message, self._clock(), self._caching and message.cache_prompt)
        refusal = self._admission.refusal(message)
        if (sender, message.request_id) in self._requests:
            refusal = "invalid", f"request_id {message.request_id} is in use"
        if refusal is None and message.sampling.grammar is not None:
            request.constraint = self.grammars.ask(message.sampling.grammar)
            refusal = _not_compiled(request)
        if refusal is not None:
            code, text = refusal
            self._metrics.requests.labels(result=f"refused_{code}").inc()
            self._journal.log_refusal(request, code, text)
            self._emit(sender, Failed(self.epoch, message.request_id, code, text))
            return
        if request.caching:  # else it keeps nothing of what it computes
            self.background.overtaken(message.boundaries)
        self._requests[sender, message.request_id] = request
        self._admission.waiting.append(request)
        self._journal.add(request)
        self._admit()

    def absorb(self, message: Absorb) -> None:
        """Have an answered conversation computed in idle time. One that cannot be is dropped: nobody waits for it."""
        problem = self._admission.unsound(message)
        if problem is None and len(message.token_ids) > self.context_tokens:
            problem = f"{len(message.token_ids)} tokens are more than fit"
        if problem is None:
            self.background.absorb(message)
        else:
            log.warning("request=%s: its answer is not absorbed: %s", message.request_id, problem)

    def cancel(self, sender: bytes, message: Cancel) -> None:
        """Stop a request or one choice. Unknown ones are no error: they ended meanwhile."""
        request = self._requests.get((sender, message.request_id))
        if request is None:
            return
        reason: FinishReason = "stop" if message.cause == "stop" else "cancelled"
        if request.choices:
            for choice in request.choices:
                if choice.finished is None and message.choice in (None, choice.index):
                    self._finish_choice(choice, reason, message.cause)
        elif message.choice is None:
            self._end(request, "finished" if reason == "stop" else "cancelled", message.cause)

    def drop_sender(self, sender: bytes) -> None:
        """A gateway is gone: its requests are orphans."""
        for request in [request for key, request in self._requests.items() if key[0] == sender]:
            self._end(request, "cancelled", "gateway_lost")

    def fail(self, request: Request, code: FailureCode, text: str) -> None:
        """End one request with an error; the others go on."""
        if request.is_open:
            self._end(request, "failed", code)
            self._emit(request.sender, Failed(self.epoch, request.request_id, code, text))

    def fail_in_pass(self, request: Request, code: FailureCode, text: str) -> None:
        """End a request whose pass did not run to the end: its recurrent state is of no position any more."""
        in_prefill = request.state == "prefill"
        if request.is_open:
            self._commits.lost(request)
        self.fail(request, code, text)
        if in_prefill and code == "internal":
            self._distrust(request, request.depth)

    def fail_for_values(self, request: Request, text: str) -> None:
        """End a request whose values are no numbers: where they came from is not known, and what it kept has them."""
        self.fail(request, "internal", text)
        self._distrust(request, request.depth or min(request.committed, default=0))

    def _distrust(self, request: Request, depth: int) -> None:
        """A fault may lie in what is kept there: nobody shall meet it again."""
        if depth:
            log.error("request=%s: what is kept of it from depth %d on goes", request.request_id, depth)
            message = request.message
            self._clearing.distrust(message.tenant, message.token_ids, depth)

    def fail_all(self, code: FailureCode, text: str) -> None:
        for request in list(self._requests.values()):
            self.fail(request, code, text)

    def abandon(self, text: str) -> None:
        """Tell everybody that their request failed, and touch nothing: the state here cannot be relied on."""
        for request in self._requests.values():
            self._emit(request.sender, Failed(self.epoch, request.request_id, "internal", text))

    @property
    def waiting(self) -> list[Request]:
        return self._admission.waiting

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together that is served."""
        return self._admission.context_tokens

    @property
    def running_count(self) -> int:
        return len(self._requests) - len(self.waiting)

    @property
    def is_idle(self) -> bool:
        """No request is open. There may be work in the background."""
        return not self._requests

    @property
    def is_loading(self) -> bool:
        """Nothing runs, as what could waits for a slower tier or for its grammar."""
        waits = self._tiers is not None and self._tiers.is_loading
        return self.running.is_empty and (waits or any(request.is_compiling for request in self.waiting))

    def _give_way(self) -> bool:
        """A request needs room: free what less urgent work holds. False if it holds nothing."""
        return self.background.give_way() or (self._tiers is not None and self._tiers.give_way())

    # Steps

    def next_step(self) -> Step | None:
        """What to do now; None when every request has ended, or waits for what is loaded, and nothing else is to do."""
        while True:
            self._admit()
            if self.is_loading:
                return None
            if self.running.is_empty:
                assert self.is_idle, "requests wait although nothing runs"
                return self.background.next_pass()
            step = self._passes.next()
            if step is not None:
                return step
            self._out_of_memory(self._passes.in_the_way())

    def after(self, step: Decode) -> Decode | None:
        """The step that follows a decode step under way, whatever its tokens are; None where that is not known yet.

        Who waits for room goes first, should there be some by now: nobody need have ended for it.
        """
        self._admit()
        for choice in step.choices:
            if not choice.sampler.is_plain_greedy or choice.generated + 1 >= self._most_tokens(choice):
                return None
        return self._passes.after(step)

    def _admit(self) -> None:
        self._refuse_overdue()
        for each in list(self.waiting):
            if problem := _not_compiled(each):
                self.fail(each, *problem)
        while True:
            try:
                request = self._admission.next()
            except NeverFits as error:
                self._out_of_memory(error.request)
                continue
            if request is None:
                return
            request.admitted_at = self._clock()
            self._metrics.count_lookup(
                request.outcome, request.reason, request.depth, request.sources, exact=request.exact
            )
            self._metrics.queue_seconds.observe(request.admitted_at - request.arrived)
            self._tell_lookup(request)
            accepted = Accepted(
                self.epoch,
                request.request_id,
                request.outcome,
                request.depth,
                request.reason,
                request.diverged_message,
                request.diverged_token,
                request.exact,
            )
            self._emit(request.sender, accepted)

    def _refuse_overdue(self) -> None:
        """Those who have waited for too long are told so while they still listen. The first has waited longest."""
        latest = self._clock() - self._max_queue_seconds
        while self.waiting and self.waiting[0].arrived < latest:
            text = f"no turn came in {self._max_queue_seconds:g} seconds of waiting in the queue"
            self.fail(self.waiting[0], "queue_full", text)

    def _tell_lookup(self, request: Request) -> None:
        digest = next((b.digest for b in request.message.boundaries if b.end == request.depth), b"")
        self._events.add(
            request.outcome,
            "" if request.outcome == "hit" else request.reason,
            slot=request.slot,
            digest=digest,
            tokens=request.depth,
            request_id=request.request_id,
        )

    # Steps done

    def prefill_done(self, step: Prefill) -> bool:
        """The pass has run. True if the prompt is complete: its choices want first tokens, and then `prompt_done`."""
        request = step.request
        assert request.state == "prefill"
        assert request.computed == step.start
        request.computed = step.end
        self._metrics.cache_tokens.labels(source="computed").inc(step.end - step.start)
        if request.computed < request.total:
            self._commits.materialised(request)
            self._emit(request.sender, Progress(self.epoch, request.request_id, request.computed))
            return False
        request.prefilled_at = self._clock()
        request.choices = [self._choice(request, index) for index in range(request.message.n)]
        return True

    def prompt_done(self, request: Request) -> None:
        """Commit what materialised, and let the choices decode.

        It may take as long as a small pass, so first tokens are sent before it. Nobody else is served in between.
        """
        self._commits.materialised(request)
        self._commits.prompt_complete(request)
        self.running.prefilling.remove(request)
        request.state = "decode"
        self._metrics.count_prefill(request)
        self._fork(request)

    def _choice(self, request: Request, index: int) -> Choice:
        message = request.message
        constraint = None if request.constraint is None else request.constraint.result().copy()
        return Choice(request, index, Sampler(message.sampling, index, message.token_ids, constraint))

    def _fork(self, request: Request) -> None:
        """Give every choice the prompt's blocks: the first takes them over, the others share them."""
        used = request.blocks[: self._pool.blocks_for(request.total)]
        for choice in request.choices:
            if choice.index:
                self._pool.share(used)
                choice.blocks = list(used)
            else:
                choice.blocks = request.blocks
            choice.length = request.total
            self.running.decoding.append(choice)
        request.blocks = []
        self._states.fork(request)

    def decode_done(self, step: Decode) -> None:
        """The pass has run: each choice's next token is in its blocks."""
        for choice in step.choices:
            choice.length += 1

    def token_chosen(self, choice: Choice, token: int) -> None:
        """Take a sampled token in, which has been sent if it `is_said`, and end the choice if it was the last."""
        choice.generated += 1
        choice.next_token = token
        choice.sampler.accept(token)
        if choice.sampler.ended or not is_said(choice, token):
            self._finish_choice(choice, "stop")
        elif choice.generated >= self._most_tokens(choice):
            self._finish_choice(choice, "length")

    def _most_tokens(self, choice: Choice) -> int:
        request = choice.request
        return min(request.message.sampling.max_tokens, self.context_tokens - request.total)

    # Ends

    def _finish_choice(self, choice: Choice, reason: FinishReason, cause: str = "") -> None:
        request = choice.request
        choice.finished = reason
        self._drop_choice(choice)
        finished = Finished(self.epoch, request.request_id, choice.index, reason, choice.generated)
        self._emit(request.sender, finished)
        if reason == "cancelled":
            request.cancel_cause = cause
        if all(other.finished for other in request.choices):
            self._end(request, "cancelled" if request.cancel_cause else "finished", request.cancel_cause)

    def _drop_choice(self, choice: Choice) -> None:
        self.running.drop(choice)
        self._pool.release(choice.blocks)
        self._states.drop_choice(choice)
        choice.blocks, choice.saved = [], None

    def _end(self, request: Request, state: Literal["finished", "cancelled", "failed"], cause: str) -> None:
        """Last act of a request: everything it holds goes back. Says `Completed` unless it failed."""
        if request.state == "prefill":
            self._commits.cut_off(request)
            self.running.prefilling.remove(request)
        elif request.state == "queued":
            self.waiting.remove(request)
        for choice in request.choices:
            self._drop_choice(choice)
        self._pool.release(request.blocks)
        if request.tail_source is not None:
            self._pool.release([request.tail_source])
        self._states.drop(request)
        request.blocks, request.tail_source = [], None
        request.state = state
        request.ended_at = self._clock()
        del self._requests[request.sender, request.request_id]
        if state != "failed":
            completed = Completed(
                self.epoch,
                request.request_id,
                request.outcome,
                request.depth,
                request.reason,
                request.total,
                request.generated,
                *request.seconds(request.ended_at),
                max(request.committed, default=0),
                request.exact,
            )
            self._emit(request.sender, completed)
        self._metrics.count_end(request, state, cause)
        self._journal.log_end(request, cause)

    def _out_of_memory(self, request: Request) -> None:
        pool, most = self._pool, self._states.most
        states = "" if most is None else f", {most} recurrent states"
        self.fail(
            request,
            "out_of_memory",
            f"kv_memory is full: {pool.total_count} blocks of {pool.block_tokens} tokens, {pool.free_count} free"
            f"{states}, and this request at {request.computed} of {request.total} tokens needs more",
        )


def is_said(choice: Choice, token: int) -> bool:
    """Whether a token is part of the answer, and does not end it unseen."""
    return token not in choice.request.message.sampling.stop_token_ids


def _not_compiled(request: Request) -> tuple[FailureCode, str] | None:
    """Why a request cannot go on whose grammar could not be compiled; None while that is not known, or where it was."""
    compiled = request.constraint
    error = compiled.exception() if compiled is not None and compiled.done() else None
    return None if error is None else ("invalid", f"grammar: {error}")
