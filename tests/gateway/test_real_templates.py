"""Boundaries in the chat templates of released models, for conversations of several shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from chat_shapes import SHAPES, SYSTEM, prefixes, said, turns, user
from jinja2.exceptions import TemplateError

from gateway.canonical import parse_tools
from gateway.conversation import Conversation, Message
from gateway.renderer import JOINED, PASSING, PromptText, Renderer
from gateway.template import ChatTemplate
from gateway.template_env import build_environment
from gateway.template_probe import learn

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
NAMES = sorted(path.name for path in FOLDER.glob("*.jinja")) if FOLDER.is_dir() else []
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}

needs_templates = pytest.mark.skipif(not NAMES, reason="the shared data folder is not here")
all_templates = pytest.mark.parametrize("name", NAMES)


def all_shapes(test: Callable[[str, str], None]) -> Callable[[str], None]:
    """Every shape in one test: a test each would be thousands."""

    def of_template(name: str) -> None:
        for shape in SHAPES:
            try:
                test(name, shape)
            except Exception as error:
                raise AssertionError(f"in the conversation {shape!r}: {error}") from error

    of_template.__name__ = test.__name__
    return of_template


@cache
def renderer(name: str) -> Renderer:
    return learn(ChatTemplate((FOLDER / name).read_text(), TOKENS))


def render(name: str, conversation: Conversation) -> PromptText:
    return renderer(name).render(conversation)


@needs_templates
def test_every_template_serves_plain_chats():
    for name in NAMES:
        prompt = renderer(name).render(SHAPES["plain"])
        assert all(isinstance(end, int) or end is PASSING for end in prompt.ends), name
        assert len(prompt.cuts) >= 5, name


@needs_templates
def test_every_template_shows_a_call_and_its_result():
    for name in NAMES:
        text = renderer(name).render(SHAPES["tools"]).text
        assert "v1" in text, name
        assert "lookup" in text, name
        assert '"result": 4' in text.replace("\\", ""), name


@needs_templates
@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "required": []}])
def test_every_template_takes_a_tool_without_parameters(parameters: dict[str, object] | None):
    function = {"name": "lookup"} if parameters is None else {"name": "lookup", "parameters": parameters}
    tools = parse_tools([{"type": "function", "function": function}])
    for name in NAMES:
        assert "lookup" in renderer(name).render(Conversation((SYSTEM, user(0)), tools)).text, name


@needs_templates
def test_no_template_drops_a_call_because_of_text_beside_it():
    for name in NAMES:
        text = renderer(name).render(SHAPES["said and called"]).text
        assert all(each in text for each in ("v1", "v4")), name


@all_templates
@all_shapes
def test_no_template_drops_or_moves_what_was_said(name: str, shape: str):
    """A system message in between stands in between, whether the template has a place for it or not."""
    conversation = SHAPES[shape]
    if conversation.messages[-1].tool_calls or shape == "thinking":
        return  # some leave a call at the end out, and most leave old thinking out
    text = render(name, conversation).text.replace("\\", "")
    leading = conversation.messages[0].role == "system"
    places = [text.find(m.content.strip()) for m in said(conversation)[leading:] if m.content]
    assert -1 not in places
    assert places == sorted(places)
    assert not leading or SYSTEM.content.strip() in text or "system" in renderer(name).habits.misplaced


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
        messages=[made.form.given(each) for each in made.form.write(conversation)],
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
    if not conversation.messages[-1].tool_calls:
        assert prompt.cuts[-1].messages == len(conversation.messages) - (prompt.ends[-1] is PASSING)
    assert prompt.text[: prompt.cuts[-1].end] == without[: prompt.cuts[-1].end]
    ends = [cut.end for cut in prompt.cuts]
    assert ends == sorted(set(ends))


@all_templates
@all_shapes
def test_every_message_is_told_its_boundary_or_why_it_has_none(name: str, shape: str):
    conversation = SHAPES[shape]
    prompt = render(name, conversation)
    counted = {cut.end for cut in prompt.cuts if cut.kind != "interior"}
    assert len(prompt.ends) == len(conversation.messages)
    assert len(counted) <= len(conversation.messages) + 1
    for end in prompt.ends:
        assert end in counted or (isinstance(end, str) and end)


@all_templates
@all_shapes
def test_the_next_turn_has_the_boundaries_of_the_one_before(name: str, shape: str):
    """Digests chain over all positions before them: one that moved would lose every boundary behind it."""
    whole = render(name, SHAPES[shape])
    for shorter in turns(SHAPES[shape]):
        prompt = renderer(name).render(shorter)
        last = prompt.cuts[-1].end
        joined = JOINED in whole.ends[: len(shorter.messages)]
        if whole.text.startswith(prompt.text[:last]) and not joined:
            assert [cut.end for cut in whole.cuts if cut.end <= last] == [cut.end for cut in prompt.cuts]


@all_templates
@all_shapes
def test_a_boundary_is_where_the_render_of_so_many_messages_ends(name: str, shape: str):
    whole = render(name, SHAPES[shape])
    for shorter in prefixes(SHAPES[shape]):
        try:
            prefix = renderer(name).run(shorter, reply=False).text
        except TemplateError:
            continue
        end = whole.ends[len(shorter.messages) - 1]
        if whole.text.startswith(prefix):
            assert end == len(prefix) or isinstance(end, str)


@needs_templates
def test_an_empty_system_message_moves_no_boundary_of_the_one_before():
    for name in NAMES:
        whole = render(name, Conversation((SYSTEM, Message("system", ""), user(0))))
        try:
            alone = renderer(name).run(Conversation((SYSTEM,)), reply=False).text
        except TemplateError:
            continue
        if whole.text.startswith(alone):
            assert whole.ends[0] == len(alone) or isinstance(whole.ends[0], str), name


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
            if cut.kind == "interior":
                continue
            assert (index < cut.messages) == (at < cut.end) or message.role == "system"
            assert at + len(text) <= cut.end or index >= cut.messages


@all_templates
def test_an_answer_to_be_continued_ends_with_its_own_text(name: str):
    conversation = Conversation((user(0), Message("assistant", "The answer is")))
    prompt = render(name, conversation)
    assert prompt.text.endswith("The answer is")
    assert prompt.cuts[-1].messages == 1 - (prompt.ends[0] is PASSING)


@all_templates
def test_a_system_message_alone_has_a_boundary(name: str):
    try:
        prompt = render(name, Conversation((SYSTEM,)))
    except TemplateError as refusal:
        pytest.skip(f"refused: {refusal.message}")
    without = renderer(name).run(Conversation((SYSTEM,)), reply=False).text
    assert not prompt.cuts or without.startswith(prompt.text[: prompt.cuts[-1].end])
