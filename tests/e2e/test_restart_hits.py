"""Conversations that go on after the worker was killed, from snapshots on disk, in every kind of model.

Every answer is compared with the one without cache, to the last bit of its log-probabilities, and the worker verifies
every hit as well.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat_model import words
from conftest import Served
from daemon import Daemon, metrics, until
from http_client import Answer, assistant, system, user
from reference import Messages, Reference

from protocol.control_client import CommandRefused
from protocol.errors import WorkerUnavailable

SCORED = {"logprobs": True, "top_logprobs": 3}


@pytest.fixture(params=("llama", "qwen3_5", "gemma4"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def served(family: str, folders: Callable[[str], Path], tmp_path: Path) -> Iterator[Served]:
    """A daemon of the family's model that keeps snapshots in `tmp_path/cache`."""
    daemon = Daemon(folders(family), *_flags(tmp_path))
    try:
        yield Served(daemon, daemon.wait_ready())
    finally:
        daemon.close()


def _flags(folder: Path) -> list[str]:
    return ["--disk-cache", str(folder / "cache"), "--kv-memory", "64MiB", "--verify-hits", "1"]


def ask(served: Served, messages: Messages, **fields) -> Answer:
    """An answer that has been found equal to the one without cache."""
    answer = served.client.chat(list(messages), **SCORED, **fields)
    cold = served.client.cold(list(messages), **SCORED, **fields)
    assert answer.choices == cold.choices
    return answer


def written(daemon: Daemon) -> dict:
    """Statistics, once all that was kept is on disk."""
    daemon.wait_idle()

    def done() -> dict | None:
        stats = daemon.stats()
        return None if stats["tier_pending"] else stats

    return until(done, "all snapshots are copied")


def restart(served: Served) -> None:
    """Kill the worker and wait for the next one."""
    epoch = written(served.daemon)["epoch"]
    [worker] = served.daemon.processes("worker")
    os.kill(worker, signal.SIGKILL)

    def is_new() -> bool:
        try:
            return served.daemon.stats()["epoch"] != epoch
        except (WorkerUnavailable, CommandRefused):
            return False

    until(is_new, "another worker serves")
    served.daemon.wait_ready()


def files(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def from_disk(served: Served) -> float:
    return metrics(served.client)["prefixd_cache_tokens_total{source=disk}"]


def test_a_conversation_goes_on_where_it_was(served: Served, reference: Reference, tmp_path: Path):
    messages = [system(words("head", 120))]
    for turn in range(3):
        messages.append(user(words(f"question {turn}", 70)))
        messages.append(assistant(ask(served, messages).text))
    told = reference.history_tokens(messages[:-1])
    restart(served)
    assert served.daemon.snapshots() == []

    messages.append(user("Go on."))
    answer = ask(served, messages)
    assert answer.outcome == ("hit", told, "none")
    assert answer.text == reference.text(messages)
    assert from_disk(served) == told
    assert f"({told} from disk)" in served.daemon.cachectl("explain", answer.request_id).stdout

    # An earlier turn is asked again, another way: its beginning is there as well.
    branch = [*messages[:4], user("Why?")]
    assert ask(served, branch).outcome == ("hit", reference.history_tokens(messages[:4]), "none")

    # The file that was written last breaks: the next shallower boundary serves.
    stats = written(served.daemon)
    assert stats["tiers"][0]["bytes"] == sum(path.stat().st_size for path in files(tmp_path))
    last = files(tmp_path)[-1]
    last.write_bytes(last.read_bytes()[:-20])
    restart(served)
    for conversation in (messages, branch):
        outcome = ask(served, conversation).outcome
        assert outcome[0] in ("hit", "partial")
        assert outcome[1] >= reference.history_tokens(messages[:4])
        assert outcome[2] in ("none", "stale")
    assert served.daemon.stats()["stale_drops"]["checksum"] == 1

    assert "disk" in served.daemon.cachectl("list").stdout
    written(served.daemon)
    verified = served.daemon.cachectl("verify", "--wait")
    assert verified.returncode == 0, verified.stdout
    served.daemon.flush()
    assert files(tmp_path) == []
    assert ask(served, messages).outcome[0] == "miss"


@pytest.mark.parametrize("family", ["qwen3_5"])
def test_a_daemon_that_is_stopped_writes_what_it_holds(
    family: str, folders: Callable[[str], Path], tmp_path: Path, reference: Reference
):
    messages = [user(words("stop", 90))]
    first = Daemon(folders(family), *_flags(tmp_path))
    try:
        answer = first.wait_ready().chat(messages, **SCORED)
        first.terminate()
        assert first.wait_exit() == 0
    finally:
        first.close()
    second = Daemon(folders(family), *_flags(tmp_path))
    try:
        again = second.wait_ready().chat(messages, **SCORED)
        assert again.outcome == ("hit", reference.history_tokens(messages), "none")
        assert again.choices == answer.choices
    finally:
        second.close()
