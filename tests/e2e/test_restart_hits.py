"""Conversations that go on after the worker was killed, from snapshots on disk, in every kind of model.

Every answer is compared with the one without cache, to the last bit of its log-probabilities, and the worker verifies
every hit as well.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chat_model import words
from conftest import Served
from daemon import Daemon, metrics, until
from http_client import Answer, assistant, system, user
from reference import Messages, Reference

SCORED = {"logprobs": True, "top_logprobs": 3}


@pytest.fixture(params=("llama", "qwen3_5", "gemma4"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def served(family: str, folders: Callable[[str], Path], tmp_path: Path) -> Iterator[Served]:
    """A daemon of the family's model that keeps snapshots in `tmp_path/cache`."""
    flags = ["--disk-cache", str(tmp_path / "cache"), "--kv-memory", "64MiB", "--verify-hits", "1"]
    daemon = Daemon(folders(family), *flags)
    try:
        yield Served(daemon, daemon.wait_ready())
    finally:
        daemon.close()


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


def files(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def from_disk(served: Served) -> float:
    return metrics(served.client)["prefixd_cache_tokens_total{source=disk}"]


def test_conversations_go_on_where_they_were(served: Served, family: str, reference: Reference, tmp_path: Path):
    messages = [system(words("head", 120))]
    for turn in range(3):
        messages.append(user(words(f"question {turn}", 70)))
        messages.append(assistant(ask(served, messages).text))
    told = reference.history_tokens(messages[:-1])
    other = [messages[0], user(words("other", 40))]
    for text in ("Yes.", "No."):
        ask(served, other)
        other += [assistant(text), user(words(text, 30))]
    stats = written(served.daemon)
    assert stats["tiers"][0]["bytes"] == sum(path.stat().st_size for path in files(tmp_path))
    last = next(path for path in reversed(files(tmp_path)) if ".kv." in path.name)
    last.write_bytes(last.read_bytes()[:-20])  # the other conversation's

    if family == "gemma4":  # told to stop, it writes what it has just kept
        late = [user(words("late", 90))]
        ask(served, late)
        served.daemon.restart_worker(signal.SIGTERM)
        assert ask(served, late).outcome == ("hit", reference.history_tokens(late), "none")
    else:
        served.daemon.restart_worker(signal.SIGKILL)

    messages.append(user("Go on."))
    before = from_disk(served)
    answer = ask(served, messages)
    assert answer.outcome == ("hit", told, "none")
    assert answer.text == reference.text(messages)
    assert from_disk(served) - before == told
    assert f"({told} from disk)" in served.daemon.cachectl("explain", answer.request_id).stdout
    # An earlier turn is asked again, another way: its beginning is there as well.
    branch = [*messages[:4], user("Why?")]
    assert ask(served, branch).outcome == ("hit", reference.history_tokens(messages[:4]), "none")
    # Where the last file is broken, the boundary before it serves; a recurrent state is only at those that were kept.
    before_it = other[:2] if family == "qwen3_5" else other[:3]
    assert ask(served, other).outcome == ("partial", reference.history_tokens(before_it), "stale")
    assert served.daemon.stats()["stale_drops"]["checksum"] == 1

    written(served.daemon)
    assert "disk" in served.daemon.cachectl("list").stdout
    verified = served.daemon.cachectl("verify", "--wait")
    assert verified.returncode == 0, verified.stdout
    served.daemon.flush()
    assert files(tmp_path) == []
    assert ask(served, messages).outcome[0] == "miss"
