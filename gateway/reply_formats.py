"""The notations that models have for calls and for reasoning, by the names under which they can be set."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.reply_call_gemma import GemmaNotation
from gateway.reply_call_json import JsonNotation
from gateway.reply_call_named import NamedNotation
from gateway.reply_call_tags import TagNotation
from gateway.reply_calls import Notation
from gateway.reply_parser import Thinking

# The first one that reads what the template writes is taken: those that take more for a call come later.
NOTATIONS: Mapping[str, Notation] = {
    "qwen_xml": TagNotation(
        "<function=",
        ">",
        "<parameter=",
        ">",
        "</parameter>",
        "</function>",
        section_open="<tool_call>",
        section_end="</tool_call>",
        padded=True,
    ),
    "seed": TagNotation(
        "<function=",
        ">",
        "<parameter=",
        ">",
        "</parameter>",
        "</function>",
        section_open="<seed:tool_call>",
        section_end="</seed:tool_call>",
    ),
    "muse": TagNotation(
        '<atem:invoke name="',
        '">',
        '<atem:parameter name="',
        '">',
        "</atem:parameter>",
        "</atem:invoke>",
        section_open="<atem:function_calls>",
        section_end="</atem:function_calls>",
    ),
    "minicpm": TagNotation('<function name="', '">', '<param name="', '">', "</param>", "</function>", cdata=True),
    "glm": TagNotation(
        "<tool_call>", "\n", "<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", value="<arg_value>"
    ),
    "gemma4": GemmaNotation(),
    "mistral": NamedNotation("[TOOL_CALLS]", r"(.+?)(?:\[CALL_ID\].*)?", "[ARGS]", lists=True),
    "kimi": NamedNotation(
        "<|tool_call_begin|>",
        r"(?:functions\.)?(.+?)(?::\d+)?",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v3": NamedNotation(
        "<｜tool▁call▁begin｜>",
        r"\w+<｜tool▁sep｜>(.+)",
        "```json",
        "```<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v3_1": NamedNotation(
        "<｜tool▁call▁begin｜>",
        r"(.+)",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
    ),
    "solar": NamedNotation(
        "<|tool_call:begin|>",
        r".*<\|tool_call:name\|>(.+)",
        "<|tool_call:args|>",
        "<|tool_call:end|>",
        "<|tool_calls|>",
    ),
    "functionary": NamedNotation("<function=", r"(.+)", ">", "</function>"),
    "harmony": NamedNotation(
        "to=functions.",
        r"([^<\s]+).*",
        "<|message|>",
        also=(("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),),
    ),
    "apertus": JsonNotation(("<|tools_prefix|>",), ("<|tools_suffix|>",), keyed=True),
    "cohere": JsonNotation(("<|START_ACTION|>",), ("<|END_ACTION|>",)),
    "command_r": JsonNotation(("Action:\n```json",), ("```",)),
    "nemotron": JsonNotation(("<TOOLCALL>",), ("</TOOLCALL>",)),
    "tool_calls": JsonNotation(("<tool_calls>",), ("</tool_calls>",)),
    "functools": JsonNotation(("functools[",)),
    "gigachat": JsonNotation(("function call<|role_sep|>\n",)),
    "hermes": JsonNotation(("<tool_call>", "<|tool_call|>"), ("</tool_call>",)),
    "llama": JsonNotation(("<|python_tag|>", "<tool_call>"), ("</tool_call>",), bare=True),
}

THINKINGS: Mapping[str, Thinking] = {
    "think": Thinking("<think>", "</think>"),
    "seed": Thinking("<seed:think>", "</seed:think>"),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "gemma4": Thinking("<|channel>thought\n", "<channel|>"),
    "cohere": Thinking(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    "apertus": Thinking("<|inner_prefix|>", "<|inner_suffix|>"),
    "solar": Thinking("<|think|>", "<|end|>", ("<|begin|>assistant", "<|content|>", "<|end|>"), anywhere=True),
    "muse": Thinking(
        " to=self<|message|>",
        "<|eom|>",
        ("<|start|>assistant", " to=user<|message|>", "<|eom|>"),
        anywhere=True,
        header=(" to=", "<|message|>"),
    ),
    "harmony": Thinking(
        "<|channel|>analysis<|message|>",
        "<|end|>",
        (
            "<|start|>assistant",
            "<|channel|>final<|message|>",
            "<|channel|>commentary<|message|>",
            "<|channel|>commentary ",
            "<|end|>",
        ),
        anywhere=True,
    ),
}


def markers(notation: Notation | None, thinking: Thinking | None, end: str = "") -> frozenset[str]:
    """All strings that mean something to a parser with these."""
    found: set[str] = {end} if end else set()
    if notation is not None:
        found |= {*notation.openers, *notation.closers, *notation.inner}
    if thinking is not None:
        found |= {thinking.open, thinking.close, *thinking.silent, *filter(None, thinking.header)}
    return frozenset(found)
