"""Ids of words, so that new text is looked up instead of encoded.

The library takes more than a microsecond for each word, also for one that it has just seen. Text is cut where its
tokenizer allows it, into words with the blanks and marks before them; of those that came before the ids are known.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from threading import Lock

from tokenizers import Tokenizer

from gateway.safe_cuts import SafeCuts, pattern_of, safe_cuts

_HELD_WORDS = 200_000  # of all owners; a word takes about 200 bytes
_LONGEST = 48  # characters of a word that may come again
_COMMON = 8_000  # of a vocabulary's tokens, those that were merged first
_BLOCK = 1 << 15  # characters that are looked up before another thread may run
_SHARE = 2048  # characters of new words that are worth a thread
_THREADS = 3  # besides the one that encodes, of all that do
_FILLER = " a"  # may stand behind whatever ends a word, and before whatever begins one
_BLANKS = str.maketrans("ĠĊĉč▁", " \n\t\r ")  # as vocabularies spell them


class WordMemory:
    """Encodes text with the ids that its tokenizer gives. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, cuts: SafeCuts) -> None:
        self._tokenizer = tokenizer
        self._words = pattern_of(cuts)
        self._block_end = re.compile(f"[{cuts.words}](?=[{cuts.behind}])")
        # Words that may be cut from what stands on both sides of them, and those that can be found among others.
        self._whole = re.compile(rf"(?=[{cuts.behind}])(?s:.)++(?<=[{cuts.words}{cuts.marks}])")
        self._bytewise = re.compile(f"[{cuts.bytewise}]++" if cuts.bytewise else "(?!)")
        self._word_end = re.compile(rf"(?s:.)*+(?<=[{cuts.words}])")
        self._blank = re.compile(f"[{cuts.blanks}]")
        self._lengths = _Lengths(tokenizer)
        self._known: OrderedDict[str, dict[str, bytes]] = OrderedDict()  # by owner
        self._held = 0
        self._lock = Lock()
        self._helpers = min(len(os.sched_getaffinity(0)) // 2 - 1, _THREADS)  # the worker needs the others
        self._pool = ThreadPoolExecutor(max(self._helpers, 1), thread_name_prefix="words")
        self._common: dict[str, bytes] = self._encoded(list(dict.fromkeys(self._first_merged())))

    def encode(self, text: str, owner: str) -> array[int]:
        """The ids of a text. What is remembered of it helps the same `owner` alone."""
        known = self._of(owner)
        made: list[bytes] = []
        for start, end in self._blocks(text):
            words = self._words.findall(text, start, end)
            found = list(map(known.get, words))
            if None in found:
                new = self._encoded(
                    list(dict.fromkeys(word for word, ids in zip(words, found, strict=True) if ids is None))
                )
                made += [new[word] if ids is None else ids for word, ids in zip(words, found, strict=True)]
                self._learn(owner, known, new)
            else:
                made += found  # type: ignore[arg-type]  # none is None
        ids = array("i")
        ids.frombytes(b"".join(made))
        return ids

    def _blocks(self, text: str) -> Iterator[tuple[int, int]]:
        """Of a text, each up to a place where it may be cut."""
        start = 0
        while start < len(text):
            found = self._block_end.search(text, start + _BLOCK)
            end = found.end() if found else len(text)
            yield start, end
            start = end

    def _encoded(self, words: Sequence[str]) -> dict[str, bytes]:
        """The ids of words, each once. Those that may stand side by side are encoded as one text."""
        together: list[str] = []
        alone: list[str] = []
        for word in words:
            if not (self._whole.fullmatch(word) and self._bytewise.fullmatch(word)):
                alone.append(word)
                continue
            if together and not self._blank.match(word) and not self._word_end.match(together[-1]):
                together.append(_FILLER)
            together.append(word)
        made = dict(zip(alone, map(_packed, self._encode(alone)), strict=True))
        shares = list(self._shares(together))
        for share, token_ids in zip(shares, self._side_by_side(list(map("".join, shares))), strict=True):
            made.update(self._parted(share, token_ids))
        return made

    def _shares(self, words: Sequence[str]) -> Iterator[Sequence[str]]:
        """The words, in parts of about the same size: one for each thread, if that is worth it."""
        size = sum(map(len, words))
        count = min(self._helpers + 1, size // _SHARE) or 1
        start = taken = 0
        for end, word in enumerate(words, 1):
            taken += len(word)
            if taken * count >= size or end == len(words):
                yield words[start:end]
                start, taken = end, 0

    def _side_by_side(self, texts: Sequence[str]) -> Iterator[Sequence[int]]:
        """The ids of each text. What no other thread has begun when it is due is done by this one."""
        waiting = [self._pool.submit(self._encode, [text]) for text in texts[1:]]
        yield from self._encode(texts[:1])
        for text, started in zip(texts[1:], waiting, strict=True):
            yield from self._encode([text]) if started.cancel() else started.result()

    def _parted(self, words: Sequence[str], token_ids: Sequence[int]) -> Iterator[tuple[str, bytes]]:
        """The ids of each of the words that were encoded as one text."""
        ids = array("i", token_ids).tobytes()
        counts = dict(
            zip(accumulate(map(self._lengths.__getitem__, token_ids)), range(4, len(ids) + 4, 4), strict=True)
        )
        place = start = 0
        for word in words:
            place += len(word) if word.isascii() else len(word.encode())
            end = counts[place]
            yield word, ids[start:end]
            start = end

    def _encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        if not texts:
            return []
        return [each.ids for each in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def _first_merged(self) -> Iterator[str]:
        """Words that are tokens, the commonest."""
        for token_id in range(_COMMON):
            word = (self._tokenizer.id_to_token(token_id) or "").translate(_BLANKS)
            if self._words.fullmatch(word) and self._whole.fullmatch(word):
                yield word

    def _of(self, owner: str) -> dict[str, bytes]:
        """The words that are known for an owner: those of the vocabulary, and what they said themselves."""
        with self._lock:
            known = self._known.get(owner)
            if known is None:
                known = self._known[owner] = self._common.copy()
                self._held += len(known)
            self._known.move_to_end(owner)
            return known

    def _learn(self, owner: str, known: dict[str, bytes], new: Mapping[str, bytes]) -> None:
        """Those who were there last keep what they have; one who has more than all may have begins again."""
        with self._lock:
            if self._known.get(owner) is not known:
                return
            before = len(known)
            known.update((word, ids) for word, ids in new.items() if len(word) <= _LONGEST)
            self._held += len(known) - before
            while self._held > _HELD_WORDS and self._known:
                self._held -= len(self._known.popitem(last=False)[1])


def word_memory(tokenizer: Tokenizer, vocabulary: Iterable[str]) -> WordMemory | None:
    """For a tokenizer that knows no added tokens; None where its text cannot be cut. `vocabulary` may have more."""
    cuts = safe_cuts(tokenizer, vocabulary)
    return None if cuts is None else WordMemory(tokenizer, cuts)


class _Lengths(dict[int, int]):
    """In how many characters a token is spelled."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> int:
        self[token_id] = length = len(self._tokenizer.id_to_token(token_id) or "")
        return length


def _packed(token_ids: Sequence[int]) -> bytes:
    return array("i", token_ids).tobytes()
