"""Templates that take one system message, one call or no short ids, and those that write the first turn on its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from chat_shapes import SHAPES, SYSTEM, answer, calls, prefixes, result, user

from gateway.conversation import Conversation, Message
from gateway.renderer import GROUPED, JOINED, Renderer
from gateway.template import ChatTemplate
from gateway.template_probe import learn

_ASK = "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
_CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}{% endfor %}"
_MESSAGE = "<|turn|>{{ m.role }}\n{{ m.content }}" + _CALLS + "<|end|>\n"
_LOOP = "{% for m in messages %}" + _MESSAGE + "{% endfor %}"
ONE_SYSTEM = {
    "refuses a second": _TOOLS + "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('one system message only') }}{% endif %}" + _MESSAGE + "{% endfor %}" + _ASK,
    "leaves a second out": _TOOLS
    + "{% for m in messages if m.role != 'system' or m is sameas messages[0] %}"
    + _MESSAGE
    + "{% endfor %}"
    + _ASK,
    "takes the last": "{% set of = messages | selectattr('role', 'equalto', 'system') | list %}"
    "{% if of %}<|turn|>system\n{{ of[-1].content }}<|end|>\n{% endif %}"
    + _TOOLS
    + "{% for m in messages if m.role != 'system' %}"
    + _MESSAGE
    + "{% endfor %}"
    + _ASK,
}
FURTHER = Message("system", "And be polite.")
TWO_SYSTEMS = Conversation((SYSTEM, FURTHER, user(0), answer(1), user(2)))


@cache
def learned(source: str) -> Renderer:
    return learn(ChatTemplate(source, {}))


def ends_of(made: Renderer, conversation: Conversation) -> list[int]:
    """Where the renders of its first messages end, one after the other."""
    return [len(made.run(each, reply=False).text) for each in prefixes(conversation)]


@pytest.mark.parametrize("kind", ONE_SYSTEM)
def test_a_second_system_message_is_said_where_a_template_takes_one(kind: str):
    made = learned(ONE_SYSTEM[kind])
    prompt = made.render(TWO_SYSTEMS)
    places = [prompt.text.find(m.content.strip()) for m in TWO_SYSTEMS.messages]
    assert -1 not in places
    assert places == sorted(places)
    assert prompt.ends[0] is JOINED
    assert list(prompt.ends[1:-1]) == ends_of(made, TWO_SYSTEMS)[1:]
    assert [(cut.kind, cut.messages) for cut in prompt.cuts][:2] == [("head", 2), ("message", 3)]


@pytest.mark.parametrize("kind", ONE_SYSTEM)
def test_one_system_message_is_written_as_ever(kind: str):
    made = learned(ONE_SYSTEM[kind])
    prompt = made.render(SHAPES["system"])
    assert list(prompt.ends[:-1]) == ends_of(made, SHAPES["system"])


def test_a_template_that_takes_several_system_messages_keeps_them_apart():
    made = learned(_TOOLS + _LOOP + _ASK)
    assert list(made.render(TWO_SYSTEMS).ends[:-1]) == ends_of(made, TWO_SYSTEMS)


def test_system_messages_that_are_written_at_once_have_one_boundary():
    """It is behind the last of them: the first may have another render alone."""
    source = (
        "{% set all = namespace(text='') %}{% for m in messages if m.role == 'system' %}"
        "{% set all.text = all.text ~ ('\n\n' if all.text else '') ~ m.content %}{% endfor %}{{ all.text }}"
        + _TOOLS
        + "{% for m in messages if m.role != 'system' %}"
        + _MESSAGE
        + "{% endfor %}"
        + _ASK
    )
    made = learned(source)
    prompt = made.render(TWO_SYSTEMS)
    assert prompt.ends[0] is GROUPED
    assert list(prompt.ends[1:-1]) == ends_of(made, TWO_SYSTEMS)[1:]


def test_short_ids_of_calls_are_made_longer_for_a_template_that_wants_that():
    long = "{% if i | length < 9 %}{{ raise_exception('short') }}{% endif %}{{ i[-9:] }}"
    checked = "{% for c in m.tool_calls or [] %}{% set i = c.id %}" + long + "{% endfor %}"
    result_of = "{% if m.role == 'tool' %}{% set i = m.tool_call_id %}" + long + "{% endif %}"
    made = learned(_TOOLS + _LOOP.replace(_CALLS, _CALLS + checked + result_of) + _ASK)
    text = made.render(SHAPES["tools"]).text
    assert all(each in text for each in ("v1", "v4", '"result": 4'))


def test_all_calls_of_a_message_come_out_where_a_template_writes_the_first_alone():
    made = learned(_TOOLS + _LOOP.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]") + _ASK)
    conversation = SHAPES["parallel"]
    prompt = made.render(conversation)
    assert all(f'<call>{{"name": "lookup", "arguments": {{"q": "{each}"' in prompt.text for each in ("v1", "v2"))
    assert list(prompt.ends[:-1]) == ends_of(made, conversation)


def test_a_text_beside_several_calls_is_said_once_where_each_call_has_a_turn():
    made = learned(_TOOLS + _LOOP.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]") + _ASK)
    asking = replace(calls(1, 2), content="I look.", reasoning="because")
    text = made.render(Conversation((user(0), asking, result(1), result(2)), SHAPES["tools"].tools)).text
    assert text.count("I look.") == 1
    assert text.index("I look.") < text.index("v1") < text.index("v2")


def test_what_tools_change_before_a_chat_takes_no_boundary_from_it():
    """The start of an answer, always written, stays where one follows, with tools and without."""
    made = learned(
        _TOOLS
        + "{% for m in messages %}{% if m.role != 'assistant' or not loop.index0 %}<|turn|>{{ m.role }}\n{% endif %}"
        + "{{ m.content }}"
        + _CALLS
        + "<|end|>\n{% if m.role != 'assistant' and not loop.last %}<|turn|>assistant\n{% endif %}"
        + "{% endfor %}{% if messages[-1].role != 'assistant' %}<|turn|>assistant\n{% endif %}"
    )
    for shape in ("one", "plain", "tools"):
        ends = made.render(SHAPES[shape]).ends
        assert all(isinstance(end, int) for end in ends), shape


FIRST_APART = (
    "{% set rest = messages %}{% if rest[0].role == 'system' %}<|turn|>system\n{{ rest[0].content }}<|end|>\n"
    "{% set rest = rest[1:] %}{% endif %}{% if tools and rest %}<|turn|>user\n"
    + _TOOLS
    + "{{ rest[0].content }}<|end|>\n{% set rest = rest[1:] %}{% endif %}"
    + _LOOP.replace("in messages", "in rest")
    + _ASK
)


@pytest.mark.parametrize("shape", ["tools", "system and tools"])
def test_a_first_turn_that_is_written_before_the_loop_has_its_boundary(shape: str):
    """Also while nothing else has been said: the next turn starts from it."""
    made, whole = learned(FIRST_APART), SHAPES[shape]
    count = 1 + (shape == "system and tools")
    first = made.render(prefixes(whole)[count - 1])
    assert first.ends[-1] == ends_of(made, whole)[count - 1]
    assert first.cuts == made.render(whole).cuts[: len(first.cuts)]


def test_a_system_message_alone_that_is_written_before_the_loop_has_its_boundary():
    made = learned(FIRST_APART)
    conversation = Conversation((SYSTEM,))
    prompt = made.render(conversation)
    assert prompt.ends == (len(made.run(conversation, reply=False).text),)
    assert prompt.cuts[-1].end == prompt.ends[0]
    assert made.render(SHAPES["system"]).ends[0] == prompt.ends[0]


def test_an_empty_message_is_taken_where_only_a_part_may_be_empty_and_results_are_text():
    made = learned(
        _TOOLS + "{% for m in messages %}<|turn|>{{ m.role }}\n"
        "{% if m.role == 'tool' %}{{ m.content | string }}{% elif m.content is string and m.content %}{{ m.content }}"
        "{% elif m.content %}{% for part in m.content %}{{ part.text }}{% endfor %}"
        "{% elif m.role == 'user' or not m.tool_calls %}{{ raise_exception('empty') }}{% endif %}"
        + _CALLS
        + "<|end|>\n{% endfor %}"
        + _ASK
    )
    prompt = made.render(SHAPES["empty"])
    assert list(prompt.ends[:-1]) == ends_of(made, SHAPES["empty"])
    assert '\n{"result": 4}<|end|>' in made.render(SHAPES["tools"]).text


def test_tools_are_given_as_a_list_to_a_template_that_prints_it():
    made = learned("{% if tools %}{{ tools }}\n{% endif %}" + _LOOP + _ASK)
    assert made.render(SHAPES["tools"]).text.startswith("[{'type': 'function'")


def test_a_system_message_alone_ends_behind_the_start_of_an_answer_that_is_always_written():
    made = learned(
        "{% for m in messages if m.role == 'system' %}<|system|>{{ m.content }}{% endfor %}{{ '\n' }}"
        + _TOOLS
        + "{% for m in messages if m.role != 'system' %}"
        + _MESSAGE
        + "{% endfor %}<|turn|>assistant\n"
    )
    conversation = Conversation((SYSTEM,))
    assert made.render(conversation).ends == (len(made.run(conversation, reply=False).text),)
    assert all(isinstance(end, int) for end in made.render(SHAPES["system inside"]).ends)
