"""`allowed_tools`: the prompt keeps all tools, and only those allowed can be called."""

from __future__ import annotations

from typing import Any

import pytest
from fake_worker import FakeWorker, say
from served import Served
from test_forced_calls import CHAT, FUNCTION, JSON_SCHEMA, JSON_TEXT, RESPONSES, fits
from test_tool_calls import ASKED, LOOKUP, ONE

from gateway.tool_choice import ToolChoice, tool_choice
from protocol.errors import RequestError

OTHER = ONE.replace('"lookup"', '"other"')
OTHERS = LOOKUP | {"function": LOOKUP["function"] | {"name": "other"}}
Choice = dict[str, Any]


def nested(*names: str, mode: str = "auto") -> Choice:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def flat(*names: str, mode: str = "auto") -> Choice:
    return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": name} for name in names]}


APIS = pytest.mark.parametrize(
    ("path", "body", "allowed", "where"),
    [
        (CHAT, {"messages": ASKED, "tools": [LOOKUP, OTHERS]}, nested, "tool_choice.allowed_tools"),
        (RESPONSES, {"input": "hi", "tools": [FUNCTION, FUNCTION | {"name": "other"}]}, flat, "tool_choice"),
    ],
    ids=["chat", "responses"],
)


@APIS
@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_can_be_called_and_the_prompt_has_all(
    served: Served, worker: FakeWorker, path: str, body: Choice, allowed: Any, where: str, mode: str
):
    worker.script = say(ONE)
    assert (await served.post(path, body)).status == 200
    for names, fitting in ((["lookup"], (True, False)), (["other", "lookup"], (True, True))):
        choice = allowed(*names, mode=mode)
        response = await served.post(path, body | {"tool_choice": choice})
        assert response.status == 200
        answer = await response.json()
        assert path == CHAT or answer["tool_choice"] == choice
        assert worker.requests[-1].token_ids == worker.requests[0].token_ids
        assert (fits(worker, ONE), fits(worker, OTHER)) == fitting
        assert fits(worker, "I cannot.") == fits(worker, f"I look.\n{ONE}") == (mode == "auto")


@APIS
async def test_none_allowed_is_text_alone_and_none_cannot_be_required(
    served: Served, worker: FakeWorker, path: str, body: Choice, allowed: Any, where: str
):
    worker.script = say("I cannot.")
    assert (await served.post(path, body | {"tool_choice": allowed()})).status == 200
    refused = await served.post(path, body | {"tool_choice": allowed(mode="required")})
    assert (refused.status, (await refused.json())["error"]["param"]) == (400, "tool_choice")
    assert len(worker.requests) == 1


@APIS
async def test_what_is_wrong_is_named(
    served: Served, worker: FakeWorker, path: str, body: Choice, allowed: Any, where: str
):
    wrong: list[tuple[Choice, str]] = [
        (allowed("lookup", "missing"), f"{where}.tools.1"),
        (allowed("lookup", mode="none"), f"{where}.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "allowed_tools": []}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["lookup"]}, "tool_choice.tools.0"),
        ({"type": "web_search"}, "tool_choice"),
        ({"type": "custom", "custom": {"name": "missing"}}, "tool_choice"),
    ]
    for choice, param in wrong:
        response = await served.post(path, body | {"tool_choice": choice})
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)
    assert not worker.requests


async def test_json_may_be_left_for_an_allowed_call_only(served: Served, worker: FakeWorker):
    worker.script = say(JSON_TEXT)
    body = {"messages": ASKED, "tools": [LOOKUP, OTHERS], "response_format": JSON_SCHEMA}
    await served.post(CHAT, body | {"tool_choice": nested("lookup")})
    assert (fits(worker, JSON_TEXT), fits(worker, ONE), fits(worker, OTHER)) == (True, True, False)
    await served.post(CHAT, body | {"tool_choice": nested()})
    assert (fits(worker, JSON_TEXT), fits(worker, ONE)) == (True, False)


async def test_where_calls_cannot_be_held_to_those_allowed_they_are_refused(served: Served, worker: FakeWorker):
    begun = [*ASKED, {"role": "assistant", "content": "I"}]
    body = {"messages": begun, "tools": [LOOKUP, OTHERS], "tool_choice": nested("lookup")}
    response = await served.post(CHAT, body)
    assert (response.status, (await response.json())["error"]["param"]) == (400, "tool_choice")
    assert not worker.requests


TOOLS = [
    {"type": "function", "name": "a"},
    {"type": "custom", "name": "b"},
    {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "a"}, {"type": "web_search"}]},
    {"type": "web_search"},
    {"type": "mcp", "server_label": "wiki"},
    "nonsense",
]


@pytest.mark.parametrize(
    ("named", "functions"),
    [
        ([{"type": "function", "name": "a"}, {"type": "custom", "name": "b"}], {"a", "b"}),
        ([{"name": "a"}], {"a"}),
        ([{"type": "namespace", "name": "files"}], {"files__a"}),
        ([{"type": "function", "name": "a", "namespace": "files"}], {"files__a"}),
        ([{"type": "function", "name": "files__a"}], {"files__a"}),
        ([{"type": "web_search"}, {"type": "mcp", "server_label": "wiki"}], set()),
    ],
)
def test_tools_are_named_as_the_request_has_them(named: list[Choice], functions: set[str]):
    choice = tool_choice({"type": "allowed_tools", "mode": "auto", "tools": named}, TOOLS)
    assert choice == ToolChoice(calls=bool(functions), allowed=frozenset(functions))


@pytest.mark.parametrize(
    "named",
    [
        {"type": "function", "name": "b"},
        {"type": "mcp", "server_label": "other"},
        {"type": "image_generation"},
        {"type": "function"},
        {"type": ["function"], "name": "a"},
        None,
    ],
)
def test_others_are_none_of_them(named: Any):
    with pytest.raises(RequestError, match="is none of the request's tools") as refused:
        tool_choice({"type": "allowed_tools", "mode": "auto", "tools": [named]}, TOOLS)
    assert refused.value.param == "tool_choice.tools.0"
