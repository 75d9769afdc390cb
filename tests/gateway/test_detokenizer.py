"""Text from tokens: whole characters, and stop strings however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import tiny_tokenizer
from tokenizers import Tokenizer, decoders, models

from gateway.detokenizer import Detokenizer, StopStrings, TokenBytes
from protocol.errors import SettingsError

TOKENS = TokenBytes(tiny_tokenizer())


@given(st.text(max_size=60))
def test_every_delta_is_whole_characters_and_they_join_to_the_text(text: str):
    ids = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    special = set(range(3))
    detokenizer = Detokenizer(TOKENS)
    deltas = [detokenizer.feed(token_id) for token_id in ids]
    assert not any("\ufffd" in delta for delta in deltas) or "\ufffd" in text
    if not special & set(ids):
        assert "".join(deltas) == text


@given(st.lists(st.integers(0, 606), max_size=30))
def test_any_ids_give_the_text_that_the_tokenizer_gives(ids: list[int]):
    """Up to an incomplete character at the end, which is never given out."""
    detokenizer = Detokenizer(TOKENS)
    text = "".join(map(detokenizer.feed, ids))
    plain = [i for i in ids if i > 2]
    assert b"".join(map(TOKENS.text, plain)).decode(errors="replace").startswith(text)


def test_special_tokens_write_nothing_and_others_that_were_added_do():
    tokenizer = tiny_tokenizer()
    assert TOKENS.text(tokenizer.token_to_id("<|im_end|>")) == b""
    assert TOKENS.spelled(tokenizer.token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert TOKENS.text(tokenizer.token_to_id("<think>")) == b"<think>"
    assert TOKENS.text(10**6) == b""


def test_special_tokens_that_are_markers_are_written_out():
    end, start = (tiny_tokenizer().token_to_id(token) for token in ("<|im_end|>", "<|im_start|>"))
    assert TOKENS.special_in(["to <|im_end|> x"]) == {end}
    detokenizer = Detokenizer(TOKENS, TOKENS.special_in(["to <|im_end|> x"]))
    assert [detokenizer.feed(token_id) for token_id in (start, end)] == ["", "<|im_end|>"]


def test_sentencepiece_tokens_become_bytes():
    tokenizer = Tokenizer(models.BPE({"▁hi": 0, "<0xF0>": 1, "<0x9F>": 2, "<0x98>": 3, "<0x80>": 4}, []))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    assert [detokenizer.feed(token_id) for token_id in range(5)] == [" hi", "", "", "", "😀"]


def test_an_unknown_decoder_is_refused_by_name():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(SettingsError, match="WordPiece"):
        TokenBytes(tokenizer)


letters = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the stop string that is complete first, reading character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@given(letters, stop_lists, st.data())
def test_stop_strings_do_not_depend_on_how_text_is_cut(text: str, stops: list[str], data: st.DataObject):
    stop = StopStrings(stops)
    out, at = "", 0
    while at < len(text) and not stop.found:
        size = data.draw(st.integers(1, 6))
        piece = text[at : at + size]
        given_out = stop.feed(piece)
        at += size
        out += given_out
        if not stop.found:  # nothing is held back that could not begin a stop string
            held = text[:at][len(out) :]
            assert not held or any(s.startswith(held) and s != held for s in stops)
    if not stop.found:
        out += stop.finish()
    assert (out, stop.found) == expected(text, stops)


def test_nothing_is_held_back_without_stop_strings():
    assert StopStrings([]).feed("abc") == "abc"
