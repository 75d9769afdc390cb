"""The sockets of the worker, and a thread that waits for them: heartbeats go out while a model loads or a step runs.

Everything for the engine goes through one queue; what the engine sends goes out at once, on its own thread. High-water
marks are off: a message is delivered or the process is gone. What bounds memory instead is the number of open requests,
each with a bounded answer.
"""

from __future__ import annotations

import logging
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import zmq

from protocol.codec import decode, encode
from protocol.curve import ZAP_ADDRESS
from protocol.endpoints import Endpoint, control_endpoint, work_endpoint
from protocol.errors import ProtocolError, SettingsError, VersionMismatch
from protocol.messages import Absorb, Cancel, Command, Generate, Heartbeat, Hello, Message, Reply, Vocabulary
from worker.own_time import TICK_SECONDS, OwnTime
from worker.shared_socket import SharedSocket, Wakener

log = logging.getLogger(__name__)

HEARTBEAT_SECONDS = TICK_SECONDS
GATEWAY_SILENCE_SECONDS = 10.0  # a gateway not heard of for so long is gone
_TAKEN_AT_ONCE = 100  # messages of one socket; then the others have their turn


@dataclass(frozen=True, slots=True)
class FromGateway:
    """A request or a cancellation, with the socket identity to answer to."""

    sender: bytes
    message: Generate | Cancel | Absorb | Vocabulary


@dataclass(frozen=True, slots=True)
class FromOperator:
    """A control command, with the socket identity to answer to."""

    sender: bytes
    command: Command


@dataclass(frozen=True, slots=True)
class GatewayLost:
    """A gateway has gone silent."""

    sender: bytes


@dataclass(frozen=True, slots=True)
class SocketsFailed:
    """The socket thread has died of a fault of ours: nobody can be reached any more."""

    error: Exception


Inbound = FromGateway | FromOperator | GatewayLost | SocketsFailed | None  # None only wakes the engine


@dataclass(slots=True)
class _Gateway:
    """A gateway that is being served. An identity that comes back with another id is another gateway."""

    gateway_id: str | None  # None until its first `Hello`
    heard_at: float  # in time that this process was awake


