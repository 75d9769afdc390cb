"""Encoding by pieces equals encoding whole, with positions, memory and control tokens."""

from __future__ import annotations

import gzip
from array import array
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_model import PLAIN_ADDED, SPECIAL, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from gateway import text_memory
from gateway.control_tokens import ControlTokens, private_characters, unused_character
from gateway.tokenizer import PromptTokenizer, TooLongError
from protocol.errors import SettingsError
from protocol.model_path import EMBEDDED_MODEL, resolve_model

QWEN = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers" / "qwen3" / "tokenizer.json.gz"

fragments = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        [
            *SPECIAL,
            *PLAIN_ADDED,
            "<|im_",
            "end|>",
            "<|im_start|",
            "\n",
            "\n\n",
            "  ",
            " \t\r\n",
            "123456",
            "it's",
            "don'T",
            "é",
            "e\u0301",
            "😀",
            "👨\u200d👩\u200d👧",
            "日本語",
            "\u2028",
            "\ufeff",
            "\U000f0000",
            "﷽",
            "a" * 40,
        ]
    ),
)
hostile = st.lists(fragments, max_size=12).map("".join)


@cache
def tiny() -> PromptTokenizer:
    return PromptTokenizer(tiny_tokenizer(), PLAIN_ADDED)


@cache
def qwen() -> tuple[Tokenizer, PromptTokenizer]:
    tokenizer = Tokenizer.from_buffer(gzip.decompress(QWEN.read_bytes()))
    return tokenizer, PromptTokenizer(tokenizer, ("<think>", "</think>"))


@cache
def smollm() -> tuple[Tokenizer, PromptTokenizer]:
    from gateway.model_files import load_model_files

    tokenizer = load_model_files(resolve_model(EMBEDDED_MODEL)).tokenizer
    return tokenizer, PromptTokenizer(tokenizer)


@given(hostile)
def test_pieces_give_the_ids_of_the_whole_text(text: str):
    whole = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    assert list(tiny().encode_chat(text).token_ids) == whole
    assert list(tiny().encode_chat(text).token_ids) == whole  # from memory


@pytest.mark.skipif(not QWEN.is_file(), reason="the shared data folder is not here")
@given(hostile)
@settings(deadline=None)
def test_pieces_give_the_ids_of_the_whole_text_for_qwen3(text: str):
    tokenizer, pieces = qwen()
    assert list(pieces.encode_chat(text).token_ids) == tokenizer.encode(text, add_special_tokens=False).ids


@given(hostile)
@settings(deadline=None)
def test_pieces_give_the_ids_of_the_whole_text_for_the_embedded_model(text: str):
    try:
        tokenizer, pieces = smollm()
    except SettingsError as missing:
        pytest.skip(str(missing))
    assert list(pieces.encode_chat(text).token_ids) == tokenizer.encode(text, add_special_tokens=False).ids


@given(st.lists(fragments, min_size=1, max_size=8))
def test_a_position_is_found_exactly_where_no_token_covers_it(parts: list[str]):
    text = "".join(parts)
    encoding = tiny_tokenizer().encode(text, add_special_tokens=False)
    ids, found = tiny().encode_chat(text, range(len(text) + 1))
    assert list(ids) == encoding.ids
    for position, count in enumerate(found):
        if count is None:
            continue
        before, after = encoding.ids[:count], encoding.ids[count:]
        spelled = tiny_tokenizer().decode(before, skip_special_tokens=False)
        assert spelled == text[:position]
        assert tiny_tokenizer().decode(after, skip_special_tokens=False) == text[position:]
    assert found[0] == 0
    assert found[-1] == len(ids)


def test_a_position_inside_a_token_is_dropped():
    tokenizer = tiny()
    text = "<|im_start|>hello\n\n<|im_end|>"
    ids, found = tokenizer.encode_chat(text, [5, 12, 14, len(text)])
    assert found[0] is None  # inside a control token
    assert found[1] == 1
    assert found[3] == len(ids)


