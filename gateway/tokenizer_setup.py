"""What a tokenizer from a file needs before prompts are encoded with it, whole and in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace

# What the library takes for blanks beside tokens that strip them; Python has a few more.
_BLANKS = frozenset(
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


def make_plain(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Have a tokenizer give the ids of a text, all of them and nothing else, with the spans they really cover.

    Files come as they were saved in training: cut to a length, filled up to one, with merges left out at random. What
    a post-processor adds is returned, ids before and behind; it may trim spans, which would put boundaries inside
    tokens.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, BPE):
        tokenizer.model.dropout = None
    added = _always_added(tokenizer)
    tokenizer.post_processor = None
    return added


def _always_added(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that plain encoding puts before any text, and behind it."""
    text = tokenizer.encode("a", add_special_tokens=False).ids
    framed: list[int] = tokenizer.encode("a", add_special_tokens=True).ids
    at = next((at for at in range(len(framed)) if framed[at : at + len(text)] == text), 0)
    return framed[:at], framed[at + len(text) :]


def piece_tokenizers(tokenizer: Tokenizer) -> tuple[Tokenizer, Tokenizer]:
    """Tokenizers that know no added tokens: one for the first piece of a text, one for pieces after others.

    They have no post-processor: one that trims spans would put boundaries inside tokens.
    """
    first = _bare(tokenizer)
    pre = tokenizer.pre_tokenizer
    if not (isinstance(pre, Metaspace) and pre.prepend_scheme == "first"):
        return first, first
    rest = _bare(tokenizer)
    rest.pre_tokenizer = Metaspace(replacement=pre.replacement, prepend_scheme="never", split=pre.split)
    return first, rest


def _bare(tokenizer: Tokenizer) -> Tokenizer:
    bare = Tokenizer(tokenizer.model)  # shared, not copied
    if tokenizer.normalizer is not None:
        bare.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        bare.pre_tokenizer = tokenizer.pre_tokenizer
    return bare


def are_searched_twice(tokens: Sequence[Any]) -> bool:
    """Whether one search for all added tokens may find others than the library, which takes those first that are
    not normalized.
    """
    first = [token for token in tokens if not token.normalized]
    beginnings = {token.content[:end] for token in first for end in range(1, len(token.content) + 1)}
    whole = [token.content for token in first]
    strips = any(token.lstrip or token.rstrip for token in first)
    for text in (token.content for token in tokens if token.normalized):
        if any(text[at:] in beginnings for at in range(len(text))) or any(each in text for each in whole):
            return True
        if strips and (text[0] in _BLANKS or text[-1] in _BLANKS):
            return True
    return False


def strip_end(text: str, start: int, end: int) -> int:
    while end > start and text[end - 1] in _BLANKS:
        end -= 1
    return end


def strip_start(text: str, start: int) -> int:
    while start < len(text) and text[start] in _BLANKS:
        start += 1
    return start


def may_depend(text: str, position: int) -> bool:
    """Whether the tokens before a position may depend on what is behind it: blanks, and letters before marks."""
    if not text[position].isascii():
        return True
    blanks = text[max(position - 2, 0) : position]
    return len(blanks) == 2 and _BLANKS.issuperset(blanks) and text[position] not in _BLANKS
