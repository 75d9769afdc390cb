"""Where text may be cut for a tokenizer: between which ASCII characters its ids on both sides are what they are alone.

Two kinds of tokenizers are understood. Byte-level ones part a text by patterns first: it may be cut where no match
holds the characters of both sides. SentencePiece ones merge what lies side by side: it may be cut where no token of
the vocabulary holds them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from gateway.split_pattern import ALL, KINDS, UnreadPattern, adjacent, kinds

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the library's own
_COMPOSING = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_COMPOSED = kinds(lambda kind: kind.first.isalpha() or kind.first in "<=>")  # with a mark behind them
# Characters that composing leaves as they are, whatever stands beside them of these: as Unicode first had them.
_STABLE = (
    r"\x00-\u02ff\u0391-\u03a1\u03a3-\u03c9\u0401-\u040f\u0410-\u044f\u0451-\u045f\u2010-\u2027\u2030-\u205e\u2190-\u21ff"
    r"\u2500-\u27bf\u3001-\u3029\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff60\U0001f300-\U0001f64f"
)
_MARKED = "▁"  # SentencePiece's blank
_ASCII = kinds(lambda kind: kind.first.isascii())
_BLANK, _BLANKS = kinds(lambda kind: kind.first == " "), kinds(lambda kind: kind.first in " \t")
_WORDS = kinds(lambda kind: kind.is_word)


@dataclass(frozen=True, slots=True)
class SafeCuts:
    """Text may be cut behind one of `words` before one of `behind`, and behind one of `marks` before one of `blanks`.

    Each is what stands between the brackets of a pattern. `bytewise` are the characters of texts whose tokens stand
    for a byte for each character that they are spelled with.
    """

    words: str
    behind: str
    marks: str
    blanks: str
    bytewise: str


def safe_cuts(tokenizer: Tokenizer, vocabulary: Iterable[str]) -> SafeCuts | None:
    """Of a tokenizer that knows no added tokens; None where no places are known to be safe.

    `vocabulary` may have more tokens than the tokenizer.
    """
    model = tokenizer.model
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    normal = _steps(_description(tokenizer.normalizer), "normalizers")
    steps = _steps(_description(tokenizer.pre_tokenizer), "pretokenizers")
    if steps and steps[-1]["type"] == "ByteLevel":
        return _byte_level(tokenizer, {step["type"] for step in normal}, steps)
    if _only_marks_blanks(normal, steps) and not model.ignore_merges:
        return _chosen(_between_tokens(tokenizer, vocabulary), "")
    return None


def _byte_level(tokenizer: Tokenizer, normal: set[str], steps: list[dict[str, Any]]) -> SafeCuts | None:
    if not normal <= _COMPOSING:
        return None
    try:
        safe = _between_matches(steps)
    except UnreadPattern:
        return None
    if normal:
        safe = [row & ~_COMPOSED for row in safe]
    if not normal <= {"NFC"}:  # others are taken apart, or become other ones
        safe = [row & _ASCII if _ASCII >> at & 1 else 0 for at, row in enumerate(safe)]
    keeps_all = all(step.get("behavior") != "Removed" for step in steps)
    return _chosen(safe, _bytewise(tokenizer, normal, keeps_all))


def _bytewise(tokenizer: Tokenizer, normal: set[str], keeps_all: bool) -> str:
    """A byte that is no token is left out of the ids, and so may be what no pattern matches."""
    if (
        keeps_all
        and normal <= {"NFC"}
        and all(tokenizer.token_to_id(byte) is not None for byte in ByteLevel.alphabet())
    ):
        return _STABLE if normal else r"\s\S"
    spelling = ByteLevel(add_prefix_space=False, use_regex=False)

    def is_known(character: str) -> bool:
        return tokenizer.token_to_id(spelling.pre_tokenize_str(character)[0][0]) is not None

    return _members(kinds(lambda kind: kind.first.isascii() and is_known(kind.first)))


def _description(part: Any) -> dict[str, Any]:
    described: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return described


def _steps(part: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The parts of one, in order, sequences in one another taken apart."""
    if not part:
        return []
    return [step for each in part[name] for step in _steps(each, name)] if part["type"] == "Sequence" else [part]


