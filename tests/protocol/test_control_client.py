"""Asking a worker: answers, refusals, silence, and replies that come too late."""

import errno
import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from protocol.codec import decode, encode
from protocol.control_client import CommandRefused, ControlClient
from protocol.errors import WorkerUnavailable
from protocol.messages import Reply
from protocol.rundir import CONTROL_SOCKET, prepare_run_dir, socket_address


@contextmanager
def worker(run_dir, answers):
    """A worker that answers each command with the frames that `answers` makes of it."""
    prepare_run_dir(run_dir)
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.bind(socket_address(run_dir, CONTROL_SOCKET))
    over = threading.Event()

    def answer():
        while not over.is_set():
            if socket.poll(10):
                sender, *frames = socket.recv_multipart()
                for reply in answers(decode(frames)):
                    socket.send_multipart([sender, *reply])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        context.destroy()


def ask(run_dir, verb="stats", timeout=5.0, **args):
    with ControlClient(run_dir, timeout) as client:
        return client.ask(verb, **args)


def test_the_data_of_the_reply_comes_back(tmp_path):
    with worker(tmp_path, lambda command: [encode(Reply("e", command.command_id, [command.verb, command.args]))]):
        assert ask(tmp_path, "evict", slots=[1, 2]) == ["evict", {"slots": [1, 2]}]


def test_a_refusal_is_raised_with_its_reason(tmp_path):
    def answers(command):
        return [encode(Reply("e", command.command_id, error="slot 3 is busy"))]

    with worker(tmp_path, answers), pytest.raises(CommandRefused, match="slot 3 is busy"):
        ask(tmp_path)


def test_the_reply_to_another_command_is_dropped(tmp_path):
    def answers(command):
        return [encode(Reply("e", "older", "late")), encode(Reply("e", command.command_id, "mine"))]

    with worker(tmp_path, answers):
        assert ask(tmp_path) == "mine"


def test_silence_is_a_worker_that_cannot_be_reached(tmp_path):
    with worker(tmp_path, lambda command: []), pytest.raises(WorkerUnavailable, match="within"):
        ask(tmp_path, timeout=0.05)


def test_nonsense_is_a_worker_that_cannot_be_talked_to(tmp_path):
    with worker(tmp_path, lambda command: [[b"{}"]]), pytest.raises(WorkerUnavailable, match="nonsense"):
        ask(tmp_path)


def test_a_worker_of_another_version_says_so(tmp_path):
    answer = [encode(Reply("e", ""))[0].replace(b'"v":1', b'"v":2')]
    said = "cannot talk to the worker at .*: protocol version 2 is not 1: upgrade both sides"
    with worker(tmp_path, lambda command: [answer]), pytest.raises(WorkerUnavailable, match=said):
        ask(tmp_path)


def test_no_socket_is_known_at_once(tmp_path):
    with pytest.raises(WorkerUnavailable, match="no worker runs"):
        ask(tmp_path, timeout=3600.0)


def test_a_directory_of_another_user_is_as_good_as_none(tmp_path, monkeypatch):
    def forbidden(path, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "stat", forbidden)
    with pytest.raises(WorkerUnavailable, match=r"cannot look into .*: Permission denied"):
        ask(tmp_path)


def test_a_number_that_does_not_fit_on_the_wire_is_refused(tmp_path):
    with (
        worker(tmp_path, lambda command: [encode(Reply("e", command.command_id, "shown"))]),
        ControlClient(tmp_path, 30.0) as client,
    ):
        with pytest.raises(CommandRefused, match=r"show: .*64-bit"):
            client.ask("show", slot=1 << 64)
        assert client.ask("show", slot=(1 << 64) - 1) == "shown"


def test_a_socket_that_nobody_serves_is_noticed(tmp_path):
    with worker(tmp_path, lambda command: []):
        pass
    (tmp_path / CONTROL_SOCKET).touch()
    with pytest.raises(WorkerUnavailable):
        ask(tmp_path, timeout=0.05)
