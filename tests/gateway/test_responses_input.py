"""Items become the messages that the same conversation has as a chat; what clients vary makes no difference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.canonical import parse_messages
from gateway.canonical import parse_tools as chat_tools
from gateway.responses_input import parse_input, seal
from gateway.responses_params import parse_params
from gateway.responses_tools import Offered, parse_tools
from protocol.errors import RequestError


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def said(text: str, **fields: Any) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": "msg_1",
        "status": "completed",
        "role": "assistant",
        "content": [part],
        **fields,
    }


def call(arguments: str = '{"cmd": "ls"}', **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": "c1", "name": "run", "arguments": arguments, **fields}


def result(output: Any = "ok", kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "id": "fco_1", "call_id": "c1", "output": output}


def chat_call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}


def chat_turn(*calls: dict[str, Any], text: str | None = None, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"role": "assistant", "content": text, "tool_calls": list(calls), **fields},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
    ]


THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}
RUN = chat_call("run", '{"cmd":"ls"}')
# Items between two messages of the user, and the chat messages that are the same.
SAME: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "an answer": ([said(" Yes. \n")], [{"role": "assistant", "content": "Yes."}]),
    "an answer without its type": (
        [{"role": "assistant", "content": "Yes."}],
        [{"role": "assistant", "content": "Yes."}],
    ),
    "two answers": ([said("A"), said("B")], [{"role": "assistant", "content": each} for each in "AB"]),
    "a refusal": (
        [said("", content=[{"type": "refusal", "refusal": "No."}])],
        [{"role": "assistant", "content": "No."}],
    ),
    "an instruction in between": (
        [{"type": "message", "role": "developer", "content": "Be brief."}],
        [{"role": "developer", "content": "Be brief."}],
    ),
    "a call": ([call(), result()], chat_turn(RUN)),
    "a call of two texts": ([call(), result([{"type": "input_text", "text": "ok"}])], chat_turn(RUN)),
    "text and a call": ([said("Let me look. "), call(), result()], chat_turn(RUN, text="Let me look.")),
    "a call and text behind it": ([call(), said("Let me look."), result()], chat_turn(RUN, text="Let me look.")),
    "two calls at once": (
        [call(), call(call_id="c2"), result()],
        chat_turn(RUN, RUN | {"id": "c2"}),
    ),
    "reasoning": (
        [THOUGHT | {"content": [{"type": "reasoning_text", "text": " Hm.\n"}]}, said("Yes.")],
        [{"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}],
    ),
    "reasoning in a summary": (
        [THOUGHT | {"summary": [{"type": "summary_text", "text": "Hm."}]}, call(), result()],
        chat_turn(RUN, reasoning="Hm."),
    ),
    "reasoning that we sealed": (
        [THOUGHT | {"encrypted_content": seal("Hm. größe")}, said("Yes.")],
        [{"role": "assistant", "content": "Yes.", "reasoning": "Hm. größe"}],
    ),
    "reasoning that another service sealed": (
        [THOUGHT | {"encrypted_content": "gAAAAB"}, said("Yes.")],
        [{"role": "assistant", "content": "Yes."}],
    ),
    "reasoning that led to nothing": ([THOUGHT | {"content": [{"text": "Hm."}]}], []),
    "reasoning between answers": (
        [said("A"), THOUGHT | {"content": [{"text": "Hm."}]}, said("B")],
        [{"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B", "reasoning": "Hm."}],
    ),
    "a call in a namespace": (
        [call(namespace="agents"), result()],
        chat_turn(chat_call("agents__run", {"cmd": "ls"})),
    ),
    "a free-form call": (
        [
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
            result(kind="custom_tool_call_output"),
        ],
        chat_turn(chat_call("apply_patch", {"input": "*** Begin"})),
    ),
    "a local shell call": (
        [
            {
                "type": "local_shell_call",
                "call_id": "c1",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "user": None},
            },
            {"type": "local_shell_call_output", "id": "c1", "output": "ok"},
        ],
        chat_turn(chat_call("local_shell", {"type": "exec", "command": ["ls"]})),
    ),
    "a shell call": (
        [
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
            result([{"stdout": "ok", "stderr": "", "outcome": {"type": "exit"}}], "shell_call_output"),
        ],
        chat_turn(chat_call("shell", {"commands": ["ls"]})),
    ),
    "a patch": (
        [
            {"type": "apply_patch_call", "call_id": "c1", "operation": {"type": "delete_file", "path": "a"}},
            result(kind="apply_patch_call_output"),
        ],
        chat_turn(chat_call("apply_patch", {"type": "delete_file", "path": "a"})),
    ),
    "a call that a service made and answered": (
        [{"type": "mcp_call", "id": "c1", "name": "run", "arguments": '{"cmd":"ls"}', "output": "ok"}],
        chat_turn(RUN),
    ),
    "a search that a service made": ([{"type": "web_search_call", "id": "ws_1", "status": "completed"}], []),
}


@pytest.mark.parametrize("case", SAME)
def test_items_are_the_messages_of_the_same_chat(case: str):
    items, messages = SAME[case]
    ends: tuple[Any, Any] = ({"role": "user", "content": "q"}, {"role": "user", "content": "r"})
    chat = parse_messages([{"role": "system", "content": "S"}, ends[0], *messages, ends[1]])
    assert parse_input("S", [user("q"), *items, user("r")]) == chat


def test_a_text_is_a_users_message():
    assert parse_input(None, "hi") == parse_messages([{"role": "user", "content": "hi"}])


def test_ids_and_statuses_make_no_difference():
    def items(**fields: Any) -> list[dict[str, Any]]:
        return [user("q") | fields, said("Yes.") | fields, user("r")]

    assert parse_input(None, items(id="msg_2", status="incomplete")) == parse_input(None, items())


def test_a_last_answer_is_to_be_continued_to_its_last_blank():
    begun = [user("q"), said("Once upon ")]
    assert parse_input(None, begun)[-1].content == "Once upon "
    assert parse_input(None, [*begun, call()])[-1].content == "Once upon"


@given(st.text())
def test_sealed_reasoning_is_read_again(text: str):
    text = text.encode(errors="replace").decode().strip()
    read = parse_input(None, [THOUGHT | {"encrypted_content": seal(text)}, said("Yes.")])
    assert read[0].reasoning == (text or None)


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (None, "input"),
        ([], "input"),
        (7, "input"),
        (["hi"], "input.0"),
        ([{"role": "robot", "content": "x"}], "input.0.role"),
        ([{"role": "user", "content": 7}], "input.0.content"),
        ([{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}], "input.0.content.0"),
        ([{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}], "input.0.content.0"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "input.0.content.0"),
        ([user("q"), {"type": "computer_call"}], "input.1.type"),
        ([user("q"), {"type": "compaction", "encrypted_content": "x"}], "input.1.type"),
        ([user("q"), {"type": ["x"]}], "input.1.type"),
        ([user("q"), {}], "input.1.type"),
        ([user("q"), {"type": "item_reference", "id": "msg_1"}], "input.1"),
        ([user("q"), call(name="")], "input.1.name"),
        ([user("q"), call(arguments=[])], "input.1.arguments"),  # type: ignore[arg-type]
        ([user("q"), call(), result([{"type": "input_image"}])], "input.2.output.0"),
        ([user("q"), {"type": "custom_tool_call", "name": "x"}], "input.1.input"),
        ([user("q"), {"type": "local_shell_call", "call_id": "c"}], "input.1.action"),
        ([user("q"), {"type": "shell_call_output", "call_id": "c", "output": ["x"]}], "input.1.output.0"),
        ([user("q"), {"type": "reasoning", "content": "x"}], "input.1.content"),
        ([user("q"), {"type": "reasoning", "summary": [{"text": 1}]}], "input.1.summary.0.text"),
    ],
)
def test_a_wrong_item_is_named(value: Any, param: str):
    with pytest.raises(RequestError) as refused:
        parse_input(None, value)
    assert refused.value.param == param
    assert str(refused.value).startswith(param)


FUNCTION = {
    "type": "function",
    "name": "run",
    "description": "Runs.",
    "parameters": {"type": "object"},
    "strict": None,
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: x"}


def test_functions_are_those_of_a_chat():
    chat = chat_tools([{"type": "function", "function": {k: v for k, v in FUNCTION.items() if k != "type"}}])
    assert parse_tools([FUNCTION]).functions == chat
    assert parse_tools([FUNCTION]).offered == {"run": Offered("function", "run")}


def test_a_namespaces_tools_are_offered_with_its_name():
    tools = parse_tools([{"type": "namespace", "name": "agents", "description": "d", "tools": [FUNCTION]}])
    assert tools.functions[0]["function"]["name"] == "agents__run"
    assert tools.offered == {"agents__run": Offered("function", "run", "agents")}


def test_a_free_form_tool_is_offered_as_a_function_of_one_text():
    tools = parse_tools([{"type": "custom", "name": "apply_patch", "description": "Patches.", "format": GRAMMAR}])
    function = tools.functions[0]["function"]
    assert function["parameters"]["required"] == ["input"]
    assert function["description"].startswith("Patches.")
    assert function["description"].endswith("lark grammar:\nstart: x")
    assert tools.offered == {"apply_patch": Offered("custom", "apply_patch")}


@pytest.mark.parametrize("kind", ["web_search", "local_shell", "image_generation", "mcp", "tool_search"])
def test_tools_that_only_a_service_can_run_are_left_out_and_repeated(kind: str):
    tools = parse_tools([{"type": kind}, FUNCTION])
    assert [tool["function"]["name"] for tool in tools.functions] == ["run"]
    assert tools.echoed == ({"type": kind}, FUNCTION)


def test_tools_in_canonical_order_do_not_depend_on_the_clients():
    other = {"name": "b", "type": "function", "parameters": {"type": "object"}}
    one, two = (parse_tools(tools, in_order=True).functions for tools in ([FUNCTION, other], [other, FUNCTION]))
    assert one == two


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "tools"),
        (["x"], "tools.0"),
        ([{"type": "function"}], "tools.0.name"),
        ([FUNCTION | {"parameters": 7}], "tools.0.parameters"),
        ([{"type": "custom"}], "tools.0.name"),
        ([{"type": "namespace", "tools": []}], "tools.0.name"),
        ([{"type": "namespace", "name": "n"}], "tools.0.tools"),
        ([{"type": "namespace", "name": "n", "tools": [{}]}], "tools.0.tools.0.name"),
    ],
)
def test_a_wrong_tool_is_named(value: Any, param: str):
    with pytest.raises(RequestError) as refused:
        parse_tools(value)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("previous_response_id", "resp_1", "previous_response_id"),
        ("conversation", {"id": "conv_1"}, "conversation"),
        ("prompt", {"id": "pmpt_1"}, "prompt"),
        ("background", True, "background"),
        ("text", {"format": {"type": "json_schema", "name": "x", "schema": 3}}, "text.format.schema"),
        ("text", {"format": {"type": "xml"}}, "text.format.type"),
        ("n", 2, "n"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("temperature", "hot", "temperature"),
        ("top_p", 2, "top_p"),
        ("instructions", ["x"], "instructions"),
        ("reasoning", "high", "reasoning"),
        ("reasoning", {"effort": 3}, "reasoning.effort"),
        ("include", "x", "include"),
        ("truncation", "some", "truncation"),
        ("metadata", {"a": 1}, "metadata.a"),
        ("top_logprobs", 21, "top_logprobs"),
        ("stream", "yes", "stream"),
    ],
)
def test_a_field_that_cannot_be_served_is_named(field: str, value: Any, param: str):
    with pytest.raises(RequestError) as refused:
        parse_params({field: value})
    assert refused.value.param == param


def test_fields_that_change_nothing_here_are_taken():
    taken = {
        "store": True,
        "previous_response_id": None,
        "background": False,
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "client_metadata": {"a": {"b": 1}},
        "stream_options": {"include_obfuscation": False},
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "reasoning": {"effort": None, "summary": "auto", "context": "auto"},
        "truncation": "auto",
        "service_tier": "priority",
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
    }
    params = parse_params(taken)
    assert params.seals_reasoning
    assert params.summary == "auto"
    assert params.asked_logprobs is None