def _between_matches(steps: list[dict[str, Any]]) -> list[int]:
    """For each character those before which text may be cut behind it. Raises `UnreadPattern`.

    A match never goes on over such a place, as none holds both; and it ends there, as another one begins.
    """
    held, begun = [0] * len(KINDS), 0
    for pattern in _patterns(steps):
        step = adjacent(pattern)
        held = [one | other for one, other in zip(held, step.held, strict=True)]
        begun |= step.begun
    return [begun & ~row for row in held]


def _patterns(steps: list[dict[str, Any]]) -> list[str]:
    *splits, last = steps
    patterns: list[str] = []
    for step in splits:
        match step:
            case {"type": "Digits", "individual_digits": each}:
                patterns.append(r"\p{N}" if each else r"\p{N}+")
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                patterns.append(pattern)
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Removed", "invert": True}:
                if adjacent(pattern).begun != ALL:
                    raise UnreadPattern("what is left out may part what is side by side")
                patterns.append(pattern)  # what it matches is kept, each by itself
            case _:
                raise UnreadPattern(step["type"])
    if last["add_prefix_space"]:
        raise UnreadPattern("a blank before every piece")
    return [*patterns, _GPT2] if last.get("use_regex", True) else patterns


def _only_marks_blanks(normal: list[dict[str, Any]], steps: list[dict[str, Any]]) -> bool:
    """Whether all that is done to text before merging is to write its blanks as SentencePiece does."""
    match normal:
        case [{"type": "Replace", "pattern": {"String": " "}, "content": content}]:
            return content == _MARKED and all(
                step["type"] == "Split" and step["pattern"] == {"String": " "} for step in steps
            )
        case []:
            return (
                len(steps) == 1
                and steps[0]["type"] == "Metaspace"
                and (steps[0]["replacement"] == _MARKED and steps[0]["prepend_scheme"] == "never")
            )
    return False


def _between_tokens(tokenizer: Tokenizer, vocabulary: Iterable[str]) -> list[int]:
    """For each character of ASCII those that follow it in no token, of those that are tokens themselves."""
    spelled = "\0".join(vocabulary).replace(_MARKED, " ")
    held = [0] * len(KINDS)
    for one, other in _pairs(spelled.encode()):
        if one < 128 and other < 128:
            held[one] |= 1 << other

    def is_known(character: str) -> bool:
        return character != "\0" and tokenizer.token_to_id(character.replace(" ", _MARKED)) is not None

    known = kinds(lambda kind: kind.first.isascii() and is_known(kind.first))
    return [known & ~row if known >> at & 1 else 0 for at, row in enumerate(held)]


def _pairs(data: bytes) -> Iterator[tuple[int, int]]:
    """What stands side by side in it, some twice."""
    for start in (0, 1):
        whole = data[start : len(data) - (len(data) - start) % 2]
        for pair in set(memoryview(whole).cast("H")):
            one, other = pair.to_bytes(2, sys.byteorder)
            yield one, other


def _chosen(safe: list[int], bytewise: str) -> SafeCuts | None:
    """The cuts to be used, of all that are safe: those around words, as they are what comes again."""
    words = kinds(lambda kind: kind.is_word and bool(safe[KINDS.index(kind)] & _BLANK))
    behind = ALL & ~_WORDS
    for at, row in enumerate(safe):
        if words >> at & 1:
            behind &= row
    if not words:
        return None
    blanks = behind & _BLANKS
    marks = kinds(lambda kind: not blanks & ~safe[KINDS.index(kind)]) & ~words
    return SafeCuts(_members(words), _members(behind), _members(marks), _members(blanks), bytewise)


def _members(some: int) -> str:
    return "".join(kind.pattern for at, kind in enumerate(KINDS) if some >> at & 1)


def pattern_of(cuts: SafeCuts) -> re.Pattern[str]:
    """Finds the parts of a text, each up to the next place where it is cut, without a character left out."""
    marks = rf"(?<=[{cuts.marks}])" if cuts.marks else "(?!)"
    return re.compile(
        rf"\s*+[^\s{cuts.words}]++{marks}(?=[{cuts.blanks}])"  # marks alone
        rf"|(?:[^{cuts.words}]*+[{cuts.words}]++)+?(?=[{cuts.behind}]|\Z)"  # a word, with what stands before it
        r"|(?s:.)++"  # what is left at the end
    )
