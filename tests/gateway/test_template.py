"""Reports of loops in templates written for the purpose."""

from __future__ import annotations

import pytest

from gateway.boundaries import Cut, merge, message_ends, with_interior
from gateway.template import NOBODY, ChatTemplate, Span
from gateway.template_env import TemplateRefusal, TemplateTooSlow
from gateway.template_probe import learn
from gateway.text_memory import common_prefix
from protocol.errors import SettingsError

MESSAGES = [{"role": "user", "content": text} for text in ("one", "two", "three")]

BODIES = [
    "{% for m in messages %}[{{ m.content }}]{% endfor %}",
    "{% set all = messages[0:] %}{% for m in all %}[{{ m['content'] }}]{% endfor %}",
    "{% for i in range(messages | length) %}[{{ messages[i].content }}]{% endfor %}",
    "{% for m in messages if m.role == 'user' %}[{{ m.content | trim }}]{% endfor %}",
    "{% for m in messages | reverse %}{% endfor %}{% for m in messages %}[{{ m.content }}]{% endfor %}",
    "{% if true %}{% for m in messages %}{% for c in [1] %}[{{ m.content }}{% endfor %}]{% endfor %}{% endif %}",
    "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}",
    "{% macro show(m) %}[{{ m.content }}]{% endmacro %}{% for m in messages %}{{ show(m) }}{% endfor %}",
    "{% for m in messages %}{% if m.content == 'four' %}{% continue %}{% endif %}[{{ m.content }}]{% endfor %}",
    "{% for m in messages %}{% for later in messages[loop.index:] %}{% endfor %}[{{ m.content }}]{% endfor %}",
]


@pytest.mark.parametrize("body", BODIES)
def test_each_message_owns_its_text(body: str):
    rendered = ChatTemplate("<{{ x }}>" + body + "end", {"x": "head"}).render(MESSAGES, None, reply=False)
    assert rendered.text == "<head>[one][two][three]end"
    owned = {span.owner: rendered.text[span.start : span.end] for span in rendered.spans}
    assert owned[0] == "[one]"
    assert owned[1] == "[two]"
    assert owned[2] == "[three]"
    assert message_ends(rendered.spans, 3) == [11, 16, 23]


def test_text_that_a_loop_captures_belongs_to_nobody():
    body = "{% set all %}{% for m in messages %}[{{ m.content }}]{% endfor %}{% endset %}{{ all }}"
    rendered = ChatTemplate(body, {}).render(MESSAGES, None, reply=False)
    assert rendered.text == "[one][two][three]"
    assert [span.owner for span in rendered.spans] == [NOBODY]
    assert message_ends(rendered.spans, 3) == [None] * 3


def test_equal_messages_are_told_apart():
    same = [dict(MESSAGES[0]) for _ in range(3)]
    rendered = ChatTemplate(BODIES[0], {}).render(same, None, reply=False)
    assert [span.owner for span in rendered.spans] == [0, 1, 2]


def test_a_group_closed_late_has_a_boundary_only_at_its_end():
    spans = [Span(0, 0, 5), Span(1, 5, 8), Span(2, 8, 11), Span(0, 11, 13), Span(3, 13, 20)]
    assert message_ends(spans, 4) == [None, None, 13, 20]


def test_messages_without_text_end_where_the_one_before_does():
    assert message_ends([Span(NOBODY, 0, 4), Span(1, 4, 8)], 3) == [4, 8, 8]


def test_cuts_at_one_position_become_one():
    cuts = [Cut(9, "message", 2), Cut(4, "message", 1), Cut(4, "head", 1), Cut(9, "message", 3)]
    assert merge(cuts) == [Cut(4, "head", 1), Cut(9, "message", 3)]


def test_interior_cuts_count_from_the_start_of_their_message():
    cuts = [Cut(10, "head", 1), Cut(35, "message", 2), Cut(45, "message", 3)]
    ends = [(cut.end, cut.kind, cut.messages) for cut in with_interior(cuts, 10)]
    assert ends == [
        (10, "head", 1),
        (20, "interior", 1),
        (30, "interior", 1),
        (35, "message", 2),
        (45, "message", 3),
    ]


