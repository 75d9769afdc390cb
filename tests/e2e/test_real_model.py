"""The default model, whose answers make sense: the same promises, beside `transformers` with the same weights."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import Served
from http_client import assistant, joined, system, user
from reference import Reference

HEAD = system(
    "You are a helpful assistant for the staff of a small railway museum. Answer in one short sentence. "
    "The museum opens at nine and closes at five. It owns three steam engines, two diesel engines and a tram. "
    "The tram was built in 1912 and runs on Sundays. Tickets cost 8 euros, for children 4 euros."
)


@pytest.fixture(autouse=True, scope="module")
def _warm(real_reference: Reference) -> None:
    """The reference takes longest to load: not while an answer is awaited."""


def ask(served: Served, messages: list[dict], **fields):
    answer = served.client.chat(messages, **fields)
    assert answer.choices == served.client.cold(messages, **fields).choices
    return answer


def test_the_capital_of_france(real: Served, real_reference: Reference):
    messages = [user("What is the capital of France?")]
    answer = ask(real, messages)
    assert "Paris" in answer.text
    assert answer.choices[0]["finish_reason"] == "stop"
    assert answer.text == real_reference.text(messages)
    on = real.client.chat(messages, ignore_eos=True, max_tokens=16)
    assert on.usage["completion_tokens"] == 16
    assert on.choices[0]["finish_reason"] == "length"


def test_packed_as_it_is_by_default_it_still_makes_sense(packed: Served):
    messages = [user("What is the capital of France?")]
    answer = ask(packed, messages)
    assert "Paris" in answer.text
    messages += [assistant(answer.text), user("And of Italy?")]
    later = ask(packed, messages)
    assert later.outcome[0] == "hit"
    assert "Rome" in later.text


def test_a_growing_chat(real: Served, real_reference: Reference):
    messages, depth = [HEAD], 0
    for turn, question in enumerate(
        ("When was the tram built?", "And what do 2 tickets and 13 for children cost?", "Thank you! Goodbye.")
    ):
        messages.append(user(question))
        answer = ask(real, messages)
        if turn < 2:
            assert answer.text == real_reference.text(messages)
        assert answer.prompt_tokens == len(real_reference.prompt_ids(messages))
        assert answer.outcome[0] == ("hit" if turn else "miss")
        assert answer.outcome[1] > depth or not turn
        assert answer.prompt_tokens - answer.outcome[1] < 60 or not turn
        depth = answer.outcome[1]
        messages.append(assistant(answer.text))


def test_two_windows(real: Served, real_reference: Reference):
    windows = {name: [HEAD, user(f"My name is {name}. Say hello to me.")] for name in ("Alice", "Bob")}
    for name, messages in windows.items():
        answer = ask(real, messages)
        assert answer.text == real_reference.text(messages)
        messages.append(assistant(answer.text))
        if name == "Bob":
            assert answer.outcome == ("hit", real_reference.history_tokens([HEAD]), "none")
    for name, messages in windows.items():
        answer = ask(real, [*messages, user("What is my name?")])
        assert answer.outcome == ("hit", real_reference.history_tokens(messages[:2]), "none")
        assert {"Alice": "Bob", "Bob": "Alice"}[name] not in answer.text


def test_text_outside_ascii(real: Served, real_reference: Reference):
    """K-ST1, with characters of up to four tokens that are all completed."""
    prompt = "日本語😀" * 12
    whole = real.client.complete(prompt, max_tokens=24)
    with real.client.stream_completion(prompt, max_tokens=24) as stream:
        pieces = [joined([event]) for event in stream]
    assert "".join(pieces) == whole.text == real_reference.continuation(real_reference.plain_ids(prompt), 24)
    assert whole.text.startswith("日本語😀日本語😀日本語")
    assert "\ufffd" not in "".join(pieces)


def test_everybody_hears_their_own_secret_only(real: Served):
    """K-SE5."""
    secrets = ["walrus", "copper", "saddle", "candle"]

    def live(secret: str):
        head = f'You are a helpful assistant. The password of today is "{secret}".'
        messages = [system(head), user("Which password is it today?")]
        first = real.client.chat(messages)
        again = [*messages, assistant(first.text), user("Say it once more.")]
        return [(messages, first), (again, real.client.chat(again))]

    with ThreadPoolExecutor(len(secrets)) as pool:
        lives = list(pool.map(live, secrets))
    for secret, answers in zip(secrets, lives, strict=True):
        assert secret in answers[0][1].text
        for messages, answer in answers:
            assert not any(other in answer.text for other in secrets if other != secret)
            assert answer.text == real.client.cold(messages).text
