"""The engine loop: takes events, carries out steps, samples and sends tokens.

A fault in a step costs the requests of that step. A fault in the loop's own bookkeeping ends the process: state that
may be wrong is never served from.
"""

from __future__ import annotations

import logging
import queue
import time
from array import array

import torch
from torch import Tensor

from protocol.messages import Failed, Generate, Tokens
from worker.control import Control
from worker.io import FromGateway, FromOperator, GatewayLost, Inbound, WorkerSockets
from worker.metrics import WorkerMetrics
from worker.model_runner import ModelRunner
from worker.scheduler import Scheduler
from worker.sequences import Choice, Request
from worker.snapshots import SnapshotStore
from worker.steps import Copies, Decode, Prefill, Step, SwapIn, SwapOut

log = logging.getLogger(__name__)

_IDLE_SECONDS = 0.5


class Engine:
    """Drives one model until asked to stop. Everything but `stop` and `loop_age` belongs to one thread."""

    def __init__(
        self,
        sockets: WorkerSockets,
        scheduler: Scheduler,
        store: SnapshotStore,
        runner: ModelRunner,
        control: Control,
        metrics: WorkerMetrics,
    ) -> None:
        self._sockets = sockets
        self._scheduler = scheduler
        self._store = store
        self._runner = runner
        self._control = control
        self._metrics = metrics
        self._turned = time.monotonic()
        self._stopping = False

    def loop_age(self) -> float:
        """Seconds since the loop last turned."""
        return time.monotonic() - self._turned

    @property
    def running_count(self) -> int:
        return self._scheduler.running_count

    @property
    def waiting_count(self) -> int:
        return len(self._scheduler.waiting)

    def stop(self) -> None:
        """Ask the loop to end: open requests fail with `stopping`. Safe in a signal handler."""
        self._stopping = True
        self._sockets.inbox.put(None)

    def run(self) -> None:
        while not self._stopping:
            self._turned = time.monotonic()
            self._take_events(wait=self._scheduler.is_idle)
            step = self._scheduler.next_step()
            if step is not None:
                self._carry_out(step)
            elif not self._scheduler.is_idle:
                self._take_events(wait=True)
        self._scheduler.fail_all("stopping", "the worker is stopping")

    def _take_events(self, wait: bool) -> None:
        try:
            self._take(
                self._sockets.inbox.get(timeout=_IDLE_SECONDS) if wait else self._sockets.inbox.get_nowait()
            )
            while True:
                self._take(self._sockets.inbox.get_nowait())
        except queue.Empty:
            return

    def _take(self, event: Inbound) -> None:
        match event:
            case FromGateway(sender, message):
                if self._stopping:
                    self._sockets.send(
                        sender,
                        Failed(self._scheduler.epoch, message.request_id, "stopping", "the worker is stopping"),
                    )
                elif isinstance(message, Generate):
                    self._scheduler.add(sender, message)
                else:
                    self._scheduler.cancel(sender, message)
            case FromOperator(sender, command):
                self._sockets.answer(sender, self._control.answer(command))
            case GatewayLost(sender):
                self._scheduler.drop_sender(sender)

    def _carry_out(self, step: Step) -> None:
        try:
            match step:
                case Prefill():
                    self._prefill(step)
                case Decode():
                    self._decode(step)
                case SwapOut(choice, blocks):
                    choice.saved = self._runner.cache.save(blocks)
                case SwapIn(choice):
                    assert choice.saved is not None
                    self._runner.cache.load(choice.blocks, choice.saved)
                    choice.saved = None
        except (MemoryError, torch.OutOfMemoryError) as error:
            log.exception("out of memory")
            self._store.drop_all("oom")
            self._fail(step, "out_of_memory", f"out of memory: {error}")
        except Exception as error:
            log.exception("step failed")
            self._fail(step, "internal", f"{type(error).__name__} in the engine")

    def _fail(self, step: Step, code: str, text: str) -> None:
        requests: list[Request]
        match step:
            case Prefill(request):
                requests = [request]
            case Decode(choices):
                requests = list(dict.fromkeys(choice.request for choice in choices))
            case SwapOut(choice) | SwapIn(choice):
                requests = [choice.request]
        for request in requests:
            self._scheduler.fail(request, "out_of_memory" if code == "out_of_memory" else "internal", text)

    def _copy(self, copies: Copies) -> None:
        for source, target in copies:
            self._runner.cache.copy_block(source, target)

    def _prefill(self, step: Prefill) -> None:
        with self._metrics.step_seconds.labels(kind="prefill").time():
            self._copy(step.copies)
            request = step.request
            ids = request.message.token_ids[step.start : step.end]
            hidden = self._runner.prefill(ids, request.blocks, step.start)
            complete = self._scheduler.prefill_done(step)
            if not complete:
                return
            logits = self._runner.head_row(hidden[len(ids) - 1])
        for choice in list(request.choices):
            self._sample(choice, logits, None)

    def _decode(self, step: Decode) -> None:
        with self._metrics.step_seconds.labels(kind="decode").time():
            self._copy(step.copies)
            logits = self._runner.decode(
                [choice.next_token for choice in step.choices],
                [choice.blocks for choice in step.choices],
                [choice.length for choice in step.choices],
            )
            best = logits.argmax(dim=-1).tolist()
        for choice, row, greedy in zip(step.choices, logits, best, strict=True):
            choice.length += 1
            self._sample(choice, row, greedy)

    def _sample(self, choice: Choice, logits: Tensor, greedy: int | None) -> None:
        """Choose and send the next token of one choice; a fault here is that request's alone."""
        request = choice.request
        if choice.finished is not None:
            return
        try:
            if greedy is not None and choice.sampler.is_plain_greedy:
                token, logprob = greedy, None
            else:
                token, logprob = choice.sampler.choose(logits)
        except Exception as error:
            log.exception("sampling failed")
            self._scheduler.fail(request, "internal", f"{type(error).__name__} while sampling")
            return
        if self._scheduler.token_chosen(choice, token):
            logprobs = () if logprob is None else (logprob,)
            self._sockets.send(
                request.sender,
                Tokens(self._scheduler.epoch, request.request_id, choice.index, array("i", [token]), logprobs),
            )
            self._scheduler.check_length(choice)
