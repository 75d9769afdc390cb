"""The worker's sockets, with real peers: nothing is lost, nothing bad gets through, nobody is forgotten."""

from __future__ import annotations

import os
import pickle
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import zmq

from protocol.codec import decode, encode
from protocol.limits import MAX_HEADER_BYTES
from protocol.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Command,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Reply,
    Sampling,
    Tokens,
)
from protocol.rundir import CONTROL_SOCKET, WORK_SOCKET, prepare_run_dir, socket_address
from worker import io
from worker.io import FromGateway, FromOperator, GatewayLost, SocketsFailed, WorkerSockets

BEAT = Heartbeat("e", "ready", "", 0.0, 0, 0, None)
WAIT_MS = 10_000  # far longer than anything takes: a test that gets nothing fails


@pytest.fixture
def sockets(tmp_path) -> Iterator[WorkerSockets]:
    sockets = started(tmp_path, lambda: BEAT)
    sockets.accepting = True
    yield sockets
    if sockets.is_alive():
        sockets.stop()
    assert not (tmp_path / WORK_SOCKET).exists()
    assert not (tmp_path / CONTROL_SOCKET).exists()


def started(run_dir: Path, heartbeat: Callable[[], Heartbeat]) -> WorkerSockets:
    prepare_run_dir(run_dir)
    sockets = WorkerSockets(run_dir, "e", heartbeat)
    sockets.start()
    return sockets


class Peer:
    """A DEALER of one of the worker's sockets."""

    def __init__(self, context: zmq.Context[Any], address: str, identity: bytes | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvhwm = 0
        self.socket.sndtimeo = self.socket.rcvtimeo = WAIT_MS
        if identity:
            self.socket.identity = identity
        self.socket.connect(address)

    def send(self, message: Message) -> None:
        self.socket.send_multipart(encode(message))

    def receive(self, *, beats: bool = False) -> Message:
        """The next message; heartbeats are passed over unless asked for."""
        while True:
            message = decode(self.socket.recv_multipart())
            if beats or not isinstance(message, Heartbeat):
                return message


@pytest.fixture
def connect(tmp_path):
    context: zmq.Context[Any] = zmq.Context()
    peers: list[Peer] = []

    def peer(name: str = WORK_SOCKET, identity: bytes | None = None) -> Peer:
        peers.append(Peer(context, socket_address(tmp_path, name), identity))
        return peers[-1]

    yield peer
    for made in peers:
        made.socket.close()
    context.term()


def taken(sockets: WorkerSockets) -> Any:
    return sockets.inbox.get(timeout=WAIT_MS / 1000)


def generate(request_id: str, count: int = 3) -> Generate:
    return Generate(request_id, array("i", range(count)), (), Sampling(1))


def test_requests_come_in_and_answers_go_to_who_asked(sockets, connect):
    one, two = connect(), connect()
    senders = []
    for number, peer in enumerate((one, two)):
        peer.send(generate(f"r{number}", 50_000))
        event = taken(sockets)
        assert isinstance(event, FromGateway)
        assert event.message.token_ids == array("i", range(50_000))
        senders.append(event.sender)
    for number, sender in enumerate(senders):
        sockets.send(sender, Tokens("e", f"r{number}", 0, array("i", [number])))
    assert [peer.receive().request_id for peer in (one, two)] == ["r0", "r1"]


def test_the_files_of_sockets_are_their_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        sockets = started(tmp_path, lambda: BEAT)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in (WORK_SOCKET, CONTROL_SOCKET)] == [0o600] * 2
    sockets.stop()


def test_hello_is_answered_at_once(tmp_path, connect, monkeypatch):
    monkeypatch.setattr(io, "HEARTBEAT_SECONDS", 3600.0)
    sockets = started(tmp_path, lambda: BEAT)
    peer = connect()
    peer.send(Hello("g"))
    assert peer.receive(beats=True) == BEAT
    sockets.stop()


def test_heartbeats_go_on(sockets, connect):
    peer = connect()
    peer.send(Hello("g"))
    assert [peer.receive(beats=True) for _ in range(3)] == [BEAT] * 3


def test_a_beat_between_the_others_is_sent_on_demand(tmp_path, connect, monkeypatch):
    monkeypatch.setattr(io, "HEARTBEAT_SECONDS", 3600)
    phase = "loading"
    sockets = started(tmp_path, lambda: replace(BEAT, phase=phase))
    gateway = connect(WORK_SOCKET)
    gateway.send(Hello("g"))
    assert gateway.receive(beats=True).phase == "loading"
    phase = "ready"
    sockets.beat()
    assert gateway.receive(beats=True).phase == "ready"
    sockets.stop()


