"""One truth, told four times: header, usage, metrics and cachectl."""

from __future__ import annotations

import json
import re
from itertools import pairwise, product
from typing import Any

import pytest
from chat_model import END_ID, words
from conftest import Served
from daemon import metrics
from http_client import Answer, cache_header, system, user

COMPUTED, DEVICE = (f"prefixd_cache_tokens_total{{source={source}}}" for source in ("computed", "device"))
GENERATED = "prefixd_generated_tokens_total"


def lookups(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {
        name: after[name] - before[name]
        for name in after
        if name.startswith("prefixd_cache_lookups_total") and after[name] != before[name]
    }


def check_agreement(served: Served, answer: Answer, before: dict[str, float]) -> None:
    outcome, depth, reason = answer.outcome
    after = metrics(served.client)
    assert type(answer.cached_tokens) is int
    assert answer.cached_tokens == depth
    assert answer.body["prefixd"]["depth"] == depth
    assert answer.usage["total_tokens"] == answer.prompt_tokens + answer.usage["completion_tokens"]
    assert after[DEVICE] - before[DEVICE] == depth
    assert after[COMPUTED] - before[COMPUTED] == answer.prompt_tokens - depth
    assert lookups(before, after) == {f"prefixd_cache_lookups_total{{outcome={outcome},reason={reason}}}": 1}
    run = served.daemon.cachectl("--json", "explain", answer.request_id)
    assert run.returncode == 0
    explained = json.loads(run.stdout)
    assert explained["outcome"] == outcome
    assert explained["reason"] == reason
    assert explained["depth"] == depth
    assert explained["prompt_tokens"] == answer.prompt_tokens
    assert explained["completion_tokens"] == answer.usage["completion_tokens"]
    assert explained["state"] == "finished"


def test_header_usage_metrics_and_cachectl_agree(served: Served):
    head = system(words("accounting", 250))
    for messages in (
        [head, user("first")],  # cold
        [head, user("first")],  # the same again
        [head, user(words("second", 500))],  # the head alone
        [user("first")],  # nothing
    ):
        before = metrics(served.client)
        check_agreement(served, served.client.chat(messages), before)
    before = metrics(served.client)
    check_agreement(served, served.client.chat([head, user("first")], cache_prompt=False), before)
    before = metrics(served.client)
    check_agreement(served, served.client.complete(words("plain", 1200)), before)


ASKED = [system(words("every kind", 40)), user("Tell me.")]
DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 8, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": words("every", 600), "max_tokens": 8, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": ASKED, "max_output_tokens": 8},
    "/v1/messages": {"messages": ASKED[1:], "system": ASKED[0]["content"], "max_tokens": 8},
}
PLURAL, ALL = list(DIALECTS)[:2], list(DIALECTS)
KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "cut by its length": (ALL, {}),
    "empty": (ALL, {"logit_bias": {str(END_ID): 100}}),
    "ended by a stop string": (PLURAL, {"stop": list("aeiou"), "max_tokens": 60}),
    "ended by a stop sequence": (["/v1/messages"], {"stop_sequences": list("aeiou"), "max_tokens": 60}),
    "several": (PLURAL, {"n": 3, "temperature": 1, "seed": 7}),
    "silent": (["/v1/messages"], {"max_tokens": 0}),
    "uncached": (ALL, {"cache_prompt": False}),
}