@given(hostile, hostile)
def test_a_broken_control_string_is_plain_text(one: str, other: str):
    text = f"{one}<|im_end|>{other}"
    control = tiny().control
    sentinel = unused_character(private_characters([text]))
    broken = control.broken(text, sentinel)
    assert broken.replace(sentinel, "") == text
    ids = tiny().encode_chat(broken, sentinel=sentinel).token_ids
    assert not set(ids) & set(range(3))
    assert tiny_tokenizer().decode(list(ids), skip_special_tokens=False) == text


@given(st.lists(hostile, min_size=2, max_size=4))
@example(["one\n\n", "<|im_end|> two"])
def test_a_position_that_is_kept_has_the_ids_of_the_text_before_it_alone(parts: list[str]):
    """Whatever begins behind it, also a control string that was typed."""
    sentinel = unused_character(private_characters(parts))
    broken = [tiny().control.broken(part, sentinel) for part in parts]
    ends = list(accumulate(map(len, broken)))
    text = "".join(broken)
    made = tiny().encode_chat(text, ends[:-1], sentinel=sentinel)
    for end, count in zip(ends, made.positions, strict=False):
        if count is not None:
            assert made.token_ids[:count] == tiny().encode_chat(text[:end], sentinel=sentinel).token_ids


@given(st.text(alphabet="\U000f0000\U000f0001\U000f0002ab", max_size=20))
def test_the_sentinel_is_no_character_of_the_text(text: str):
    assert unused_character(private_characters([text])) not in text


def test_kept_control_strings_stay():
    control = ControlTokens(["<think>", "<|end|>"])
    assert control.broken("<think>x<|end|>", "~", frozenset(["<think>"])) == "<think>x<~|end|>"


@given(
    st.lists(st.text(alphabet="<|ab>", min_size=1, max_size=4), min_size=1, max_size=8),
    st.text(alphabet="<|ab>", max_size=30),
)
def test_the_longest_control_token_at_each_place_is_found(tokens: list[str], text: str):
    found = [(m.start(), m.group()) for m in ControlTokens(tokens).matches(text)]
    expected, at = [], 0
    while at < len(text):
        here = max((t for t in tokens if text.startswith(t, at)), key=len, default=None)
        if here:
            expected.append((at, here))
        at += len(here) if here else 1
    assert found == expected


@given(
    st.lists(fragments, min_size=1, max_size=10), st.lists(st.lists(fragments, max_size=5), max_size=4), st.data()
)
def test_a_text_that_goes_on_from_others_is_encoded_as_if_it_were_the_first(
    head: list[str], tails: list[list[str]], data: st.DataObject
):
    remembering = PromptTokenizer(tiny_tokenizer(), PLAIN_ADDED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_memory, "_LEAST", 0)
        for tail in [*tails, []]:
            kept = data.draw(st.integers(0, len(head)), "parts of the last text that this one keeps")
            head = [*head[:kept], *tail] or ["a"]
            text = "".join(head)
            ends = list(accumulate(map(len, head)))
            asked = sorted(data.draw(st.sets(st.sampled_from(ends)), "where counts are asked for"))
            ids, found = remembering.encode_chat(text, asked)
            fresh = PromptTokenizer(tiny_tokenizer(), PLAIN_ADDED).encode_chat(text, asked)
            assert (list(ids), found) == (list(fresh.token_ids), fresh.positions)


def test_an_added_token_that_goes_on_behind_a_remembered_text_is_one_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text_memory, "_LEAST", 0)
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str())
    tokenizer.add_special_tokens(["<|a|>", "<|a|>more"])
    remembering = PromptTokenizer(tokenizer)
    text = "some words <|a|>"
    remembering.encode_chat(text, [len(text)])
    for longer in (f"{text}more", f"{text}mo", f"{text}<|a|>more"):
        ids, _ = remembering.encode_chat(longer, [len(text), len(longer)])
        assert list(ids) == tokenizer.encode(longer, add_special_tokens=False).ids


