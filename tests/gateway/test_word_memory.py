"""Text that is looked up word by word has the ids of the text encoded at once, whatever the tokenizer."""

from __future__ import annotations

import gzip
import random
from functools import cache
from pathlib import Path
from string import ascii_letters, digits
from threading import Event

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import tiny_tokenizer
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gateway import word_memory as module
from gateway.gguf_tokenizer import _PRE, _pre_tokenizer
from gateway.tokenizer_setup import piece_tokenizers
from gateway.word_memory import WordMemory, word_memory

QWEN = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers" / "qwen3" / "tokenizer.json.gz"
WORDS = [
    "foo",
    "Bar",
    "x1",
    "it's",
    "we'LL",
    "HTTPServer",
    "1234567",
    "größe",
    "мир",
    "ёж",
    "世界",
    "カナ",
    "한국어",
]
WORDS += ["café", "naïve", "日本語，", "😀", "👨\u200d👩\u200d👧", "हिन्दी", "ก็", "﷽", "a" * 60, "²½", "١٢"]
BLANKS = [" ", "  ", "\n", "\n\n", "\r\n", "\t", " \t\n ", "\xa0", "\u3000", "\u2028", "\x85", "\x1c", "\u180e"]
MARKS = [
    *".,;:!?'\"()[]{}<=>/\\|_-+*&^%$#@`~",
    "...",
    "//",
    "()",
    "->",
    "、",
    "。",
    "！",
    "—",
    "“",
    "▁",
    "▁▁",
    "<0x0A>",
]
COMBINING = [
    "\u0301",
    "\u0338",
    "=\u0338",
    "e\u0301",
    "か\u3099",
    "и\u0306",
    "\u1161\u11a8",
    "ſ",
    "K",
    "Å",
    "\u037e",
]
fragments = st.one_of(
    *(st.sampled_from(kind) for kind in (WORDS, BLANKS, MARKS, COMBINING)),
    st.text(st.characters(max_codepoint=127), max_size=4),
    st.text(st.characters(codec="utf-8"), max_size=3),
)
hostile = st.lists(fragments, max_size=24).map("".join)


@cache
def greedy_model() -> models.BPE:
    """Whose tokens hold whatever often stood side by side: words with marks and blanks on both sides."""
    source = random.Random(5)
    some = [*WORDS, *BLANKS, *MARKS, *COMBINING, *" .,(" * 5]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(("".join(source.choices(some, k=4)) for _ in range(4000)), trainer)
    return tokenizer.model


