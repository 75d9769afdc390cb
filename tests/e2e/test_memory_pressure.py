"""A budget that is too small for what is asked: it is never exceeded, and every answer is still the right one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from chat_model import words
from conftest import Served
from daemon import metrics
from http_client import GREEDY, user
from reference import Reference

BUDGET = 1 << 20
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, width, float32
LONG = {"max_tokens": 320, "ignore_eos": True}


class Budget:
    """Watches what the worker holds, from a thread, while a test works."""

    def __init__(self, served: Served) -> None:
        self._daemon = served.daemon
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.seen: list[dict] = []

    def __enter__(self) -> Budget:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.02):
            self.seen.append(self._daemon.stats())

    def check(self) -> None:
        assert self.seen
        for stats in self.seen:
            assert stats["kv_bytes_total"] <= BUDGET
            assert stats["kv_bytes_used"] <= stats["kv_bytes_total"]
            assert stats["snapshot_bytes"] <= stats["kv_bytes_used"]
            assert not any(stats["stale_drops"].values())


def test_eviction_keeps_to_the_budget(tight: Served, reference: Reference):
    """K-SM1 and K-SM2: conversations worth ten times the memory."""
    before = tight.daemon.stats()["evictions"]["blocks"]
    conversations = [[user(words(f"pressure {number}", 500))] for number in range(30)]
    with Budget(tight) as budget:
        answers = [tight.client.chat(messages) for messages in conversations]
    budget.check()
    assert [answer.status for answer in answers] == [200] * 30
    assert answers[0].text == reference.text(conversations[0])
    assert answers[29].text == reference.text(conversations[29])
    stats = tight.daemon.wait_idle()
    assert stats["evictions"]["blocks"] > before + 20
    assert stats["kv_bytes_used"] == stats["snapshot_bytes"]
    latest = tight.client.chat(conversations[29])
    assert latest.outcome[0] == "hit"
    assert latest.text == answers[29].text
    outcome, depth, reason = tight.client.chat(conversations[1]).outcome
    assert outcome != "hit"
    assert depth < 100, "at most what all share is left"
    assert reason == "evicted"


def test_a_prompt_larger_than_the_memory_is_refused_with_numbers(tight: Served):
    for answer in (
        tight.client.chat([user(words("too much", 2500))]),
        tight.client.chat([user(words("too much", 2500))], stream=True),
    ):
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"
        numbers = [int(word) for word in answer.error["message"].split() if word.isdigit()]
        assert "kv_memory" in answer.error["message"]
        assert any(2500 < number < 2600 for number in numbers)
        assert tight.daemon.stats()["kv_bytes_total"] // BYTES_PER_TOKEN in numbers
    assert tight.client.chat([user("Hello")]).status == 200
    assert tight.daemon.wait_idle()["requests"]["failed"] == 0


def test_several_long_answers_take_turns_in_memory(tight: Served):
    """Swapped out and in again, none of them computes a decoded token twice, and none of them changes."""
    prompts = [[user(words(f"long answer {number}", 200))] for number in range(5)]
    alone = [tight.client.cold(prompt, **LONG) for prompt in prompts]
    before, swapped = metrics(tight.client), "prefixd_swaps_total{direction=%s}"
    with Budget(tight) as budget, ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda prompt: tight.client.chat(prompt, **LONG), prompts))
    budget.check()
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    after = metrics(tight.client)
    assert after[swapped % "out"] > before[swapped % "out"]
    assert after[swapped % "out"] - before[swapped % "out"] == after[swapped % "in"] - before[swapped % "in"]
    generated = "prefixd_generated_tokens_total"
    assert after[generated] - before[generated] == 5 * LONG["max_tokens"]
    computed = "prefixd_cache_tokens_total{source=computed}"
    assert after[computed] - before[computed] == sum(a.prompt_tokens - a.cached_tokens for a in answers)


def test_an_answer_ends_where_the_memory_does(tight: Served):
    """The prompt fits, what it asks for does not: as at the end of the context."""
    prompt = [user(words("outgrows", 1500))]
    answer = tight.client.chat(prompt, max_tokens=3000, ignore_eos=True)
    assert answer.choices[0]["finish_reason"] == "length"
    holds = tight.daemon.stats()["kv_bytes_total"] // BYTES_PER_TOKEN
    assert holds - 32 <= answer.usage["total_tokens"] <= holds + 1
    assert answer.text.startswith(tight.client.cold(prompt, max_tokens=20).text)
    assert tight.daemon.wait_idle()["requests"]["failed"] == 0


def test_no_slots_no_cache(start):
    """K-SM3: 0 turns it off, cleanly."""
    daemon = start("--slots", "0")
    client = daemon.wait_ready()
    prompt = [user(words("no slots", 400))]
    answers = [client.chat(prompt) for _ in range(2)]
    assert [answer.outcome for answer in answers] == [("miss", 0, "disabled")] * 2
    assert answers[0].text == answers[1].text
    assert client.chat(prompt, n=2, **GREEDY | {"max_tokens": 3}).status == 200
    stats = daemon.wait_idle()
    assert stats["snapshots"] == stats["kv_bytes_used"] == 0
    assert sum(stats["slots"].values()) == 0
    assert daemon.cachectl("list").returncode == 0
    assert daemon.cachectl("flush").returncode == 0
    assert daemon.cachectl("show", 0).returncode == 1