def test_commands_that_the_engine_cannot_hear_are_refused_with_the_cause(tmp_path, connect):
    beat = replace(BEAT, phase="hung", detail="a step has been running for 9 s")
    sockets = started(tmp_path, lambda: beat)
    sockets.accepting = True
    operator = connect(CONTROL_SOCKET)
    operator.send(Command("c", "stats", {}))
    assert operator.receive() == Reply("e", "c", error="worker is hung: a step has been running for 9 s")
    beat = BEAT
    operator.send(Command("d", "stats", {}))
    assert taken(sockets).command.command_id == "d"
    sockets.stop()


def test_a_gateway_that_hangs_up_is_lost(sockets, connect):
    peer = connect()
    peer.send(Hello("g"))
    peer.send(generate("r"))
    sender = taken(sockets).sender
    peer.socket.close()
    assert taken(sockets) == GatewayLost(sender)


def test_a_gateway_that_falls_silent_is_lost(sockets, connect, monkeypatch):
    monkeypatch.setattr(io, "GATEWAY_SILENCE_SECONDS", 0.0)
    peer = connect()
    peer.send(generate("r"))
    sender = taken(sockets).sender
    assert taken(sockets) == GatewayLost(sender)


def test_a_gateway_that_reconnects_with_its_identity_goes_on(sockets, connect):
    first = connect(identity=b"gateway")
    first.send(Hello("g"))
    first.send(generate("r"))
    assert taken(sockets).sender == b"gateway"
    second = connect(identity=b"gateway")  # takes over while the first is still connected
    second.send(Hello("g"))
    second.send(Cancel("r", "disconnect"))
    assert taken(sockets) == FromGateway(b"gateway", Cancel("r", "disconnect"))
    sockets.send(b"gateway", Tokens("e", "r", 0, array("i", [1])))
    assert second.receive() == Tokens("e", "r", 0, array("i", [1]))


def test_another_gateway_under_the_same_identity_orphans_the_requests_of_the_first(sockets, connect):
    first = connect(identity=b"gateway")
    first.send(Hello("g"))
    first.send(generate("r"))
    taken(sockets)
    second = connect(identity=b"gateway")
    second.send(Hello("other"))
    second.send(generate("r"))
    assert taken(sockets) == GatewayLost(b"gateway")
    assert isinstance(taken(sockets), FromGateway)
    assert second.receive(beats=True) == BEAT


def test_a_reader_that_pauses_loses_nothing(sockets, connect):
    peer = connect()
    peer.socket.rcvhwm = 1000
    peer.send(generate("r"))
    sender = taken(sockets).sender
    for number in range(5000):
        sockets.send(sender, Tokens("e", "r", 0, array("i", [number])))
    # Others are served meanwhile.
    other = connect()
    other.send(generate("other"))
    sockets.send(taken(sockets).sender, Tokens("e", "other", 0, array("i", [1])))
    assert other.receive().request_id == "other"
    assert [peer.receive().token_ids[0] for _ in range(5000)] == list(range(5000))


def test_what_comes_while_much_is_sent_is_taken_at_once(tmp_path, connect, monkeypatch):
    """Sending may find what has come, and then the thread that waits for it is not told of it by its descriptor."""
    monkeypatch.setattr(io, "HEARTBEAT_SECONDS", 3600.0)
    sockets = started(tmp_path, lambda: BEAT)
    peer = connect()
    peer.send(generate("r"))
    sender = taken(sockets).sender
    for number in range(300):
        peer.send(Cancel(f"{number}", "stop"))
        for part in range(5):
            sockets.send(sender, Tokens("e", "r", 0, array("i", [5 * number + part])))
        assert taken(sockets).message.request_id == f"{number}"
    assert [peer.receive().token_ids[0] for _ in range(1500)] == list(range(1500))
    sockets.stop()


def test_commands_are_answered_to_who_asked(sockets, connect):
    one, two = connect(CONTROL_SOCKET), connect(CONTROL_SOCKET)
    for peer, name in ((one, "1"), (two, "2")):
        peer.send(Command(name, "stats"))
        event = taken(sockets)
        assert isinstance(event, FromOperator)
        sockets.answer(event.sender, Reply("e", event.command.command_id, {"n": name}))
    assert [peer.receive().data for peer in (two, one)] == [{"n": "2"}, {"n": "1"}]


