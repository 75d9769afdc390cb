"""Whatever a model says, in whatever pieces it comes, the events keep to the grammar and add up to one response."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from responses_grammar import check_response, check_stream, read_events, text_of

from gateway.detokenizer import TokenBytes
from gateway.prompts import PromptMaker
from gateway.reply import CallArguments, CallEnd, CallStart, Part, ReasoningDelta, TextDelta
from gateway.responses_answers import ResponsesAnswer
from gateway.responses_input import parse_input
from gateway.responses_params import parse_params
from gateway.responses_tools import parse_tools
from gateway.turn import Delta, ScoredToken
from protocol.errors import CapacityError, RequestError, ServeError, WorkerUnavailable
from protocol.messages import Accepted, Completed, TokenLogprob

TOOLS = [
    {"type": "function", "name": "run", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "agents", "description": "d", "tools": [{"type": "function", "name": "spawn"}]},
    {"type": "web_search"},
]


@dataclass
class Ended:
    """As much of a turn as an answer looks at."""

    prompt_tokens: int = 40
    completion_tokens: int = 20
    reasoning_tokens: int = 5
    prompts: int = 1
    accepted: dict[int, Accepted] = field(default_factory=dict)
    completed: dict[int, Completed] = field(
        default_factory=lambda: {0: Completed("e", "r", "partial", 7, "diverged", 40, 20, 0.1, 0.2, 0.3)}
    )


def answer(maker: PromptMaker | None = None, **fields: Any) -> ResponsesAnswer:
    tokens = maker.token_bytes if maker else TokenBytes.__new__(TokenBytes)
    return ResponsesAnswer("r1", "tiny", parse_params(fields), parse_tools(TOOLS), tokens)


def stream(deltas: list[Delta], made: ResponsesAnswer | None = None) -> dict[str, Any]:
    """The response at the end of a stream whose grammar has been checked."""
    made = made or answer()
    turn: Any = Ended()
    raw = made.opening(turn) + b"".join(made.events([delta]) for delta in deltas) + made.closing(turn)
    return check_stream(read_events(raw.decode().split("\n"))[0])


def deltas(*groups: list[Part], reason: str = "stop") -> list[Delta]:
    if reason == "stop" and any(isinstance(part, CallStart) for group in groups for part in group):
        reason = "tool_calls"
    ends: list[str | None] = [None] * (len(groups) - 1) + [reason]
    return [Delta(0, "", tuple(group), (), end) for group, end in zip(groups, ends, strict=True)]


def call(name: str, *fragments: str, index: int = 0) -> list[Part]:
    pieces = [CallArguments(index, fragment) for fragment in fragments]
    return [CallStart(index, f"call_{index}", name), *pieces, CallEnd(index)]


def shapes(response: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(item["type"], item["status"], text_of(item)) for item in response["output"]]


def test_reasoning_text_and_calls_are_items_in_order():
    got = stream(
        deltas(
            [ReasoningDelta("Hm"), ReasoningDelta(".")],
            [TextDelta("Let "), TextDelta("me.")],
            call("run", '{"a":', " 1}"),
            call("run", "{}", index=1),
            reason="tool_calls",
        )
    )
    assert shapes(got) == [
        ("reasoning", "completed", "Hm."),
        ("message", "completed", "Let me."),
        ("function_call", "completed", '{"a": 1}'),
        ("function_call", "completed", "{}"),
    ]
    assert [item["call_id"] for item in got["output"][2:]] == ["call_0", "call_1"]
    assert (got["status"], got["usage"]["output_tokens_details"]) == ("completed", {"reasoning_tokens": 5})


def test_an_empty_answer_is_an_empty_message():
    assert shapes(stream(deltas([]))) == [("message", "completed", "")]


@pytest.mark.parametrize(
    ("last", "shape"),
    [
        ([TextDelta("Once")], ("message", "incomplete", "Once")),
        ([ReasoningDelta("Hm")], ("reasoning", "incomplete", "Hm")),
        (call("run", '{"a'), ("function_call", "incomplete", '{"a')),
        ([], ("message", "incomplete", "")),
    ],
)
def test_an_answer_that_was_cut_off_says_so(last: list[Part], shape: tuple[str, str, str]):
    got = stream(deltas(last, reason="length"))
    assert got["status"] == "incomplete"
    assert shapes(got) == [shape]


def test_a_call_that_a_stop_string_cut_off_is_incomplete():
    half = [Delta(0, "", tuple(call("run", '{"a"')), (), "stop")]
    got = stream(half)
    assert shapes(got) == [("function_call", "incomplete", '{"a"')]
    assert got["status"] == "completed"


def test_a_call_that_was_complete_before_the_cut_stays_complete():
    got = stream(deltas(call("run", "{}"), [TextDelta("And")], reason="length"))
    assert [status for _, status, _ in shapes(got)] == ["completed", "incomplete"]


def test_a_summary_is_told_where_one_was_asked_for_and_reasoning_can_be_sealed():
    said = deltas([ReasoningDelta("Hm."), TextDelta("Yes.")])
    [plain, _] = stream(said)["output"]
    assert plain["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert plain["summary"] == []
    assert "encrypted_content" not in plain
    asked = answer(reasoning={"summary": "auto"}, include=["reasoning.encrypted_content"])
    [summed, _] = stream(said, asked)["output"]
    assert summed["summary"] == [{"type": "summary_text", "text": "Hm."}]
    assert "content" not in summed
    bare = summed | {"summary": []}
    for echoed in (plain, summed, bare):
        [message] = parse_input(None, [echoed, {"role": "assistant", "content": "Yes."}])
        assert message.reasoning == "Hm."


def test_calls_carry_the_clients_own_names():
    got = stream(deltas(call("agents__spawn", "{}"), call("unheard_of", "{}", index=1)))
    first, second = got["output"]
    assert (first["name"], first["namespace"]) == ("spawn", "agents")
    assert second["name"] == "unheard_of"
    assert "namespace" not in second
    [message] = parse_input(None, got["output"])
    assert [each.name for each in message.tool_calls] == ["agents__spawn", "unheard_of"]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [('{"input": "*** Begin\\n"}', "*** Begin\n"), ('{"input": 7}', '{"input": 7}'), ('{"inp', '{"inp')],
)
def test_a_free_form_call_has_its_input_as_text(arguments: str, given: str):
    got = stream(deltas(call("patch", arguments[:5], arguments[5:])))
    [item] = got["output"]
    assert (item["type"], item["input"]) == ("custom_tool_call", given)


def test_log_probabilities_go_with_the_text(maker: PromptMaker):
    def scored(at: int, token: int) -> ScoredToken:
        return ScoredToken(at, TokenLogprob(token, -0.5, ((token, -0.5), (token + 1, -2.0))))

    made = answer(maker, include=["message.output_text.logprobs"], top_logprobs=2)
    got = stream(
        [
            Delta(0, "<", (ReasoningDelta("Hm"),), (scored(0, 40),)),
            Delta(0, "a", (), (scored(0, 50),)),  # held back
            Delta(0, "b", (TextDelta("ab"),), (scored(1, 51),)),
            Delta(0, "", (), (scored(2, 52),), "stop"),
        ],
        made,
    )
    told = got["output"][1]["content"][0]["logprobs"]
    assert [entry["bytes"] for entry in told] == [list(maker.token_bytes.spelled(token)) for token in (50, 51, 52)]
    assert [len(entry["top_logprobs"]) for entry in told] == [2, 2, 2]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CapacityError("no room"), "rate_limit_exceeded"),
        (WorkerUnavailable("gone"), "server_error"),
        (ServeError("oh"), "server_error"),
        (RequestError("bad"), "invalid_prompt"),
        (RequestError("long", code="context_length_exceeded"), "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("said", [[], [TextDelta("On")], call("patch", "{}")[:2]])
def test_a_stream_that_breaks_off_fails_and_keeps_what_was_said(error: ServeError, code: str, said: list[Part]):
    made, turn = answer(), Ended()
    raw = made.opening(turn) + made.events([Delta(0, "", tuple(said))]) + made.broken(error)  # type: ignore[arg-type]
    events, _ = read_events(raw.decode().split("\n"))
    if code == "context_length_exceeded":  # the official client's model does not list it, but clients look for it
        assert events[-1]["response"]["error"]["code"] == code
        return
    got = check_stream(events)
    assert got["error"]["code"] == code
    assert [item["status"] for item in got["output"]] == ["incomplete"] * bool(said)


def test_the_response_repeats_what_was_asked():
    asked = {
        "instructions": "Be brief.",
        "max_output_tokens": 30,
        "temperature": 0.0,
        "top_p": 0.5,
        "metadata": {"a": "b"},
        "user": "u",
        "prompt_cache_key": "k",
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": None},
    }
    got = stream(deltas([TextDelta("Yes.")]), answer(**asked, store=True, truncation="auto"))
    assert {name: got[name] for name in asked} == asked
    assert (got["store"], got["truncation"], got["previous_response_id"]) == (False, "disabled", None)
    assert [tool["type"] for tool in got["tools"]] == ["function", "custom", "namespace", "web_search"]
    assert got["prefixd"]["outcome"] == "partial"
    assert got["usage"]["input_tokens_details"]["cached_tokens"] == 7


_TEXTS = st.text(min_size=1, max_size=6)
_CALLS = st.tuples(st.sampled_from(["run", "patch", "agents__spawn", "x"]), st.lists(_TEXTS, max_size=3))
_PIECES = st.one_of(_TEXTS.map(TextDelta), _TEXTS.map(ReasoningDelta), _CALLS)


@given(st.lists(_PIECES, max_size=8), st.lists(st.integers(0, 30)), st.sampled_from(["stop", "length"]))
def test_any_answer_in_any_pieces(pieces: list[Any], cuts: list[int], reason: str):
    parts: list[Part] = []
    calls = 0
    for piece in pieces:
        if isinstance(piece, tuple):
            parts += call(piece[0], *piece[1], index=calls)
            calls += 1
        else:
            parts.append(piece)
    edges = sorted({0, len(parts), *(cut for cut in cuts if cut < len(parts))})
    groups = [parts[a:b] for a, b in pairwise(edges)] or [parts]
    got = stream(deltas(*groups, reason=reason))
    turn: Any = Ended()
    whole = answer().whole(deltas(*groups, reason=reason), turn)
    check_response(whole)
    assert {**whole, "created_at": 0, "completed_at": 0} == {**got, "created_at": 0, "completed_at": 0}
    texts = (
        "".join(part.text for part in parts if isinstance(part, kind)) for kind in (TextDelta, ReasoningDelta)
    )
    kinds = ("message", "reasoning")
    for kind, text in zip(kinds, texts, strict=True):
        assert "".join(text_of(item) for item in got["output"] if item["type"] == kind) == text