def test_only_what_is_new_in_a_text_is_searched_for_added_tokens(monkeypatch: pytest.MonkeyPatch):
    tokenizer = PromptTokenizer(tiny_tokenizer())
    turns = [f"<|im_start|>assistant {number}{' x' * 200}<|im_end|>" for number in range(20)]
    searched: list[int] = []
    plain = ControlTokens.matches
    monkeypatch.setattr(
        ControlTokens, "matches", lambda self, text, start=0: searched.append(start) or plain(self, text, start)
    )
    for count in (18, 19, 20):
        ends = list(accumulate(map(len, turns[:count])))
        ids, found = tokenizer.encode_chat("".join(turns[:count]) + "<|im_start|>assistant", ends)
        assert (
            list(ids[: found[-1]]) == tiny_tokenizer().encode("".join(turns[:count]), add_special_tokens=False).ids
        )
    ends = [0, *accumulate(map(len, turns))]
    assert searched == [0, ends[18], ends[19]]


def test_memory_is_bounded_by_bytes():
    tokenizer = PromptTokenizer(tiny_tokenizer(), cache_bytes=20_000)
    for number in range(200):
        tokenizer.encode_chat(f"<|im_start|>message number {number} " + "x" * 100)
        assert tokenizer._held_bytes <= 20_000
    assert 0 < len(tokenizer._pieces) < 200
    assert tokenizer._held_bytes == sum(piece.bytes for piece in tokenizer._pieces.values())


def test_a_piece_larger_than_the_memory_pushes_nothing_out():
    tokenizer = PromptTokenizer(tiny_tokenizer(), cache_bytes=20_000)
    tokenizer.encode_chat("<|im_start|>a short one")
    kept = list(tokenizer._pieces)
    tokenizer.encode_chat("<|im_start|>" + "x y " * 8000)
    assert list(tokenizer._pieces) == kept
    assert tokenizer._held_bytes == sum(piece.bytes for piece in tokenizer._pieces.values())


def test_text_that_cannot_fit_is_not_encoded():
    with pytest.raises(TooLongError) as refused:
        tiny().encode_chat("x" * 1_000_000, limit=100)
    assert refused.value.at_least > 100


def test_blanks_beside_stripping_tokens_are_swallowed():
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken("<|l|>", lstrip=True), AddedToken("<|r|>", rstrip=True)])
    pieces = PromptTokenizer(tokenizer)
    for text in ("a  <|l|>  b", "a <|r|> \n b", "<|r|>  <|l|>", "  <|l|>", "<|r|>\n", "x <|l|><|r|> y"):
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids, found = pieces.encode_chat(text, range(len(text) + 1))
        assert list(ids) == encoding.ids
        assert found == sorted(found, key=lambda count: -1 if count is None else count) or None in found


def sentencepiece_like(prefix: str) -> Tokenizer:
    letters = [chr(code) for code in range(97, 123)]
    vocabulary = {token: at for at, token in enumerate(["<unk>", "<s>", "</s>", "▁", *letters, "▁a", "ab"])}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize("prefix", ["first", "always", "never"])
@given(text=st.lists(st.sampled_from(["ab", " a", "</s>", "<s>", "é", " ", "b", "\n"]), max_size=10).map("".join))
def test_sentencepiece_prefixes_are_those_of_the_whole_text(prefix: str, text: str):
    tokenizer = sentencepiece_like(prefix)
    pieces = PromptTokenizer(tokenizer)
    pieces.check(["<s>ab ab</s>ab", "ab</s> ab"])
    assert list(pieces.encode_chat(text).token_ids) == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_tokenizer_whose_pieces_differ_is_used_whole():
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str())
    tokenizer.add_special_tokens([AddedToken("word", single_word=True)])
    pieces = PromptTokenizer(tokenizer)
    assert not pieces.by_pieces
    text = "a word, words, <|im_end|>"
    ids, found = pieces.encode_chat(text, [2, 6, len(text)])
    assert list(ids) == tokenizer.encode(text, add_special_tokens=False).ids
    assert found[2] == len(ids)


def test_plain_prompts_get_the_default_tokens():
    pieces = PromptTokenizer(sentencepiece_like("first"))
    assert pieces.default_prefix() == [1]
    assert pieces.encode_plain("ab")[0] == 1
    assert isinstance(pieces.encode_plain("ab"), array)