def told_of(raw: bytes) -> tuple[int, int, int]:
    """Tokens of the prompt, of these the cached ones, and of the answer: whole, or as its stream said last."""
    lines = raw.decode().splitlines() if raw.startswith((b"data: ", b"event: ")) else ["data: " + raw.decode()]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    told = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
    usage = next(filter(None, reversed(told)))
    if "prompt_tokens" in usage:
        details, prompt, output = (
            usage["prompt_tokens_details"],
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        return prompt, details["cached_tokens"], output
    if "input_tokens_details" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    cached = usage["cache_read_input_tokens"]
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached, usage["output_tokens"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_answer_is_accounted_for_in_every_dialect(kind: str, served: Served):
    paths, fields = KINDS[kind]
    for path, stream in product(paths, (False, True)):
        before = metrics(served.client)
        body = {"temperature": 0, **DIALECTS[path], **fields, "stream": stream}
        answer = served.client.request("POST", path, body)
        assert answer.status == 200, answer.raw
        served.daemon.wait_idle()
        after = metrics(served.client)
        explained = served.daemon.ask("explain", request_id=answer.request_id)
        prompt, cached, output = told_of(answer.raw)
        assert (explained["prompt_tokens"], explained["depth"]) == (prompt, cached)
        assert explained["completion_tokens"] == output > 0
        gained = [after[name] - before[name] for name in (COMPUTED, DEVICE, GENERATED)]
        assert gained == [prompt - cached, cached, output]


def test_an_answer_that_was_hung_up_on_is_accounted_for(served: Served):
    before = metrics(served.client)
    with served.client.stream(ASKED, max_tokens=15_000, ignore_eos=True) as stream:
        stream.take_text(3)
        name = stream.headers["x-request-id"]
    served.daemon.wait_idle()
    after = metrics(served.client)
    explained = served.daemon.ask("explain", request_id=name)
    assert explained["state"] == "cancelled"
    gained = [after[name] - before[name] for name in (COMPUTED, DEVICE, GENERATED)]
    assert gained == [explained["prompt_tokens"], 0, explained["completion_tokens"]]


def test_cached_tokens_are_a_number_in_every_form(served: Served):
    """K-MT1."""
    messages = [user(words("a number", 80))]
    cold = served.client.chat(messages)
    assert cold.cached_tokens == 0
    warm = served.client.chat(messages)
    with served.client.stream(messages, stream_options={"include_usage": True}) as stream:
        header = cache_header(stream.headers)
        last = list(stream)[-1]
    assert warm.cached_tokens > 0
    assert last["usage"] == warm.usage
    assert header == warm.outcome
    assert (last["prefixd"]["outcome"], last["prefixd"]["depth"], last["prefixd"]["reason"]) == header
    with served.client.stream(messages) as stream:
        assert all(event.get("usage") is None for event in stream)
        assert any(comment.startswith("prefixd") for comment in stream.comments)


def test_every_prompt_is_counted_once(served: Served):
    """K-MT3: prompts of several passes, then the same again."""
    prompts = [[user(words(f"unrelated {number}", 700))] for number in range(6)]
    before = metrics(served.client)
    answers = [served.client.chat(prompt) for prompt in prompts]
    total, shared = (
        sum(counts) for counts in zip(*((a.prompt_tokens, a.cached_tokens) for a in answers), strict=True)
    )
    middle = metrics(served.client)
    assert middle[COMPUTED] - before[COMPUTED] == total - shared
    assert middle[DEVICE] - before[DEVICE] == shared < 0.05 * total
    repeated = [served.client.chat(prompt) for prompt in prompts]
    after = metrics(served.client)
    assert after[DEVICE] - middle[DEVICE] == sum(answer.cached_tokens for answer in repeated) > 0.9 * total
    assert after[DEVICE] + after[COMPUTED] - middle[DEVICE] - middle[COMPUTED] == total


def test_requests_are_counted_by_how_they_ended(served: Served):
    names = [f"prefixd_requests_total{{result={result}}}" for result in ("finished", "cancelled", "failed")]
    before = metrics(served.client)
    served.client.chat([user("one")])
    served.client.chat([user("two")], n=2)
    served.client.chat([user("three")], stop="e", max_tokens=60)
    served.client.request("POST", "/v1/chat/completions", {"messages": 3})
    served.daemon.wait_idle()
    after = metrics(served.client)
    assert [after[name] - before[name] for name in names] == [3, 0, 0]
    bad = "prefixd_http_requests_total{route=chat,status=400}"
    good = "prefixd_http_requests_total{route=chat,status=200}"
    assert (after[bad] - before[bad], after[good] - before[good]) == (1, 3)


def test_counters_only_rise_and_a_hit_is_timed_as_one(served: Served):
    """K-MT4 and K-MT6: of a prompt that is known but for its end, what counts as computed is the end."""
    head = system(words("timed", 400))
    scrapes = [metrics(served.client)]
    for messages, outcome in (
        ([head, user("one")], "miss"),
        ([head, user("one two")], "hit"),
        ([user("two")], "miss"),
    ):
        answer = served.client.chat(messages)
        assert answer.outcome[0] == outcome
        served.daemon.wait_idle()
        scrapes.append(metrics(served.client))
        before, after = scrapes[-2:]
        gained = {name: after[name] - before[name] for name in after}
        for timed in ("ttft", "prefill"):
            counts = {kind: gained[f"prefixd_{timed}_seconds_count{{outcome={kind}}}"] for kind in ("hit", "miss")}
            assert counts == {outcome: 1.0, ({"hit", "miss"} - {outcome}).pop(): 0.0}
        assert gained[COMPUTED] == answer.prompt_tokens - answer.cached_tokens
        assert answer.cached_tokens == (0 if outcome == "miss" else gained[DEVICE])
    sums = [name for name in scrapes[0] if re.search(r"_(total|count|sum|bucket)\b", name)]
    assert all(one[name] <= two[name] for one, two in pairwise(scrapes) for name in sums)


@pytest.mark.parametrize("name", ["prefixd_slots{state=ready}", "prefixd_stale_drops_total{cause=tokens}"])
def test_gauges_and_counters_are_there_from_the_start(name: str, served: Served):
    assert metrics(served.client)[name] == 0


def test_metrics_hold_no_text(served: Served):
    """K-SE4."""
    secret = "xylophone-4711"
    served.client.chat([system(f"The word is {secret}."), user(words("quiet", 30))])
    assert secret.encode() not in served.client.get("/metrics").raw
    [row] = served.daemon.cachectl("list").stdout.splitlines()[1:2]
    assert secret not in row
    assert secret not in served.daemon.log()
