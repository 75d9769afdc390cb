"""Habits of templates that the stored ones do not have, each in a template of a few lines."""

from __future__ import annotations

from functools import cache

import pytest
from chat_shapes import SHAPES, calls, prefixes, result, turns, user
from jinja2.exceptions import TemplateError
from tiny_model import tiny_tokenizer

from gateway.check_template import PROBES, _conversation
from gateway.conversation import Conversation, Message
from gateway.model_files import ModelFiles
from gateway.prompts import PromptMaker
from gateway.renderer import UNSEEN, Renderer
from gateway.template import ChatTemplate
from gateway.template_probe import learn
from gateway.template_report import report, verdict

_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %}"
_TOOLS = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
KINDS = {
    "text in parts only": _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content or [] %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    + _ASK,
    "the first part's text": _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[0].text }}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    + _ASK,
    "empty text in parts only": _TOOLS + "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content[0].thoughts %}{{ m.content[0].thoughts }}{% endif %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    + _CALLS
    + "<|im_end|>\n{% endfor %}"
    + _ASK,
    "the last message is left open": _TOOLS
    + "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}"
    + _ASK,
    "calls end in what results begin with": _TOOLS + "{% for m in messages %}"
    "{% set before = messages[loop.index0 - 1] if loop.index0 else {'role': ''} %}"
    "{% if m.role == 'tool' %}{% if before.role == 'tool' %}<|result|>{% endif %}{{ m.content }}<|/result|>"
    "{% else %}{% if m.role != 'assistant' or before.role != 'tool' %}<|turn|>{{ m.role }}\n{% endif %}{{ m.content }}"
    + _CALLS
    + "{% if m.tool_calls %}<|result|>{% else %}<|/turn|>\n{% endif %}{% endif %}"
    "{% if m.role == 'tool' and not loop.last and messages[loop.index].role not in ('assistant', 'tool') %}"
    "<|/turn|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|turn|>assistant\n{% endif %}",
    "a group is closed where another turn follows": _TOOLS + "{% for m in messages %}{% if m.role != 'tool' %}"
    "<|turn|>{{ m.role }}\n{{ m.content }}"
    + _CALLS
    + "{% if m.tool_calls %}{% set answered = namespace(yes=false) %}{% for later in messages[loop.index:] %}"
    "{% if later.role != 'tool' %}{% if answered.yes and later.role != 'assistant' %}<|/turn|>\n{% endif %}{% break %}"
    "{% endif %}<|result|>{{ later.content }}<|/result|>{% set answered.yes = true %}{% endfor %}"
    "{% else %}<|/turn|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
    "gathered in a variable": "{% set all = namespace(text='') %}"
    "{% if tools %}{% set all.text = all.text ~ (tools | tojson) %}{% endif %}"
    "{% for m in messages %}{% set all.text = all.text + '<|im_start|>' + m.role + '\n' + m.content %}"
    "{% for c in m.tool_calls or [] %}{% set all.text = all.text ~ '<tool_call>' ~ (c.function | tojson) %}"
    "{% endfor %}{% set all.text = all.text ~ '<|im_end|>\n' %}{% endfor %}"
    "{% if add_generation_prompt %}{% set all.text = all.text ~ '<|im_start|>assistant\n' %}{% endif %}"
    "{{- all.text -}}",
    "a frame around pairs": "{% for pair in messages | batch(2) %}<s>{% for m in pair %}<|im_start|>{{ m.content }}"
    "<|im_end|>{% endfor %}{% endfor %}",
    "tools of a form of its own": "{% for t in tools or [] %}{{ t.name + t.parameter_definitions }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + _ASK,
}