class WorkerSockets(threading.Thread):
    """Binds both sockets and moves messages until `stop`. `heartbeat` is called on this thread.

    The engine's thread sends on both sockets too, and may find that a gateway has gone.
    """

    def __init__(
        self,
        run_dir: Path,
        epoch: str,
        heartbeat: Callable[[], Heartbeat],
        *,
        work: Endpoint | None = None,
        control: Endpoint | None = None,
    ) -> None:
        """`work` and `control`: where, if not in the run directory. Raises `SettingsError`."""
        super().__init__(name="sockets", daemon=True)
        self.inbox: queue.SimpleQueue[Inbound] = queue.SimpleQueue()
        self.bad_frames = 0
        self.time = OwnTime()
        self.accepting = False  # while a model loads, commands that need the engine are refused
        self._epoch = epoch
        self._heartbeat = heartbeat
        work, control = work or work_endpoint(run_dir), control or control_endpoint(run_dir)
        self._paths = [endpoint.file for endpoint in (work, control) if endpoint.file is not None]
        self._context = zmq.Context()
        self._keys = work.keys or control.keys
        self._wakener = Wakener()
        self._zap = self._judge() if self._keys else None
        self._work = self._bind(work)
        self._control = self._bind(control)
        self._next_beat = 0.0
        self._stopping = False
        self._gateways: dict[bytes, _Gateway] = {}  # by socket identity
        self._last_mismatch = ""

    def _judge(self) -> SharedSocket:
        """Where libzmq asks about peers; it must be there before they come."""
        socket = self._context.socket(zmq.REP)
        socket.bind(ZAP_ADDRESS)
        return SharedSocket(socket, self._wakener)

    def _bind(self, endpoint: Endpoint) -> SharedSocket:
        socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            endpoint.bind(socket)
        except SettingsError:
            self._context.destroy(linger=0)
            self._wakener.close()
            raise
        return SharedSocket(socket, self._wakener)

    # Called by the engine thread

    def send(self, sender: bytes, message: Message) -> None:
        """Send to a gateway."""
        self._deliver(self._work, sender, encode(message))

    def answer(self, sender: bytes, reply: Reply) -> None:
        """Answer a control command."""
        self._deliver(self._control, sender, encode(reply))

    def beat(self) -> None:
        """Tell the gateways at once how this process is, as when a model has been loaded."""
        self._next_beat = 0.0
        self._wakener.wake()

    def stop(self) -> None:
        """Send what is queued, close everything and remove the socket files. Called once, by the engine thread."""
        self._stopping = True
        self._wakener.wake()
        self.join(timeout=5)
        self._wakener.close()
        self._context.term()
        for path in self._paths:
            path.unlink(missing_ok=True)

    # The thread

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            log.exception("the socket thread failed")
            self.inbox.put(SocketsFailed(error))
        finally:
            for socket in self._sockets:
                socket.close()

    @property
    def _sockets(self) -> list[SharedSocket]:
        sockets = [self._work, self._control]
        return sockets if self._zap is None else [*sockets, self._zap]

    def _serve(self) -> None:
        poller = select.poll()
        for number in (self._wakener.fileno(), *(socket.fileno() for socket in self._sockets)):
            poller.register(number, select.POLLIN)
        while not self._stopping:
            now = time.monotonic()
            if now >= self._next_beat:
                self._next_beat = now + HEARTBEAT_SECONDS
                self.time.tick()
                self._beat(self.time.awake())
            more = self._receive(self._work, self._take_work)
            more |= self._receive(self._control, self._take_command)
            if self._zap is not None and self._keys is not None:
                while (asked := self._zap.receive()) is not None:
                    self._zap.send(self._keys.judgement(asked))
            if not more:
                poller.poll(max(self._next_beat - now, 0) * 1000 + 1)
                self._wakener.clear()

    def _deliver(self, socket: SharedSocket, sender: bytes, frames: list[bytes]) -> None:
        try:
            socket.send([sender, *frames])
        except zmq.ZMQError as error:
            # Only an identity that has disconnected: its requests are cancelled, nothing else is lost. Or the thread
            # has ended, which the engine hears of as an event.
            log.debug("peer %s is unreachable: %s", sender.hex(), error)
            if socket is self._work:
                self._lose(sender)

    def _receive(self, socket: SharedSocket, take: Callable[[bytes, Message], None]) -> bool:
        """Take what has come. True if there may be more."""
        for _ in range(_TAKEN_AT_ONCE):
            message = socket.receive()
            if message is None:
                return False
            sender, *frames = message
            try:
                take(sender, decode(frames))
            except VersionMismatch as error:
                self.bad_frames += 1
                self._refuse(socket, sender, str(error))
            except ProtocolError as error:
                self.bad_frames += 1
                log.warning("dropped a message: %s", error)
        return True

    def _refuse(self, socket: SharedSocket, sender: bytes, cause: str) -> None:
        """Answer a peer of another version in ours: all that it can read of it is the number."""
        if cause != self._last_mismatch:  # a gateway sends the same twice a second
            log.error("cannot talk to a %s: %s", "gateway" if socket is self._work else "client", cause)
            self._last_mismatch = cause
        answer = self._heartbeat() if socket is self._work else Reply(self._epoch, "", error=cause)
        self._deliver(socket, sender, encode(answer))

    def _take_work(self, sender: bytes, message: Message) -> None:
        match message:
            case Hello(gateway_id):
                before = self._gateways[sender].gateway_id if sender in self._gateways else None
                if before not in (None, gateway_id):
                    self._lose(sender)  # what another process left open under this identity
                self._hear(sender).gateway_id = gateway_id
                if before != gateway_id:
                    self._deliver(self._work, sender, encode(self._heartbeat()))
            case Generate() | Cancel() | Absorb() | Vocabulary():
                self._hear(sender)
                self.inbox.put(FromGateway(sender, message))
            case _:
                raise ProtocolError(f"a worker takes no {type(message).__name__} on its work socket")

    def _take_command(self, sender: bytes, message: Message) -> None:
        if not isinstance(message, Command):
            raise ProtocolError(f"a worker takes no {type(message).__name__} on its control socket")
        beat = self._heartbeat()
        if message.verb == "health":
            reply = Reply(self._epoch, message.command_id, asdict(beat))
            self._deliver(self._control, sender, encode(reply))
        elif not self.accepting or beat.phase in ("hung", "failed"):
            error = f"worker is {beat.phase}: {beat.detail}" if beat.detail else f"worker is {beat.phase}"
            self._deliver(self._control, sender, encode(Reply(self._epoch, message.command_id, error=error)))
        else:
            self.inbox.put(FromOperator(sender, message))

    def _beat(self, now: float) -> None:
        for sender, gateway in list(self._gateways.items()):
            if now - gateway.heard_at > GATEWAY_SILENCE_SECONDS:
                self._lose(sender)
        if self._gateways:
            frames = encode(self._heartbeat())
            for sender in list(self._gateways):
                self._deliver(self._work, sender, frames)

    def _hear(self, sender: bytes) -> _Gateway:
        gateway = self._gateways.setdefault(sender, _Gateway(None, 0.0))
        gateway.heard_at = self.time.awake()
        return gateway

    def _lose(self, sender: bytes) -> None:
        if self._gateways.pop(sender, None) is not None:
            self.inbox.put(GatewayLost(sender))
