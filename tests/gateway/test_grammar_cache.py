"""What grammars are made of decides whether one that is known is taken, and old ones go first."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reply_templates import LARGE, TOOL, maker

from gateway import grammar_cache, reply_reader
from gateway.canonical import parse_messages
from gateway.config import GatewaySettings
from gateway.conversation import Conversation
from gateway.grammar import Demand
from gateway.grammar_cache import KnownGrammars
from gateway.reply_reader import ReplyReaders
from protocol.errors import RequestError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=1), inner, max_size=2),
    max_leaves=5,
)


def told(value: Any) -> str:
    """A text that two values share only if JSON writes both alike, keys in their order."""
    match value:
        case dict():
            return f"{{{','.join(f'{key!r}:{told(item)}' for key, item in value.items())}}}"
        case list():
            return f"[{','.join(map(told, value))}]"
    return repr(value)


@given(st.lists(JSON, max_size=6))
def test_each_is_made_of_its_own(values: list[Any]):
    known = KnownGrammars()
    for value in values * 2:
        assert known.grammar(value, lambda value=value: told(value)) == told(value)


def test_what_cannot_be_made_is_tried_again():
    known = KnownGrammars()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            known.grammar("x", lambda: str(1 // 0))
    assert known.grammar("x", lambda: "made") == "made"


def test_the_one_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_cache, "MAX_KEPT_CHARACTERS", 20)
    known, made = KnownGrammars(), []

    def make(name: str) -> str:
        made.append(name)
        return name * 10

    for name in "abacab":
        known.grammar(name, lambda name=name: make(name))
    assert made == ["a", "b", "c", "b"]


def test_an_agent_s_next_turn_brings_the_grammar_of_the_last(monkeypatch: pytest.MonkeyPatch):
    prompts = maker("gemma")
    readers = ReplyReaders(prompts, GatewaySettings())
    made: list[Demand] = []
    make = reply_reader.answer_grammar

    def counted(demand: Demand, *args: Any, **options: Any) -> str:
        made.append(demand)
        return make(demand, *args, **options)

    monkeypatch.setattr(reply_reader, "answer_grammar", counted)

    def grammar(demand: Demand, turns: int, tool: dict[str, Any] = TOOL) -> str | None:
        asked = parse_messages([{"role": "user", "content": f"turn {turns}"}])
        conversation = Conversation(asked, (tool,))
        return readers.grammar(conversation, prompts.chat(conversation, LARGE), demand, calls=True)

    held = Demand("tools", strict=frozenset({"lookup"}), free=True)
    assert grammar(held, 1) == grammar(held, 2)
    assert len(made) == 1
    other = {"type": "function", "function": {**TOOL["function"], "parameters": {"type": "object"}}}
    texts = {grammar(held, 3), grammar(held, 3, other), grammar(Demand("tool_choice"), 3)}
    assert len(texts) == len(made) == 3
    with pytest.raises(RequestError, match=r"text\.format: "):
        grammar(Demand("text.format", {"not": {}}), 4)
    with pytest.raises(RequestError, match="response_format: "):
        grammar(Demand("response_format", {"not": {}}), 4)
