"""The worker dies under load, or never comes up."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_model import words
from daemon import FAULTY, Daemon, metrics, until
from faulty_daemon import HANGS
from http_client import joined, user

ENDLESS = {"max_tokens": 15_000, "ignore_eos": True}
SECONDS = 15.0  # "within seconds", on a machine that may be busy


@pytest.fixture(scope="module")
def daemon(chat_model: Path) -> Iterator[Daemon]:
    """Up to two requests run. It comes through all that is done to its worker here."""
    daemon = Daemon(chat_model, "--max-running", "2", "--hung-seconds", "6", program=FAULTY)
    yield daemon
    daemon.close()


def _wait_watched(daemon: Daemon) -> None:
    """Until the supervisor knows that the worker which lives now was ready."""
    until(lambda: daemon.log().rfind("worker is ready again") >= daemon.log().rfind("worker died"), "it knows it")


def test_a_start_and_first_steps_that_never_end(daemon: Daemon):
    """A worker is ready once it has come through steps of its own, and knows then what a first one takes. What is open
    ends, readiness is red with the cause, and service comes back by itself.
    """
    until(daemon.run_dir.is_dir, "it has begun")
    hangs = daemon.run_dir / HANGS
    hangs.touch()
    client = daemon.wait_listening()
    until(lambda: "worker died (warming up has been going on for" in daemon.log(), "the supervisor says why")
    assert client.get("/ready").status == 503
    hangs.unlink()
    client = daemon.wait_ready()
    until(lambda: "prefixd serves" in daemon.log(), "the supervisor knows it")
    daemon.ask("fault", what="hang")
    stream, whole = client.stream([user("hangs")]), client.send([user("waits for it")])
    try:
        last = list(stream)[-1]
        assert last["error"]["type"] == "server_error"
        assert "the worker is hung" in last["error"]["message"]
        assert not stream.is_done
        red = client.get("/ready")
        assert (red.status, red.body["phase"]) == (503, "hung")
        assert "a prefill step of " in red.body["detail"]
        assert whole.getresponse().status == 503
    finally:
        stream.close()
        whole.close()
    until(lambda: "worker died (a prefill step of " in daemon.log(), "the supervisor says why")
    daemon.wait_ready()
    _wait_watched(daemon)
    [worker] = daemon.processes("worker")
    daemon.ask("fault", what="hang", step="decode")
    with client.stream([user("Hello")]) as stream:
        events = list(stream)
        assert joined(events), "the first token was there"
        assert "the worker is hung" in events[-1]["error"]["message"]
    assert "a decode step of 1 has been running for" in client.get("/ready").body["detail"]
    os.kill(worker, signal.SIGKILL)


def test_worker_killed_under_load(daemon: Daemon):
    """K-ST5 and K-LO5: two streams run and a request waits."""
    client = daemon.wait_ready()
    lost, before = "prefixd_worker_lost_requests_total", metrics(daemon.wait_ready())
    # Else the next one is not said to be ready again.
    until(lambda: "prefixd serves" in daemon.log(), "the supervisor knows it")
    _wait_watched(daemon)
    deaths = daemon.log().count("worker died (killed by SIGKILL")
    greeting = [user("Hello")]
    known = client.chat(greeting)
    streams = [client.stream([user(words(f"stream {n}", 50))], **ENDLESS) for n in range(2)]
    try:
        for stream in streams:
            assert stream.take_text(3)
        waiting = client.send([user("waits")])
        until(lambda: daemon.stats()["requests_waiting"] == 1, "the third request waits")
        [worker] = daemon.processes("worker")
        os.kill(worker, signal.SIGKILL)
        killed = time.monotonic()
        for stream in streams:
            last = list(stream)[-1]
            assert last["error"]["type"] == "server_error"
            assert last["error"]["message"]
            assert not stream.is_done, "a stream that broke off must not look complete"
        response = waiting.getresponse()
        assert response.status == 503
        assert json.loads(response.read())["error"]["type"] == "server_error"
        waiting.close()
        assert time.monotonic() - killed < SECONDS
    finally:
        for stream in streams:
            stream.close()
    until(lambda: daemon.log().count("worker died (killed by SIGKILL") == deaths + 1, "the supervisor says why")
    assert client.get("/health").status == 200
    daemon.wait_ready()
    assert daemon.processes("worker") != [worker]
    assert daemon.snapshots() == []
    again = client.chat(greeting)
    assert again.outcome == ("miss", 0, "cold")
    assert again.text == known.text
    assert metrics(client)[lost] - before.get(lost, 0) == 3


def test_a_worker_that_hangs_is_started_again(daemon: Daemon):
    """One that lives and says nothing: what is open ends, readiness is red with the cause, and service comes back."""
    client = daemon.wait_ready()
    until(lambda: "prefixd serves" in daemon.log(), "the supervisor knows it")
    _wait_watched(daemon)
    [worker] = daemon.processes("worker")
    stream = client.stream([user(words("hangs", 50))], **ENDLESS)
    whole = client.send([user("Tell me a story without end.")], **ENDLESS)
    try:
        assert stream.take_text(3)
        until(lambda: daemon.stats()["requests_running"] == 2, "both run")
        os.kill(worker, signal.SIGSTOP)
        stopped = time.monotonic()
        assert daemon.cachectl("--timeout", "0.5", "stats").returncode == 3
        last = list(stream)[-1]
        assert last["error"]["type"] == "server_error"
        assert not stream.is_done
        answer = client.get("/ready")
        assert answer.status == 503
        assert answer.body == {"phase": "unreachable", "detail": "the worker cannot be reached"}
        assert metrics(client)["prefixd_worker_up"] == 0
        assert client.get("/health").status == 200
        response = whole.getresponse()
        assert response.status == 503
        assert json.loads(response.read())["error"]["message"]
        assert time.monotonic() - stopped < SECONDS
    finally:
        stream.close()
        whole.close()
    refused = client.chat([user("Hello")])
    assert refused.status == 503
    assert "worker" in refused.error["message"]
    until(lambda: "worker died (killed, as it has been silent for" in daemon.log(), "the supervisor says why")
    daemon.wait_ready()
    assert daemon.processes("worker") != [worker]
    assert client.chat([user("Hello")]).status == 200


def test_a_worker_that_cannot_load_its_model(start, chat_model: Path, tmp_path: Path):
    """`serve` gives up with the cause; until then the gateway answers and says where things stand."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in chat_model.iterdir():
        if file.name != "model.safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes((chat_model / "model.safetensors").read_bytes()[:200_000])
    daemon = start(model=broken)
    client = daemon.wait_listening()
    answer = client.get("/ready")
    assert answer.status == 503
    assert answer.body["phase"] in ("unreachable", "starting", "loading", "failed")
    assert client.chat([user("Hello")]).status == 503
    assert client.get("/health").status == 200
    assert daemon.wait_exit() == 1
    last = daemon.log().strip().splitlines()[-1]
    assert last.startswith("prefixd serve: error: the worker does not start:")
    assert "model.safetensors" in last
    assert daemon.processes() == []
    assert not list(daemon.run_dir.glob("*.sock"))
