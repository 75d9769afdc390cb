"""Rendered text to token ids, piece by piece and with memory.

The text is cut at added tokens; each piece between them is encoded alone and its ids are remembered. A long history
then costs what its new message costs. The ids are those of the whole text encoded at once: checked at load, and
where they are not (some SentencePiece rules), texts are encoded whole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from gateway.control_tokens import ControlTokens
from gateway.text_memory import TextMemory
from gateway.tokenizer_setup import (
    are_searched_twice,
    make_plain,
    may_depend,
    piece_tokenizers,
    strip_end,
    strip_start,
)
from gateway.word_memory import word_memory

_CACHE_BYTES = 128 << 20
_NEAR = 32  # characters from which is told how the blanks between them are cut
_TEXT_SHRINKS = 4  # normalizing makes text shorter by less than this


class Encoded(NamedTuple):
    """Token ids, and for each asked text position the number of tokens before it (None: inside a token)."""

    token_ids: array[int]
    positions: list[int | None]


@dataclass(frozen=True, slots=True)
class _Added:
    id: int
    lstrip: bool
    rstrip: bool


@dataclass(slots=True)
class _Piece:
    """A remembered piece: its ids and, once needed, the text span of each token."""

    token_ids: array[int]
    spans: list[tuple[int, int]] | None
    bytes: int


class TooLongError(Exception):
    """The text cannot have fewer than `at_least` tokens, which is more than allowed."""

    def __init__(self, at_least: int) -> None:
        super().__init__(at_least)
        self.at_least = at_least


class PromptTokenizer:
    """Encodes rendered chats and plain prompts. Safe to use from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, control: Iterable[str] = (), *, cache_bytes: int = _CACHE_BYTES
    ) -> None:
        """`control` are added tokens to keep out of message text, besides those that are special.

        The tokenizer is ours from now on: what would shorten, lengthen or vary its output is switched off.
        """
        self._before, self._behind = make_plain(tokenizer)
        self._whole = tokenizer
        tokens = tokenizer.get_added_tokens_decoder()
        self._added = {t.content: _Added(i, t.lstrip, t.rstrip) for i, t in tokens.items()}
        self._cuts = ControlTokens(self._added)
        special = {t.content for t in tokens.values() if t.special}
        self.control = ControlTokens(special | (set(control) & set(self._added)))
        self._first, self._rest = piece_tokenizers(tokenizer)
        self._pieces: OrderedDict[tuple[str, str], _Piece] = OrderedDict()
        self._cache_bytes, self._held_bytes = cache_bytes, 0
        self._texts = TextMemory(max(map(len, self._added), default=0))
        self._lock = Lock()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._words = word_memory(self._rest, vocabulary)
        self._longest = max((len(token) for token in vocabulary), default=1)
        self.vocab_size = max(vocabulary.values(), default=0) + 1
        self.by_pieces = not any(
            token.single_word or (token.normalized and tokenizer.normalizer) for token in tokens.values()
        ) and not are_searched_twice(list(tokens.values()))

    def check(self, texts: Iterable[str]) -> None:
        """Encode texts both ways and give up cutting if any differs. To be called once, before use."""
        for text in texts:
            if list(self.encode_chat(text).token_ids) != self._encode(self._whole, text).ids:
                self.by_pieces = False
        self._pieces.clear()
        self._held_bytes = 0

    def default_prefix(self) -> list[int]:
        """The tokens that plain encoding puts before any text, such as BOS."""
        return self._before

    def encode_plain(self, text: str, limit: int | None = None, owner: str = "") -> array[int]:
        """A plain prompt as the tokenizer encodes it by default. Control tokens in it are recognised.

        `owner` and what is raised are those of `encode_chat`.
        """
        ids = self.encode_chat(text, limit=limit, owner=owner).token_ids
        return array("i", self._before) + ids + array("i", self._behind)

    def encode_chat(
        self,
        text: str,
        positions: Sequence[int] = (),
        *,
        sentinel: str = "",
        limit: int | None = None,
        owner: str = "",
    ) -> Encoded:
        """Encode rendered text without adding tokens. `positions` rise.

        `sentinel` is a character to leave out wherever it stands: it breaks control strings of message text.
        What is remembered helps texts of the same `owner` alone, or the time taken would tell of others' texts.
        Raises `TooLongError` where the text cannot fit in `limit` tokens.
        """
        self._refuse_hopeless(text, limit)
        if not self.by_pieces:
            return self._encode_whole(text, positions, sentinel, owner)
        known = self._texts.find(text, positions, sentinel, owner)
        ids, found, marks = known or (array("i"), [], [])
        wanted = iter([*positions[len(found) :], len(text) + 1])
        position = next(wanted)
        at = marks[-1][0] if marks else 0  # text before it is encoded
        for match in [*self._cuts.matches(text, at), None]:
            start = match.start() if match else len(text)
            added = self._added[match.group()] if match else None
            stop = strip_end(text, at, start) if added and added.lstrip else start
            inside: list[int] = []
            while position < stop:
                inside.append(position - at)
                position = next(wanted)
            if at < stop:
                found += self._piece(text[at:stop], inside, ids, sentinel, owner)
            while position <= start:
                # Blanks that the token swallows are tokens while nothing follows them.
                found.append(len(ids) if position <= stop else None)
                position = next(wanted)
            if match is None or added is None:
                break
            while position < match.end():
                found.append(None)
                position = next(wanted)
            ids.append(added.id)
            at = strip_start(text, match.end()) if added.rstrip else match.end()
            while position < at:
                found.append(len(ids))
                position = next(wanted)
            marks.append((at, len(ids)))
        self._texts.keep(text, ids, marks, positions, found, sentinel, owner)
        return Encoded(ids, found)

    def _piece(
        self, text: str, inside: Sequence[int], ids: array[int], sentinel: str, owner: str
    ) -> list[int | None]:
        """Append the ids of a piece that is not empty; the token counts at text positions inside it."""
        if sentinel and sentinel in text:
            inside = [position - text.count(sentinel, 0, position) for position in inside]
            text = text.replace(sentinel, "")
        before = len(ids)
        piece = self._remembered(text, bool(ids), bool(inside), owner)
        ids.extend(piece.token_ids)
        if not inside:
            return []
        counts = self._counts_at(text, piece.spans or [], inside, owner)
        return [None if count is None else before + count for count in counts]

    def _remembered(self, text: str, later: bool, spans: bool, owner: str) -> _Piece:
        key = owner, text if later or self._first is self._rest else "\0" + text
        with self._lock:
            piece = self._pieces.get(key)
            if piece is not None:
                self._pieces.move_to_end(key)
        if piece is None or (spans and piece.spans is None):
            piece = self._new_piece(text, self._rest if later else self._first, spans, owner)
            self._remember(key, piece)
        return piece

    def _new_piece(self, text: str, tokenizer: Tokenizer, spans: bool, owner: str) -> _Piece:
        cost = 200 + 2 * len(text)
        if self._words is not None and tokenizer is self._rest and not spans:
            ids = self._words.encode(text, owner)
            return _Piece(ids, None, cost + ids.itemsize * len(ids))
        encoding = self._encode(tokenizer, text, spans)
        ids = array("i", encoding.ids)
        cost += (ids.itemsize + 140 * spans) * len(ids)
        return _Piece(ids, encoding.offsets if spans else None, cost)

    def _remember(self, key: tuple[str, str], piece: _Piece) -> None:
        if piece.bytes > self._cache_bytes:  # all others would go for it, and then it too
            return
        with self._lock:
            replaced = self._pieces.pop(key, None)
            self._held_bytes += piece.bytes - (replaced.bytes if replaced else 0)
            self._pieces[key] = piece
            while self._held_bytes > self._cache_bytes:
                _, dropped = self._pieces.popitem(last=False)
                self._held_bytes -= dropped.bytes

    def _encode_whole(self, text: str, positions: Sequence[int], sentinel: str, owner: str) -> Encoded:
        if sentinel:
            positions = [position - text.count(sentinel, 0, position) for position in positions]
            text = text.replace(sentinel, "")
        encoding = self._encode(self._whole, text, spans=True)
        counts = self._counts_at(text, encoding.offsets, positions, owner, whole=True)
        return Encoded(array("i", encoding.ids), counts)

    def _counts_at(
        self,
        text: str,
        spans: Sequence[tuple[int, int]],
        positions: Sequence[int],
        owner: str,
        *,
        whole: bool = False,
    ) -> list[int | None]:
        """Tokens before each text position; None where one covers it, or the text up to it alone has others.

        `whole`: the text is no piece, so that there are added tokens in it.
        """
        if not positions:
            return []
        starts = [start for start, _ in spans]
        counts: list[int | None] = []
        for position in positions:
            count = bisect_right(starts, position - 1)  # tokens that start before the position
            covered = count and spans[count - 1][1] > position
            counts.append(None if covered or self._is_cut_otherwise(text, position, owner, whole) else count)
        return counts

    def _is_cut_otherwise(self, text: str, position: int, owner: str, whole: bool) -> bool:
        """Whether the text up to a position ends in other tokens when nothing follows it.

        Most patterns part the last of several blanks from the rest, unless the text ends there; marks that follow a
        letter may be composed with it.
        """
        if position == len(text) or not may_depend(text, position):
            return False
        near, behind = text[max(position - _NEAR, 0) : position], text[position : position + _NEAR]
        if whole:
            near = near[max((match.end() for match in self._cuts.matches(near)), default=0) :]
            if match := next(self._cuts.matches(behind), None):
                behind = behind[: match.start()]
        alone = self._remembered(near, True, False, owner).token_ids
        return self._remembered(near + behind, True, False, owner).token_ids[: len(alone)] != alone

    def _encode(self, tokenizer: Tokenizer, text: str, spans: bool = False) -> Any:
        # The batch calls let go of Python's lock while they work, the single ones do not.
        encode = tokenizer.encode_batch if spans else tokenizer.encode_batch_fast
        return encode([text], add_special_tokens=False)[0]

    def _refuse_hopeless(self, text: str, limit: int | None) -> None:
        """Spare the work on text that cannot fit whatever its tokens are."""
        at_least = len(text) // (self._longest * _TEXT_SHRINKS)
        if limit is not None and at_least > limit:
            raise TooLongError(at_least)
