"""A body that begins as another one did says what parsing it whole gives."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import body_memory
from gateway.body import MAX_ITEMS, parse_object
from gateway.body_memory import BodyMemory
from protocol.errors import RequestError


@pytest.fixture(autouse=True)
def small_bodies_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_memory, "_LEAST", 0)


texts = st.text('ab"\\]}{[, \n\u00e9😀\ud83d', max_size=6) | st.just('"messages":[{')
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([1.0, 1e30, 2**70]) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
items = st.dictionaries(st.sampled_from(["role", "content", "messages", "input"]), values, max_size=3)
names = st.sampled_from(["messages", "input", "model", "tools", "system"])
fields = st.lists(st.tuples(names, values), max_size=3)


def written(before: Any, name: str, said: list[Any], after: Any, plain: bool, spaced: bool) -> bytes:
    """A body as some client writes it, with its fields in this order, doubled ones too."""
    separators = (", ", ": ") if spaced else (",", ":")
    parts = [*before, (name, said), *after]
    inner = separators[0].join(
        json.dumps(key) + separators[1] + json.dumps(value, ensure_ascii=plain, separators=separators)
        for key, value in parts
    )
    return f"{{{inner}}}".encode(errors="surrogatepass" if plain else "replace")


def outcome(parse: Any) -> str:
    try:
        return repr(sorted(parse().items()))  # tells 1 from True, and shows the order of what is nested
    except RequestError as error:
        return f"{error} {error.param}"


@given(
    fields,
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(items | values, max_size=3), fields, names, st.booleans()),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_any_body_says_what_parsing_it_whole_gives(before: Any, turns: Any, spaced: bool):
    memory, said = BodyMemory(), []
    for kept, added, after, name, plain in turns:
        said = said[: max(len(said) - kept, 0)] + added
        body = written(before, name, said, after, plain, spaced)
        for owner in ("one", "two"):
            assert outcome(lambda body=body, owner=owner: memory.parse(owner, body)) == outcome(
                lambda body=body: parse_object(body)
            )


def messages(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{number}", "input": {"x": number}} for number in range(count)]


@pytest.mark.parametrize("spaced", [False, True])
@pytest.mark.parametrize("name", ["messages", "input"])
def test_what_is_known_of_a_body_is_the_same_objects(name: str, spaced: bool):
    memory = BodyMemory()
    before, after = (
        [("model", "m"), ("system", 'a"]}')],
        [("tools", [{"required": ["messages"]}]), ("stream", True)],
    )
    first = memory.parse("one", written(before, name, messages(8), after, True, spaced))[name]
    second = memory.parse("one", written(before, name, messages(10), after, True, spaced))[name]
    third = memory.parse("one", written(before, name, [*messages(9), {"other": 1}, {}], after, True, spaced))[name]
    assert len(second) == 10
    assert all(one is other for one, other in zip(first, second[:8], strict=True))
    assert all(one is other for one, other in zip(second[:9], third[:9], strict=True))
    theirs = memory.parse("two", written(before, name, messages(10), after, True, spaced))[name]
    assert not any(one is other for one, other in zip(second, theirs, strict=True))


def test_a_history_that_differs_far_before_its_end_is_read_again():
    """At its end it is as long and says the same as one that is known: only comparing all of it tells them apart."""
    memory = BodyMemory()
    said = [{"role": "user", "content": text} for text in ("the first", "b" * 100, "c" * 100)]
    memory.parse("one", json.dumps({"messages": said[:2]}).encode())
    said[0] = {"role": "user", "content": "THE FIRST"}
    body = json.dumps({"messages": said}).encode()
    assert memory.parse("one", body) == parse_object(body)


def test_a_list_that_is_named_twice_is_the_last_one():
    memory, old = BodyMemory(), json.dumps(messages(3))[:-1]
    for _ in range(2):
        memory.parse("", f'{{"messages": {old}]}}'.encode())
        twice = f'{{"messages": {old}, {{}}], "messages": {json.dumps(messages(4))}}}'.encode()
        assert memory.parse("", twice) == {"messages": messages(4)}
        escaped = f'{{"messages": {old}, {{}}], "\\u006dessages": {json.dumps(messages(2))}}}'.encode()
        assert memory.parse("", escaped) == {"messages": messages(2)}
        as_we_do = f'{{"messages": {old}, {{}}], "messages": ["known", {{}}]}}'.encode()
        assert memory.parse("", as_we_do) == {"messages": ["known", {}]}
    assert memory.parse("", f'{{"messages": {old}, {{}}]}}'.encode()) == {"messages": [*messages(3), {}]}


def test_limits_count_what_is_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MAX_ITEMS, "messages", 10)
    memory = BodyMemory()
    memory.parse("", json.dumps({"messages": messages(9)}).encode())
    memory.parse("", json.dumps({"messages": messages(10)}).encode())
    with pytest.raises(RequestError, match="11 items"):
        memory.parse("", json.dumps({"messages": messages(11)}).encode())
    deep: Any = {}
    for _ in range(200):
        deep = {"x": deep}
    with pytest.raises(RequestError, match="nested"):
        memory.parse("", json.dumps({"messages": [*messages(9), deep]}).encode())


def test_memory_of_bodies_is_bounded():
    memory = BodyMemory(max_bytes=50_000)
    for number in range(100):
        memory.parse("", json.dumps({"messages": messages(20 + number % 7), "n": number}).encode())
    assert 0 < memory.held_bytes <= 50_000
