"""Forced answers of models whose answers have parts: reasoning may come first, and each part has its own header."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_answer_grammar import accepts
from test_reply_templates import LARGE, NAMES, TOOL, maker, needs_templates

from gateway.canonical import parse_messages
from gateway.config import GatewaySettings
from gateway.conversation import Conversation
from gateway.grammar import Demand
from gateway.reply import Reply
from gateway.reply_reader import ReplyReaders

HARMONY, SOLAR, COHERE = "openai-gpt-oss-120b", "upstage-Solar-Open-100B", "Cohere2MoE"
MUSE, GIGACHAT = "muse-glimmer", "GigaChat3-10B-A1.8B"
ASKED = parse_messages([{"role": "user", "content": "Look it up."}])
ARGUMENTS = {"q": "größe", "n": 3}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
SOLAR_CALL = f"<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>lookup<|tool_call:args|>{JSON}<|tool_call:end|>"
MUSE_CALL = """
<atem:invoke name="lookup">
<atem:parameter name="q">größe</atem:parameter>
<atem:parameter name="n">3</atem:parameter>
</atem:invoke>
"""
CALLS = {
    HARMONY: [
        f" to=functions.lookup<|channel|>commentary json<|message|>{JSON}",
        f"<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{JSON}",
    ],
    SOLAR: [f"<|tool_calls|>{SOLAR_CALL}", f"<|tool_calls|>{SOLAR_CALL}{SOLAR_CALL}"],
    MUSE: [f" to=lookup<|message|><atem:function_calls>{MUSE_CALL}</atem:function_calls>"],
    GIGACHAT: [f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "lookup", "arguments": {JSON}}}'],
    "gemma": ['<|tool_call>call:lookup{q:<|"|>größe<|"|>,n:3}<tool_call|>'],
}
THOUGHTS = {
    HARMONY: "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant",
    SOLAR: "<|think|>I look.<|end|><|begin|>assistant",
    MUSE: " to=self<|message|>I look.<|eom|><|start|>assistant",
    "gemma": "<|channel>thought\nI look.\n<channel|>",
}
TEXTS = {
    HARMONY: "<|channel|>final<|message|>",
    SOLAR: "<|content|>",
    COHERE: "<|START_TEXT|>",
    MUSE: " to=user<|message|>",
    "gemma": "",
}
SCHEMA: dict[str, Any] = TOOL["function"]["parameters"]  # type: ignore[index]


def answers(name: str, demand: Demand, **wanted: Any) -> tuple[str, Any]:
    """The grammar of a model's answers to a demand, and a function that reads them."""
    if name not in (*NAMES, "gemma"):
        pytest.skip("the shared data folder is not here")
    made = maker(name)
    conversation = Conversation(ASKED, (TOOL,))
    prompt = made.chat(conversation, LARGE)
    readers = ReplyReaders(made, GatewaySettings())
    grammar = readers.grammar(conversation, prompt, demand, calls=True, **wanted)
    assert grammar is not None

    def read(text: str) -> Reply:
        parser = readers.reader(conversation, prompt).parser()
        return Reply.of([*parser.feed(text), *parser.finish()])

    return grammar, read


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_forced_with_and_without_reasoning_before_it(name: str):
    grammar, read = answers(name, Demand("tool_choice"), many=True)
    for call in CALLS[name]:
        for thought in {"", THOUGHTS.get(name, "")}:
            assert accepts(grammar, thought + call), thought + call
            reply = read(thought + call)
            assert {(call.name, str(call.value())) for call in reply.calls} == {("lookup", str(ARGUMENTS))}
            assert (reply.text, reply.reasoning) == ("", "I look." if thought else "")
    thought = THOUGHTS.get(name, "")
    for other in ("I cannot.", thought, thought + "No.", TEXTS.get(name, "") + "No."):
        assert not accepts(grammar, other)


@pytest.mark.parametrize("name", CALLS)
def test_one_call_is_all_where_no_more_are_wanted(name: str):
    grammar, read = answers(name, Demand("tool_choice"))
    assert [accepts(grammar, call) for call in CALLS[name]] == [len(read(call).calls) == 1 for call in CALLS[name]]


@pytest.mark.parametrize("name", TEXTS)
def test_json_is_forced_where_text_has_its_place(name: str):
    grammar, read = answers(name, Demand("response_format", SCHEMA))
    text = TEXTS[name] + JSON
    closed = "Hm.<|END_THINKING|>" if name == COHERE else ""  # the prompt has begun it
    assert accepts(grammar, closed + text)
    assert read(closed + text).text == JSON
    assert not accepts(grammar, closed + TEXTS[name] + "No.")
    for call in CALLS.get(name, ())[:1]:
        assert accepts(grammar, THOUGHTS[name] + call)


@needs_templates
def test_text_without_its_header_is_none():
    grammar, _ = answers(HARMONY, Demand("response_format", SCHEMA))
    assert not accepts(grammar, JSON)