def test_an_operator_who_leaves_before_the_answer_disturbs_nobody(sockets, connect):
    gone = connect(CONTROL_SOCKET)
    gone.send(Command("1", "stats"))
    event = taken(sockets)
    gone.socket.close()
    sockets.answer(event.sender, Reply("e", "1", {}))
    other = connect(CONTROL_SOCKET)
    other.send(Command("2", "health"))
    assert other.receive().data["phase"] == "ready"
    assert sockets.inbox.empty()


def test_health_is_answered_without_the_engine_and_other_verbs_say_what_it_is_waiting_for(sockets, connect):
    sockets.accepting = False
    peer = connect(CONTROL_SOCKET)
    peer.send(Command("1", "health"))
    assert peer.receive().data["epoch"] == "e"
    peer.send(Command("2", "stats"))
    assert peer.receive().error == "worker is ready"
    assert sockets.inbox.empty()


GOOD = encode(generate("r"))
BAD = {
    "garbage": [b"\x00\xff garbage"],
    "pickle": [pickle.dumps({"type": "Generate"})],
    "empty": [b""],
    "no frames of tokens": GOOD[:1],
    "a frame too many": [*GOOD, b"1234"],
    "many frames": [*GOOD, *[b""] * 200],
    "half a token": [GOOD[0], GOOD[1][:-1]],
    "another version": [GOOD[0].replace(b'"v":1', b'"v":2'), GOOD[1]],
    "no version": [GOOD[0].replace(b'"v":1', b'"w":1'), GOOD[1]],
    "an unknown type": [GOOD[0].replace(b"Generate", b"Degenerate"), GOOD[1]],
    "a list": [orjson.dumps([1, 2])],
    "deeply nested": [b"[" * 100_000],
    "not UTF-8": [b'{"v":1,"type":"\xff"}'],
    "oversize": [b" " * (MAX_HEADER_BYTES + 1)],
    "a message of the other direction": encode(BEAT),
    "a message of the other socket": encode(Command("1", "stats")),
    "a wrong field": [GOOD[0].replace(b'"n":1', b'"n":"x"'), GOOD[1]],
    "a number for a name": [b'{"v":1,"type":"Cancel","body":{"request_id":1}}'],
}


@pytest.mark.parametrize("frames", BAD.values(), ids=BAD.keys())
def test_what_is_not_a_message_is_counted_and_dropped(sockets, connect, frames):
    peer = connect()
    peer.socket.send_multipart(frames)
    peer.send(generate("good"))
    assert taken(sockets).message.request_id == "good"
    assert sockets.bad_frames == 1
    assert sockets.inbox.empty()


@pytest.mark.parametrize(("name", "message"), [(WORK_SOCKET, Hello("g")), (CONTROL_SOCKET, Command("1", "stats"))])
def test_a_peer_of_another_version_is_told_ours(sockets, connect, caplog, name, message):
    """By the one thing that every version can read: the number in the header."""
    peer = connect(name)
    other = [encode(message)[0].replace(b'"v":1', b'"v":2')]
    for _ in range(3):
        peer.socket.send_multipart(other)
        assert orjson.loads(peer.socket.recv_multipart()[0])["v"] == PROTOCOL_VERSION
    assert sockets.bad_frames == 3
    assert sockets.inbox.empty()
    assert [line for line in caplog.messages if "protocol version 2 is not 1: upgrade both sides" in line] == [
        caplog.messages[-1]
    ], "said once"


def test_requests_on_the_control_socket_are_dropped(sockets, connect):
    peer = connect(CONTROL_SOCKET)
    peer.send(generate("r"))
    peer.send(Command("1", "health"))
    assert isinstance(peer.receive(), Reply)
    assert sockets.bad_frames == 1
    assert sockets.inbox.empty()


def test_what_was_sent_before_the_stop_arrives(sockets, connect):
    peer = connect()
    peer.send(generate("r"))
    sender = taken(sockets).sender
    for number in range(500):
        sockets.send(sender, Tokens("e", "r", 0, array("i", [number])))
    sockets.stop()
    assert [peer.receive().token_ids[0] for _ in range(500)] == list(range(500))


def test_a_fault_of_the_thread_reaches_the_engine(tmp_path, connect):
    fault = RuntimeError("a fault")

    def heartbeat() -> Heartbeat:
        raise fault

    sockets = started(tmp_path, heartbeat)
    connect().send(Hello("g"))
    assert taken(sockets) == SocketsFailed(fault)
    sockets.join()
    sockets.send(b"somebody", Tokens("e", "r", 0, array("i", [1])))  # the engine's last words block nothing
    sockets.stop()