@pytest.mark.parametrize(
    ("one", "other", "length"), [("", "", 0), ("abc", "abd", 2), ("ab", "abc", 2), ("x", "y", 0)]
)
def test_common_prefix(one: str, other: str, length: int):
    assert common_prefix(one, other) == common_prefix(other, one) == length


def test_the_sandbox_holds():
    for body in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ messages.__class__ }}x{{ 1/0 }}"):
        with pytest.raises(Exception, match=r"unsafe|division|undefined"):
            ChatTemplate(body, {}).render(MESSAGES, None, reply=False)


def test_the_short_ways_give_what_the_sandbox_gives():
    body = (
        "{{ x.keys() | list }}{{ x.field }}{{ x.missing is defined }}{{ 'a,b'.split(',') }}{{ 'aXb'.lower() }}"
        "{% for y in [1, 2] %}{{ loop.first }}{{ loop.index0 }}{{ 'ab'.replace('b', loop.index | string) }}{% endfor %}"
    )
    rendered = ChatTemplate(body, {}).render([], None, reply=False, extra={"x": {"field": 1, "keys": 2}})
    assert rendered.text == "['field', 'keys']1False['a', 'b']axbTrue0a1False1a2"
    for escape in ("'{0.__class__}'.format(1)", "''.join.__self__.__class__", "'a'.split.__self__.__class__"):
        assert ChatTemplate("{{ " + escape + " }}", {}).render([], None, reply=False).text == ""


def test_json_is_written_as_models_know_it():
    template = ChatTemplate("{{ x | tojson }}|{{ x | tojson(indent=1) }}|{{ ['b'] | map('upper') | tojson }}", {})
    rendered = template.render([], None, reply=False, extra={"x": {"b": "<é>", "a": 1}})
    assert rendered.text == '{"b": "<é>", "a": 1}|{\n "b": "<é>",\n "a": 1\n}|["B"]'


def test_a_refusal_keeps_its_words():
    template = ChatTemplate("{{ raise_exception('not like this') }}", {})
    with pytest.raises(TemplateRefusal, match="not like this"):
        template.render(MESSAGES, None, reply=False)


def test_a_broken_template_is_refused_at_load():
    with pytest.raises(SettingsError, match="line 2"):
        ChatTemplate("x\n{% for %}", {})
    with pytest.raises(SettingsError, match="cannot render"):
        learn(ChatTemplate("{{ nothing.here.at_all }}", {}))
    with pytest.raises(SettingsError, match="does not appear"):
        learn(ChatTemplate("constant", {}))


HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops in a macro": "{% macro m() %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endmacro %}{{ m() }}",
    "macros that call themselves twice": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "loops captured": "{% set x %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    "{% endset %}",
    "a loop that is filtered": "{% filter upper %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfilter %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_render_that_does_not_end_is_ended(source):
    template = ChatTemplate(source, {}, max_seconds=0.05)
    with pytest.raises(TemplateTooSlow):
        template.render([{"role": "user", "content": "hi"}], None, reply=True)


@pytest.mark.parametrize("source", ["{{ 9 ** (9 ** 9) }}", "{{ 'x' * 10 ** 12 }}", "{{ 10 ** 12 * [1] }}"])
def test_one_operation_that_would_take_for_ever_is_refused(source):
    with pytest.raises(TemplateRefusal, match="out of bounds"):
        ChatTemplate(source, {}).render([], None, reply=True)


def test_products_and_powers_of_ordinary_size_are_as_ever():
    source = "{{ '=' * 80 }}{{ 3 * [1] }}{{ 2 ** 16 }}{{ 2 * 3.5 }}"
    assert ChatTemplate(source, {}).render([], None, reply=True).text == "=" * 80 + "[1, 1, 1]" + "65536" + "7.0"
