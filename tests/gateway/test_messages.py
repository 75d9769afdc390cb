"""`/v1/messages` over real sockets: answers, streams, and what they say they used."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from anthropic_stream import added_up, parse_events
from fake_worker import Call, FakeWorker, ids_of, say
from line_parser import LineParser
from served import QUESTION, Served

from gateway.reply import ReplyReader


@pytest.fixture
def by_line(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Answers are read by `LineParser`; what the reader was asked for."""
    asked: list[dict[str, Any]] = []

    def reader(conversation: object, prompt: object, **options: Any) -> ReplyReader:
        asked.append(options)
        return ReplyReader(LineParser)

    monkeypatch.setattr(served.gateway.readers, "reader", reader)
    return asked


async def both(served: Served, **fields: Any) -> dict[str, Any]:
    """The message asked for whole, which must equal the one that its stream adds up to."""
    whole = await (await served.message(**fields)).json()
    streamed = added_up(parse_events(await (await served.message(stream=True, **fields)).read()), cut=True)
    for message in (whole, streamed):
        del message["id"]
    assert streamed == whole
    return whole


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages?beta=true"])
async def test_a_whole_answer_has_content_usage_and_headers(served: Served, worker: FakeWorker, path: str):
    worker.script = say("Paris.", outcome="hit", depth=6, reason="none", kept=10)
    body = {"messages": QUESTION, "max_tokens": 9, "model": "tiny"}
    response = await served.post(path, body, **{"x-api-key": "secret", "anthropic-beta": "a,b"})
    message = await response.json()
    sent = worker.requests[0]
    assert response.status == 200
    assert response.headers["x-prefixd-cache"] == "hit; depth=6; reason=none"
    assert response.headers["request-id"] == response.headers["x-request-id"] == sent.request_id
    assert message == {
        "id": f"msg_{sent.request_id}",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Paris."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(sent.token_ids) - 10,
            "cache_creation_input_tokens": 4,
            "cache_read_input_tokens": 6,
            "cache_creation": {"ephemeral_5m_input_tokens": 4, "ephemeral_1h_input_tokens": 0},
            "output_tokens": len(ids_of("Paris.")) + 1,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
        "prefixd": message["prefixd"],
    }
    assert message["prefixd"]["outcome"] == "hit"
    assert sent.sampling.max_tokens == 9


