"""The engine loop: takes events, carries out steps, samples and sends tokens.

A fault in running a step, or in choosing a token, costs the requests of that step. A fault in the bookkeeping around it
ends the process: state that may be wrong is never served from.
"""

from __future__ import annotations

import logging
import queue
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from protocol.messages import Absorb, Cancel, Failed, FailureCode, Generate, Tokens, Vocabulary
from worker.ahead import Ahead
from worker.control import Control
from worker.grammar import GrammarError
from worker.io import FromGateway, FromOperator, GatewayLost, Inbound, SocketsFailed, WorkerSockets
from worker.logit_rows import LogitRows, NotFinite
from worker.metrics import WorkerMetrics
from worker.outbox import Outbox
from worker.scheduler import Scheduler, is_said
from worker.sequences import Choice, Request
from worker.snapshot_clearing import Clearing
from worker.snapshots import SnapshotStore
from worker.step_watch import StepWatch
from worker.steps import Copies, Decode, Prefill, Step, SwapIn, SwapOut, requests_of
from worker.tiers.tiers import Tiers
from worker.warm_up import warm_up

if TYPE_CHECKING:
    from worker.runner import Runner

log = logging.getLogger(__name__)

_IDLE_SECONDS = 0.5
_PAUSE_SECONDS = 0.03  # between a request and idle work: an agent's next turn often comes within it
_FINISH_SECONDS = 8.0  # `prefixd serve` gives a worker ten to stop
_STOPPING = "the worker is stopping"


class EngineFault(Exception):
    """The worker cannot go on: its own state may be wrong."""