@cache
def renderer(kind: str) -> Renderer:
    return learn(ChatTemplate(KINDS[kind], {}))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_boundaries_are_where_so_many_messages_end_and_stay_there(kind: str, shape: str):
    made, conversation = renderer(kind), SHAPES[shape]
    whole = made.render(conversation)
    for shorter in prefixes(conversation):
        try:
            text = made.run(shorter, reply=False).text
        except TemplateError:
            continue
        end = whole.ends[len(shorter.messages) - 1]
        if whole.text.startswith(text):
            assert end == len(text) or isinstance(end, str)
    for shorter in turns(conversation):
        prompt = made.render(shorter)
        last = prompt.cuts[-1].end
        if whole.text.startswith(prompt.text[:last]):
            assert [cut.end for cut in whole.cuts if cut.end <= last] == [cut.end for cut in prompt.cuts]


@pytest.mark.parametrize("kind", KINDS)
def test_every_message_of_a_plain_chat_has_a_boundary(kind: str):
    whole = renderer(kind).render(SHAPES["plain"])
    assert all(isinstance(end, int) for end in whole.ends)
    assert all(message.content.strip() in whole.text for message in SHAPES["plain"].messages)


@pytest.mark.parametrize("kind", KINDS)
def test_each_can_be_used(kind: str):
    maker = PromptMaker(ModelFiles(tiny_tokenizer(), {"default": KINDS[kind]}))
    reports = [report(maker, name, _conversation(body)) for name, body in PROBES.items()]
    assert verdict(reports)[0] in (0, 1)
    assert all(each.refused is None for each in reports)


def test_tools_that_a_template_cannot_write_are_shown_as_text():
    text = renderer("tools of a form of its own").render(SHAPES["tools"]).text
    assert "lookup" in text
    assert '"result": 4' in text


def test_a_reminder_behind_results_moves_no_boundary():
    """A turn that is closed because a reminder follows has its boundaries where they were before."""
    made, note = renderer("a group is closed where another turn follows"), Message("system", "A reminder.")
    before = Conversation((user(0), calls(1), result(1)), SHAPES["tools"].tools)
    after = Conversation((*before.messages, note, user(1)), before.tools)
    assert made.render(after).ends[:3] == made.render(before).ends
    assert all(isinstance(end, int) for end in made.render(after).ends)


_FRAME = "'<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n'"
ELSEWHERE = {
    "in a macro": "{% macro all(ms) %}{% for m in ms %}{{ "
    + _FRAME
    + " }}{% endfor %}{% endmacro %}{{ all(messages) }}",
    "in a list": "{% set ns = namespace(texts=[]) %}{% for m in messages %}{% set ns.texts = ns.texts + ["
    + _FRAME
    + "] %}{% endfor %}{{ ns.texts | join }}",
    "in a variable that begins anew": "{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set ns.text = ns.text ~ m.role %}{% endfor %}{% set ns = namespace(text='') %}{% for m in messages %}"
    "{% set ns.text = ns.text ~ " + _FRAME + " %}{% endfor %}{{ ns.text }}",
    "in pairs by number": "{% for i in range(0, messages | length, 2) %}{% set m = messages[i] %}{{ "
    + _FRAME
    + " }}{% if i + 1 < messages | length %}{% set m = messages[i + 1] %}{{ "
    + _FRAME
    + " }}{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("kind", ELSEWHERE)
def test_text_whose_messages_cannot_be_told_apart_has_boundaries_as_plain_text_has(kind: str):
    maker = PromptMaker(ModelFiles(tiny_tokenizer(), {"default": ELSEWHERE[kind] + _ASK}))
    chat = [Message("user", "1" * 700), Message("assistant", "2" * 700), Message("user", "3" * 700)]
    first, second = (maker.trace(Conversation(tuple(chat[:count]))) for count in (1, 3))
    assert second.ends == (UNSEEN,) * 3
    assert [cut.end for cut in first.cuts] == [512]
    assert [cut.end for cut in second.cuts] == [512, 1024, 1536, 2048]
    assert {cut.kind for cut in second.cuts} == {"interior"}
    assert first.token_ids[:700] == second.token_ids[:700]