def byte_level(pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = Tokenizer(greedy_model())
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre, normalizer
    return tokenizer


def sentencepiece_like() -> Tokenizer:
    """With tokens of two words, so that not every blank is a place to cut."""
    pieces = ["<unk>", "▁", "\n", *map(chr, range(33, 127)), "▁▁", "▁f", "oo", "▁foo", "a▁", "a.", "▁foo", "'s"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {piece: at for at, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "▁"), ("o", "o"), ("a", "▁"), ("▁", "f"), ("▁f", "oo"), ("a", "."), ("'", "s")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = sentencepiece_like()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
KINDS = {
    **{
        name: lambda name=name: byte_level(_pre_tokenizer(_PRE[name]))
        for name in {patterns: name for patterns, name in zip(_PRE.values(), _PRE, strict=True)}.values()
        if name != "deepseek-coder"  # whose pattern tells some letters from others
    },
    **{
        f"gpt-2, {form.__name__}": lambda form=form: byte_level(_BYTES, form())
        for form in (normalizers.NFC, normalizers.NFD, normalizers.NFKC, normalizers.NFKD)
    },
    "qwen2, composing": lambda: byte_level(
        _pre_tokenizer(_PRE["qwen2"]), normalizers.Sequence([normalizers.NFC()])
    ),
    "matches are kept": lambda: byte_level(keeping_matches(r" ?[\p{L}\p{M}]+| ?[^\s\p{L}\p{M}]+|\s+(?!\S)|\s+")),
    "some matches are kept": lambda: byte_level(keeping_matches(r"[\p{L}\p{N}]+|\s+|[^\s\p{L}\p{N}\p{M}]")),
    "sentencepiece": sentencepiece_like,
    "metaspace": metaspace,
    "bytes that are no tokens": lambda: without_bytes("Ē", "ð", "!"),
}
KINDS = {name: KINDS[name] for name in KINDS if name not in ("phi-2", "mpt", "olmo", "jais", "llama3", "llama4")}


def keeping_matches(pattern: str) -> pre_tokenizers.PreTokenizer:
    """What stands between matches is left out of the ids."""
    parts = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    return pre_tokenizers.Sequence([parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def without_bytes(*left_out: str) -> Tokenizer:
    """The library leaves such bytes out of the ids."""
    vocabulary = [byte for byte in pre_tokenizers.ByteLevel.alphabet() if byte not in left_out]
    tokenizer = Tokenizer(models.BPE({byte: at for at, byte in enumerate([*vocabulary, "ab"])}, [("a", "b")]))
    tokenizer.pre_tokenizer = _BYTES
    return tokenizer


@cache
def built(kind: str) -> tuple[Tokenizer, WordMemory]:
    _, tokenizer = piece_tokenizers(KINDS[kind]())
    memory = word_memory(tokenizer, tokenizer.get_vocab())
    assert memory is not None
    return tokenizer, memory


def check(tokenizer: Tokenizer, memory: WordMemory, text: str) -> None:
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert list(memory.encode(text, "")) == whole
    assert list(memory.encode(text, "")) == whole  # from memory


@pytest.mark.parametrize("kind", KINDS)
@given(text=hostile)
@settings(max_examples=30, deadline=None)
def test_words_give_the_ids_of_the_whole_text(kind: str, text: str):
    check(*built(kind), text)


def test_what_a_tokenizer_leaves_out_moves_no_word():
    tokenizer, memory = built("some matches are kept")
    check(tokenizer, memory, "one e\u0301x a\u0301b two")


def merging(pattern: str, normalizer: normalizers.Normalizer | None, token: str) -> Tokenizer:
    """With bytes, and a token for a text wherever it is not parted."""
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = bytes_of.pre_tokenize_str(token)[0][0]
    merges = [(spelled[:at], spelled[at]) for at in range(1, len(spelled))]
    vocabulary = [*pre_tokenizers.ByteLevel.alphabet(), *map("".join, merges)]
    tokenizer = Tokenizer(models.BPE({token: at for at, token in enumerate(vocabulary)}, merges))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer, tokenizer.normalizer = pre_tokenizers.Sequence([split, bytes_of]), normalizer
    return tokenizer


@pytest.mark.parametrize(
    ("pattern", "normalizer", "token", "text"),
    [
        (r"[^=\s]+|=+|\s+", normalizers.NFC(), "x\u2260", "x=\u0338"),  # composed it is no = any more
        (
            r"[\p{L}\p{N}]+|[^\s\p{L}\p{N}]+|\s+",
            normalizers.NFD(),
            "\u0306.",
            "и\u0306.й.",
        ),  # taken apart it ends in a mark
        (
            r"[\p{L}\p{N}]+|，+|[^\s\p{L}\p{N}，]+|\s+",
            normalizers.NFKC(),
            "?,",
            "x，a?， ",
        ),  # it becomes another character
        (r"[^\s,]+,?|,+|\s+", None, "x,", "x, x,x"),
        (r"(?:a|b )+|\s+|[^ab\s]+", None, "b a", "b ab a"),
    ],
)
def test_what_is_joined_only_beside_some_others_is_not_parted(
    pattern: str, normalizer: normalizers.Normalizer | None, token: str, text: str
):
    tokenizer = merging(pattern, normalizer, token)
    assert len(tokenizer.encode(text).ids) < len(unmerged(tokenizer, text))
    memory = word_memory(tokenizer, tokenizer.get_vocab())
    if memory is not None:
        check(tokenizer, memory, text)
        check(tokenizer, memory, f"foo {text} bar")


def unmerged(tokenizer: Tokenizer, text: str) -> str:
    parts = tokenizer.pre_tokenizer.pre_tokenize_str(
        text if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(text)
    )
    return "".join(part for part, _ in parts)


@cache
def qwen() -> tuple[Tokenizer, WordMemory]:
    _, tokenizer = piece_tokenizers(Tokenizer.from_buffer(gzip.decompress(QWEN.read_bytes())))
    memory = word_memory(tokenizer, tokenizer.get_vocab())
    assert memory is not None
    return tokenizer, memory


LONG = {
    "one word": "a" * 100_000,
    "digits": "0123456789" * 5_000,
    "blanks": " \t" * 20_000 + "\n" * 20_000 + "x",
    "marks": "/-.;" * 10_000,
    "lines": "foo(bar)\r\n\tx = 'é'; y\n" * 3_000,
    "no blanks": "世界、カナ！" * 5_000,
    "marks on letters": "e\u0301" * 20_000,
    "letters before others": "aé" * 20_000 + ";",
    "shown as bytes": "\\xe2\\x80\\x94 " * 5_000,
}


@pytest.mark.parametrize("text", LONG)
def test_long_texts_are_cut_into_blocks(text: str):
    check(*built("qwen2, composing"), LONG[text])


@pytest.mark.skipif(not QWEN.is_file(), reason="the shared data folder is not here")
@given(text=hostile)
@settings(deadline=None)
def test_words_give_the_ids_of_the_whole_text_for_qwen3(text: str):
    check(*qwen(), text)


@pytest.mark.skipif(not QWEN.is_file(), reason="the shared data folder is not here")
def test_the_files_of_this_project_have_the_ids_of_the_whole_text_for_qwen3():
    for file in [*Path(module.__file__).parent.glob("t*.py"), *Path(__file__).parents[2].glob("*.md")]:
        check(*qwen(), file.read_text(encoding="utf-8"))


class Counting:
    """A tokenizer that remembers what it was asked to encode."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def encode_batch_fast(self, texts, add_special_tokens):
        self.texts += texts
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    def __getattr__(self, name: str):
        return getattr(self._tokenizer, name)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[WordMemory, list[str]]:
    memory = word_memory(tiny_tokenizer(), tiny_tokenizer().get_vocab())
    counting = Counting(tiny_tokenizer())
    monkeypatch.setattr(memory, "_tokenizer", counting)
    return memory, counting.texts


def test_only_words_that_are_new_are_encoded_and_all_at_once(counted: tuple[WordMemory, list[str]]):
    memory, encoded = counted
    memory.encode("the zebra crossed, a walrus (swam) over.", "")
    assert [len(text) < 40 for text in encoded[-1:]] == [True]
    before = len(encoded)
    memory.encode("the walrus crossed, a zebra (swam) over.", "")
    assert encoded[before:] == []
    memory.encode("the walrus crossed, a heron (swam) over.", "")
    assert encoded[before:] == [" heron"]


@pytest.mark.parametrize("busy", [False, True])
def test_many_new_words_are_encoded_by_several_threads(monkeypatch: pytest.MonkeyPatch, busy: bool):
    memory = word_memory(tiny_tokenizer(), tiny_tokenizer().get_vocab())
    counting = Counting(tiny_tokenizer())
    monkeypatch.setattr(memory, "_tokenizer", counting)
    monkeypatch.setattr(memory, "_helpers", 3)
    text = "".join(f" word{number},\n  ({number})" for number in range(3000))[: module._BLOCK]
    done = Event()
    if busy:  # what the helpers do not come to is not waited for
        memory._pool.submit(done.wait)
    try:
        assert list(memory.encode(text, "")) == tiny_tokenizer().encode(text, add_special_tokens=False).ids
    finally:
        done.set()
    assert len([each for each in counting.texts if len(each) > module._SHARE]) == 4


def test_what_one_said_is_new_when_another_says_it(counted: tuple[WordMemory, list[str]]):
    memory, encoded = counted
    memory.encode("x the zebra", "one")
    before = len(encoded)
    memory.encode("x the zebra", "other")
    assert " zebra" in "".join(encoded[before:])


def test_words_of_the_vocabulary_are_known_from_the_start(counted: tuple[WordMemory, list[str]]):
    memory, encoded = counted
    memory.encode(" the quick the the fox", "")
    assert not any(" the" in text for text in encoded)


def test_words_that_are_held_are_bounded(monkeypatch: pytest.MonkeyPatch):
    memory = word_memory(tiny_tokenizer(), tiny_tokenizer().get_vocab())
    bound = 3 * len(memory._common)
    monkeypatch.setattr(module, "_HELD_WORDS", bound)
    for number in range(100):
        memory.encode(" ".join(f"word{number}x{at}" for at in range(20)), f"owner {number % 7}")
        assert memory._held == sum(map(len, memory._known.values())) <= bound
    assert f"owner {99 % 7}" in memory._known
    for number in range(100):  # one alone begins again
        memory.encode(" ".join(f"word{number}x{at}" for at in range(20)), "")
        assert memory._held == sum(map(len, memory._known.values())) <= bound


def test_a_very_long_word_is_not_kept():
    memory = word_memory(tiny_tokenizer(), tiny_tokenizer().get_vocab())
    before = memory._held
    memory.encode("x " + "y" * 1000 + " z", "")
    assert not any(len(word) > 100 for word in memory._known[""])
    assert memory._held > before


NOT_CUT = {
    "lower case": lambda: byte_level(_BYTES, normalizers.Lowercase()),
    "a blank before every piece": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "a pattern that looks back": lambda: byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"(?<=a)b|\w+|\W"), "isolated"), _BYTES])
    ),
    "parts that are joined": lambda: byte_level(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+"), "merged_with_next"), _BYTES])
    ),
    "matches of letters alone": lambda: byte_level(keeping_matches(r"\p{L}+")),
    "no parts": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "another pre-tokenizer": lambda: byte_level(pre_tokenizers.Whitespace()),
    "legacy prefix": lambda: changed_normalizer(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    ),
    "words": lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
}


def changed_normalizer(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = sentencepiece_like()
    tokenizer.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize("kind", NOT_CUT)
def test_text_is_not_cut_where_that_is_not_known_to_be_safe(kind: str):
    tokenizer = NOT_CUT[kind]()
    assert word_memory(tokenizer, tokenizer.get_vocab()) is None


def test_a_blank_that_tokens_hold_is_no_place_to_cut():
    tokenizer = sentencepiece_like()
    memory = word_memory(tokenizer, [*tokenizer.get_vocab(), *(f"{letter}▁" for letter in ascii_letters + digits)])
    assert memory is None
