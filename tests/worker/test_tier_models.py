"""Real models: what is exported from one hits in another worker of it, and is refused by a worker of any other."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exact_rig import VOCAB, Worker, ids
from snapshot_rig import prompt
from tiny_models import save_tiny

from protocol.messages import Command
from worker.io import FromOperator


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Any]:
    workers: list[Worker] = []

    def start(name: str, seed: int, **settings: Any) -> Worker:
        path = tmp_path / f"model-{seed}"
        if not path.exists():
            save_tiny(path, "llama", seed=seed, vocab_size=VOCAB, max_position_embeddings=1024)
        workers.append(Worker(path, disk_cache=str(tmp_path / name), **settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.engine.close()


def ask(worker: Worker, verb: str, **args: Any) -> Any:
    data = _tell(worker, verb, **args)
    deadline = time.monotonic() + 60
    while isinstance(data, dict) and data.get("pending"):  # files are copied beside the engine
        assert time.monotonic() < deadline, f"{verb} does not end"
        time.sleep(0.002)
        data = _tell(worker, "transfer")
    return data


def _tell(worker: Worker, verb: str, **args: Any) -> Any:
    replies: list[Any] = []
    worker.sockets.answer = lambda _sender, reply: replies.append(reply)  # type: ignore[attr-defined]
    worker.sockets.inbox.put(FromOperator(b"operator", Command("c", verb, args)))
    worker.engine.turn(wait=False)
    assert replies[0].error is None
    return replies[0].data


def settle(worker: Worker) -> None:
    tiers = worker.engine._tiers
    assert tiers is not None
    while tiers.turn(idle=True) or tiers.pending or any(tier.is_writing for tier in tiers.tiers):
        pass


def test_other_weights_and_other_types_are_another_model(begin: Any, tmp_path: Path):
    first = begin("a", 0)
    talk = prompt(ids(1, 45), ids(2, 29), tail=ids(9, 3))
    first.ask(talk)
    first.run()
    settle(first)
    away = str(tmp_path / "away")
    slots = [row["slot"] for row in ask(first, "list")["slots"]]
    written = ask(first, "export", folder=away, slots=slots)
    for name, seed, settings in (("b", 1, {}), ("c", 0, {"dtype": "bfloat16"})):
        other = begin(name, seed, **settings)
        taken = ask(other, "import", folder=away)
        assert taken == {"files": 0, "bytes": 0, "refused": {"fingerprint": written["files"]}, "pending": False}
        assert ask(other, "stats")["tiers"][0]["bytes"] == 0
    same = begin("d", 0)
    assert ask(same, "import", folder=away)["files"] == written["files"]
    assert [row["tokens"] for row in ask(same, "stored")["stored"]] == [talk.last.end]


def test_a_budget_below_one_snapshot_is_said_at_the_start(begin: Any, caplog: pytest.LogCaptureFixture):
    begin("a", 0, host_memory="64KiB", disk_memory="1GiB")
    (said,) = [message for message in caplog.messages if "_memory:" in message]
    assert said.startswith("host_memory: 64KiB is less than the ")
    assert "of one snapshot at the full context of 1024 tokens" in said
