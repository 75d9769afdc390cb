"""Token ids to text, as they come: whole code points only, and never a part of a stop string."""

from __future__ import annotations

import json
from codecs import getincrementaldecoder
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tokenizers import Tokenizer

from gateway.control_tokens import ControlTokens
from protocol.errors import SettingsError

_Utf8 = getincrementaldecoder("utf-8")


class TokenBytes:
    """The bytes of every token of a vocabulary. Special tokens write nothing into answers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `SettingsError` for a decoder that is neither byte-level nor SentencePiece's."""
        added = {i: t for i, t in tokenizer.get_added_tokens_decoder().items()}
        vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
        self._tokens = {token_id: token for token, token_id in vocabulary.items()}
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._special = frozenset(token_id for token_id, token in added.items() if token.special)
        self._bytes_of = {"byte_level": _byte_level, "sentencepiece": _sentencepiece}[_scheme(tokenizer)]
        self._known: dict[int, bytes] = {}
        self._special_ids = {added[token_id].content: token_id for token_id in self._special}
        self._find_special = ControlTokens(self._special_ids)

    def text(self, token_id: int) -> bytes:
        """What the token adds to an answer."""
        return b"" if token_id in self._special else self.spelled(token_id)

    @property
    def special(self) -> frozenset[int]:
        return self._special

    def split(self, text: str) -> Iterator[int | str]:
        """The special tokens in a text by their ids, and the texts between them."""
        at = 0
        for match in self._find_special.matches(text):
            if at < match.start():
                yield text[at : match.start()]
            yield self._special_ids[match.group()]
            at = match.end()
        if at < len(text):
            yield text[at:]

    def special_in(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens that are part of any of some texts."""
        wanted = list(texts)
        spelled = {token_id: self._added[token_id].decode() for token_id in self._special}
        return frozenset(i for i, token in spelled.items() if token and any(token in text for text in wanted))

    def spelled(self, token_id: int) -> bytes:
        """The token itself, special or not; empty for an id outside the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._added.get(token_id)
            if found is None:
                found = self._bytes_of(self._tokens.get(token_id, ""))
            self._known[token_id] = found
        return found


class Detokenizer:
    """The text of one choice. Joined results are the same however the ids are grouped."""

    def __init__(self, tokens: TokenBytes, visible: frozenset[int] = frozenset()) -> None:
        """`visible` are special tokens to write out all the same: what reads the text knows them as markers."""
        self._tokens = tokens
        self._visible = visible
        self._decoder = _Utf8(errors="replace")

    def feed(self, token_id: int) -> str:
        """The text that is complete after one more token. What is not whole at the end is never given out."""
        of = self._tokens.spelled if token_id in self._visible else self._tokens.text
        return self._decoder.decode(of(token_id))


class StopStrings:
    """Ends a text before the stop string that completes first, and holds back what could still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False
        self.matched: str | None = None  # the stop string that was found

    def feed(self, text: str) -> str:
        """Text that is safe to send. After `found` nothing more may be fed."""
        if not self._stops:
            return text
        window = self._held + text
        end, start = self._first_match(window)
        if end >= 0:
            self.found, self.matched, self._held = True, window[start:end], ""
            return window[:start]
        keep = self._possible(window)
        self._held = window[len(window) - keep :]
        return window[: len(window) - keep]

    def finish(self) -> str:
        """What was held back, once no more text will come."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, window: str) -> tuple[int, int]:
        """End and start of the match that ends first (of several, the longest); -1 if none."""
        best = (-1, -1)
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0:
                match = (start + len(stop), start)
                best = match if best[0] < 0 else min(best, match)
        return best

    def _possible(self, window: str) -> int:
        """Length of the longest end of the window that begins a stop string."""
        longest = min(len(window), max(map(len, self._stops)) - 1)
        return next((n for n in range(longest, 0, -1) if any(s.startswith(window[-n:]) for s in self._stops)), 0)


def _scheme(tokenizer: Tokenizer) -> str:
    decoder = tokenizer.decoder
    kinds = set(_kinds(json.loads(decoder.__getstate__()))) if decoder is not None else set()
    if "ByteLevel" in kinds:
        return "byte_level"
    if kinds & {"ByteFallback", "Metaspace"}:
        return "sentencepiece"
    raise SettingsError(f"model: tokenizer decoder {'/'.join(sorted(kinds)) or 'none'} is not supported")


def _kinds(description: dict[str, Any]) -> Iterable[str]:
    yield description["type"]
    for part in description.get("decoders", []):
        yield from _kinds(part)


def _byte_characters() -> dict[str, int]:
    """The printable stand-ins of byte-level vocabularies: printable Latin-1 for itself, others from 256 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in kept)
    return {chr(byte): byte for byte in kept} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_characters()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode("utf-8", errors="replace")


def _sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode("utf-8", errors="replace")