class Engine:
    """Drives one model until asked to stop. Everything but `stop` and `watch` belongs to one thread."""

    def __init__(
        self,
        sockets: WorkerSockets,
        scheduler: Scheduler,
        store: SnapshotStore,
        runner: Runner,
        control: Control,
        metrics: WorkerMetrics,
        clock: Callable[[], float] = time.monotonic,
        tiers: Tiers | None = None,
        watch: StepWatch | None = None,
        outbox: Outbox | None = None,
        *,
        check_each: bool = False,
    ) -> None:
        """`check_each`: the accounts are checked after every step too, not only at rest."""
        self._sockets = sockets
        self._outbox = outbox or Outbox(sockets.send)
        self._scheduler = scheduler
        self._store = store
        self._clearing = Clearing(store)
        self._runner = runner
        self._ahead = Ahead(scheduler, runner)
        self._control = control
        self._metrics = metrics
        self._clock = clock
        self.watch = watch or StepWatch(clock)
        self._busy = clock()  # when a request was last open, or an answer to absorb came
        self._tiers = tiers
        self._copying = tiers is not None  # there may be something to copy between tiers now
        self._stopping = False
        self._check_each = check_each
        self._checked = False  # the accounts, since anything last happened

    @property
    def running_count(self) -> int:
        return self._scheduler.running_count

    @property
    def waiting_count(self) -> int:
        return len(self._scheduler.waiting)

    def warm_up(self) -> None:
        """Have what a first request would wait for behind us, before `run`: no step that hangs goes unnoticed then."""
        warm_up(self._run, self.watch, self._runner, self._store, self._scheduler.context_tokens)

    def stop(self) -> None:
        """Ask the loop to end: open requests fail with `stopping`. Safe in a signal handler."""
        self._stopping = True
        self._sockets.inbox.put(None)

    def close(self) -> None:
        """End what goes on beside the loop, and give back what that holds. Call it once the loop has ended."""
        self._scheduler.grammars.close()
        if self._tiers is not None:
            self._tiers.close()

    def run(self, alive: Callable[[], None] = lambda: None) -> None:
        """`alive` is called before each turn: not while a step hangs.

        Raises `EngineFault` when the loop's own bookkeeping fails: open requests are told, nothing else is done.
        """
        try:
            while not self._stopping:
                alive()
                self.turn(wait=self._scheduler.is_idle or self._scheduler.is_loading)
            self._scheduler.fail_all("stopping", _STOPPING)
            self._take_events(wait=False)
            self._finish_tiers()
        except Exception as error:
            log.exception("the engine's bookkeeping failed")
            self._scheduler.abandon("the worker failed and starts again")
            raise EngineFault(f"the engine's bookkeeping failed: {type(error).__name__}: {error}") from error

    def turn(self, wait: bool) -> None:
        """Take what has come in, waiting for something if asked to, and carry out one step."""
        self._turn(wait)
        self._outbox.flush()

    def _turn(self, wait: bool) -> None:
        self.watch.turned()
        started = self._ahead.step
        self._take_events(wait and started is None and not self._copying)
        idle = self._scheduler.is_idle
        if self._tiers is not None:
            with self.watch.copying():
                self._copying = self._tiers.turn(idle=idle or self._scheduler.is_loading)
        if wait and idle and started is None and self._pause_left() > 0:
            return  # an operator has asked something: that neither ends the pause nor begins another one
        step = started or self._scheduler.next_step()
        if step is not None:
            self._carry_out(step)
            if self._check_each:
                self._store.check_invariants()
            self._copying = self._tiers is not None
        if not idle:
            self._busy = self._clock()

    def _finish_tiers(self) -> None:
        """What was kept last goes to the slower tiers as well, if that does not take too long."""
        if self._tiers is not None:
            left = self._tiers.finish(_FINISH_SECONDS)
            if left:
                log.warning("%d snapshots were not written to slower tiers in time", left)

    def _pause_left(self) -> float:
        """Seconds before idle work may go on. It makes one pause, not one in every pass."""
        return max(0.0, self._busy + _PAUSE_SECONDS - self._clock())

    def _take_events(self, wait: bool) -> None:
        """Take all that is there. After a while of nothing the accounts are checked, once."""
        inbox = self._sockets.inbox
        resting = self._scheduler.background.is_empty
        seconds = _IDLE_SECONDS if resting or self._scheduler.is_loading else self._pause_left()
        try:
            event = inbox.get(timeout=seconds) if wait else inbox.get_nowait()
        except queue.Empty:
            if wait and resting and self._scheduler.is_idle and not self._checked:
                self._checked = True
                self._store.check_invariants(*(self._tiers.references if self._tiers else ((), ())))
            return
        self._checked = False
        self._take(event)
        while not inbox.empty():  # this thread alone takes from it
            self._take(inbox.get_nowait())

    def _take(self, event: Inbound) -> None:
        match event:
            case FromGateway(sender, Generate() as message) if self._stopping:
                refused = Failed(self._scheduler.epoch, message.request_id, "stopping", _STOPPING)
                self._outbox.send(sender, refused)
            case FromGateway(sender, Generate() as message):
                self._scheduler.add(sender, message)
            case FromGateway(sender, Cancel() as message):
                self._scheduler.cancel(sender, message)
            case FromGateway(_, Absorb() as message):
                self._busy = self._clock()
                self._scheduler.absorb(message)
            case FromGateway(_, Vocabulary() as message):
                self._scheduler.grammars.learn(message)
            case FromOperator(sender, command):
                self._sockets.answer(sender, self._control.answer(command))
            case GatewayLost(sender):
                self._scheduler.drop_sender(sender)
            case SocketsFailed(error):
                raise error

    def _carry_out(self, step: Step) -> None:
        """Run a step and report it done. What fails in running it fails its requests alone."""
        try:
            with self.watch.step(step), self._metrics.timed(step):
                rows = self._run(step)
        except torch.AcceleratorError:
            raise  # the device's context is lost: no later step could run either
        except (MemoryError, torch.OutOfMemoryError) as error:
            log.exception("out of memory in a step")
            self._clearing.drop_all("oom")
            self._fail(step, "out_of_memory", f"out of memory: {error}")
        except Exception as error:
            log.exception("step failed")
            self._fail(step, "internal", f"{type(error).__name__} in the engine")
        else:
            self._done(step, rows)

    def _run(self, step: Step) -> LogitRows | None:
        """What touches the device. The rows of logits that tokens are to be chosen from, if there are any."""
        match step:
            case Prefill(request, start, end, copies, states):
                ids = request.message.token_ids[start:end]
                hidden = self._runner.prefill(ids, request.blocks, start, states, copies)
                self._outbox.flush()
                if end < request.total:
                    return None
                logits = self._runner.head_row(hidden[len(ids) - 1])
                return LogitRows(logits.unsqueeze(0), self._runner)
            case Decode(choices, copies):
                started = self._ahead.take(step)
                if started is None:
                    self._copy(copies)
                    started = self._runner.decode(
                        [choice.next_token for choice in choices],
                        [choice.blocks for choice in choices],
                        [choice.length for choice in choices],
                        [choice.entry for choice in choices if choice.entry is not None],
                    )
                self._ahead.start_after(step)
                rows = LogitRows(started, self._runner)
                if self._ahead.step is None:  # or all are greedy, and the logits another step's
                    rows.draw([choice.sampler for choice in choices])
                return rows
            case SwapOut(choice, blocks, entry):
                choice.saved = self._runner.save(blocks, entry)
            case SwapIn(choice, blocks):
                assert choice.saved is not None
                self._runner.load(blocks, choice.entry, choice.saved)
                choice.saved = None
        return None

    def _copy(self, copies: Copies) -> None:
        for source, target in copies:
            self._runner.cache.copy_block(source, target)

    def _fail(self, step: Step, code: FailureCode, text: str) -> None:
        with self._wiping():
            for request in dict.fromkeys(requests_of(step)):
                if self._scheduler.background.is_mine(request):
                    self._scheduler.background.failed()
                    continue
                self._scheduler.fail_in_pass(request, code, text)

    @contextmanager
    def _wiping(self) -> Iterator[None]:
        """Zero the blocks that come free meanwhile, after a fault: whoever has them next shall not meet it too."""
        pool = self._store.pool
        before = list(pool.refcounts)
        yield
        freed = [block for block, count in enumerate(before) if count and not pool.refcount(block)]
        if freed:
            self._runner.cache.wipe(freed)

    def _done(self, step: Step, rows: LogitRows | None) -> None:
        match step:
            case Prefill(request) if self._scheduler.background.is_mine(request):
                self._scheduler.background.done(step, None if rows is None else rows.logits[0])
            case Prefill(request):
                if self._scheduler.prefill_done(step):
                    assert rows is not None
                    self._begin_answers(request, rows)
            case Decode(choices):
                assert rows is not None
                self._scheduler.decode_done(step)
                for row, choice in enumerate(choices):
                    self._sample(choice, rows, row)

    def _begin_answers(self, request: Request, rows: LogitRows) -> None:
        """Whoever waits for the first tokens has them before what is kept of the prompt is put in order."""
        chosen: list[tuple[Choice, int | Exception]] = []
        for choice in request.choices:
            chosen.append((choice, self._choose(choice, rows, 0)))
            if isinstance(chosen[-1][1], Exception):
                break  # the request fails with it
        self._scheduler.prompt_done(request)
        self._scheduler.background.hit(request, rows.logits[0])
        for choice, token in chosen:
            self._take_in(choice, token)

    def _sample(self, choice: Choice, rows: LogitRows, row: int) -> None:
        """Choose and send the next token of one choice."""
        if choice.finished is None and choice.request.is_open:
            self._take_in(choice, self._choose(choice, rows, row))

    def _choose(self, choice: Choice, rows: LogitRows, row: int) -> int | Exception:
        """The next token, sent if it is part of the answer; or the fault in choosing it."""
        try:
            token, logprob = rows.choose(row, choice.sampler)
        except Exception as error:
            return error
        if is_said(choice, token):
            request, logprobs = choice.request, () if logprob is None else (logprob,)
            tokens = Tokens(self._scheduler.epoch, request.request_id, choice.index, array("i", [token]), logprobs)
            self._outbox.send(request.sender, tokens)
        return token

    def _take_in(self, choice: Choice, chosen: int | Exception) -> None:
        """A fault in choosing is the request's alone."""
        request = choice.request
        if isinstance(chosen, int):
            self._scheduler.token_chosen(choice, chosen)
            return
        if isinstance(chosen, GrammarError):
            self._scheduler.fail(request, "invalid", f"grammar: {chosen}")
            return
        log.error("sampling failed", exc_info=chosen)
        text = f"{type(chosen).__name__} while sampling: {chosen}"
        if isinstance(chosen, NotFinite):
            with self._wiping():
                self._scheduler.fail_for_values(request, text)
        else:
            self._scheduler.fail(request, "internal", text)
