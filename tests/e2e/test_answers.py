"""What an answer is made of: streams and whole answers alike, sampling, stops, log-probabilities, lengths."""

from __future__ import annotations

import math

import pytest
from chat_model import CONTEXT, END_ID, words
from conftest import Served
from daemon import metrics
from http_client import choice_text, joined, system, user
from reference import Reference

STORY = [system(words("storyteller", 60)), user("Tell me a story.")]
SAMPLED = {"temperature": 1.0, "seed": 11, "max_tokens": 20}


def test_a_stream_says_the_same_as_a_whole_answer(served: Served, reference: Reference):
    whole = served.client.chat(STORY, max_tokens=60)
    with served.client.stream(STORY, max_tokens=60, stream_options={"include_usage": True}) as stream:
        assert stream.status == 200
        assert stream.headers["content-type"].startswith("text/event-stream")
        assert "no-cache" in stream.headers["cache-control"]
        assert stream.headers["x-accel-buffering"] == "no"
        assert stream.headers["x-prefixd-cache"].startswith("hit; depth=")
        events = list(stream)
        assert stream.is_done
    assert joined(events) == whole.text == served.client.cold(STORY, max_tokens=60).text
    assert whole.text.startswith(reference.text(STORY))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * (len(events) - 2) + ["length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 60
    assert len({event["id"] for event in events}) == 1


def test_a_completion_streams_as_well(served: Served, reference: Reference):
    text = words("a plain prompt", 300)
    whole = served.client.complete(text)
    with served.client.stream_completion(text) as stream:
        events = list(stream)
        assert stream.is_done
    ids = reference.plain_ids(text)
    assert joined(events) == whole.text == served.client.complete(text, cache_prompt=False).text
    assert whole.text == reference.continuation(ids)
    assert whole.prompt_tokens == len(ids)


def test_text_outside_ascii_comes_whole(served: Served, reference: Reference):
    """K-ST1: characters of several tokens, some of them never completed."""
    ids = reference.plain_ids("😀🎉🦊日本語の文章を書く。漢字とかな交じり文 größe naïve café")
    bias = {str(token): 100 for token in ids}
    fields = {**SAMPLED, "max_tokens": 60, "logit_bias": bias}
    for seed in range(2):
        whole = served.client.chat(STORY, **fields | {"seed": seed})
        with served.client.stream(STORY, **fields | {"seed": seed}) as stream:
            events = list(stream)
        assert joined(events) == whole.text == served.client.cold(STORY, **fields | {"seed": seed}).text
        assert any(ord(character) > 0x3000 for character in whole.text.replace("\ufffd", ""))


def test_seeds_are_reproducible(served: Served):
    first, again = (served.client.chat(STORY, **SAMPLED) for _ in range(2))
    assert first.choices == again.choices == served.client.cold(STORY, **SAMPLED).choices
    assert first.choices != served.client.chat(STORY, **SAMPLED | {"seed": 12}).choices
    assert served.client.chat(STORY, temperature=1).choices != served.client.chat(STORY, temperature=1).choices


def test_several_choices(served: Served):
    """Choice i is drawn with the seed plus i, and is the answer to a request of its own with that seed."""
    answer = served.client.chat(STORY, n=3, **SAMPLED)
    alone = [served.client.chat(STORY, **SAMPLED | {"seed": 11 + i}) for i in range(3)]
    assert [choice["index"] for choice in answer.choices] == [0, 1, 2]
    assert [choice_text(choice) for choice in answer.choices] == [one.text for one in alone]
    assert len({one.text for one in alone}) == 3
    assert answer.usage["completion_tokens"] == sum(one.usage["completion_tokens"] for one in alone)
    with served.client.stream(STORY, n=3, **SAMPLED) as stream:
        events = list(stream)
    assert [joined(events, i) for i in range(3)] == [one.text for one in alone]
    greedy = served.client.chat(STORY, n=2)
    assert choice_text(greedy.choices[0]) == choice_text(greedy.choices[1]) == served.client.chat(STORY).text


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_p": 0.0},
        {"min_p": 1.0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_sampling_of_the_best_token_alone_is_greedy(fields: dict[str, float], served: Served):
    assert served.client.chat(STORY, temperature=1, **fields).text == served.client.chat(STORY).text


def test_penalties_and_bias_change_the_answer(served: Served, reference: Reference):
    greedy = served.client.chat(STORY, logprobs=True)
    [token] = reference.plain_ids(" river")
    assert served.client.chat(STORY, logit_bias={str(token): 100}).text == " river" * 12
    tired = served.client.chat(STORY, logit_bias={str(token): 15}, frequency_penalty=2).text.count(" river")
    assert 1 < tired < 12 == served.client.chat(STORY, logit_bias={str(token): 15}).text.count(" river")
    banned = reference.plain_ids(greedy.choices[0]["logprobs"]["content"][0]["token"])[0]
    assert served.client.chat(STORY, logit_bias={str(banned): -100}).text != greedy.text


def test_stop_strings(served: Served):
    """K-ST2: across tokens and inside one, in both modes."""
    text = served.client.cold(STORY, max_tokens=40).text
    for stop in (text[30:38], text[41:43], text[50:75]):
        expected = text[: text.index(stop)]
        whole = served.client.chat(STORY, max_tokens=40, stop=stop)
        with served.client.stream(STORY, max_tokens=40, stop=[stop, "never in there"]) as stream:
            events = list(stream)
        assert whole.text == joined(events) == expected
        assert whole.choices[0]["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "stop"
    assert served.daemon.wait_idle()["requests"]["failed"] == 0


def test_logprobs(served: Served, reference: Reference):
    fields = {"logprobs": True, "top_logprobs": 4}
    answer = served.client.chat(STORY, **fields)
    content = answer.choices[0]["logprobs"]["content"]
    assert len(content) == 12
    assert b"".join(bytes(token["bytes"]) for token in content).decode(errors="replace") == answer.text
    for token in content:
        top = [other["logprob"] for other in token["top_logprobs"]]
        assert top == sorted(top, reverse=True)
        assert token["logprob"] == top[0], "a greedy token is the best one"
        assert sum(map(math.exp, top)) <= 1
    expected = reference.next_logprobs(reference.prompt_ids(STORY)).topk(4).values.tolist()
    assert [other["logprob"] for other in content[0]["top_logprobs"]] == pytest.approx(expected, abs=1e-4)
    with served.client.stream(STORY, **fields) as stream:
        streamed = [
            token
            for event in stream
            for choice in event["choices"]
            for token in (choice["logprobs"] or {"content": []})["content"]
        ]
    assert streamed == content
    plain = served.client.complete(words("scored", 30), logprobs=2)
    assert len(plain.choices[0]["logprobs"]["tokens"]) == 12
    assert "".join(plain.choices[0]["logprobs"]["tokens"]) == plain.text


def test_the_end_token_ends_an_answer_unless_told_otherwise(served: Served):
    bias = {str(END_ID): 100}
    answer = served.client.chat(STORY, logit_bias=bias)
    assert answer.text == ""
    assert answer.choices[0]["finish_reason"] == "stop"
    assert answer.usage["completion_tokens"] == 1
    with served.client.stream(STORY, logit_bias=bias) as stream:
        events = list(stream)
    assert joined(events) == ""
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    on = served.client.chat(STORY, logit_bias=bias, ignore_eos=True)
    assert on.choices[0]["finish_reason"] == "length"
    assert on.usage["completion_tokens"] == 12


def ids_of(count: int) -> list[int]:
    return [1000 + n * 7 % 5000 for n in range(count)]


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_a_prompt_that_fills_the_context_is_refused(length: int, streaming: bool, served: Served):
    """K-ST7 and K-ST8: before any stream bytes, with both counts; nothing is computed and nothing kept."""
    before, gauges = served.daemon.stats(), metrics(served.client)
    for answer in (
        served.client.complete(ids_of(length), stream=streaming),
        served.client.chat([user(words(length, length))], stream=streaming),
    ):
        assert answer.status == 400
        assert answer.error["code"] == "context_length_exceeded"
        assert answer.error["type"] == "invalid_request_error"
        assert str(CONTEXT) in answer.error["message"]
    assert str(length) in served.client.complete(ids_of(length)).error["message"]
    after = served.daemon.wait_idle()
    assert after["cache_tokens"] == before["cache_tokens"]
    assert after["lookups"] == before["lookups"]
    assert after["snapshots"] == 0
    assert metrics(served.client)["prefixd_gateway_open_requests"] == gauges["prefixd_gateway_open_requests"] == 0


def test_an_answer_is_cut_where_the_context_ends(served: Served):
    """K-ST7: the prompt fits, what it asks for does not."""
    answer = served.client.complete(ids_of(CONTEXT - 10), max_tokens=100)
    assert answer.choices[0]["finish_reason"] == "length"
    assert answer.usage == {
        "prompt_tokens": CONTEXT - 10,
        "completion_tokens": 10,
        "total_tokens": CONTEXT,
        "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    last = served.client.complete(ids_of(CONTEXT - 1), max_tokens=100)
    assert last.usage["completion_tokens"] == 1
    assert last.cached_tokens > 0
