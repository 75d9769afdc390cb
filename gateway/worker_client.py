"""The gateway's end of the work socket: one DEALER, a queue for each HTTP request, and a watch on the worker.

Nothing is lost at a high-water mark (there is none). Nothing outlives the worker it was meant for: while no
worker is connected sending fails instead of queueing, and answers of an older epoch are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import Queue
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from secrets import token_hex
from typing import Literal

import zmq

from gateway.loop_socket import LoopSocket
from protocol.codec import decode, encode
from protocol.endpoints import Endpoint
from protocol.errors import ProtocolError, ServeError, VersionMismatch, WorkerUnavailable
from protocol.messages import (
    Absorb,
    Accepted,
    Cancel,
    Completed,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Message,
    ModelInfo,
    Progress,
    Tokens,
    Vocabulary,
)

Event = Accepted | Progress | Tokens | Finished | Completed | Failed
Cause = Literal["disconnect", "stop", "shutdown"]

BEAT_SECONDS = 0.5
SILENT_BEATS = 6  # beats without a word until a worker counts as gone
LOADING_BEATS = 60  # the same while it starts, and once told the vocabulary: what it makes keeps it from speaking

_log = logging.getLogger("prefixd.gateway")


@dataclass(slots=True)
class _Open:
    """A request in the worker. The epoch is that of the worker it was sent to."""

    epoch: str
    queue: Queue[Event | ServeError]


class WorkerClient:
    """Used on one event loop only."""

    def __init__(self, endpoint: Endpoint, *, beat_seconds: float = BEAT_SECONDS) -> None:
        self._endpoint = endpoint
        self._beat_seconds = beat_seconds
        self._gateway_id = token_hex(8)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: LoopSocket | None = None
        self._open: dict[str, _Open] = {}
        self._heartbeat: Heartbeat | None = None
        self._silent_beats = 0
        self._beating: asyncio.Task[None] | None = None
        self._last_refusal = ""
        self._mismatch = ""  # why the worker cannot be understood, if it speaks another version
        self.bad_frames = 0
        self.vocabulary: Callable[[], Vocabulary] | None = None  # asked for before a first request with a grammar
        self._told_epoch: str | None = None  # of the worker that knows it
        self._told_beats = LOADING_BEATS  # since then
        self.on_lost: Callable[[int], None] | None = None  # told the number of requests that were open
        self.on_bad_frame: Callable[[], None] | None = None

    async def start(self) -> None:
        self._connect()
        self._beating = asyncio.create_task(self._beat())

    async def close(self) -> None:
        """Cancel what is open in the worker and let go of the socket. No request may be waiting for events."""
        for request_id in list(self._open):
            self.cancel(request_id, "shutdown")
            self.forget(request_id)
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        if self._socket is not None:
            self._socket.close(linger=200)  # milliseconds: enough for the cancellations
        self._context.term()

    @property
    def heartbeat(self) -> Heartbeat | None:
        """The worker's last word; None once it has been silent for too long."""
        return self._heartbeat

    def why_not_ready(self) -> str | None:
        """None if requests can be sent, else the reason."""
        beat = self._heartbeat
        if beat is None:
            return self._mismatch or "the worker cannot be reached"
        if beat.phase != "ready":
            return f"the worker is {beat.phase}" + (f": {beat.detail}" if beat.detail else "")
        if beat.model is None:
            return "the worker has not said what it serves"
        return None

    def model(self) -> ModelInfo:
        """The model being served. Raises `WorkerUnavailable` when no request can be."""
        reason = self.why_not_ready()
        if reason is not None or self._heartbeat is None or self._heartbeat.model is None:
            raise WorkerUnavailable(reason or "the worker is not ready")
        return self._heartbeat.model

    def submit(self, request: Generate, queue: Queue[Event | ServeError]) -> None:
        """Send a request; its events go to `queue`, and a `ServeError` if the worker is lost.

        The id must not be open. Raises `WorkerUnavailable`.
        """
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id} is open already")
        self.model()
        assert self._heartbeat is not None
        if request.sampling.grammar is not None:
            self._tell_vocabulary(self._heartbeat.epoch)
        if not self._send(request):
            raise WorkerUnavailable("the worker cannot be reached")
        self._open[request.request_id] = _Open(self._heartbeat.epoch, queue)

    def cancel(self, request_id: str, cause: Cause, choice: int | None = None) -> None:
        """Tell the worker to stop a request or one of its choices. No effect once it has ended."""
        if request_id in self._open:
            self._send(Cancel(request_id, cause, choice))

    def absorb(self, message: Absorb) -> None:
        """Let the worker compute this when it is idle. Nothing is lost if it is away."""
        self._send(message)

    def forget(self, request_id: str) -> None:
        """Drop the events of a request that are still to come."""
        self._open.pop(request_id, None)

    def fail_open(self, error: ServeError, cause: Cause) -> None:
        """Cancel all open requests and end each with `error`."""
        for request_id in list(self._open):
            self.cancel(request_id, cause)
            self._open.pop(request_id).queue.put_nowait(error)

    def _tell_vocabulary(self, epoch: str) -> None:
        """Messages keep their order: what is sent now is known when the request comes."""
        if self.vocabulary is not None and self._told_epoch != epoch and self._send(self.vocabulary()):
            self._told_epoch, self._told_beats = epoch, 0

    def _connect(self) -> None:
        if self._socket is not None:
            self._socket.close(linger=0)
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.SNDHWM, 0)
        socket.set(zmq.RCVHWM, 0)
        socket.set(zmq.IMMEDIATE, 1)  # nothing may wait for a worker that does not exist yet
        socket.set(zmq.RECONNECT_IVL, 50)
        socket.set(zmq.RECONNECT_IVL_MAX, 500)
        self._endpoint.connect(socket)
        self._socket = LoopSocket(socket, self._take)

    def _send(self, message: Message) -> bool:
        """False if no worker is connected."""
        return self._socket is not None and self._socket.send(encode(message))

    def _take(self, frames: list[bytes]) -> None:
        self._silent_beats = 0
        try:
            self._dispatch(decode(frames))
        except VersionMismatch as error:
            self._misunderstood(str(error))
        except ProtocolError as error:
            self._count_bad_frame()
            if str(error) != self._last_refusal:  # a worker of another version sends the same twice a second
                _log.error("dropped a message of the worker: %s", error)
            self._last_refusal = str(error)

    def _count_bad_frame(self) -> None:
        self.bad_frames += 1
        if self.on_bad_frame is not None:
            self.on_bad_frame()

    def _misunderstood(self, cause: str) -> None:
        """Another version is at the other end, perhaps since an upgrade: nothing can come of what is open."""
        self._count_bad_frame()
        self._heartbeat = None
        self._fail_older(None)
        cause = f"the worker and this gateway do not understand each other: {cause}"
        if cause != self._mismatch:
            _log.error("%s", cause)
        self._mismatch = cause

    def _dispatch(self, message: Message) -> None:
        match message:
            case Heartbeat():
                self._heard(message)
            case Accepted() | Progress() | Tokens() | Finished() | Completed() | Failed():
                request = self._open.get(message.request_id)
                if request is None or request.epoch != message.epoch:
                    return
                if isinstance(message, Completed | Failed):
                    del self._open[message.request_id]
                request.queue.put_nowait(message)
            case _:
                raise ProtocolError(f"a worker does not send {type(message).__name__} here")

    def _heard(self, beat: Heartbeat) -> None:
        before, self._heartbeat = self._heartbeat, beat
        self._mismatch = ""
        if before is None or before.epoch != beat.epoch:
            _log.info("worker epoch %s is %s", beat.epoch, beat.phase)
            self._fail_older(beat.epoch)
        if beat.phase in ("hung", "failed") and self._open:
            _log.error("the worker is %s: %s", beat.phase, beat.detail)
            self._fail_older(None, f"the worker is {beat.phase}")  # should it come back, it finds them cancelled

    def _fail_older(self, epoch: str | None, cause: str = "the worker was lost") -> None:
        """End the requests of every epoch but this one."""
        lost = [request_id for request_id, request in self._open.items() if request.epoch != epoch]
        for request_id in lost:
            self.cancel(request_id, "disconnect")  # a new worker may have been given it all the same
            error = WorkerUnavailable(f"{cause} while it served this request")
            self._open.pop(request_id).queue.put_nowait(error)
        if lost and self.on_lost is not None:
            self.on_lost(len(lost))

    async def _beat(self) -> None:
        """Say hello, and count the beats in which nothing came.

        Beats are counted rather than seconds: when this process itself stood still, the worker is not to blame.
        """
        while True:
            self._send(Hello(self._gateway_id))
            await asyncio.sleep(self._beat_seconds)
            self._silent_beats += 1
            self._told_beats += 1
            if self._silent_beats >= SILENT_BEATS:
                self._mismatch = ""  # whoever said so is gone
            starts = self._heartbeat is not None and self._heartbeat.phase in ("starting", "loading")
            most = LOADING_BEATS if starts or self._told_beats < LOADING_BEATS else SILENT_BEATS
            if self._silent_beats >= most and self._heartbeat is not None:
                _log.error("the worker has been silent for %.1f s", self._silent_beats * self._beat_seconds)
                self._heartbeat = None
                self._fail_older(None)
                with suppress(zmq.ZMQError):
                    self._connect()  # whatever was queued for the old one goes with its socket
