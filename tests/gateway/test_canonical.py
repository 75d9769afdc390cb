"""What clients vary without meaning it makes no other ids; what they mean does."""

from __future__ import annotations

import orjson
import pytest
from fake_worker import FakeWorker
from served import Served

from gateway.canonical import parse_messages, parse_tools
from gateway.config import GatewaySettings
from gateway.conversation import Conversation
from gateway.prompts import PromptMaker
from protocol.errors import RequestError

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.a3f; cc_entrypoint=cli; cch=00000;"
OTHER_BILLING = BILLING.replace("a3f", "77c")


def ids(maker: PromptMaker, messages: list[dict], tools: object = None, **options: bool) -> list[int]:
    made = Conversation(parse_messages(messages, **options), parse_tools(tools))
    return list(maker.trace(made).token_ids)


def turns(*middle: dict) -> list[dict]:
    return [{"role": "user", "content": "q"}, *middle, {"role": "user", "content": "r"}]


def calling(arguments: str, **fields: object) -> dict:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **fields}


VARIED = {
    "one part or a string": ({"role": "user", "content": "x"}, {"role": "user", "content": [{"text": "x"}]}),
    "a cache_control that moves": (
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
    ),
    "item ids": (
        {"role": "assistant", "content": "x", "id": "msg_1", "status": "completed"},
        {"role": "assistant", "content": "x", "id": "msg_2"},
    ),
    "spacing of arguments": (calling('{ "a" : "b",\n"c": [1 , 2]}'), calling('{"a":"b","c":[1,2]}')),
    "arguments as an object": (calling('{"a": "b"}'), calling({"a": "b"})),  # type: ignore[arg-type]
    "escapes in arguments": (calling('{"a": "\\u00e9\\/"}'), calling('{"a": "é/"}')),
    "an empty text or null beside calls": (calling("{}", content=""), calling("{}")),
    "no text at all beside calls": (calling("{}", content=[]), calling("{}")),
    "outer blanks of an answer": (
        {"role": "assistant", "content": "\n x y \n"},
        {"role": "assistant", "content": "x y"},
    ),
    "outer blanks of reasoning": (
        {"role": "assistant", "content": "x", "reasoning_content": " hm\n"},
        {"role": "assistant", "content": "x", "reasoning": "hm"},
    ),
    "the name of a result": (
        {"role": "tool", "content": "x", "tool_call_id": "call_1", "name": "f"},
        {"role": "tool", "content": "x", "tool_call_id": "call_1"},
    ),
}


@pytest.mark.parametrize("case", VARIED)
def test_it_makes_no_other_ids(maker: PromptMaker, case: str):
    one, other = VARIED[case]
    assert ids(maker, turns(calling("{}"), one)) == ids(maker, turns(calling("{}"), other))


@pytest.mark.parametrize("content", ["B\n\nBe brief.", ["B", "Be brief."], ["B", "", "Be brief."]])
def test_a_billing_header_at_the_start_is_left_out(maker: PromptMaker, content: str | list[str]):
    def system(header: str) -> list[dict]:
        if isinstance(content, str):
            return [{"role": "system", "content": content.replace("B\n", header + "\n", 1)}, *turns()]
        parts = [header if part == "B" else part for part in content]
        return [{"role": "system", "content": [{"type": "text", "text": part} for part in parts]}, *turns()]

    plain = ids(maker, [{"role": "system", "content": "Be brief."}, *turns()])
    assert ids(maker, system(BILLING)) == ids(maker, system(OTHER_BILLING)) == plain
    one, other = (ids(maker, system(each), drop_billing_header=False) for each in (BILLING, OTHER_BILLING))
    assert one != other


def test_a_system_message_that_is_nothing_but_a_billing_header_is_left_out(maker: PromptMaker):
    assert ids(maker, [{"role": "system", "content": BILLING}, *turns()]) == ids(maker, turns())


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": BILLING},
        {"role": "system", "content": f"Be brief.\n{BILLING}"},
        {"role": "system", "content": f" {BILLING}"},
        {"role": "system", "content": "x-anthropic-billing-header: what is that?"},
        {"role": "system", "content": "x-anthropic-billing-header: cc_version=1 is the first line."},
    ],
)
def test_text_that_mentions_the_billing_header_is_untouched(message: dict):
    made = parse_messages([message, *turns()])
    assert made[0].content == message["content"]
    later = parse_messages([*turns(), {"role": "system", "content": BILLING}])
    assert later[-1].content == BILLING


def tool(name: str, **properties: object) -> dict:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


def test_tools_in_canonical_order_are_equal_whatever_their_order():
    one = [
        tool("b", y={"type": "string", "enum": ["q", "p"]}),
        tool("a", x={"type": "string"}, w={"type": "string"}),
    ]
    shuffled = [orjson.loads(orjson.dumps(each, option=orjson.OPT_SORT_KEYS)) for each in reversed(one)]
    assert parse_tools(one) != parse_tools(shuffled)
    sorted_one, sorted_other = (parse_tools(each, in_order=True) for each in (one, shuffled))
    assert orjson.dumps(sorted_one) == orjson.dumps(sorted_other)
    assert [each["function"]["name"] for each in sorted_one] == ["a", "b"]
    assert sorted_one[0]["function"]["parameters"]["required"] == ["x", "w"]
    assert sorted_one[1]["function"]["parameters"]["properties"]["y"]["enum"] == ["q", "p"]


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "input_audio", "file"])
def test_parts_that_are_no_text_are_refused_by_name(kind: str):
    parts = [{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "data:,"}}]
    with pytest.raises(RequestError, match="takes text only") as refused:
        parse_messages([{"role": "user", "content": parts}])
    assert refused.value.param == "messages.0.content.1"
    assert refused.value.status == 400


class TestSettings:
    """Both are settings of the running gateway."""

    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return settings.model_copy(update={"drop_billing_header": False, "canonical_tool_order": True})

    async def test_they_reach_the_prompt(self, served: Served, worker: FakeWorker):
        messages = [{"role": "system", "content": BILLING}, {"role": "user", "content": "q"}]
        for tools in ([tool("a"), tool("b")], [tool("b"), tool("a")]):
            body = {"messages": messages, "tools": tools}
            async with served.http.post(f"{served.url}/v1/chat/completions", json=body) as response:
                assert response.status == 200
        one, other = worker.requests
        assert one.token_ids == other.token_ids
        assert one.boundaries[0].messages == 1
