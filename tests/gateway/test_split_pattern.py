"""What may stand side by side in a match, against what the library's own search finds."""

from __future__ import annotations

import unicodedata
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from gateway.gguf_tokenizer import _PRE
from gateway.split_pattern import ALL, KINDS, Adjacent, UnreadPattern, adjacent, kinds

_NOT_READ = "[一-龥ࠀ-一가-퟿]+"  # it begins in the middle of a range
PATTERNS = [
    *sorted({pattern for patterns in _PRE.values() for pattern in patterns} - {_NOT_READ}),
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    r"\p{Han}+|\P{Han}",
    r"[^\S ]+|\S{2}| ",
    r"(?:a|b )*c|\w+?|\d",
    r"ab?c{2,}| {2}|[\]a\-]",
    r"ab{2}|c",
]
characters = st.one_of(st.sampled_from("aZé0 .'/\n\t\r_-]bc日、ё\u0301\u2028\x1c"), st.characters(codec="utf-8"))
texts = st.text(characters, max_size=8)
members = st.one_of(st.sampled_from("aZé0 .'/\n\t_-]bc日、ё"), st.sampled_from([kind.last for kind in KINDS]))
read = cache(adjacent)


def parts(pattern: str, text: str) -> list[str]:
    """Matches, and what stands between them."""
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return [part for part, _ in split.pre_tokenize_str(text)] if text else []


def cut_between(step: Adjacent, one: str, other: str) -> bool:
    first, second = (
        next((at for at, kind in enumerate(KINDS) if kind.first <= c <= kind.last), None) for c in (one, other)
    )
    if first is None or second is None:
        return False
    return not step.held[first] >> second & 1 and bool(step.begun >> second & 1)


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.text(characters, min_size=2, max_size=24))
@settings(max_examples=25)
def test_no_match_holds_what_is_said_to_stand_in_none(pattern: str, text: str):
    for at in range(1, len(text)):
        if cut_between(read(pattern), text[at - 1], text[at]):
            assert parts(pattern, text) == parts(pattern, text[:at]) + parts(pattern, text[at:])


@pytest.mark.parametrize("pattern", PATTERNS)
@given(before=texts, one=members, other=members, behind=texts)
@settings(max_examples=25)
def test_all_that_begins_at_once_is_found_wherever_it_stands(
    pattern: str, before: str, one: str, other: str, behind: str
):
    text, at = f"{before}{one}{other}{behind}", len(before) + 1
    if cut_between(read(pattern), one, other):
        assert parts(pattern, text) == parts(pattern, text[:at]) + parts(pattern, text[at:])


def test_words_may_be_cut_from_what_follows_them():
    step = adjacent(PATTERNS[-6])
    assert all(cut_between(step, "a", behind) for behind in " .\n'(、")
    assert not cut_between(step, ".", "a")
    assert not cut_between(step, " ", "a")


@pytest.mark.parametrize("look", [r"\s+(?!\S)", r"\s+$"])
def test_what_a_match_looks_at_is_not_cut_from_it(look: str):
    step = adjacent(rf"{look}|\s+|\S+")
    assert not cut_between(step, "\n", "a")  # whether it is parted from one before it depends on what follows
    assert cut_between(step, "a", "\n")


def test_sets_of_a_pattern_are_those_of_the_library():
    for name in (*"LMNPSZC", "Lu", "Ll", "Lo", "Nd", "Po", "Sm", "Cc", "Han", "Hiragana", "Katakana", "Hangul"):
        pattern = rf"\p{{{name}}}"
        begun = adjacent(pattern).begun
        for at, kind in enumerate(KINDS):
            for each in (kind.first, kind.last):
                found = len(parts(pattern, f"{each}{each}")) == 2
                assert found == bool(begun >> at & 1), (name, each)


def test_ranges_are_of_one_category():
    for kind in KINDS:
        between = range(ord(kind.first), ord(kind.last) + 1)
        assert {unicodedata.category(chr(code)) for code in between} == {kind.category}
    assert kinds(lambda _: True) == ALL


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        "a*",
        "a|",
        "(?=a)b",
        "(?<=a)b",
        "(?!a)b",
        "^a",
        r"a\b",
        r"\Aa",
        ".",
        "(a",
        "a)",
        "[a",
        "[]a]",
        "[a-z&&b]",
        "[[:alpha:]]",
        r"\p{Greek}",
        r"\pL",
        r"\x41",
        "a{1}?",
        "*a",
        "(?i:é)",
        "(?i:[a-z])",
        "一",
        _NOT_READ,
    ],
)
def test_what_is_not_understood_is_refused(pattern: str):
    with pytest.raises(UnreadPattern):
        adjacent(pattern)
