"""Conversations as clients hold them: growing, alternating, shortened, edited, repeated."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from chat_model import words
from conftest import Served
from http_client import Answer, assistant, system, user
from reference import Messages, Reference

SCORED = {"logprobs": True, "top_logprobs": 3}


def ask(served: Served, messages: Messages, **fields) -> Answer:
    """An answer that has been found equal to the one without cache, to the last bit of its log-probabilities."""
    answer = served.client.chat(list(messages), **SCORED, **fields)
    cold = served.client.cold(list(messages), **SCORED, **fields)
    assert answer.choices == cold.choices
    assert answer.text
    assert cold.outcome == ("miss", 0, "disabled")
    assert answer.prompt_tokens == cold.prompt_tokens
    assert answer.cached_tokens == answer.outcome[1] < answer.prompt_tokens
    return answer


def test_every_turn_of_a_growing_chat_starts_where_the_last_one_ended(served: Served, reference: Reference):
    messages = [system(words("head", 200))]
    known, depth = 0, 0
    for turn in range(10):
        messages.append(user(words(f"question {turn}", 20 + 15 * turn)))
        before = served.daemon.stats()["cache_tokens"]["computed"]
        answer = served.client.chat(messages, **SCORED)
        computed = served.daemon.stats()["cache_tokens"]["computed"] - before
        assert answer.choices == served.client.cold(messages, **SCORED).choices
        if turn in (1, 9):
            assert answer.text == reference.text(messages)
        assert answer.prompt_tokens == len(reference.prompt_ids(messages))
        assert answer.outcome[0] == ("hit" if turn else "miss")
        assert answer.outcome[1] >= known
        assert answer.outcome[1] > depth or not turn
        assert computed == answer.prompt_tokens - answer.outcome[1] <= answer.prompt_tokens - known
        depth, known = answer.outcome[1], reference.history_tokens(messages)
        messages.append(assistant(answer.text))


@pytest.mark.parametrize("slots", ["many", "few"])
def test_alternating_windows_reuse_their_whole_history(slots, served: Served, few_slots: Served, reference):
    """S4: no window's turn costs another one its snapshot, though all share their head."""
    at = served if slots == "many" else few_slots
    head = system(words("shared head", 300))
    windows = {name: [head] for name in ("a", "b", "c")}
    known = dict.fromkeys(windows, 0)
    for visit in range(4):
        for name, messages in windows.items():
            messages.append(user(words(f"{name}{visit}", 150)))
            answer = ask(at, messages)
            assert answer.outcome[1] >= known[name]
            if visit:
                assert answer.outcome[0] == "hit"
            if visit == 2 and name != "c":
                assert answer.text == reference.text(messages)
            known[name] = reference.history_tokens(messages)
            messages.append(assistant(answer.text))
    assert all(at.daemon.stats()["stale_drops"][cause] == 0 for cause in at.daemon.stats()["stale_drops"])


def test_returning_to_a_conversation_after_one_with_the_same_head(served: Served, reference: Reference):
    """S4, steps 1 to 4: what the third conversation takes from the first stays with the first."""
    head = system(words("P", 400))
    first = [head, user(words("a", 600))]
    answer = ask(served, first)
    ask(served, [user(words("unrelated", 600))])
    third = ask(served, [head, user(words("c", 500))])
    assert third.outcome == ("hit", reference.history_tokens([head]), "none")
    longer = [*first, assistant(answer.text), user(words("100 more", 100))]
    again = ask(served, longer)
    assert again.outcome == ("hit", reference.history_tokens(first), "none")
    assert again.text == reference.text(longer)
    assert answer.text == reference.text(first)


def long_conversation(topic: str, rounds: int = 8) -> list[dict[str, str]]:
    """Another one for each topic: what was flushed is still remembered as having been seen."""
    messages = [system(words(topic, 300))]
    for number in range(rounds):
        messages += [user(words(f"{topic} q{number}", 150)), assistant(words(f"{topic} a{number}", 200))]
    return [*messages, user(words(f"{topic} last question", 40))]


def test_a_compacted_history_starts_from_the_head(served: Served, reference: Reference):
    """K-RC1: the prompt is shorter than anything stored of the conversation, except for its head."""
    history = long_conversation("compaction")
    ask(served, history)
    compacted = [history[0], user(words("summary", 120))]
    answer = ask(served, compacted)
    assert answer.outcome == ("hit", reference.history_tokens(history[:1]), "none")
    assert answer.text == reference.text(compacted)
    assert ask(served, history).outcome[1] > 2500, "the long history is still there"


def test_a_history_cut_after_its_third_message(served: Served, reference: Reference):
    """K-RC1: a boundary that was computed but not kept is a part of the deeper snapshot that was."""
    history = long_conversation("cut")
    ask(served, history)
    cut = [*history[:4], user(words("another way", 30))]
    first = ask(served, cut)
    assert first.outcome == ("hit", reference.history_tokens(history[:4]), "none")
    assert first.text == reference.text(cut)
    assert ask(served, history).outcome[1] == reference.history_tokens(history), "the whole is still there"


