"""Tokenizers as they are found in files: cut, filled up, random, trimming, swallowing blanks, prefixing.

The library itself is the reference, without what would shorten, lengthen or vary what it gives.
"""

from __future__ import annotations

import json
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from gateway.tokenizer import PromptTokenizer


def changed(*tokens: AddedToken, **parts: object) -> Tokenizer:
    """The byte-level tokenizer with other parts and further added tokens."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str())
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    for token in tokens:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


def sentencepiece_like(normalizer: normalizers.Normalizer | None, pre: object = None) -> Tokenizer:
    pieces = [
        "<unk>",
        "▁",
        *map(chr, range(97, 123)),
        "▁a",
        "ab",
        "▁▁",
        *(f"<0x{byte:02X}>" for byte in range(256)),
    ]
    merges = [("▁", "▁"), ("▁", "a"), ("a", "b")]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def cut() -> Tokenizer:
    tokenizer = changed()
    tokenizer.enable_truncation(4)
    return tokenizer


def filled() -> Tokenizer:
    tokenizer = changed()
    tokenizer.enable_padding(length=40)
    return tokenizer


def random_merges() -> Tokenizer:
    tokenizer = changed()
    tokenizer.model.dropout = 0.5
    return tokenizer


_FRAME = processors.TemplateProcessing(
    single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)]
)
_LEGACY = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS = {
    "cut to a length": cut,
    "filled up to a length": filled,
    "merging at random": random_merges,
    "framing text": lambda: changed(post_processor=_FRAME),
    "trimming spans": lambda: changed(post_processor=processors.ByteLevel(trim_offsets=True)),
    "trimming spans, and whole words": lambda: changed(
        AddedToken("zzz", single_word=True), post_processor=processors.ByteLevel(trim_offsets=True)
    ),
    "swallowing blanks": lambda: changed(
        AddedToken("<s>", lstrip=True, special=True), AddedToken("</s>", rstrip=True, special=True)
    ),
    "swallowing blanks that are tokens": lambda: changed(
        AddedToken("<s>", lstrip=True, rstrip=True, special=True, normalized=False),
        AddedToken("  ", normalized=True),
    ),
    "two searches": lambda: changed(
        AddedToken("<a|>", normalized=True), AddedToken("|>b", special=True, normalized=False)
    ),
    "composing": lambda: changed(normalizer=normalizers.NFC()),
    "lower case": lambda: changed(AddedToken("WORD", normalized=True), normalizer=normalizers.Lowercase()),
    "a blank before every piece": lambda: changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "legacy prefix": lambda: sentencepiece_like(_LEGACY),
    "no prefix": lambda: sentencepiece_like(normalizers.Replace(" ", "▁")),
    "prefix at the start, in a sequence": lambda: sentencepiece_like(
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), pre_tokenizers.Metaspace(prepend_scheme="first")]),
    ),
}

_BLANKS = (" ", "  ", "\n", "\t", "\x1c", "\x85", "\u3000")
_TOKENS = ("<s>", "</s>", "<|im_end|>", "<a|>", "|>b", "word", "WORD", "▁", "<", "|>")
_WORDS = ("xwords", "ab", " a", "hello", "1234", "it's", "é", "e\u0301", "😀", "日本")
texts = st.lists(st.sampled_from([*_BLANKS, *_TOKENS, *_WORDS]), max_size=10).map("".join)


@cache
def built(kind: str) -> tuple[Tokenizer, PromptTokenizer]:
    """The library's tokenizer, and ours of the same file."""
    tokenizer = KINDS[kind]()
    plain = json.loads(tokenizer.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
    plain["model"] = plain["model"] | {"dropout": None}
    ours = PromptTokenizer(tokenizer)
    ours.check(["<s>  It's 12\n a</s> b<s>c", "<|im_end|> a<|im_end|>b"])
    return Tokenizer.from_str(json.dumps(plain)), ours


@pytest.mark.parametrize("kind", KINDS)
@given(text=texts)
@settings(max_examples=50)
def test_ids_are_those_of_the_whole_text_and_positions_those_of_its_beginnings(kind: str, text: str):
    library, ours = built(kind)
    ids, found = ours.encode_chat(text, range(len(text) + 1))
    encoding = library.encode(text, add_special_tokens=False)
    assert list(ids) == encoding.ids
    for position, count in enumerate(found):
        before = library.encode(text[:position], add_special_tokens=False).ids
        if count is not None:
            assert list(ids[:count]) == before
        elif ours.by_pieces and encoding.ids[: len(before)] == before:
            assert any(start < position < end for start, end in encoding.offsets)


def test_plain_prompts_are_framed_and_chats_begin_as_they_do():
    ours = PromptTokenizer(changed(post_processor=_FRAME))
    ids = list(ours.encode_plain("hello"))
    assert (ids[0], ids[-1]) == (0, 2)
    assert list(ours.encode_chat("hello").token_ids) == ids[1:-1]
    assert ours.default_prefix() == [0]


def test_a_long_plain_prompt_is_neither_cut_nor_filled_up():
    for kind in (cut, filled):
        assert (
            list(PromptTokenizer(kind()).encode_plain("hello " * 20)) == tiny_tokenizer().encode("hello " * 20).ids
        )
        assert len(PromptTokenizer(kind()).encode_plain("hello")) == len(tiny_tokenizer().encode("hello").ids)
