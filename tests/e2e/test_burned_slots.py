"""S2: a reservation that came to nothing must cost nobody anything. Played with a full table, in all its variants,
on every family of models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chat_model import FAMILIES, words
from conftest import Served
from daemon import until
from http_client import Answer, assistant, system, user
from reference import Messages, Reference

SCORED = {"logprobs": True, "top_logprobs": 2}
ON_ONE_FAMILY = pytest.mark.parametrize("family", ["llama"])


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(served: Served, messages: Messages, **fields) -> Answer:
    """An answer, found equal to the one without cache; the table is sound afterwards."""
    answer = served.client.chat(list(messages), **SCORED, **fields)
    assert answer.choices == served.client.cold(list(messages), **SCORED, **fields).choices
    assert answer.text
    check_table(served)
    return answer


def check_table(served: Served) -> None:
    """One snapshot a slot, one slot a key, bytes counted once, and no entry was ever found stale."""
    stats = served.daemon.wait_idle()
    rows = served.daemon.snapshots()
    assert len({row["slot"] for row in rows}) == len({row["digest"] for row in rows}) == len(rows)
    assert {row["state"] for row in rows} <= {"ready"}
    assert stats["slots"]["ready"] == len(rows) == stats["snapshots"]
    assert stats["slots"]["reserved"] == stats["slots"]["writing"] == 0
    states = (stats["states_total"] - stats["states_free"]) * stats["state_bytes"]
    assert stats["snapshot_bytes"] == stats["kv_bytes_used"] + states <= sum(row["total_bytes"] for row in rows)
    assert not any(stats["stale_drops"].values())


def tiny_prompt(served: Served) -> None:
    ask(served, [user("Hi")])


def hang_up_in_prefill(served: Served) -> None:
    """Before any of its boundaries is computed."""
    before = served.daemon.stats()["cache_tokens"]["computed"]
    connection = served.client.send([user(words("never finished", 12_000))])
    until(lambda: served.daemon.stats()["cache_tokens"]["computed"] > before, "prefill is under way")
    connection.close()
    served.daemon.wait_idle()


def hang_up_in_decode(served: Served) -> None:
    with served.client.stream([user(words("cut off", 100))], max_tokens=8000, ignore_eos=True) as stream:
        stream.take_text(3)
    served.daemon.wait_idle()


def too_long_for_the_context(served: Served) -> None:
    assert served.client.chat([user(words("too long", 17_000))]).status == 400


def too_long_for_the_memory(served: Served) -> None:
    """Refused by the worker, which has been asked."""
    ids = [1000 + n % 900 for n in range(16_300)]
    answer = served.client.complete(ids)
    assert answer.status == 400
    assert "16300" in answer.error["message"]


def nothing_to_say(served: Served) -> None:
    """No token of an answer at all."""
    answer = served.client.chat([user(words("mute", 60))], logit_bias={"2": 100})
    assert (answer.text, answer.choices[0]["finish_reason"]) == ("", "stop")


ABORTS = [
    tiny_prompt,
    hang_up_in_prefill,
    hang_up_in_decode,
    too_long_for_the_context,
    too_long_for_the_memory,
    nothing_to_say,
]


@pytest.mark.parametrize(
    ("family", "abort"),
    [("llama", abort) for abort in ABORTS]
    + [(family, abort) for family in ("qwen3_5", "gemma4") for abort in (hang_up_in_prefill, nothing_to_say)],
)
def test_a_slot_burned_between_two_conversations(abort: Callable[[Served], None], two_slots: Served, reference):
    a = [system(words(f"{abort.__name__} A", 300)), user(words("first", 80))]
    ask(two_slots, a)  # t1
    abort(two_slots)  # t2
    check_table(two_slots)
    b = [user(words(f"{abort.__name__} B", 1200))]
    ask(two_slots, b)  # t3
    shorter = [*a, assistant("Well."), user(words("second", 60))]
    answer = ask(two_slots, shorter)  # t4: A's extension, shorter than B
    assert answer.outcome[1] in (0, reference.history_tokens(a[:1]), reference.history_tokens(a))
    assert answer.text == reference.text(shorter)
    longer = [*shorter, assistant("Hm."), user(words("third", 1500))]
    answer = ask(two_slots, longer)  # t5: A's extension, longer than B
    assert answer.outcome[1] in {reference.history_tokens(longer[:end]) for end in (1, 2, 4)} | {0}
    assert answer.text == reference.text(longer)


def test_a_client_that_leaves_while_its_answer_is_decoded(two_slots: Served, reference: Reference):
    """S2-a and S2-f: what it displaced is gone, what it computed is kept."""
    a = [user(words("A of S2-a", 300))]
    b = [user(words("B of S2-a", 900))]
    ask(two_slots, a)
    ask(two_slots, [user(words("T of S2-a", 30))])
    with two_slots.client.stream(b, max_tokens=8000, ignore_eos=True) as stream:
        stream.take_text(3)
    two_slots.daemon.wait_idle()
    check_table(two_slots)
    again = ask(two_slots, b)
    assert again.outcome == ("hit", reference.history_tokens(b), "none")
    extended = [*a, assistant("Yes."), user(words("more", 1000))]
    assert ask(two_slots, extended).text == reference.text(extended)


@ON_ONE_FAMILY
def test_one_slot_and_a_request_that_comes_to_nothing(one_slot: Served, reference: Reference):
    """S2-b and S2-d: nothing was written, so what the slot holds still stands under its own key."""
    b = [user(words("B of S2-b", 500))]
    ask(one_slot, b)
    [row] = one_slot.daemon.snapshots()
    hang_up_in_prefill(one_slot)
    too_long_for_the_context(one_slot)
    assert [(s["digest"], s["generation"]) for s in one_slot.daemon.snapshots()] == [
        (row["digest"], row["generation"])
    ]
    answer = ask(one_slot, b)
    assert answer.outcome == ("hit", reference.history_tokens(b), "none")
    assert answer.text == reference.text(b)


def test_as_many_victims_as_it_takes(tight: Served, reference: Reference):
    """S3-12: of some 2,000 tokens, a snapshot that needs the memory of two others gets it."""
    for name in ("first", "second"):
        ask(tight, [user(words(f"victim {name}", 700))])
    large = [user(words("needs the room of both", 1600))]
    tight.client.chat(large)  # the answer without cache would push it out again
    [*_, row] = sorted(tight.daemon.snapshots(), key=lambda row: row["tokens"])
    assert row["tokens"] == reference.history_tokens(large)
    longer = [*large, assistant("So."), user("What next?")]
    assert ask(tight, longer).outcome == ("hit", row["tokens"], "none")
    assert ask(tight, [user(words("victim first", 700))]).outcome[2] == "evicted"


@ON_ONE_FAMILY
def test_fifty_conversations_through_two_slots(two_slots: Served):
    """K-SM5: everything that is not in use can go."""
    before = two_slots.daemon.stats()["evictions"]["slots"]
    for number in range(50):
        answer = two_slots.client.chat([user(words(f"conversation {number}", 40))], max_tokens=2)
        assert answer.status == 200
    check_table(two_slots)
    assert two_slots.daemon.stats()["evictions"]["slots"] > before
    assert all(row["busy"] == 0 for row in two_slots.daemon.snapshots())


@ON_ONE_FAMILY
def test_small_one_shots_do_not_push_out_a_session(two_slots: Served, reference: Reference):
    """K-RT6."""
    session = [user(words("a long session", 3000))]
    for turn in range(2):
        answer = ask(two_slots, session)
        session += [assistant(answer.text), user(words(f"turn {turn}", 50))]
    for number in range(20):
        two_slots.client.chat([user(words(f"title {number}", 200))], max_tokens=2)
    answer = ask(two_slots, session)
    assert answer.outcome == ("hit", reference.history_tokens(session[:3]), "none")
