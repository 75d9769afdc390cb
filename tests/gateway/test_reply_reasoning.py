"""Reasoning taken out of answers, and the channels and parts that answers are sent in."""

from __future__ import annotations

import pytest
from reply_rig import ONE, WRITTEN, calls, read

from gateway.reply import Reply
from gateway.reply_formats import THINKINGS


@pytest.mark.parametrize("thinking", ["think", "gemma4", "mistral", "seed", "apertus", "cohere"])
def test_reasoning_is_taken_out(thinking: str):
    marks = THINKINGS[thinking]
    text = f"{marks.open}\nI wonder.\n\nYes.\n{marks.close}\n\nThe answer. "
    assert read(text, "hermes", thinking) == Reply("The answer. ", "I wonder.\n\nYes.")
    opened = text.removeprefix(marks.open)
    assert read(opened, None, thinking, inside=True) == Reply("The answer. ", "I wonder.\n\nYes.")
    assert read(text, None, thinking, inside=True) == Reply("The answer. ", "I wonder.\n\nYes.")


def test_reasoning_may_be_empty_or_never_end():
    assert read("<think>\n\n</think>\n\nYes.", "hermes", "think") == Reply("Yes.")
    assert read("I wonder", "hermes", "think", inside=True) == Reply("", "I wonder")
    assert read("", "hermes", "think", inside=True) == Reply()


def test_reasoning_in_the_middle_of_text_is_text():
    assert read("The tag <think> opens it.", "hermes", "think") == Reply("The tag <think> opens it.")


def test_reasoning_between_calls_is_joined():
    text = f"<think>one</think>{WRITTEN['hermes']}<think>two</think>{WRITTEN['hermes']}done"
    reply = read(text, "hermes", "think")
    assert (reply.reasoning, reply.text, calls(reply)) == ("one\n\ntwo", "done", ONE * 2)


def test_a_call_ends_reasoning_that_was_left_open():
    reply = read(f"I must look.\n{WRITTEN['hermes']}", "hermes", "think", inside=True)
    assert (reply.reasoning, reply.text, calls(reply)) == ("I must look.", "", ONE)
    reply = read("I could use <tool_call> here.</think>Yes.", "hermes", "think", inside=True)
    assert reply == Reply("Yes.", "I could use <tool_call> here.")


def test_blanks_before_an_answer_that_goes_on_are_kept():
    for notation in (None, "hermes", "llama", "qwen_xml"):
        assert read(" and so on", notation, "think") == Reply(" and so on")


def test_channels_of_harmony():
    text = (
        "<|channel|>analysis<|message|>I wonder.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait."
        '<|end|><|start|>assistant<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"n": 1}'
    )
    reply = read(text, "harmony", "harmony")
    assert (reply.reasoning, reply.text, calls(reply)) == ("I wonder.", "Wait.", [("lookup", {"n": 1})])
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    assert read(text, "harmony", "harmony") == Reply("Yes.", "Hm.")


MUSE_HEADS = (
    " to=self<|message|>Hm.<|eom|><|start|>assistant",
    f" to=lookup<|message|>{WRITTEN['muse']}",
    f"<|eom|><|start|>assistant to=lookup<|message|>{WRITTEN['muse']}",
    "<|eom|><|start|>assistant to=user<|message|> Found.",
)


def test_parts_have_headers_that_are_no_text():
    reply = read("".join(MUSE_HEADS), "muse", "muse")
    assert (reply.reasoning, reply.text, calls(reply)) == ("Hm.", "Found.", ONE * 2)
    assert read(" to=user<|message|>Write to=x or to=<b>.", "muse", "muse") == Reply("Write to=x or to=<b>.")
    assert read(" to=nobody knows", "muse", "muse") == Reply(" to=nobody knows")
