"""Which added tokens steer the model, and how message text is kept from spelling them.

Control tokens are those the tokenizer calls special, and those that the chat template writes (Qwen's `<think>`
and `<tool_call>` are added but not special). Other added tokens, such as runs of blanks, are vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

_PRIVATE_USE = range(0xF0000, 0xFFFFD)
_IN_PRIVATE_USE = re.compile(f"[{chr(_PRIVATE_USE[0])}-{chr(_PRIVATE_USE[-1])}]")


class ControlTokens:
    """Finds the strings of a fixed set of tokens. Immutable."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = frozenset(token for token in tokens if token)
        pattern = _pattern(self.tokens) if self.tokens else r"(?!)"
        self._find = re.compile(pattern)
        self._find_overlapping = re.compile(f"(?={pattern})")

    def matches(self, text: str, start: int = 0) -> Iterator[re.Match[str]]:
        """Non-overlapping occurrences from `start` on, in order, the longest token at each place."""
        return self._find.finditer(text, start)

    def occur_in(self, text: str) -> bool:
        return self._find.search(text) is not None

    def broken(self, text: str, sentinel: str, kept: frozenset[str] = frozenset()) -> str:
        """`text` with the sentinel inside every control string but the kept ones, so that none is left in it."""
        if not self.occur_in(text):
            return text
        pieces: list[str] = []
        at = 0
        for match in self._find_overlapping.finditer(text):
            found = self._find.match(text, match.start())
            if found is None or found.group() in kept:
                continue
            pieces += (text[at : match.start() + 1], sentinel)
            at = match.start() + 1
        return "".join([*pieces, text[at:]])


def private_characters(texts: Iterable[str]) -> frozenset[str]:
    """The private-use characters that the texts hold."""
    return frozenset(c for text in texts if not text.isascii() for c in _IN_PRIVATE_USE.findall(text))


def unused_character(used: Iterable[str]) -> str:
    """The first private-use character that is not used."""
    taken = frozenset(used)
    return next(chr(code) for code in _PRIVATE_USE if chr(code) not in taken)


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from strings_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def _pattern(tokens: Iterable[str]) -> str:
    """A regular expression for the longest of many strings, as a trie: hundreds of them cost little more than one."""
    trie: dict[str, Any] = {}
    for token in tokens:
        node = trie
        for character in token:
            node = node.setdefault(character, {})
        node[""] = {}

    def expression(node: dict[str, Any]) -> str:
        branches = [re.escape(character) + expression(below) for character, below in node.items() if character]
        if not branches:
            return ""
        joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
        return joined + ("?" if "" in node else "")

    return expression(trie)
