"""A render that goes on from one of before is the one that a template makes from the start."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.conversation import Conversation, Message, ToolCall
from gateway.renderer import PromptText, Renderer
from gateway.template import ChatTemplate
from gateway.template_form import Habits
from gateway.template_resume import Course, ResumableLoop

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
NAMES = sorted(path.name for path in FOLDER.glob("*.jinja")) if FOLDER.is_dir() else []
TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
# What they write for a message may depend on any later one.
ALWAYS_WHOLE = {
    "Cohere2MoE.jinja",
    "NVIDIA-Nemotron-Nano-v2.jinja",
    "muse-glimmer.jinja",
    "openai-gpt-oss-120b.jinja",
    "upstage-Solar-Open-100B.jinja",
}
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer", "description": "n"}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": PARAMETERS}}


@cache
def renderer(name: str) -> Renderer:
    habits = Habits(ordinal_ids="istral" in name, joined=frozenset({"system", "user"}))
    return Renderer(ChatTemplate((FOLDER / name).read_text(), TOKENS), habits)


@contextmanager
def nothing_remembered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ResumableLoop, "find", lambda *_: None)
        patch.setattr(ResumableLoop, "keep", lambda *_: None)
        yield


def outcome(made: Renderer, conversation: Conversation) -> tuple[PromptText | str, Any]:
    try:
        return made.render(conversation), made.run(conversation, reply=True)
    except Exception as error:
        return f"{type(error).__name__}: {error}", None


def check(made: Renderer, conversation: Conversation) -> None:
    again = outcome(made, conversation)
    with nothing_remembered():
        assert again == outcome(made, conversation)


def answer(number: int, random: random.Random) -> Message:
    text = random.choice([f"answer {number}", "", f"<think>\nhm {number}\n</think>\n\nyes"])
    return Message("assistant", text, reasoning=random.choice([None, None, f"since {number}"]))


def turn(number: int, random: random.Random) -> list[Message]:
    """What comes next in a conversation: mostly what clients send, sometimes what no template expects."""
    match random.randrange(7):
        case 0 | 1:
            return [Message("user", f" question {number}\n")]
        case 2:
            return [answer(number, random)]
        case 3 | 4:
            calls = tuple(
                ToolCall(f"call_{number}_{at}", "f", {"n": number}) for at in range(random.randint(1, 2))
            )
            text = random.choice(["", "I look."])
            results = [Message("tool", f"result {number}", tool_call_id=call.id) for call in calls]
            return [Message("assistant", text, calls), *results]
        case 5:
            return [Message("user", f"question {number}"), answer(number, random)]
        case _:
            return [Message("system", f"note {number}")]


@pytest.mark.skipif(not NAMES, reason="the shared data folder is not here")
@pytest.mark.parametrize("name", NAMES)
def test_real_templates_write_the_same_whatever_was_rendered_before(name: str):
    made, chance = renderer(name), random.Random(name)
    for _ in range(5):
        said = [Message("system", "Be brief.")] * chance.randint(0, 1) + [Message("user", "q")]
        tools = (TOOL,) if chance.randint(0, 1) else ()
        variables = chance.choice([{}, {}, {"enable_thinking": False}])
        for number in range(14):
            if chance.random() < 0.15:
                said = said[: chance.randint(1, len(said))]
            if chance.random() < 0.1:
                variables = chance.choice([{}, {"enable_thinking": True}, {"date_string": "today"}])
            said += turn(number, chance)
            check(made, Conversation(tuple(said), tools, variables))


def count_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    taken: list[int] = []
    rest = Course.rest

    def counted(self: Course, items: Any) -> Any:
        left = rest(self, items)
        taken.append(len(items) - len(left))
        return left

    monkeypatch.setattr(Course, "rest", counted)
    return taken


@pytest.mark.skipif(not NAMES, reason="the shared data folder is not here")
@pytest.mark.parametrize("kind", ["chat", "agent"])
def test_nearly_all_templates_go_on_from_what_they_wrote(kind: str, monkeypatch: pytest.MonkeyPatch):
    taken, whole, refused = count_taken(monkeypatch), set(), set()
    for name in NAMES:
        said = [Message("system", "s"), Message("user", "q")]
        for number in range(6):
            call = ToolCall(f"call_{number}", "f", {"n": number})
            added = [Message("assistant", "", (call,)), Message("tool", "r", tool_call_id=call.id)]
            said += added if kind == "agent" else [Message("assistant", "a"), Message("user", "b")]
            taken.clear()
            made = outcome(renderer(name), Conversation(tuple(said), (TOOL,) if kind == "agent" else ()))
        if isinstance(made[0], str):
            refused.add(name)
        if not taken or taken[-1] < len(said) - 5:
            whole.add(name)
    assert whole - ALWAYS_WHOLE <= refused
    assert len(refused) < len(NAMES) // 3


LINE = "{{ message.role }}:{{ message.content }}\n"
LOOP = "{% for message in messages %}" + LINE
STATEFUL = [
    LOOP + "{% endfor %}",
    LOOP + "{{ messages|length }}{% endfor %}",
    LOOP + "{{ loop.length }}{{ loop.revindex }}{% endfor %}",
    LOOP + "{% if loop.last %}last{% endif %}{{ loop.index }}{% endfor %}",
    LOOP + "{{ (loop.nextitem or {}).content }}{{ (loop.previtem or {}).content }}{% endfor %}",
    LOOP + "{{ messages[loop.index0 - 1].content }}{% endfor %}",
    LOOP + "{{ (messages[loop.index0 + 2] or {}).content }}{% endfor %}",
    LOOP + "{{ messages[-1].content }}{% endfor %}",
    LOOP + "{{ messages[loop.index:]|length }}{% endfor %}",
    LOOP + "{{ loop.cycle('a', 'b') }}{{ loop.changed(message.role) }}{% endfor %}",
    "{% set ns = namespace(n=0, seen='') %}" + LOOP + "{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}{{ ns.n }}",
    "{% set ns = namespace(l=[]) %}" + LOOP + "{% set ns.l = ns.l + [message] %}{{ ns.l|length }}{% endfor %}",
    "{% set ns = namespace(n=messages|length) %}" + LOOP + "{{ ns.n }}{% endfor %}",
    "{% set ns = namespace(n=messages|length - 3) %}" + LOOP + "{{ loop.index0 > ns.n }}{% endfor %}",
    "{% set ns = namespace(n=messages|length // 2) %}"
    + LOOP
    + "{{ loop.index != ns.n }}{{ loop.index0 }}{% endfor %}",
    "{% set a = namespace(n=0) %}{% set b = a %}" + LOOP + "{% set b.n = b.n + 1 %}{{ a.n }}{% endfor %}{{ a.n }}",
    "{% set n = messages|length %}{% macro m(x) %}{{ x }}{{ n }}{% endmacro %}" + LOOP + "{{ m(1) }}{% endfor %}",
    "{% set c = cycler('a', 'b', 'c') %}" + LOOP + "{{ c.next() }}{% endfor %}",
    "{% set j = joiner(',') %}" + LOOP + "{{ j() }}{% endfor %}",
    LOOP + "{% if message.content == 'm5' %}{% break %}{% endif %}{% endfor %}end",
    "{{ messages|length }}" + LOOP + "{% endfor %}",
    "{% set x = variable %}" + LOOP + "{{ x }}{{ variable }}{% endfor %}",
    "{% for message in messages if message.role == 'user' %}" + LINE + "{{ loop.index }}{% endfor %}",
    "{% for message in messages[1:] %}" + LINE + "{{ loop.index }}{% else %}none{% endfor %}",
    "{% set messages = messages[1:] %}" + LOOP + "{% endfor %}{{ messages|length }}",
    LOOP + "{% set x = message.content %}{% endfor %}{% set x = 1 %}{{ x }}",
    "{% if messages|length > 4 %}{% set x = 1 %}{% endif %}" + LOOP + "{{ x }}{% endfor %}",
    LOOP + "{% for m in messages %}{{ m.content[0] }}{% endfor %}{% endfor %}",
    LOOP
    + "{% for m in message.content %}{{ loop.index }}{% endfor %}{% if loop.first %}first{% endif %}{% endfor %}",
    LOOP + "{{ caller }}{{ x is defined }}{% endfor %}",
    "{% set d = {'n': messages|length} %}" + LOOP + "{{ d.n }}{{ d['n'] }}{% endfor %}",
    "{% set f = messages[-1].content.upper %}" + LOOP + "{{ f() }}{% endfor %}",
]
REFUSED = [
    "{{ strftime_now('%S') }}",
    "{{ [1, 2]|random }}",
    "{{ lipsum() }}",
    "{{ self }}",
    "{{ loop.revindex0 }}",
]


@given(
    st.sampled_from(STATEFUL),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 1)), min_size=2, max_size=5),
)
def test_whatever_a_loop_depends_on_counts(source: str, turns: list[tuple[int, int, int]]):
    template = ChatTemplate(source, {})
    said = [{"role": "user", "content": "m"}]
    for cut, added, variable in turns:
        said = said[: max(len(said) - max(cut - 6, 0), 1)]  # often none, and sometimes nothing is added either
        for _ in range(2 * added):
            said.append({"role": ("user", "assistant")[len(said) % 2], "content": f"m{len(said)}"})
        again = template.render(said, None, reply=True, extra={"variable": variable})
        with nothing_remembered():
            assert again == template.render(said, None, reply=True, extra={"variable": variable})


@pytest.mark.parametrize("source", STATEFUL)
def test_a_history_that_is_sent_again_or_cut_is_written_anew(source: str):
    template = ChatTemplate(source, {})
    said = [{"role": ("user", "assistant")[number % 2], "content": f"m{number}"} for number in range(9)]
    for count in (9, 7, 7, 8, 9, 6, 9):
        again = template.render(said[:count], None, reply=True)
        with nothing_remembered():
            assert again == template.render(said[:count], None, reply=True)


def test_what_is_known_of_the_stateful_loops_is_used(monkeypatch: pytest.MonkeyPatch):
    taken, resumed = count_taken(monkeypatch), []
    for source in STATEFUL:
        template = ChatTemplate(source, {})
        said = [{"role": "user", "content": f"m{number}"} for number in range(10)]
        for count in (8, 9, 10):
            template.render(said[:count], None, reply=True)
        resumed.append(bool(taken) and taken[-1] > 0)
        taken.clear()
    assert sum(resumed) >= 13


@pytest.mark.parametrize("part", REFUSED)
def test_a_loop_that_reads_what_cannot_be_compared_is_rendered_whole(part: str):
    assert ChatTemplate(LOOP + "{% endfor %}", {}).is_resumable
    assert not ChatTemplate(LOOP + part + "{% endfor %}", {}).is_resumable


def test_the_same_text_said_by_others_is_not_taken_over(monkeypatch: pytest.MonkeyPatch):
    """What is found is known by its very objects, which no two owners share."""
    taken = count_taken(monkeypatch)
    template = ChatTemplate(LOOP + "{% endfor %}", {})
    for _ in range(2):
        template.render([{"role": "user", "content": f"m{n}"} for n in range(6)], None, reply=True)
    assert taken == [0, 0]
