"""Tokenizers and templates from folders and from GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import END_ID, PLAIN_ADDED, TEMPLATE, tiny_tokenizer, write_gguf, write_model_dir

from gateway.conversation import Conversation, Message
from gateway.gguf_metadata import read_metadata
from gateway.gguf_tokenizer import build_tokenizer
from gateway.model_files import load_model_files
from gateway.prompts import PromptMaker
from protocol.errors import SettingsError


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_folder_gives_tokenizer_template_and_ends(model_dir: Path):
    files = load_model_files(model_dir)
    assert files.templates == {"default": TEMPLATE}
    assert files.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    assert files.end_token_ids == {0, END_ID}


def test_a_gguf_file_gives_the_same_tokenizer(gguf_file: Path):
    files = load_model_files(gguf_file)
    assert files.templates == {"default": TEMPLATE}
    assert files.special_tokens == {"eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    assert files.end_token_ids == {END_ID}
    added = {token.content: token.special for token in files.tokenizer.get_added_tokens_decoder().values()}
    assert {token for token, special in added.items() if not special} == set(PLAIN_ADDED)

    @given(st.text(max_size=60))
    @settings(deadline=None)
    def same_ids(text: str) -> None:
        expected = tiny_tokenizer().encode(text, add_special_tokens=False).ids
        assert files.tokenizer.encode(text, add_special_tokens=False).ids == expected

    same_ids()
    text = "<|im_start|>user\n12 34<think>hi</think><|im_end|>"
    assert files.tokenizer.encode(text).ids == tiny_tokenizer().encode(text).ids


PRE = ["gpt-2", "default", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "seed-coder", "deepseek-v3"]


@pytest.mark.parametrize("pre", [*PRE, "deepseek-coder"])
def test_every_listed_pre_tokenizer_loses_no_text(tmp_path: Path, pre: str):
    tokenizer = load_model_files(write_gguf(tmp_path / "x.gguf", pre)).tokenizer
    text = "It's 12345 Größe, don'T\r\n\r\n  x = [1];\t日本語😀\n"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path):
    with pytest.raises(SettingsError, match="no-such-split"):
        load_model_files(write_gguf(tmp_path / "x.gguf", "no-such-split"))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("default", "x=12345", ["x", "=", "123", "45"]),
        ("gpt-2", "x=12345 a's", ["x", "=", "12345", "Ġa", "'s"]),
        ("smollm", "x=12", ["x", "=", "1", "2"]),
        ("deepseek-v3", "x=12345 .abc", ["x", "=", "123", "45", "Ġ.", "abc"]),
        ("deepseek-coder", "if x:\n\n 12", ["if", "Ġx", ":", "Ċ", "Ċ", "Ġ", "1", "2"]),
        ("seed-coder", "a();\n\nb", ["a", "();", "ĊĊ", "b"]),
        ("llama-bpe", "a();\n\nb", ["a", "();ĊĊ", "b"]),
        ("qwen2", "123", ["1", "2", "3"]),
    ],
)
def test_text_is_split_as_the_word_says(tmp_path: Path, pre: str, text: str, pieces: list[str]):
    splitter = load_model_files(write_gguf(tmp_path / "x.gguf", pre)).tokenizer.pre_tokenizer
    assert [piece for piece, _ in splitter.pre_tokenize_str(text)] == pieces


def test_plain_text_begins_with_bos_where_such_a_file_does_not_say(tmp_path: Path):
    for pre, begins in (("llama-bpe", True), ("tekken", True), ("qwen2", False)):
        tokenizer = load_model_files(write_gguf(tmp_path / "x.gguf", pre)).tokenizer
        assert (tokenizer.encode("hello").ids[0] == 1) is begins


@pytest.mark.parametrize(("kind", "lacking"), [("gpt2", "merges"), ("llama", "scores")])
def test_what_a_gguf_file_lacks_is_named(kind: str, lacking: str):
    with pytest.raises(SettingsError, match=f"tokenizer.ggml.{lacking}"):
        build_tokenizer({"tokenizer.ggml.model": kind, "tokenizer.ggml.tokens": ["a"]})


def test_an_unknown_tokenizer_model_is_refused_by_name():
    with pytest.raises(SettingsError, match="bert"):
        build_tokenizer({"tokenizer.ggml.model": "bert", "tokenizer.ggml.tokens": []})


def test_sentencepiece_scores_decide_the_merges():
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
        "▁ab",
    ]
    scores = [0.0] * 259 + [-10.0, -11.0, -12.0, -2.0, -1.0, -3.0]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.encode(" b</s> b").tokens == ["<s>", "▁", "▁", "b", "</s>", "▁", "▁", "b"]
    assert tokenizer.encode("ab é</s>b").tokens == ["<s>", "▁ab", "▁", "<0xC3>", "<0xA9>", "</s>", "▁", "b"]


@pytest.mark.parametrize("size", [0, 3, 10, 40, 1000])
def test_a_cut_gguf_file_is_refused(tmp_path: Path, gguf_file: Path, size: int):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(gguf_file.read_bytes()[:size])
    with pytest.raises(SettingsError, match="GGUF"):
        read_metadata(cut, lambda key: True)


def test_a_file_of_another_kind_is_refused(tmp_path: Path):
    other = tmp_path / "x.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(SettingsError, match="letters GGUF"):
        read_metadata(other, lambda key: True)


def test_metadata_of_every_type_are_read(tmp_path: Path):
    import gguf

    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int16("a.i16", -5)
    writer.add_uint64("a.u64", 1 << 40)
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.25)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "größe")
    writer.add_array("a.ints", [1, 2, 3])
    writer.add_array("a.texts", ["x", "yy"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_metadata(tmp_path / "x.gguf", lambda key: key.startswith("a."))
    assert found == {
        "a.u8": 200,
        "a.i16": -5,
        "a.u64": 1 << 40,
        "a.f32": 0.5,
        "a.f64": 0.25,
        "a.bool": True,
        "a.text": "größe",
        "a.ints": [1, 2, 3],
        "a.texts": ["x", "yy"],
    }


def test_named_templates_and_template_files(tmp_path: Path):
    folder = write_model_dir(tmp_path / "m")
    listed = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    assert load_model_files(folder).templates == {"default": "A", "tool_use": "B"}
    (folder / "chat_template.jinja").write_text("C")
    assert load_model_files(folder).templates == {"default": "C", "tool_use": "B"}
    own = tmp_path / "own.jinja"
    own.write_text("D")
    assert load_model_files(folder, own).templates == {"default": "D"}


def test_what_is_missing_is_named(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        load_model_files(tmp_path)
    with pytest.raises(SettingsError, match="chat_template"):
        load_model_files(write_model_dir(tmp_path / "m"), tmp_path / "none.jinja")


def test_tokens_that_only_the_configuration_declares_are_single_ids(tmp_path: Path):
    folder = write_model_dir(tmp_path / "m")
    tokenizer = tiny_tokenizer()
    size, word = tokenizer.get_vocab_size(), "Ġthe"
    declared = {
        str(size): {"content": "<|new|>", "special": True},
        str(tokenizer.token_to_id(word)): {"content": word, "special": False},
        str(size + 7): {"content": "<|nowhere|>", "special": True},
        "x": {"content": "<|x|>"},
    }
    config = {"added_tokens_decoder": declared, "eos_token": "ing", "pad_token": "<|none|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(
        '{"eos_token": "no", "bos_token": {"content": "<|im_start|>"}}'
    )
    files = load_model_files(folder)
    assert files.special_tokens == {"eos_token": "ing", "bos_token": "<|im_start|>", "pad_token": "<|none|>"}
    added = {token.content: at for at, token in files.tokenizer.get_added_tokens_decoder().items()}
    assert added["<|new|>"] == size
    assert added[word] == tokenizer.token_to_id(word)
    assert ("ing" in added) is (tokenizer.token_to_id("ing") is not None)
    assert not {"<|nowhere|>", "<|x|>", "<|none|>"} & set(added)
    assert files.tokenizer.encode("a<|new|>b").ids.count(size) == 1


def test_a_template_of_the_processor_and_a_list_without_names(tmp_path: Path):
    folder = write_model_dir(tmp_path / "m")
    config = folder / "tokenizer_config.json"
    config.write_text("{}")
    (folder / "chat_template.json").write_text('{"chat_template": "A"}')
    assert load_model_files(folder).templates == {"default": "A"}
    config.write_text('{"chat_template": "B"}')
    assert load_model_files(folder).templates == {"default": "B"}
    config.write_text('{"chat_template": [{"template": "B"}]}')
    with pytest.raises(SettingsError, match="no name"):
        load_model_files(folder)
    config.write_text("{}")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(SettingsError, match="cannot read"):
        load_model_files(folder)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_special_tokens_without_names_are_there_for_templates(tmp_path: Path, file: str):
    folder = write_model_dir(tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = (
        "{% for m in messages %}{{ additional_special_tokens[1] }}{{ m.role }}\n{{ m.content }}"
        "{{ additional_special_tokens[0] }}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    named = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    listed = {"additional_special_tokens": ["<|im_end|>", {"content": "<|im_start|>"}]}
    (folder / file).write_text(json.dumps(named | listed))
    text, _ = PromptMaker(load_model_files(folder)).history(Conversation((Message("user", "Hello"),)))
    assert text == "<|im_start|>user\nHello<|im_end|>"
