"""What a sound worker never does, brought about inside it (`faulty_daemon.py`): clients never see more than an error.

Every answer is compared with the one without cache, to the last bit of its log-probabilities, on a model whose layers
all attend and on one whose layers recur.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_model import words
from conftest import Served, emptied
from daemon import FAULTY, Daemon
from http_client import Answer, assistant, user
from reference import Messages

SCORED = {"logprobs": True, "top_logprobs": 3}
HEAD_TOKENS = 21  # what the template says before a first message of a user, and all that any two have in common


@pytest.fixture(scope="session", params=("llama", "qwen3_5"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def faulty_daemon(family: str, folders: Callable[[str], Path]) -> Iterator[Served]:
    daemon = Daemon(folders(family), "--slots", "8", "--kv-memory", "64MiB", program=FAULTY)
    try:
        yield Served(daemon, daemon.wait_ready())
    finally:
        daemon.close()


@pytest.fixture
def faulty(faulty_daemon: Served) -> Iterator[Served]:
    """It is the same process afterwards, and sound: its own check of all accounts has not ended it."""
    epoch = emptied(faulty_daemon).daemon.stats()["epoch"]
    yield faulty_daemon
    stats = faulty_daemon.daemon.wait_idle()
    assert stats["epoch"] == epoch
    assert stats["slots"]["reserved"] == stats["slots"]["writing"] == stats["slots"]["restoring"] == 0


def ask(served: Served, messages: Messages) -> Answer:
    """An answer that has been found equal to the one without cache."""
    answer = served.client.chat(list(messages), **SCORED)
    assert answer.choices == served.client.cold(list(messages), **SCORED).choices
    assert answer.text
    assert answer.cached_tokens == answer.outcome[1] < answer.prompt_tokens
    return answer


def longer(messages: Messages, count: int = 40) -> list[dict[str, Any]]:
    return [*messages, assistant("Well."), user(words(f"and {count} more", count))]


def slot_of(served: Served, answer: Answer) -> int:
    """The slot that holds the prompt of an answer up to its last message."""
    return served.daemon.ask("diff", a=answer.request_id, b=answer.request_id)["a"]["slot"]


def dropped(served: Served, cause: str) -> int:
    return served.daemon.stats()["stale_drops"][cause]


@pytest.mark.parametrize("cause", ["length", "generation"])
def test_a_slot_that_holds_a_longer_snapshot_than_its_key_says(faulty: Served, cause: str):
    """S1, steps 1 and 2, and S2 at t4 and t5: prompts shorter and longer than what is really in the slot."""
    a, b = [user(words(f"A {cause}", 300))], [user(words(f"B {cause}", 900))]
    slots = [slot_of(faulty, ask(faulty, messages)) for messages in (a, b)]
    before = dropped(faulty, cause)
    if cause == "length":
        faulty.daemon.ask("fault", what="put_into", slot=slots[0], source=slots[1])
    else:
        faulty.daemon.ask("fault", what="write_again", slot=slots[0])
    answer = ask(faulty, longer(a))
    assert answer.outcome == ("partial", HEAD_TOKENS, "stale")
    assert dropped(faulty, cause) == before + 1
    explained = faulty.daemon.ask("explain", request_id=answer.request_id)
    assert (explained["outcome"], explained["reason"], explained["depth"]) == (*answer.outcome[::2], HEAD_TOKENS)
    ask(faulty, longer(a, 800))
    assert ask(faulty, longer(b)).outcome[0] == "hit", "the other one is still there"
    assert ask(faulty, longer(longer(a))).outcome[0] == "hit", "and this one again"
    assert dropped(faulty, cause) == before + 1


def test_a_worker_that_is_told_to_restore_more_than_the_prompt(faulty: Served):
    """S1, step 3: whoever found it, it is not the prompt's own."""
    b = [user(words("B of S1-3", 900))]
    slot = slot_of(faulty, ask(faulty, b))
    for messages in ([user(words("shorter", 200))], [user(words("longer", 1200))]):
        faulty.daemon.ask("fault", what="believe", slot=slot)
        assert ask(faulty, messages).outcome == ("miss", 0, "restore_failed")
    assert ask(faulty, longer(b)).outcome[0] == "hit"
    assert not any(faulty.daemon.stats()["stale_drops"][cause] for cause in ("tokens", "verify"))


