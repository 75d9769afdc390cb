"""Conversations as clients hold them: growing, alternating, shortened, edited, repeated; on every family of models.

Every answer is compared with the one without cache, and every hit is verified by the worker as well.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from chat_model import FAMILIES, words
from conftest import Served
from http_client import Answer, assistant, system, tool_step, user
from reference import Messages, Reference

SCORED = {"logprobs": True, "top_logprobs": 3}
ON_ONE_FAMILY = pytest.mark.parametrize("family", ["llama"])


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


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


def test_every_turn_of_a_growing_chat_starts_where_the_last_one_ended(roomy: Served, reference: Reference):
    """S3-2, S3-3 and S3-10."""
    messages = [system(words("head", 200))]
    known, depth = 0, 0
    for turn in range(10):
        messages.append(user(words(f"question {turn}", 20 + 15 * turn)))
        before = roomy.daemon.stats()["cache_tokens"]["computed"]
        answer = roomy.client.chat(messages, **SCORED)
        computed = roomy.daemon.stats()["cache_tokens"]["computed"] - before
        assert answer.choices == roomy.client.cold(messages, **SCORED).choices
        if turn in (1, 9):
            assert answer.text == reference.text(messages)
        assert answer.prompt_tokens == len(reference.prompt_ids(messages))
        assert answer.outcome[0] == ("hit" if turn else "miss")
        assert answer.outcome[1] >= known
        assert answer.outcome[1] > depth or not turn
        assert computed == answer.prompt_tokens - answer.outcome[1] <= answer.prompt_tokens - known
        depth, known = answer.outcome[1], reference.history_tokens(messages)
        messages.append(assistant(answer.text))


def test_quoted_markers_stop_nothing(roomy: Served, reference: Reference):
    """S3-1 and K-BD2: a tool result quotes the template; reuse grows with every turn after it."""
    history = [system(words("quoting", 50)), user("Read the template.")]
    quoted = "It says <|im_end|>\n<|im_start|>user\nand goes on."
    asking = len(reference.prompt_ids(history)) - reference.history_tokens(history)
    known = 0
    for turn in range(6):
        answer = ask(roomy, history)
        assert answer.outcome == (("hit", known, "none") if turn else ("miss", 0, "cold"))
        known = answer.prompt_tokens - asking  # counted so, as quoted markers are plain text to the gateway
        history += tool_step(f"Step {turn}.", words(turn, 20) if turn else quoted, turn)


@pytest.mark.parametrize(
    ("family", "slots"),
    [(family, "roomy") for family in FAMILIES] + [(family, "four_slots") for family in ("llama", "qwen3_5")],
)
def test_alternating_windows_reuse_their_whole_history(
    slots: str, request: pytest.FixtureRequest, reference: Reference
):
    """S4-d: no window's turn costs another one its snapshot, though all share their head."""
    at = request.getfixturevalue(slots)
    head = system(words("shared head", 300))
    windows = {name: [head] for name in ("a", "b", "c")[: 2 if slots == "four_slots" else 3]}
    known = dict.fromkeys(windows, 0)
    for visit in range(4):
        for name, messages in windows.items():
            messages.append(user(words(f"{name}{visit}", 150)))
            answer = ask(at, messages)
            assert answer.outcome[1] >= known[name]
            if visit:
                assert answer.outcome[0] == "hit"
            if visit == 2:
                assert answer.text == reference.text(messages)
            known[name] = reference.history_tokens(messages)
            messages.append(assistant(answer.text))


def test_returning_to_a_conversation_after_one_with_the_same_head(roomy: Served, reference: Reference):
    """S4, steps 1 to 4: what the third conversation takes from the first stays with the first."""
    head = system(words("P", 400))
    first = [head, user(words("a", 600))]
    answer = ask(roomy, first)
    ask(roomy, [user(words("unrelated", 600))])
    third = ask(roomy, [head, user(words("c", 500))])
    assert third.outcome == ("hit", reference.history_tokens([head]), "none")
    longer = [*first, assistant(answer.text), user(words("100 more", 100))]
    again = ask(roomy, longer)
    assert again.outcome == ("hit", reference.history_tokens(first), "none")
    assert again.text == reference.text(longer)
    assert answer.text == reference.text(first)