def test_the_last_message_edited(served: Served, reference: Reference):
    history = long_conversation("last edited", 3)
    ask(served, history)
    edited = [*history[:-1], user("something else altogether")]
    answer = ask(served, edited)
    assert answer.outcome == ("hit", reference.history_tokens(history[:-1]), "none")
    assert answer.text == reference.text(edited)


def test_a_message_in_the_middle_edited(served: Served, reference: Reference):
    history = long_conversation("middle edited", 4)
    ask(served, history)
    edited = [*history]
    edited[3] = user(words("middle edited q1", 149) + " instead")
    answer = ask(served, edited)
    assert answer.outcome == ("hit", reference.history_tokens(history[:3]), "none")
    explained = served.daemon.ask("explain", request_id=answer.request_id)
    assert explained["diverged_message"] == 3
    assert (
        reference.history_tokens(history[:3]) < explained["diverged_token"] < reference.history_tokens(history[:4])
    )
    assert answer.text == reference.text(edited)


def test_another_head_is_a_miss_that_says_where_it_differs(served: Served):
    """K-BD11: a clock in the system text."""
    head = words("stable", 200)
    ask(served, [system(f"{head} It is 10:14."), user("Hello")])
    answer = ask(served, [system(f"{head} It is 10:15."), user("Hello")])
    assert answer.outcome == ("miss", 0, "diverged")
    explained = served.daemon.ask("explain", request_id=answer.request_id)
    assert explained["diverged_message"] == 0
    assert explained["diverged_token"] > 150


def test_a_prompt_shorter_than_the_only_snapshot(served: Served):
    """S1: a snapshot longer than the prompt is no candidate and no error."""
    ids = [1000 + n % 700 for n in range(500)]
    assert served.client.complete(ids).outcome == ("miss", 0, "cold")
    shorter = served.client.complete(ids[:380])
    assert shorter.outcome == ("miss", 0, "longer_than_prompt")
    assert shorter.text == served.client.complete(ids[:380], cache_prompt=False).text != ""


def test_a_prompt_that_equals_its_snapshot(served: Served):
    """S1 and K-RC3: at least one token is computed, from a state that does not hold it yet."""
    ids = [1000 + n % 700 for n in range(640)]
    texts = {served.client.complete(ids, cache_prompt=False).text}
    for _ in range(3):
        answer = served.client.complete(ids)
        assert answer.cached_tokens < 640
        texts.add(answer.text)
    assert len(texts) == 1
    assert answer.cached_tokens == 512


def test_the_same_request_three_times(served: Served, reference: Reference):
    """K-RC3."""
    for messages in ([user("What is the capital of France?")], long_conversation("thrice", 2)):
        answers = [ask(served, messages) for _ in range(3)]
        assert [answer.outcome[0] for answer in answers] == ["miss", "hit", "hit"]
        assert answers[1].outcome[1] == answers[2].outcome[1] == reference.history_tokens(messages)
        assert {answer.text for answer in answers} == {reference.text(messages)}


def test_answers_of_one_snapshot_do_not_touch_each_other(served: Served, reference: Reference):
    """K-RC8: X, Y and X again from one snapshot, in turn and at once."""
    messages = [system(words("head", 77)), user("Go on.")]
    x = {"temperature": 1, "seed": 1, "max_tokens": 40, **SCORED}
    y = {**x, "seed": 2}
    cold = {seed: served.client.cold(messages, **fields).choices for seed, fields in ((1, x), (2, y))}
    assert cold[1] != cold[2]
    served.client.chat(messages)
    for fields in (x, y, x):
        answer = served.client.chat(messages, **fields)
        assert answer.outcome[1] == reference.history_tokens(messages)
        assert answer.choices == cold[fields["seed"]]
    with ThreadPoolExecutor(6) as pool:
        fields = [x, y] * 3
        for asked, answer in zip(
            fields, pool.map(lambda f: served.client.chat(messages, **f), fields), strict=True
        ):
            assert answer.outcome[0] == "hit"
            assert answer.choices == cold[asked["seed"]]


def test_four_questions_on_one_slot(one_slot: Served, reference: Reference):
    """K-RC4: nothing of an earlier answer comes back with the head."""
    head = system("You are a terse assistant who answers in one line and never repeats what was said before.")
    for number, question in enumerate(("Who?", "Where is it?", "When was that?", "Why not now?")):
        messages = [head, user(question)]
        answer = ask(one_slot, messages)
        if number % 2:
            assert answer.text == reference.text(messages)
    tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]
    ask(one_slot, [head, user("Look.")], tools=tools)
    assert len(one_slot.daemon.snapshots()) == 1