def test_prefixes_of_equal_digest_are_told_apart_by_their_tokens(faulty: Served):
    """S2-g: of as many tokens, and of others."""
    before = dropped(faulty, "tokens")
    faulty.daemon.ask("fault", what="collide", on=True)
    try:
        a, b, c = (
            [user(f"{word} {words('collision', count)}")] for word, count in (("I", 90), ("A", 90), ("It", 60))
        )
        for messages in (a, b, longer(a), longer(b), c, longer(c), b, a):
            ask(faulty, messages)
        assert dropped(faulty, "tokens") > before
        assert ask(faulty, longer(a)).outcome[0] == "hit", "what agrees in its tokens as well is found"
    finally:
        faulty.daemon.ask("fault", what="collide", on=False)


def test_a_restore_that_fails_costs_one_request_its_hit(faulty: Served):
    """S4-h."""
    a = [user(words("A of S4-h", 300))]
    ask(faulty, a)
    faulty.daemon.ask("fault", what="refuse_restore")
    assert ask(faulty, longer(a)).outcome == ("miss", 0, "restore_failed")
    assert ask(faulty, longer(longer(a))).outcome[0] == "hit"


@pytest.mark.parametrize("fault", ["spoil", "fail_prefill"])
def test_a_stored_state_that_is_corrupt_fails_one_request_and_is_wiped(faulty: Served, fault: str):
    """S4-h: the client is told, and all later requests are right, also those that get its memory."""
    a, other = [user(words(f"A {fault}", 300))], [user(words(f"other {fault}", 200))]
    slot = slot_of(faulty, ask(faulty, a))
    ask(faulty, other)
    before = dropped(faulty, "verify")
    if fault == "spoil":
        faulty.daemon.ask("fault", what="spoil", slot=slot)
    else:
        faulty.daemon.ask("fault", what="fail_prefill", after=0, memory=False)
    refused = faulty.client.chat(longer(a), **SCORED)
    assert refused.status == 500
    assert refused.error["message"]
    assert dropped(faulty, "verify") > before
    assert ask(faulty, longer(a)).outcome[1:] in ((HEAD_TOKENS, "stale"), (0, "stale"))
    assert ask(faulty, longer(other)).outcome[0] == "hit"
    assert ask(faulty, [user(words(f"new {fault}", 500))]).cached_tokens in (HEAD_TOKENS, 0)
    assert ask(faulty, longer(longer(a))).outcome[0] == "hit"


def test_memory_that_runs_out_in_the_middle_of_a_prefill(faulty: Served):
    """S6-5: all snapshots go, that request is told, and everything else goes on."""
    kept = [user(words("kept until then", 200))]
    ask(faulty, kept)
    before = faulty.daemon.stats()
    faulty.daemon.ask("fault", what="fail_prefill", after=1, memory=True)
    long = [user(words("too much at once", 900))]
    refused = faulty.client.chat(long)
    assert refused.status in (500, 503)
    assert "memory" in refused.error["message"]
    stats = faulty.daemon.wait_idle()
    assert (faulty.daemon.snapshots(), stats["kv_bytes_used"], stats["snapshots"]) == ([], 0, 0)
    assert stats["states_free"] == stats["states_total"]
    assert stats["evictions"]["oom"] == before["evictions"]["oom"] + before["snapshots"] > 0
    assert ask(faulty, longer(kept)).outcome == ("miss", 0, "evicted")
    assert ask(faulty, long).cached_tokens == HEAD_TOKENS
    assert ask(faulty, longer(long)).cached_tokens > 900