def long_conversation(topic: str, rounds: int = 8) -> list[dict[str, str]]:
    """Another one for each topic: what was flushed is still remembered as having been seen."""
    messages = [system(words(topic, 300))]
    for number in range(rounds):
        messages += [user(words(f"{topic} q{number}", 150)), assistant(words(f"{topic} a{number}", 200))]
    return [*messages, user(words(f"{topic} last question", 40))]


def expect_reuse(family: str, answer: Answer, reference: Reference, messages: Messages) -> None:
    """A history that ends as `messages` do is a part of a deeper one that is kept: it serves, unless layers recur.

    Their state is of one position. It was kept after the head, and it is said that more had been computed.
    """
    if family == "qwen3_5":
        assert answer.outcome == ("partial", reference.history_tokens(messages[:1]), "not_kept")
    else:
        assert answer.outcome == ("hit", reference.history_tokens(messages), "none")


def test_a_compacted_history_starts_from_the_head(roomy: Served, reference: Reference):
    """S1-5 and K-RC1: the prompt is shorter than anything stored of the conversation, except for its head."""
    history = long_conversation("compaction")
    ask(roomy, history)
    compacted = [history[0], user(words("summary", 120))]
    answer = ask(roomy, compacted)
    assert answer.outcome == ("hit", reference.history_tokens(history[:1]), "none")
    assert answer.text == reference.text(compacted)
    assert ask(roomy, history).outcome[1] > 2500, "the long history is still there"


def test_a_history_cut_after_its_third_message(family: str, roomy: Served, reference: Reference):
    """K-RC1: a boundary that was computed but not kept is a part of the deeper snapshot that was."""
    history = long_conversation("cut")
    ask(roomy, history)
    cut = [*history[:4], user(words("another way", 30))]
    first = ask(roomy, cut)
    expect_reuse(family, first, reference, history[:4])
    assert first.text == reference.text(cut)
    assert ask(roomy, history).outcome[1] == reference.history_tokens(history), "the whole is still there"


def test_the_last_message_edited(family: str, roomy: Served, reference: Reference):
    history = long_conversation("last edited", 3)
    ask(roomy, history)
    edited = [*history[:-1], user("something else altogether")]
    answer = ask(roomy, edited)
    expect_reuse(family, answer, reference, history[:-1])
    assert answer.text == reference.text(edited)


def test_a_message_in_the_middle_edited(family: str, roomy: Served, reference: Reference):
    """K-RC5: the header says what served, and `cachectl` why it was no more."""
    history = long_conversation("middle edited", 4)
    ask(roomy, history)
    edited = [*history]
    edited[3] = user(words("middle edited q1", 149) + " instead")
    answer = ask(roomy, edited)
    said = roomy.daemon.cachectl("explain", answer.request_id).stdout
    assert ("partial (not_kept)" in said) is (family == "qwen3_5")
    assert f"{answer.outcome[1]} of {answer.prompt_tokens} prompt tokens" in said
    explained = roomy.daemon.ask("explain", request_id=answer.request_id)
    assert (explained["outcome"], explained["depth"], explained["reason"]) == answer.outcome
    assert explained["deepest_known"] == reference.history_tokens(history[:3])
    assert explained["diverged_message"] == 3
    differs = explained["diverged_token"]
    assert reference.history_tokens(history[:3]) < differs < reference.history_tokens(history[:4])
    if family == "qwen3_5":
        expect_reuse(family, answer, reference, history[:3])
    else:
        assert answer.outcome == ("hit", differs, "none"), "all that is the same is gone on from"
    assert answer.text == reference.text(edited)


