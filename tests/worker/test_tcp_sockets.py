"""The worker's sockets over TCP: whoever has not the right key cannot say a word."""

from __future__ import annotations

import socket as plain
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import zmq

from protocol.codec import decode, encode
from protocol.control_client import ControlClient
from protocol.curve import CurveKeys, make_curve_keys, read_curve_keys
from protocol.endpoints import Endpoint
from protocol.errors import SettingsError, WorkerUnavailable
from protocol.messages import Heartbeat, Hello
from protocol.rundir import prepare_run_dir
from worker.io import FromOperator, WorkerSockets

BEAT = Heartbeat("e", "ready", "", 0.0, 0, 0, None)
WAIT_MS = 10_000  # far longer than anything takes
NOT_MS = 200  # in which a stranger has had no answer; another peer's, meanwhile, shows that one would have come


def free_port() -> int:
    with plain.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def keys(tmp_path: Path) -> tuple[CurveKeys, CurveKeys]:
    """A worker's and its peer's."""
    paths = [tmp_path / "worker.key", tmp_path / "peer.key"]
    make_curve_keys(paths)
    worker, peer = map(read_curve_keys, paths)
    return worker, peer


@pytest.fixture
def sockets(short_run_dir: Path, keys: tuple[CurveKeys, CurveKeys]) -> Iterator[WorkerSockets]:
    work, control = (Endpoint(f"tcp://127.0.0.1:{free_port()}", keys=keys[0]) for _ in range(2))
    made = WorkerSockets(short_run_dir, "e", lambda: BEAT, work=work, control=control)
    made.endpoints = work, control
    made.start()
    yield made
    made.stop()
    assert not any(path.suffix == ".sock" for path in short_run_dir.iterdir())


@pytest.fixture
def short_run_dir(tmp_path: Path) -> Path:
    prepare_run_dir(tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def connect() -> Iterator[Callable[[Endpoint], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened: list[zmq.Socket[bytes]] = []

    def connect(endpoint: Endpoint) -> zmq.Socket[bytes]:
        opened.append(context.socket(zmq.DEALER))
        endpoint.connect(opened[-1])
        return opened[-1]

    yield connect
    context.destroy(linger=0)


def is_answered(peer: zmq.Socket[bytes], wait_ms: int) -> bool:
    peer.sndtimeo = wait_ms
    try:
        peer.send_multipart(encode(Hello("g")))
    except zmq.Again:  # it was turned away before, and has nobody to send to
        return False
    return bool(peer.poll(wait_ms)) and decode(peer.recv_multipart()) == BEAT


def test_a_peer_with_its_key_is_served(sockets, keys, connect):
    work, control = (Endpoint(endpoint.address, keys=keys[1]) for endpoint in sockets.endpoints)
    assert is_answered(connect(work), WAIT_MS)
    with ControlClient(control, WAIT_MS / 1000) as client:
        assert client.ask("health") == asdict(BEAT)


def test_a_stranger_is_not_heard(sockets, keys, connect, tmp_path):
    """One without keys, one with keys of its own, one that takes another for the worker, one with the worker's own."""
    make_curve_keys([tmp_path / "other.key"])
    other = read_curve_keys(tmp_path / "other.key")
    worker, peer = keys
    strangers = [
        None,
        CurveKeys(other.public, other.secret, frozenset({worker.public})),
        CurveKeys(peer.public, peer.secret, other.peers),
        CurveKeys(worker.public, worker.secret, frozenset({worker.public})),
    ]
    work, control = sockets.endpoints
    told = [connect(Endpoint(work.address, keys=each)) for each in strangers]
    assert is_answered(connect(Endpoint(work.address, keys=peer)), WAIT_MS)
    assert not any(is_answered(each, NOT_MS) for each in told)
    stranger = ControlClient(Endpoint(control.address, keys=strangers[1]), NOT_MS / 1000)
    with stranger as client:
        for _ in range(2):  # after the first it has been turned away
            with pytest.raises(WorkerUnavailable):
                client.ask("flush")
    assert sockets.inbox.empty()
    assert sockets.bad_frames == 0


def test_what_is_no_zeromq_ends_nothing(sockets, keys, connect):
    work = sockets.endpoints[0]
    port = int(work.address.rpartition(":")[2])
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, b""):
        with plain.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(sent)
    assert is_answered(connect(Endpoint(work.address, keys=keys[1])), WAIT_MS)


def test_one_socket_may_stay_in_the_run_directory(short_run_dir, keys):
    work = Endpoint(f"tcp://127.0.0.1:{free_port()}", keys=keys[0])
    made = WorkerSockets(short_run_dir, "e", lambda: BEAT, work=work)
    made.accepting = True
    made.start()
    try:
        with ControlClient(short_run_dir, WAIT_MS / 1000) as client:
            assert client.ask("health") == asdict(BEAT)
            with pytest.raises(WorkerUnavailable):
                ControlClient(short_run_dir / "none", 1.0)
        assert made.inbox.empty() or not isinstance(made.inbox.get(), FromOperator)
    finally:
        made.stop()


def test_an_address_that_cannot_be_had_is_refused(short_run_dir, keys):
    with plain.create_server(("127.0.0.1", 0)) as taken:
        work = Endpoint(f"tcp://127.0.0.1:{taken.getsockname()[1]}", keys=keys[0])
        with pytest.raises(SettingsError, match=r"cannot listen on tcp://127\.0\.0\.1"):
            WorkerSockets(short_run_dir, "e", lambda: BEAT, work=work)
