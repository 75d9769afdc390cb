"""Conversations that share few slots, branch, come back and are cut: how other servers mixed them up.

Played on a model whose layers all attend and on one whose layers recur, growth on one whose layers slide as well.
Every answer is compared with the one without cache, to the last bit of its log-probabilities, and the worker verifies
every hit as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from chat_model import FAMILIES, words
from conftest import Served, emptied
from daemon import until
from http_client import Answer, assistant, system, tool_step, user
from reference import Messages, Reference

SCORED = {"logprobs": True, "top_logprobs": 3}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture(scope="session", params=("llama", "qwen3_5"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(served: Served, messages: Messages, **fields: Any) -> Answer:
    """An answer that has been found equal to the one without cache."""
    answer = served.client.chat(list(messages), **SCORED, **fields)
    assert answer.choices == served.client.cold(list(messages), **SCORED, **fields).choices
    return answer


def all_at_once(served: Served, requests: Sequence[Messages]) -> list[Answer]:
    """Answers to requests that run side by side, each found equal in text to the one without cache alone."""
    cold = [served.client.cold(list(messages)).text for messages in requests]
    with ThreadPoolExecutor(len(requests)) as pool:
        answers = list(pool.map(lambda messages: served.client.chat(list(messages)), requests))
    assert [answer.text for answer in answers] == cold
    return answers


# Routing and slots


def test_two_conversations_on_one_head_take_turns(four_slots: Served, reference: Reference):
    """S4-d, S5-10 and K-RT2: a hit consumes nothing, and each return reuses all that is stored of the conversation."""
    head = system(words("shared", 300))
    a, b = [head, user(words("a", 80))], [head, user(words("b", 90))]
    ask(four_slots, a)
    ask(four_slots, b)
    for _ in range(2):
        for history in (a, b):
            known = reference.history_tokens(history)
            history += [assistant("Well."), user("And then?")]
            assert ask(four_slots, history).outcome == ("hit", known, "none")


def test_a_conversation_and_a_longer_one_that_begins_like_it(roomy: Served, reference: Reference):
    """S4-e and K-RT3: the deepest match of either wins, however good a shorter one looks."""
    short = [system(words("prefix", 60)), user(words("a", 40))]
    long = [*short, assistant("Yes."), user(words("b", 400)), assistant("No."), user(words("c", 100))]
    ask(roomy, short)
    ask(roomy, long)
    for turn in range(2):
        for history in (short, long):
            known = reference.history_tokens(history)
            history += [assistant(f"Answer {turn} to {len(history)}."), user(f"Go on {turn}.")]
            assert ask(roomy, history).outcome == ("hit", known, "none")


def test_four_conversations_that_look_alike(four_slots: Served, reference: Reference):
    """K-RT4: 95% in common is not the same; none gets the state of another, and the head always serves."""
    head = system(words("much in common", 500))
    histories = [[head, user(f"I am number {number}.")] for number in range(4)]
    for turn in range(3):
        for history in histories:
            answer = ask(four_slots, history)
            if turn or history is not histories[0]:
                assert answer.outcome[1] >= reference.history_tokens([head])
            history += [assistant(answer.text), user(words(turn, 8))]
    all_at_once(four_slots, histories)


@EVERY_FAMILY
def test_unrelated_prompts_at_once_on_a_full_table(two_slots: Served):
    """S4-g and K-RT5: what is not restored starts from nothing, also where every slot is taken."""
    for number in range(3):
        ask(two_slots, [system(words(f"full {number}", 50)), user(words(number, 60))])
    answers = all_at_once(two_slots, [[system(f"Number {n}."), user(words(f"u{n}", 5 + n))] for n in range(8)])
    assert {answer.cached_tokens for answer in answers} == {0}


def test_a_session_key_is_no_identity(four_slots: Served):
    """K-RT7."""
    named = {"user": "somebody", "prompt_cache_key": "session", "metadata": {"session": "one"}}
    ask(four_slots, [system(words("one", 80)), user("First.")], **named)
    other = ask(four_slots, [system(words("two", 80)), user("Second.")], **named)
    assert other.outcome[:2] == ("miss", 0)
    assert ask(four_slots, [system(words("two", 80)), user("Second.")]).outcome[0] == "hit", (
        "the key is not needed"
    )


@pytest.mark.parametrize(
    ("family", "slots"), [("llama", "four_slots"), ("qwen3_5", "four_slots"), ("gemma4", "roomy")]
)
def test_an_agent_that_grows_with_every_step(slots: str, request: pytest.FixtureRequest, reference: Reference):
    """S3-11 and K-RT8: each step starts where the one before ended, on few slots, with other requests in between."""
    served: Served = request.getfixturevalue(slots)
    history = [system(words("tools", 200)), user("Do it.")]
    asking = len(reference.prompt_ids(history)) - reference.history_tokens(history)
    known = 0
    for step in range(6):
        answer = ask(served, history)
        assert answer.outcome[1] == known
        known = answer.prompt_tokens - asking  # this template has no words for calls: the gateway writes them
        history += tool_step(f"Step {step}.", words(f"result {step}", 60), step)
        ask(served, [user(f"A title for {step}?")])


@EVERY_FAMILY
def test_more_conversations_than_slots_on_one_head(two_slots: Served, reference: Reference):
    """S3-7 and K-RT9: leaves go, the head that all share stays."""
    head = system(words("ancestor", 400))
    for number in range(8):
        answer = ask(two_slots, [head, user(words(f"leaf {number}", 30))])
        if number:
            assert answer.outcome[1] == reference.history_tokens([head])
    assert two_slots.daemon.stats()["evictions"]["slots"] > 0


@pytest.mark.parametrize("size", [10, 100, 1200])
def test_a_session_comes_back_after_every_few_one_shots(size: int, four_slots: Served, reference: Reference):
    """K-RT6: each time to all that there was of it, however many others have come meanwhile, with heads or without.

    Larger ones too leave a session alone once it has come back.
    """
    history = [system(words(f"head beside {size}", 100)), user(words(f"session beside {size}", 800))]
    known = 0
    for turn in range(5):
        answer = ask(four_slots, history)
        assert answer.outcome == (("hit", known, "none") if turn else ("miss", 0, "cold"))
        known = reference.history_tokens(history)
        for number in range(6 if turn or size < 800 else 0):
            head = [system(words(f"head {turn} {number}", 20))] * (number % 2)
            one_shot = [*head, user(words(f"one-shot {turn} {number}", size))]
            text = four_slots.client.chat(one_shot, max_tokens=2).text
            assert number or text == four_slots.client.cold(one_shot, max_tokens=2).text
        history += [assistant(answer.text), user(words(turn, 30))]


# Memory


def test_an_only_slot_goes_forward_with_its_conversation(one_slot: Served, reference: Reference):
    """What recurs too: the state of the turn before makes room for that of this one once it has been copied."""
    history = [system(words("an only slot", 40)), user("First.")]
    for turn in range(4):
        answer = ask(one_slot, history)
        known = reference.history_tokens(history[:-2]) if turn else 0
        assert answer.outcome[1] == known
        [row] = one_slot.daemon.snapshots()
        assert row["tokens"] == reference.history_tokens(history)
        history += [assistant("Well."), user(words(turn, 30))]


def test_a_commit_while_the_only_snapshot_is_being_restored(one_slot: Served):
    """K-SM6: one slot, and requests that hit it side by side with some that want it."""
    stem = [user(words("the one", 200))]
    ask(one_slot, stem)
    for attempt in range(4):
        hits = [[*stem, assistant("Yes."), user(f"Hit {attempt} {n}")] for n in range(2)]
        all_at_once(
            one_slot, [*hits, [user(words(f"other {attempt}", 150))], [user(words(f"more {attempt}", 250))]]
        )
    assert one_slot.daemon.stats()["snapshots"] <= 1


def test_marks_of_other_caches_mean_nothing(four_slots: Served):
    """K-SM7: there is no time to live. A mark changes neither prompt nor answer, in either dialect."""
    mark = {"cache_control": {"type": "ephemeral", "ttl": "5m"}}
    plain = [{"type": "text", "text": words("marked", 60)}]
    marked = [{**plain[0], **mark}]
    first = ask(four_slots, [user(plain)])
    second = ask(four_slots, [user(marked)])
    assert (second.text, second.outcome[0]) == (first.text, "hit")
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": [user(marked)]}
    third = four_slots.client.request("POST", "/v1/messages", body)
    assert third.status == 200
    assert third.outcome == second.outcome
    assert "".join(part.get("text", "") for part in third.body["content"]) == first.text


# Restored state


@EVERY_FAMILY
def test_boundaries_that_no_chunk_ends_at(two_slots: Served, reference: Reference):
    """S3-8, K-RC2 and K-RC6: kept and restored at exactly the length of the key."""
    for count in (1, 31, 64, 100, 255, 1300):
        stem = [system(f"Length {count}."), user(words(f"length {count}", count))]
        emptied(two_slots)  # a short prompt need not be worth more than what is there
        ask(two_slots, stem)
        longer = [*stem, assistant("So."), user("What next?")]
        answer = ask(two_slots, longer, max_tokens=24)
        assert answer.outcome == ("hit", reference.history_tokens(stem), "none")
        assert answer.text == reference.text(longer, 24)


def test_an_answer_repeated_three_times(four_slots: Served, reference: Reference):
    """K-RC3: something is always left to compute."""
    messages = [user(words("regenerate", 70))]
    texts = [ask(four_slots, messages).text for _ in range(3)]
    assert texts == [reference.text(messages)] * 3


def test_several_questions_and_one_that_calls_for_tools(one_slot: Served):
    """K-RC4: nothing of an earlier answer comes back with the head."""
    head = system(words("short head", 20))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    for number in range(4):
        ask(one_slot, [head, user(f"Question {number}?")], max_tokens=30)
    ask(one_slot, [head, user("Use the tool.")], tools=tools)
    ask(one_slot, [head, user("Question 0?")], max_tokens=30)


def test_edits_at_the_end_and_in_the_middle(roomy: Served, reference: Reference):
    """K-RC1, K-RC5 and K-RC7: all layers come from one position, and no further than the prompts agree."""
    history = [system(words("edited", 100))]
    for number in range(5):
        history += [user(words(f"q{number}", 40)), assistant(words(f"a{number}", 30))]
        ask(roomy, history[:-1])
    for place in (9, 5, 1):
        edited = [*history[:place], user(history[place]["content"][:-8] + " otherwise"), *history[place + 1 : -1]]
        answer = ask(roomy, edited)
        assert 0 < answer.cached_tokens <= reference.history_tokens(history[:place])
    compacted = [history[0], user("In short: nothing.")]
    assert ask(roomy, compacted).cached_tokens == reference.history_tokens(history[:1])
    assert ask(roomy, history[:-1]).outcome[0] == "hit", "the long one is still there"


def test_two_branches_of_one_snapshot_again_and_again(roomy: Served):
    """K-RC8: a continuation of 60 tokens writes into nothing that the next one starts from."""
    stem = [system(words("stem", 50)), user(words("stem", 70))]
    ask(roomy, stem)
    x, y = ([*stem, assistant(f"{word}."), user(f"On with {word}.")] for word in ("X", "Y"))
    texts = [ask(roomy, branch, max_tokens=60).text for branch in (x, y, x)]
    assert texts[0] == texts[2]
    all_at_once(roomy, [x, y, x, y])


def test_clients_that_leave_a_long_prefill_while_others_commit(four_slots: Served):
    """K-RC12: what is kept of it is a finished part under its own key, or nothing."""
    long = [system(words("long head", 100)), *(user(words(f"part {n}", 500)) for n in range(6))]
    for attempt in range(8):
        goal = four_slots.daemon.stats()["cache_tokens"]["computed"] + (attempt + 1) * 300
        connection = four_slots.client.send(long, cache_prompt=True)
        until(
            lambda goal=goal: (
                four_slots.daemon.is_idle() or four_slots.daemon.stats()["cache_tokens"]["computed"] >= goal
            ),
            "the prefill is under way or over",
        )
        connection.close()
        ask(four_slots, [user(words(f"between {attempt}", 40))])
    four_slots.daemon.wait_idle()
    ask(four_slots, long)