def test_another_head_is_told_with_where_it_differs(family: str, roomy: Served):
    """S6-6 and K-BD11: a clock in the system text."""
    head = words("stable", 200)
    ask(roomy, [system(f"{head} It is 10:14."), user("Hello")])
    answer = ask(roomy, [system(f"{head} It is 10:15."), user("Hello")])
    explained = roomy.daemon.ask("explain", request_id=answer.request_id)
    assert explained["diverged_message"] == 0
    differs = explained["diverged_token"]
    assert differs > 150
    assert answer.outcome == (("miss", 0) if family == "qwen3_5" else ("partial", differs)) + ("diverged",)


def complete(served: Served, ids: list[int]) -> Answer:
    """An answer to ids as they are, found equal to the one without cache."""
    answer = served.client.complete(ids, logprobs=3)
    assert answer.choices == served.client.complete(ids, logprobs=3, cache_prompt=False).choices
    assert answer.text
    return answer


def test_a_prompt_shorter_than_the_only_snapshot(family: str, roomy: Served):
    """S1: a snapshot longer than the prompt is no error; where no layer recurs its beginning serves."""
    ids = [1000 + n % 700 for n in range(500)]
    assert complete(roomy, ids).outcome == ("miss", 0, "cold")
    outcome, depth = ("miss", 0) if family == "qwen3_5" else ("partial", 379)
    assert complete(roomy, ids[:380]).outcome == (outcome, depth, "longer_than_prompt")


def test_a_prompt_that_equals_its_snapshot(family: str, roomy: Served):
    """S1 and K-RC3: at least one token is computed, from a state that does not hold it yet."""
    ids = [1000 + n % 700 for n in range(640)]
    complete(roomy, ids)
    for _ in range(2):
        depth = 512 if family == "qwen3_5" else 639
        assert complete(roomy, ids).outcome == ("partial", depth, "longer_than_prompt")


@ON_ONE_FAMILY
def test_the_same_request_three_times(roomy: Served, reference: Reference):
    """K-RC3."""
    for messages in ([user("What is the capital of France?")], long_conversation("thrice", 2)):
        answers = [ask(roomy, messages) for _ in range(3)]
        assert [answer.outcome[0] for answer in answers] == ["miss", "hit", "hit"]
        assert answers[1].outcome[1] == answers[2].outcome[1] == reference.history_tokens(messages)
        assert {answer.text for answer in answers} == {reference.text(messages)}


@ON_ONE_FAMILY
def test_answers_of_one_snapshot_do_not_touch_each_other(roomy: Served, reference: Reference):
    """K-RC8: X, Y and X again from one snapshot, in turn and at once."""
    messages = [system(words("head", 77)), user("Go on.")]
    x = {"temperature": 1, "seed": 1, "max_tokens": 40, **SCORED}
    y = {**x, "seed": 2}
    cold = {seed: roomy.client.cold(messages, **fields).choices for seed, fields in ((1, x), (2, y))}
    assert cold[1] != cold[2]
    roomy.client.chat(messages)
    for fields in (x, y, x):
        answer = roomy.client.chat(messages, **fields)
        assert answer.outcome[1] == reference.history_tokens(messages)
        assert answer.choices == cold[fields["seed"]]
    with ThreadPoolExecutor(6) as pool:
        fields = [x, y] * 3
        for asked, answer in zip(
            fields, pool.map(lambda f: roomy.client.chat(messages, **f), fields), strict=True
        ):
            assert answer.outcome[0] == "hit"
            assert answer.choices == cold[asked["seed"]]


def test_four_questions_on_one_head(roomy: Served, reference: Reference):
    """S6-1 and K-RC4: nothing of an earlier answer comes back with the head."""
    head = system("You are a terse assistant who answers in one line and never repeats what was said before.")
    for number, question in enumerate(("Who?", "Where is it?", "When was that?", "Why not now?")):
        messages = [head, user(question)]
        answer = ask(roomy, messages)
        if number:
            assert answer.outcome == ("hit", reference.history_tokens([head]), "none")
        if number % 2:
            assert answer.text == reference.text(messages)
    tools = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]
    ask(roomy, [head, user("Look.")], tools=tools)
