"""What the daemon does while nobody asks: it absorbs answers and verifies hits, and leaves off for whoever asks.

Played on a model whose layers all attend and on one whose layers recur, with memory for some 4,000 tokens. What is
computed when is told by the worker itself (`faulty_daemon.py`), pass by pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from chat_model import words
from conftest import Served, emptied
from daemon import FAULTY, Daemon, metrics, until
from faulty_daemon import HELD
from http_client import assistant, system, user
from reference import Reference

from worker.background import PASS_ROWS
from worker.kv_cache import BLOCK_TOKENS

SCORED = {"logprobs": True, "top_logprobs": 3}
ABSORBED = "prefixd_absorbed_tokens_total"
BEFORE_HELD = 2  # passes of the absorption


@pytest.fixture(scope="session", params=("llama", "qwen3_5"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def absorbing_daemon(family: str, folders: Callable[[str], Path]) -> Iterator[Served]:
    flags = ("--absorb", "--verify-hits", "1", "--kv-memory", "2MiB")
    daemon = Daemon(folders(family), *flags, program=FAULTY)
    try:
        yield Served(daemon, daemon.wait_ready())
    finally:
        daemon.close()


@pytest.fixture
def absorbing(absorbing_daemon: Served) -> Iterator[Served]:
    """Nothing that ran in it is left afterwards, and its own check of all accounts has not ended it."""
    epoch = emptied(absorbing_daemon).daemon.stats()["epoch"]
    yield absorbing_daemon
    assert absorbing_daemon.daemon.ask("verify")["mismatched"] == 0
    emptied(absorbing_daemon)
    stats = absorbing_daemon.daemon.stats()
    assert stats["epoch"] == epoch
    assert stats["kv_bytes_used"] == stats["snapshot_bytes"] == 0


def test_a_turn_after_an_absorbed_answer_computes_its_new_message_alone(absorbing: Served, reference: Reference):
    daemon, client = absorbing.daemon, absorbing.client
    verified = daemon.ask("verify")["verified"]
    messages = [system(words("head", 120))]
    hits = absorbed = 0
    for turn in range(4):
        messages.append(user(words(f"idle question {turn}", 40)))
        # The random model does not end by itself: a piece of its own answer ends it.
        stop = client.cold(messages).text[-4:]
        answer = client.chat(messages, stop=stop)
        assert answer.choices == client.cold(messages, stop=stop).choices
        hits += answer.outcome[0] == "hit"
        if turn:
            assert answer.outcome == ("hit", absorbed, "none")
        if not answer.text.strip():
            break
        messages.append(assistant(answer.text))
        absorbed = reference.history_tokens(messages)
        wait_absorbed(absorbing, absorbed)
    done = daemon.cachectl("--json", "verify", "--wait")
    assert done.returncode == 0, done.stdout
    counts = daemon.ask("verify")
    assert (counts["verified"] - verified, counts["skipped"], counts["pending"]) == (hits, 0, 0)
    assert hits > 0
    assert metrics(client)[ABSORBED] > 0


@dataclass(frozen=True)
class Absorption:
    """An answer is being absorbed: two passes have been made, and the third ends when a request has come."""

    history: list[dict[str, Any]]  # with the answer
    start: int  # what was kept of it before
    end: int
    stats: dict[str, Any]  # of the worker, when nothing was stored yet
    absorbed: float  # tokens of all answers until then


@pytest.fixture
def absorption(absorbing: Served, reference: Reference, request: pytest.FixtureRequest) -> Absorption:
    """The client has begun the answer itself, at a length that takes many passes."""
    daemon, client = absorbing.daemon, absorbing.client
    asked, begun = [user(words(request.node.name, 20))], words(f"begun in {request.node.name}", 400)
    stop = client.cold([*asked, assistant(begun)]).text[-4:]
    stats, absorbed, held = daemon.stats(), metrics(client)[ABSORBED], daemon.log().count(HELD)
    daemon.ask("fault", what="hold_absorption", after=BEFORE_HELD)
    answer = client.chat([*asked, assistant(begun)], stop=stop)
    until(lambda: daemon.log().count(HELD) > held, "an absorption is under way")
    history = [*asked, assistant(begun + answer.text)]
    start, end = reference.history_tokens(asked), reference.history_tokens(history)
    return Absorption(history, start, end, stats, absorbed)


class Passes:
    """What the worker computed since the absorption began, and how far that had come when the request was taken."""

    def __init__(self, served: Served, absorption: Absorption) -> None:
        noted = [(kind, start, end) for kind, start, end in served.daemon.ask("fault", what="passes")]
        runs = [(kind, list(run)) for kind, run in groupby(noted, key=lambda each: each[0])]
        self.kinds = [kind for kind, _ in runs]
        assert self.kinds[:3] == ["request", "absorb", "request"]
        # The pass in which the request came was the last one before its own.
        assert len(runs[1][1]) == BEFORE_HELD + 1
        spans = [(start, end) for kind, start, end in noted if kind == "absorb"]
        starts, self.ends = zip(*spans, strict=True)
        assert starts == (absorption.start, *self.ends[:-1]), "nothing is absorbed twice or left out"
        assert all(end - start <= PASS_ROWS for start, end in spans)
        total = metrics(served.client)[ABSORBED] - absorption.absorbed
        assert total == self.ends[-1] - absorption.start


def test_a_newcomer_waits_for_the_pass_under_way_and_no_other(absorbing: Served, absorption: Absorption):
    """The absorption goes on behind it from where it was."""
    newcomer = [system(words("other", 40)), user(words("newcomer", 150))]
    answer = absorbing.client.chat(newcomer, **SCORED)
    wait_absorbed(absorbing, absorption.end)
    passes = Passes(absorbing, absorption)
    assert passes.kinds == ["request", "absorb", "request", "absorb"]
    assert passes.ends[-1] == absorption.end
    assert answer.choices == absorbing.client.cold(newcomer, **SCORED).choices
    following = [*absorption.history, user("And then?")]
    answer = absorbing.client.chat(following, **SCORED)
    assert answer.outcome == ("hit", absorption.end, "none")
    assert answer.choices == absorbing.client.cold(following, **SCORED).choices


def test_the_next_turn_makes_the_rest_of_an_absorption_moot(absorbing: Served, absorption: Absorption):
    """What it computes itself is not computed for it."""
    following = [*absorption.history, user("And then?")]
    answer = absorbing.client.chat(following, **SCORED)
    assert answer.outcome == ("hit", absorption.start, "none")
    absorbing.daemon.wait_idle()
    passes = Passes(absorbing, absorption)
    assert passes.kinds[3:] in ([], ["verify"])
    assert passes.ends[-1] < absorption.end
    assert answer.choices == absorbing.client.cold(following, **SCORED).choices


def test_an_absorption_gives_its_memory_up_before_any_snapshot_does(absorbing: Served, absorption: Absorption):
    """It is dropped then. What the turn before it kept is still there."""
    client, before = absorbing.client, absorption.stats
    kept, spare = -(-absorption.start // BLOCK_TOKENS), 2  # blocks; less is spare than the absorption holds
    ids = [1000 + n % 900 for n in range((before["kv_blocks_free"] - kept - spare) * BLOCK_TOKENS - 12)]
    answer = client.complete(ids, logprobs=3)
    stats = absorbing.daemon.wait_idle()
    passes = Passes(absorbing, absorption)
    assert passes.kinds == ["request", "absorb", "request"]
    assert stats["evictions"] == before["evictions"]
    assert absorption.start in {row["tokens"] for row in absorbing.daemon.snapshots()}
    assert answer.choices == client.complete(ids, logprobs=3, cache_prompt=False).choices


def wait_absorbed(served: Served, end: int) -> None:
    until(lambda: end in {row["tokens"] for row in served.daemon.snapshots()}, "the answer is absorbed")
