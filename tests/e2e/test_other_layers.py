"""Models whose layers recur (Qwen3.5), or slide and share keys (Gemma 4), through the daemon.

A recurrent state is of one position: it is kept at a boundary while the prompt is computed, or not at all. Every answer
is compared with the one without cache, to the last bit of its log-probabilities, and every hit is verified by the
worker as well.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from chat_model import words
from conftest import Served
from daemon import metrics, until
from http_client import Answer, assistant, system, tool_step, user
from reference import Messages, Reference

SCORED = {"logprobs": True, "top_logprobs": 3}


@pytest.fixture(scope="session", params=("qwen3_5", "gemma4"))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def ask(served: Served, messages: Messages, **fields) -> Answer:
    """An answer that has been found equal to the one without cache."""
    answer = served.client.chat(list(messages), **SCORED, **fields)
    cold = served.client.cold(list(messages), **SCORED, **fields)
    assert answer.choices == cold.choices
    assert cold.outcome == ("miss", 0, "disabled")
    assert answer.cached_tokens == answer.outcome[1] < answer.prompt_tokens
    return answer


def test_answers_are_those_of_transformers(roomy: Served, reference: Reference):
    for count in (3, 90, 700):
        messages = [system(words("transformers", 20)), user(words(count, count))]
        assert ask(roomy, messages).text == reference.text(messages)


def test_short_conversations_hit_from_their_second_turn_on(roomy: Served, reference: Reference):
    """S5-1, S5-4: far below the periodic distance, every turn starts where the one before ended."""
    messages = [system(words("short head", 60))]
    known = 0
    for turn in range(8):
        messages.append(user(words(f"question {turn}", 10 + 9 * turn)))
        answer = ask(roomy, messages)
        assert answer.outcome == (("hit", known, "none") if turn else ("miss", 0, "cold"))
        known = reference.history_tokens(messages)
        messages.append(assistant(answer.text))


def test_a_conversation_of_one_message_has_a_boundary(roomy: Served, reference: Reference):
    """S5-3, S5-11: asked again, it starts as late as it can."""
    messages = [user(words("single", 80))]
    assert ask(roomy, messages).outcome[0] == "miss"
    assert ask(roomy, messages).outcome == ("hit", reference.history_tokens(messages), "none")


def test_what_was_generated_is_not_in_the_kept_state(roomy: Served, reference: Reference):
    """S5-5: long answers move the running state far past the boundary that was kept."""
    messages = [system(words("head", 40)), user(words("tell", 50))]
    ask(roomy, messages, max_tokens=200)
    other = [*messages, assistant("No."), user("Go on.")]
    answer = ask(roomy, other)
    assert answer.outcome == ("hit", reference.history_tokens(messages), "none")
    assert answer.text == reference.text(other)
    assert ask(roomy, messages, max_tokens=200).outcome[0] == "hit"


def test_a_branch_does_not_take_the_stem_along(roomy: Served, reference: Reference):
    """S5-6 and S4-c: both branches and the stem hit, and requests at once do not touch one state."""
    stem = [system(words("head", 50)), user(words("stem", 60))]
    first = ask(roomy, stem)
    branches = [[*stem, assistant(first.text), user(words(f"branch {i}", 20 + i))] for i in range(4)]
    cold = [roomy.client.cold(messages, **SCORED).choices for messages in branches]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda messages: roomy.client.chat(messages, **SCORED), branches))
    assert [answer.choices for answer in answers] == cold
    assert all(answer.outcome[1] >= reference.history_tokens(stem) for answer in answers)
    assert ask(roomy, stem).outcome[0] == "hit"


def test_a_loop_of_tool_results(roomy: Served):
    """S5-9: boundaries after tool results are boundaries."""
    messages = [system(words("head", 40)), user("Look at the files.")]
    depth = -1
    for step in range(5):
        answer = ask(roomy, messages)
        assert answer.outcome[1] > depth or not step
        depth = answer.outcome[1]
        messages += tool_step(answer.text, words(f"file {step}", 70), step)


def test_long_stretches_are_kept_in_between(roomy: Served, reference: Reference):
    """S5-2: another conversation that shares most of a long one starts far inside it."""
    messages = [system(words("head", 40)), *(user(words(f"part {number}", 1500)) for number in range(9))]
    ask(roomy, messages)
    kept = {row["tokens"] for row in roomy.daemon.snapshots()}
    assert reference.history_tokens(messages) in kept
    assert any(8192 < tokens <= 12288 for tokens in kept)
    edited = [*messages[:-1], user("Why not?")]
    assert ask(roomy, edited).outcome[1] > 8192


def test_a_history_that_was_edited(roomy: Served, reference: Reference):
    history = [system(words("head", 300))]
    for number in range(4):
        history += [user(words(f"q{number}", 60)), assistant(words(f"a{number}", 70))]
        ask(roomy, [*history[:-1]])
    edited = [*history[:5], user("something else")]
    answer = ask(roomy, edited)
    assert answer.outcome[0] in ("hit", "partial")
    assert answer.outcome[1] >= reference.history_tokens(history[:4])
    assert answer.text == reference.text(edited)


def test_choices_of_one_request_and_samples(roomy: Served):
    messages = [user(words("choices", 90))]
    ask(roomy, messages)
    ask(roomy, messages, n=3, temperature=1, seed=5, max_tokens=30)


@pytest.mark.parametrize("family", ["qwen3_5"])
def test_memory_for_states_is_shown_and_ends(tight: Served):
    """More conversations than there are states: who comes back late starts anew, and nothing is wrong."""
    daemon, client = tight.daemon, tight.client
    stats = daemon.stats()
    assert stats["states_total"] * stats["state_bytes"] + stats["kv_bytes_total"] <= 1 << 20
    assert "recurrent states" in daemon.log()
    assert "recurrent states" in daemon.cachectl("stats").stdout
    before = stats["evictions"]["states"]
    played(tight, conversations=stats["states_total"])
    stats = daemon.wait_idle()
    assert stats["evictions"]["states"] > before
    assert stats["snapshots"] == stats["states_total"] - stats["states_free"]
    samples = metrics(client)
    assert samples["prefixd_state_bytes{state=used}"] == stats["snapshots"] * stats["state_bytes"]


def played(served: Served, conversations: int) -> None:
    for turn in range(2):
        for number in range(conversations):
            messages = [user(words(f"{number} {part}", 12)) for part in range(turn + 1)]
            ask(served, messages, max_tokens=4)


def test_hanging_up_leaves_no_state_behind(roomy: Served, reference: Reference):
    messages = [user(words("hang up", 50))]
    with roomy.client.stream(messages, max_tokens=15_000, ignore_eos=True) as stream:
        assert stream.take_text(5)
    stats = roomy.daemon.wait_idle()
    assert stats["states_total"] - stats["states_free"] in (0, stats["snapshots"])
    assert ask(roomy, messages).outcome == ("hit", reference.history_tokens(messages), "none")


def test_leaving_during_prefill_keeps_what_is_computed(roomy: Served, reference: Reference):
    """The last boundary that was passed, though nobody had asked for a state there."""
    messages = [system(words("long", 100))]
    for number in range(45):
        messages += [user(words(f"q {number}", 100)), assistant(words(f"a {number}", 130))]
    messages.append(user("And now?"))
    start = roomy.daemon.stats()["cache_tokens"]["computed"]
    connection = roomy.client.send(messages)
    until(lambda: roomy.daemon.stats()["cache_tokens"]["computed"] > start + 1000, "prefill is under way")
    connection.close()
    roomy.daemon.wait_idle()
    kept = max(row["tokens"] for row in roomy.daemon.snapshots())
    assert kept in {reference.history_tokens(messages[:end]) for end in range(1, len(messages))}
    answer = ask(roomy, messages)
    assert answer.outcome == ("hit", kept, "none")
    assert 500 < kept < answer.prompt_tokens - 500
