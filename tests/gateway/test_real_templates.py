"""Boundaries in the chat templates of released models, for conversations of several shapes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from jinja2.exceptions import TemplateError

from gateway.conversation import Conversation, Message, ToolCall
from gateway.renderer import PromptText, Renderer
from gateway.template import ChatTemplate
from gateway.template_env import build_environment
from gateway.template_probe import learn

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
NAMES = sorted(path.name for path in FOLDER.glob("*.jinja")) if FOLDER.is_dir() else []
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}

# Text that a template writes once no message follows, and that its loop writes again with the next message: a
# boundary lies before it, in the short conversation and in the longer one alike.
CLOSERS = {
    "Apertus-8B-Instruct.jinja": "]",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B.jinja": "<｜tool▁outputs▁end｜>",
    "deepseek-ai-DeepSeek-V3.jinja": "<｜tool▁outputs▁end｜>",
    "llama-cpp-deepseek-r1.jinja": "<｜tool▁outputs▁end｜><｜end▁of▁sentence｜>",
    "fireworks-ai-llama-3-firefunction-v2.jinja": "<|start_header_id|>assistant<|end_header_id|>\n\n",
}

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}},
    },
}
SYSTEM = Message("system", "Be brief. ")


def user(number: int) -> Message:
    return Message("user", f"  user {number} says\nhello ")


def answer(number: int) -> Message:
    return Message("assistant", f"answer {number}\n\nwith lines")


def calls(*numbers: int) -> Message:
    return Message(
        "assistant", "", tuple(ToolCall(f"call_{n}", "lookup", {"q": f"v{n}", "n": n}) for n in numbers)
    )


def result(number: int) -> Message:
    return Message("tool", f'{{"result": {number}}}', tool_call_id=f"call_{number}")


SHAPES = {
    "one": Conversation((user(0),)),
    "plain": Conversation((user(0), answer(1), user(2), answer(3), user(4))),
    "system": Conversation((SYSTEM, user(0), answer(1), user(2), answer(3), user(4))),
    "tools": Conversation((user(0), calls(1), result(1), answer(2), user(3), calls(4), result(4)), (TOOL,)),
    "system and tools": Conversation((SYSTEM, user(0), calls(1), result(1), answer(2), user(3)), (TOOL,)),
    "parallel": Conversation((user(0), calls(1, 2), result(1), result(2), answer(2), user(3)), (TOOL,)),
    "system inside": Conversation((SYSTEM, user(0), answer(1), SYSTEM, user(2))),
    "two users": Conversation((user(0), user(1), answer(2), user(3))),
    "thinking": Conversation(
        (
            user(0),
            Message("assistant", "<think>\nhm\n</think>\n\nyes"),
            user(1),
            Message("assistant", "ok", reasoning="because"),
            user(2),
        )
    ),
}
needs_templates = pytest.mark.skipif(not NAMES, reason="the shared data folder is not here")
all_templates = pytest.mark.parametrize("name", NAMES)
all_shapes = pytest.mark.parametrize("shape", SHAPES)


@cache
def renderer(name: str) -> Renderer:
    return learn(ChatTemplate((FOLDER / name).read_text(), TOKENS))


def render(name: str, conversation: Conversation) -> PromptText:
    """Skips what the template itself refuses."""
    try:
        return renderer(name).render(conversation)
    except TemplateError as refusal:
        pytest.skip(f"refused: {refusal.message}")


def prefixes(conversation: Conversation) -> list[Conversation]:
    """The conversations that end before each later answer or message."""
    shorter = [
        replace(conversation, messages=conversation.messages[:count])
        for count in range(1, len(conversation.messages))
    ]
    return [each for each in shorter if not each.continues and each.messages[-1].role != "system"]


@needs_templates
def test_every_template_serves_plain_chats():
    for name in NAMES:
        prompt = renderer(name).render(SHAPES["plain"])
        assert [cut.messages for cut in prompt.cuts][-5:] == [1, 2, 3, 4, 5], name


@needs_templates
def test_every_template_shows_a_call_and_its_result():
    for name in NAMES:
        text = renderer(name).render(SHAPES["tools"]).text
        assert "v1" in text, name
        assert "lookup" in text, name
        assert '"result": 4' in text.replace("\\", ""), name


@all_templates
@all_shapes
def test_reports_change_no_text(name: str, shape: str):
    prompt = render(name, SHAPES[shape])
    made = renderer(name)
    template = build_environment().from_string((FOLDER / name).read_text())
    conversation = SHAPES[shape]
    tools = None if made.habits.tools_as_text else conversation.tools or None
    variables = TOKENS | made.variables(conversation)
    plain = template.render(
        messages=made.messages(conversation),
        tools=tools or made.habits.no_tools,
        add_generation_prompt=True,
        **variables,
    )
    assert prompt.text == plain


@all_templates
@all_shapes
def test_the_last_boundary_counts_every_message_and_precedes_the_generation_suffix(name: str, shape: str):
    conversation = SHAPES[shape]
    prompt = render(name, conversation)
    without = renderer(name).run(conversation, reply=False).text
    assert prompt.cuts[-1].messages == len(conversation.messages)
    assert prompt.text[: prompt.cuts[-1].end] == without[: prompt.cuts[-1].end]
    ends = [cut.end for cut in prompt.cuts]
    assert ends == sorted(set(ends))


@all_templates
@all_shapes
def test_a_longer_conversation_begins_with_the_boundaries_of_a_shorter_one(name: str, shape: str):
    """Digests chain over all positions before them: one that moved would lose every boundary behind it."""
    whole = render(name, SHAPES[shape])
    for shorter in prefixes(SHAPES[shape]):
        try:
            prompt = renderer(name).render(shorter)
        except TemplateError:
            continue
        last = prompt.cuts[-1].end
        if whole.text.startswith(prompt.text[:last]):
            assert [cut.end for cut in whole.cuts if cut.end <= last] == [cut.end for cut in prompt.cuts]


@all_templates
@all_shapes
def test_boundaries_agree_with_prefix_renders(name: str, shape: str):
    whole = render(name, SHAPES[shape])
    positions = {cut.end for cut in whole.cuts}
    for shorter in prefixes(SHAPES[shape]):
        try:
            prefix = renderer(name).run(shorter, reply=False).text
        except TemplateError:
            continue
        if whole.text.startswith(prefix):
            closed = prefix.removesuffix(CLOSERS.get(name, ""))
            assert positions & {len(prefix), len(closed)}


@all_templates
@all_shapes
def test_no_boundary_claims_a_message_that_lies_behind_it(name: str, shape: str):
    conversation = SHAPES[shape]
    prompt = render(name, conversation)
    for index, message in enumerate(conversation.messages):
        text = message.content.strip()
        moved = message.role in renderer(name).habits.misplaced
        if moved or not text or prompt.text.count(text) != 1:
            continue
        at = prompt.text.index(text)
        for cut in prompt.cuts:
            assert (index < cut.messages) == (at < cut.end) or message.role == "system"
            assert at + len(text) <= cut.end or index >= cut.messages


@all_templates
def test_an_answer_to_be_continued_ends_with_its_own_text(name: str):
    conversation = Conversation((user(0), Message("assistant", "The answer is")))
    prompt = render(name, conversation)
    assert prompt.text.endswith("The answer is")
    assert prompt.cuts[-1].messages == 1


@all_templates
def test_a_system_message_alone_has_a_boundary(name: str):
    prompt = render(name, Conversation((SYSTEM,)))
    without = renderer(name).run(Conversation((SYSTEM,)), reply=False).text
    assert not prompt.cuts or without.startswith(prompt.text[: prompt.cuts[-1].end])
