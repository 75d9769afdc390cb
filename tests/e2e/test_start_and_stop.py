"""The daemon's own life: what it refuses at start, and what it leaves behind."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path

from conftest import Served
from daemon import BIN, DEADLINE_SECONDS, metrics, until
from http_client import joined, user

ENDLESS = {"max_tokens": 15_000, "ignore_eos": True}


def left_behind(daemon) -> list[str]:
    sockets = [path.name for path in daemon.run_dir.glob("*.sock")]
    return [*map(str, daemon.processes()), *sockets]


def test_sigterm_while_loading(start):
    daemon = start()
    daemon.wait_listening()
    daemon.terminate()
    assert daemon.wait_exit() == 0
    assert left_behind(daemon) == []


def test_sigterm_drains_what_streams_and_leaves_no_process_and_no_socket(start):
    """K-LO6."""
    daemon = start()
    client = daemon.wait_ready()
    assert len(daemon.processes()) == 3
    assert (daemon.run_dir.stat().st_mode & 0o777) == 0o700
    messages = [user("Tell me a long story.")]
    cold = client.cold(messages, max_tokens=500, ignore_eos=True)
    with client.stream(messages, max_tokens=500, ignore_eos=True) as stream:
        events = stream.take_text(3)
        daemon.terminate()
        until(lambda: client.get("/ready").status == 503, "it says that it stops")
        assert client.get("/ready").body["phase"] == "stopping"
        late = client.chat([user("Me too")])
        assert late.status == 503
        assert "shutting down" in late.error["message"]
        events += list(stream)
        assert stream.is_done
    assert joined(events) == cold.text
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert daemon.wait_exit() == 0
    assert left_behind(daemon) == []
    assert not daemon.is_reachable()
    assert daemon.cachectl("stats").returncode == 3


def test_shutdown_after_the_grace_period_tells_everyone(start):
    """K-LO6 and S6-7: a stream ends with an error event, a queued request gets an error with a body."""
    daemon = start("--grace-seconds", "0.5", "--max-running", "1")
    client = daemon.wait_ready()
    with client.stream([user("Tell me a story without end.")], **ENDLESS) as stream:
        stream.take_text(2)
        queued = client.send([user("waits")])
        until(lambda: daemon.stats()["requests_waiting"] == 1, "the second request waits")
        daemon.terminate()
        last = list(stream)[-1]
        assert last["error"]["message"] == "the server is shutting down"
        assert not stream.is_done
        response = queued.getresponse()
        assert response.status == 503
        assert json.loads(response.read())["error"]["message"] == "the server is shutting down"
        queued.close()
    assert daemon.wait_exit() == 0
    assert left_behind(daemon) == []


def test_a_second_signal_cuts_the_grace_period_short(start):
    daemon = start()
    client = daemon.wait_ready()
    with client.stream([user("Tell me a story without end.")], **ENDLESS) as stream:
        stream.take_text(2)
        daemon.terminate()
        until(lambda: client.get("/ready").status == 503, "it says that it stops")
        daemon.process.send_signal(signal.SIGINT)
        assert list(stream)[-1]["error"]["message"] == "the server is shutting down"
        assert not stream.is_done
        assert daemon.wait_exit() == 0
    assert left_behind(daemon) == []


def test_a_killed_daemon_takes_its_children_along(start):
    daemon = start()
    daemon.wait_ready()
    daemon.process.kill()
    daemon.wait_exit()
    until(lambda: not daemon.processes(), "the children end with their parent")
    again = start(run_dir=daemon.run_dir)
    assert again.wait_ready().chat([user("Hello")]).status == 200, "what a killed one left is no obstacle"


def test_a_run_directory_that_is_removed_is_made_again(start):
    """As where a user's last session ends: what streams goes on, and then service comes back where it was."""
    daemon = start()
    client = daemon.wait_ready()
    until(lambda: "prefixd serves" in daemon.log(), "it knows that it does")
    with client.stream([user("Tell me a long story.")], **ENDLESS) as stream:
        assert stream.take_text(3)
        shutil.rmtree(daemon.run_dir)
        until(lambda: client.get("/ready").status == 503, "it notices")
        assert stream.take_text(3)
    until(lambda: daemon.log().count("prefixd serves") == 2, "it serves again")
    assert "was removed: starting again in another one" in daemon.log()
    assert client.chat([user("Hello")]).status == 200
    assert daemon.stats()["requests"]["finished"] == 1, "it is another worker"
    assert metrics(client)["prefixd_worker_up"] == 1
    daemon.terminate()
    assert daemon.wait_exit() == 0
    assert left_behind(daemon) == []


def test_a_run_directory_that_another_daemon_holds(served: Served, chat_model: Path):
    first = served.daemon
    command = [BIN / "prefixd", "serve", "--port", "0", "--model", chat_model, "--run-dir", first.run_dir]
    second = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    assert second.returncode == 2
    assert str(first.run_dir) in second.stderr
    assert "held by another" in second.stderr
    assert str(first.process.pid) in second.stderr
    assert served.client.chat([user("Hello")]).status == 200, "the first one is not disturbed"


def test_a_run_directory_too_long_for_a_socket(start, tmp_path: Path):
    daemon = start(run_dir=tmp_path / ("d" * 110))
    assert daemon.wait_exit() == 2
    assert "run_dir" in daemon.log()
    assert "107" in daemon.log()
    assert "d" * 110 in daemon.log()
    assert not (tmp_path / ("d" * 110)).exists()


def test_more_threads_than_processors(start):
    daemon = start("--threads=1000000")
    assert daemon.wait_exit() == 1
    assert "threads: 1000000 is more than this machine's" in daemon.log()
    assert left_behind(daemon) == []


def test_settings_that_make_no_sense(start, tmp_path: Path):
    daemons = [
        (start(flag), name)
        for flag, name in (
            ("--slots=-1", "slots"),
            ("--kv-memory=0", "kv_memory"),
            ("--kv-memory=-1GiB", "kv_memory"),
            ("--max-model-len=none", "max_model_len"),
        )
    ]
    daemons.append((start(model=tmp_path / "nothing-here"), "model"))
    for daemon, name in daemons:
        assert daemon.wait_exit() == 2
        assert f"{name}:" in daemon.log()