@pytest.mark.parametrize("at_once", [1, 3, 100])
async def test_a_stream_adds_up_to_the_whole_answer(served: Served, worker: FakeWorker, at_once: int):
    worker.script = say(
        "größe 日本語 😀👨‍👩‍👧 done", at_once=at_once, outcome="partial", depth=3, reason="evicted"
    )
    message = await both(served)
    assert message["content"] == [{"type": "text", "text": "größe 日本語 😀👨‍👩‍👧 done"}]
    assert message["usage"]["cache_read_input_tokens"] == 3
    assert message["usage"]["cache_creation_input_tokens"] == 0
    response = await served.message(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-prefixd-cache"] == "partial; depth=3; reason=evicted"
    events = parse_events(await response.read())
    assert [event["type"] for event in events[:3]] == ["message_start", "ping", "content_block_start"]
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 3


@pytest.mark.parametrize("at_once", [1, 7, 100])
async def test_thinking_text_and_calls_are_blocks_in_their_order(
    served: Served, worker: FakeWorker, by_line: list, at_once: int
):
    lines = [
        "think a while",
        "think and on",
        "Let me look.",
        'call lookup {"where": "here"}',
        'call lookup {"where": ["there", 1]}',
        "call ping",
        "Done",
    ]
    worker.script = say("\n".join(lines), at_once=at_once)
    message = await both(served)
    assert message["content"] == [
        {"type": "thinking", "thinking": "a whileand on", "signature": "prefixd"},
        {"type": "text", "text": "Let me look."},
        {"type": "tool_use", "id": "call_0", "name": "lookup", "input": {"where": "here"}},
        {"type": "tool_use", "id": "call_1", "name": "lookup", "input": {"where": ["there", 1]}},
        {"type": "tool_use", "id": "call_2", "name": "ping", "input": {}},
        {"type": "text", "text": "Done"},
    ]
    assert message["stop_reason"] == "tool_use"
    assert 0 < message["usage"]["output_tokens_details"]["thinking_tokens"] < message["usage"]["output_tokens"]


async def test_thinking_alone_is_closed_with_its_signature(served: Served, worker: FakeWorker, by_line: list):
    worker.script = say("think for ever and ev")
    message = await both(served, max_tokens=len(ids_of("think for ever")))
    assert message["content"] == [{"type": "thinking", "thinking": "for ever", "signature": "prefixd"}]
    assert message["stop_reason"] == "max_tokens"


async def test_a_call_that_is_cut_off_is_no_call_to_make(served: Served, worker: FakeWorker, by_line: list):
    worker.script = say('call lookup {"where": "here, or maybe', at_once=50)
    message = await both(served, max_tokens=12)
    assert message["stop_reason"] == "max_tokens"
    assert message["content"][0]["input"] == {}


async def test_an_empty_answer_has_no_blocks(served: Served, worker: FakeWorker):
    worker.script = say("")
    message = await both(served)
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")
    assert message["usage"]["output_tokens"] == 1


async def test_nothing_is_said_where_only_the_prompt_is_to_be_kept(served: Served, worker: FakeWorker):
    """The token that is sampled all the same is counted."""
    for said in ("Paris.", ""):
        worker.script = say(said, kept=5)
        message = await both(served, max_tokens=0)
        assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
        assert message["usage"]["cache_creation_input_tokens"] == 5
        assert message["usage"]["output_tokens"] == 1
    assert [request.sampling.max_tokens for request in worker.requests] == [1] * 4
    assert not worker.absorbed


@pytest.mark.parametrize("at_once", [1, 2, 50])
async def test_the_stop_sequence_that_was_met_is_named(served: Served, worker: FakeWorker, at_once: int):
    async def script(call: Call) -> None:
        await call.accept()
        ids = ids_of("Hello there, wonderful world of stops")
        for at in range(0, len(ids), at_once):
            await call.tokens(ids[at : at + at_once])
        await call.worker.cancelled.wait()
        await call.finish()
        await call.complete()

    worker.script = script
    message = await both(served, stop_sequences=["wonderful w", "never", "rld"])
    assert message["content"] == [{"type": "text", "text": "Hello there, "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "wonderful w")
    assert worker.cancels[0].cause == "stop"


async def test_a_length_stop_says_so(served: Served, worker: FakeWorker):
    worker.script = say("one two three four five")
    message = await both(served, max_tokens=2, stop_sequences=["zzz"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert message["usage"]["output_tokens"] == 2


async def test_sampling_fields_reach_the_worker(served: Served, worker: FakeWorker):
    await served.message(temperature=0.5, top_p=0.9, top_k=40, seed=7)
    sampling = worker.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 40, 7)


async def test_fields_without_meaning_here_are_ignored(served: Served, worker: FakeWorker):
    response = await served.message(
        metadata={"user_id": "{}"},
        service_tier="auto",
        context_management={"edits": []},
        output_config={"effort": "high"},
        container=None,
        mcp_servers=[],
        thinking={"type": "enabled", "budget_tokens": 1024},
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert response.status == 200
    await served.message()
    assert worker.requests[0].token_ids == worker.requests[1].token_ids


@pytest.mark.parametrize(
    ("choice", "calls", "one_call"),
    [
        (None, True, False),
        ({"type": "auto"}, True, False),
        ({"type": "none"}, False, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, True, True),
    ],
)
async def test_the_tool_choice_decides_how_the_answer_is_read(
    served: Served, by_line: list, choice: object, calls: bool, one_call: bool
):
    await served.message(tool_choice=choice)
    assert by_line == [{"calls": calls, "one_call": one_call, "held": False}]


async def test_a_lookup_that_comes_late_is_told_at_the_end(served: Served, worker: FakeWorker):
    async def script(call: Call) -> None:
        await worker.cancelled.wait()  # set by the test once it has seen the headers
        await say("late", outcome="hit", depth=5, reason="none")(call)

    worker.script = script
    response = await served.message(stream=True)
    assert "x-prefixd-cache" not in response.headers
    worker.cancelled.set()
    events = parse_events(await response.read())
    assert events[0]["message"]["usage"]["cache_read_input_tokens"] == 0
    message = added_up(events)
    assert message["usage"]["cache_read_input_tokens"] == 5
    assert (message["prefixd"]["outcome"], message["prefixd"]["depth"]) == ("hit", 5)


async def test_an_answer_is_absorbed_as_its_client_will_send_it_back(
    served: Served, worker: FakeWorker, by_line: list
):
    tools = [{"name": "lookup", "input_schema": {"type": "object"}}]
    worker.script = say('think hard\nLet me look.\ncall lookup {"where": "here"}')
    message = await (await served.message(tools=tools)).json()
    await served.until(lambda: bool(worker.absorbed))
    result = {"type": "tool_result", "tool_use_id": message["content"][-1]["id"], "content": "nothing"}
    history = [
        *QUESTION,
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    await served.message(messages=history, tools=tools)
    absorbed = worker.absorbed[0]
    assert worker.requests[1].token_ids[: len(absorbed.token_ids)] == absorbed.token_ids
    assert worker.requests[1].boundaries[: len(absorbed.boundaries)] == absorbed.boundaries


def agent_turn(nonce: str, *history: dict[str, Any]) -> dict[str, Any]:
    """What a coding agent sends: a line of telemetry that varies, and a mark on whatever message is the newest."""
    mark = {"cache_control": {"type": "ephemeral"}}
    line = f"x-anthropic-billing-header: cc_version=2.1.197.{nonce}; cc_entrypoint=cli;"
    last = history[-1]["content"]
    blocks = last if isinstance(last, list) else [{"type": "text", "text": last}]
    newest = {**history[-1], "content": [*blocks[:-1], {**blocks[-1], **mark}]}
    return {
        "system": [{"type": "text", "text": line}, {"type": "text", "text": "You write programs.", **mark}],
        "messages": [*history[:-1], newest],
        "tools": [{"name": "Bash", "description": "Runs.", "input_schema": {"type": "object"}, **mark}],
        "thinking": {"type": "adaptive"},
        "metadata": {"user_id": nonce},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": nonce},
    }


async def test_what_an_agent_changes_between_turns_is_no_change(served: Served, worker: FakeWorker):
    """K-BD9 and K-BD10: a nonce in the head, moving marks, system messages in between, text that becomes blocks."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}}
    answer = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "Right."}, call]
    history: list[dict[str, Any]] = [{"role": "user", "content": "List the files."}]
    steps = [
        [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a b"}]},
            {"role": "system", "content": "The user has opened a file."},
        ],
        [{"role": "assistant", "content": "Two."}, {"role": "user", "content": "Thanks."}],
        [{"role": "system", "content": "The user has closed it."}],
    ]
    await served.message(**agent_turn("abc", *history))
    for number, step in enumerate(steps):
        history += step
        await served.message(**agent_turn(f"d{number}", *history))
    for before, after in itertools.pairwise(worker.requests):
        end = before.boundaries[-1].end
        assert after.token_ids[:end] == before.token_ids[:end]
        assert after.boundaries[: len(before.boundaries)] == before.boundaries


async def test_counting_gives_what_a_request_would_use(served: Served, worker: FakeWorker):
    body = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [*QUESTION, {"role": "assistant", "content": "Paris."}, *QUESTION],
        "tools": [{"name": "lookup", "description": "Looks.", "input_schema": {"type": "object"}}],
    }
    counted = await served.post("/v1/messages/count_tokens?beta=true", body)
    assert counted.status == 200
    number = await counted.json()
    assert not worker.requests
    worker.script = say("x", outcome="hit", depth=4, reason="none", kept=9)
    usage = (await (await served.message(**body)).json())["usage"]
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert number == {"input_tokens": sum(usage[part] for part in parts)}


async def test_counting_goes_past_the_context(served: Served, worker: FakeWorker):
    long = [{"role": "user", "content": "word " * 600}]
    counted = await (await served.post("/v1/messages/count_tokens", {"messages": long})).json()
    assert counted["input_tokens"] > worker.model.max_model_len
    refused = await served.message(messages=long)
    assert refused.status == 400
    message = (await refused.json())["error"]["message"]
    assert message.startswith(f"prompt is too long: {counted['input_tokens']} tokens > 511 maximum")


async def test_models_have_the_shape_that_the_client_expects(served: Served):
    version = {"anthropic-version": "2023-06-01"}
    listed = await (await served.http.get(served.url + "/v1/models", headers=version)).json()
    names = [entry["id"] for entry in listed["data"]]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (False, names[0], names[-1])
    one = await (await served.http.get(served.url + f"/v1/models/{names[-1]}", headers=version)).json()
    assert one == listed["data"][-1]
    assert (one["type"], one["display_name"], one["max_input_tokens"]) == ("model", names[-1], 512)
    other = await (await served.http.get(served.url + f"/v1/models/{names[-1]}")).json()
    assert (other["object"], other["id"]) == ("model", names[-1])
    missing = await served.http.get(served.url + "/v1/models/none", headers=version)
    error = await missing.json()
    assert (missing.status, error["type"], error["error"]["type"]) == (404, "error", "not_found_error")
    assert error["request_id"] == missing.headers["request-id"]
