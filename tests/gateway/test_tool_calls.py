"""Tool calls and reasoning in chat completions: over sockets, streamed and whole, through the official client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from fake_worker import Call, FakeWorker, ids_of, say
from served import Served
from test_chat import events

from gateway.conversation import Conversation, Message
from gateway.prompts import PromptMaker
from gateway.reply import ReasoningDelta, TextDelta
from gateway.reply_parser import Thinking
from gateway.reply_reader import ReplyReaders

LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}}},
    },
}
ASKED = [{"role": "user", "content": "How is it?"}]
ONE = '<tool_call>\n{"name": "lookup", "arguments": {"q": "größe 😀", "n": 1}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "lookup", "arguments": {}}\n</tool_call>'
THOUGHT = "<think>\nLet me see.\n</think>\n\n"
ARGUMENTS = '{"q": "größe 😀", "n": 1}'


@pytest.fixture
async def client(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as made:
        yield made


async def ask(served: Served, **fields: Any) -> dict[str, Any]:
    fields = {"messages": ASKED, "tools": [LOOKUP]} | fields
    body = await (await served.chat(**fields)).json()
    choice: dict[str, Any] = body["choices"][0]
    return choice


async def test_a_call_is_no_text(served: Served, worker: FakeWorker):
    worker.script = say(ONE)
    choice = await ask(served)
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": None}
    assert choice["finish_reason"] == "tool_calls"
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "lookup", "arguments": ARGUMENTS}}


async def test_text_reasoning_and_parallel_calls_come_together(served: Served, worker: FakeWorker):
    worker.script = say(f"{THOUGHT}I look.\n{ONE}\n{TWO}")
    message = (await ask(served))["message"]
    assert (message["content"], message["reasoning_content"]) == ("I look.", "Let me see.")
    assert message["reasoning"] == message["reasoning_content"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ARGUMENTS, "{}"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("at_once", [1, 5, 200])
async def test_a_stream_tells_what_a_whole_answer_tells(served: Served, worker: FakeWorker, at_once: int):
    worker.script = say(f"{THOUGHT}I look.\n{ONE}\n{TWO}", at_once=at_once)
    response = await served.chat(messages=ASKED, tools=[LOOKUP], stream=True)
    data, _ = await events(response)
    choices = [choice for event in data for choice in event["choices"]]
    deltas = [choice["delta"] for choice in choices]
    assert "".join(d.get("content") or "" for d in deltas) == "I look."
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Let me see."
    calls = [call for d in deltas for call in d.get("tool_calls", ())]
    starts = [call for call in calls if "id" in call]
    assert [(call["index"], call["function"]["name"]) for call in starts] == [(0, "lookup"), (1, "lookup")]
    for index, whole in enumerate((ARGUMENTS, "{}")):
        pieces = [call["function"]["arguments"] for call in calls if call["index"] == index]
        assert "".join(pieces) == whole
        assert at_once > 1 or index == 1 or len(pieces) > 3
    assert all(len(set(d) & {"content", "tool_calls", "reasoning_content"}) <= 1 for d in deltas)
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["tool_calls"]
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "tool_calls")


async def test_the_official_client_joins_a_stream(worker: FakeWorker, client: openai.AsyncOpenAI):
    worker.script = say(f"{THOUGHT}I look.\n{ONE}\n{TWO}", at_once=2)
    async with client.chat.completions.stream(model="tiny", messages=ASKED, tools=[LOOKUP]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert message.content == "I look."
    assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS, "{}"]
    assert final.choices[0].finish_reason == "tool_calls"


async def test_a_tool_round_trip_begins_with_what_was_absorbed(
    served: Served, worker: FakeWorker, client: openai.AsyncOpenAI
):
    worker.script = say(f"{THOUGHT}I look.\n{ONE}\n{TWO}")
    asked: list[Any] = list(ASKED)
    first = await client.chat.completions.create(model="tiny", messages=asked, tools=[LOOKUP])
    await served.until(lambda: bool(worker.absorbed))
    message = first.choices[0].message
    asked.append(message.model_dump(exclude_none=True))
    asked += [{"role": "tool", "tool_call_id": call.id, "content": "found"} for call in message.tool_calls]
    worker.script = say("It is well.")
    last = await client.chat.completions.create(model="tiny", messages=asked, tools=[LOOKUP])
    assert last.choices[0].message.content == "It is well."
    absorbed, following = worker.absorbed[0], worker.requests[1]
    end = absorbed.boundaries[-1].end
    assert following.token_ids[:end] == absorbed.token_ids
    assert following.boundaries[: len(absorbed.boundaries)] == absorbed.boundaries


async def test_without_tools_a_call_is_text(served: Served, worker: FakeWorker):
    worker.script = say(f"I look.\n{ONE}")
    choice = await ask(served, tools=None)
    assert choice["message"] == {"role": "assistant", "content": f"I look.\n{ONE}"}
    assert choice["finish_reason"] == "stop"


async def test_tool_choice_none_keeps_the_prompt_and_reads_no_calls(served: Served, worker: FakeWorker):
    worker.script = say(ONE)
    await ask(served)
    choice = await ask(served, tool_choice="none")
    assert choice["message"]["content"] == ONE
    assert worker.requests[0].token_ids == worker.requests[1].token_ids


@pytest.mark.parametrize("at_once", [1, 200])
async def test_no_parallel_calls_end_the_answer_with_its_first(served: Served, worker: FakeWorker, at_once: int):
    async def script(call: Call) -> None:
        await call.accept()
        ids = ids_of(f"{ONE}\n{TWO}")
        for at in range(0, len(ids), at_once):
            await call.tokens(ids[at : at + at_once])
        await worker.cancelled.wait()
        await call.finish()
        await call.complete()

    worker.script = script
    choice = await ask(served, parallel_tool_calls=False)
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == [ARGUMENTS]
    assert choice["finish_reason"] == "tool_calls"
    assert worker.cancels[0].cause == "stop"


async def test_a_call_that_is_cut_off_keeps_what_there_is(served: Served, worker: FakeWorker):
    cut = ONE[: ONE.index("größe") + 3]
    worker.script = say(ONE)
    choice = await ask(served, max_tokens=len(ids_of(cut)))
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length"
    assert call["function"]["arguments"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])


@pytest.mark.parametrize(
    ("stop", "reason"), [("röße", "stop"), ("arguments", "stop"), ("\n</tool_call>", "tool_calls")]
)
async def test_a_stop_string_in_a_call_leaves_none_to_be_made(
    served: Served, worker: FakeWorker, stop: str, reason: str
):
    worker.script = say(f"{ONE} and more")
    choice = await ask(served, stop=[stop])
    assert choice["finish_reason"] == reason
    made = [call["function"]["arguments"] for call in choice["message"].get("tool_calls") or []]
    assert all(ARGUMENTS.startswith(each) for each in made)
    assert (made == [ARGUMENTS]) == (reason == "tool_calls")


async def test_reasoning_without_an_end_leaves_no_text(served: Served, worker: FakeWorker):
    worker.script = say("<think>\nI wonder")
    message = (await ask(served))["message"]
    assert (message["content"], message["reasoning_content"]) == ("", "I wonder")


async def test_a_stop_string_in_reasoning_ends_the_answer(served: Served, worker: FakeWorker):
    worker.script = say(f"{THOUGHT}Yes.")
    choice = await ask(served, stop=["see"])
    assert choice["message"]["reasoning_content"] == "Let me"
    assert choice["finish_reason"] == "stop"


async def test_logprobs_cover_reasoning_calls_and_text(served: Served, worker: FakeWorker):
    text = f"{THOUGHT}I look.\n{ONE}"
    worker.script = say(text)
    whole = await ask(served, logprobs=True)
    spelled = b"".join(bytes(entry["bytes"]) for entry in whole["logprobs"]["content"])
    assert spelled.decode() == text
    response = await served.chat(messages=ASKED, tools=[LOOKUP], logprobs=True, stream=True)
    data, _ = await events(response)
    streamed = [t for e in data for c in e["choices"] if c["logprobs"] for t in c["logprobs"]["content"]]
    assert streamed == whole["logprobs"]["content"]


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
            {"enable_thinking": False, "x": 1},
        ),
    ],
)
async def test_fields_about_reasoning_reach_the_template(
    served: Served, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], variables: dict[str, Any]
):
    seen: list[dict[str, Any]] = []
    chat = PromptMaker.chat

    def spied(self: PromptMaker, conversation: Any, *others: Any) -> Any:
        seen.append(conversation.variables)
        return chat(self, conversation, *others)

    monkeypatch.setattr(PromptMaker, "chat", spied)
    await ask(served, **fields)
    assert seen[0] == variables


async def test_the_settings_come_before_what_the_template_shows(served: Served, worker: FakeWorker):
    settings = served.gateway.settings.model_copy(update={"tool_call_format": "none", "reasoning_format": "none"})
    served.gateway.readers = ReplyReaders(served.gateway.maker, settings)
    worker.script = say(f"{THOUGHT}{ONE}")
    message = (await ask(served))["message"]
    assert message == {"role": "assistant", "content": f"{THOUGHT}{ONE}"}


def test_reasoning_is_open_where_the_prompt_ends_in_it():
    think = Thinking("<think>", "</think>")
    assert think.opened_by("<|im_start|>assistant\n<think>\n")
    assert not think.opened_by("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not think.opened_by("<|im_start|>assistant\n")
    assert Thinking("<|channel>thought\n", "<channel|>").opened_by("<|turn>model\n<|channel>thought\n")


async def test_what_was_asked_opens_no_reasoning(served: Served, worker: FakeWorker):
    maker, readers = served.gateway.maker, served.gateway.readers
    for text, continued in (("What is <think>?", "<think>I see"), ("<think>", "<think>")):
        asked = Conversation((Message("user", text),))
        prompt = maker.chat(asked, worker.model)._replace(opening=f"{text}<|im_end|>\n<|im_start|>assistant\n")
        assert isinstance(readers.reader(asked, prompt).parser().feed("Yes")[0], TextDelta)
        begun = Conversation((Message("user", "Hm?"), Message("assistant", continued)))
        prompt = maker.chat(begun, worker.model)
        assert isinstance(readers.reader(begun, prompt).parser().feed("Yes")[0], ReasoningDelta)
