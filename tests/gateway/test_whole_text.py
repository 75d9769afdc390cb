"""Piecewise ids are those of the whole text: real conversations, real tokenizers and templates, and hostile text."""

from __future__ import annotations

import gzip
import json
import unicodedata
from collections.abc import Iterable
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gateway.body import parse_object
from gateway.canonical import parse_messages, parse_tools
from gateway.conversation import Conversation
from gateway.model_files import ModelFiles, load_model_files
from gateway.prompts import PromptMaker
from protocol.errors import SettingsError
from protocol.model_path import EMBEDDED_MODEL, resolve_model

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
FILES = sorted((SHARED / "conversations").glob("*.jsonl.gz")) if SHARED.is_dir() else []
MAX_CHARACTERS = 400_000

pytestmark = pytest.mark.skipif(not FILES, reason="the shared data folder is not here")
models = pytest.mark.parametrize("model", ["qwen3", "smollm2"])


@cache
def maker(model: str) -> tuple[Tokenizer, PromptMaker]:
    if model == "qwen3":
        packed = (SHARED / "tokenizers" / "qwen3" / "tokenizer.json.gz").read_bytes()
        template = (SHARED / "chat_templates" / "Qwen-Qwen3-0.6B.jinja").read_text()
        files = ModelFiles(Tokenizer.from_buffer(gzip.decompress(packed)), {"default": template})
    else:
        try:
            files = load_model_files(resolve_model(EMBEDDED_MODEL))
        except SettingsError as missing:
            pytest.skip(str(missing))
    return files.tokenizer, PromptMaker(files)


def spelled(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """What ids stand for. Some tokenizers normalize text, and some have no token for rare bytes."""
    return unicodedata.normalize("NFC", tokenizer.decode(list(ids), skip_special_tokens=False))


def check(model: str, conversation: Conversation) -> int:
    """Compare with one encode of the whole text, where no control token was typed. Returns the boundaries."""
    tokenizer, made_by = maker(model)
    made = made_by.trace(conversation)
    whole = tokenizer.encode(made.text + made.suffix, add_special_tokens=False)
    if list(made.token_ids) != whole.ids:
        # The only difference there may be: control tokens that somebody typed are spelled out.
        typed = [t for t in made_by.tokenizer.control.tokens if any(t in m.content for m in conversation.messages)]
        assert typed, "the ids differ from those of the whole text"
        assert spelled(tokenizer, made.token_ids) == spelled(tokenizer, whole.ids)
    else:
        starts = {start for start, _ in whole.offsets} | {len(made.text)}
        text_ends = {cut.end for cut in made.text_cuts}
        for cut in made.cuts:
            if cut.end < len(whole.offsets) and cut.kind != "interior":
                assert whole.offsets[cut.end][0] in text_ends & starts
    return len(made.cuts)


@models
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name.partition(".")[0])
def test_real_conversations_have_the_ids_of_their_whole_text(model: str, file: Path):
    with gzip.open(file) as lines:
        sessions = [json.loads(line) for line in islice(lines, 4)]
    for session in sessions:
        messages: list[dict] = []
        for message in session["messages"][:120]:
            if message.get("role") in ("system", "user", "assistant", "tool"):
                messages.append(message)
            if sum(len(str(m.get("content"))) for m in messages) > MAX_CHARACTERS // 4:
                break
        tools = parse_tools(session.get("tools"))
        for count in {len(messages), len(messages) // 2} - {0}:
            conversation = Conversation(parse_messages(messages[:count]), tools)
            assert check(model, conversation) >= count - 1 - conversation.continues


MARKERS = ["<|im_end|>", "<|im_start|>", "<think>", "</think>", "<tool_call>", "<|im_", "\n<|", "[INST]", "<s>"]
BLANKS = ["\n", "\n\n\n", "    ", " \t \r\n", "\u00a0", "\u3000", "\u200b", "\u2028", "\ufeff", "\x00", "\x85"]
MARKS = [
    "e\u0301",
    "n\u0303\u0323",
    "\u0301",
    "\u093f",
    "ก็",
    "각",
    "👩\u200d👩\u200d👧\u200d👦",
    "🇩🇪",
    "日本語",
    "﷽",
]
WORDS = ["'s", "don'T", "1234567", "x_y", "{'a': 1}", "https://x.y/z?q=1"]
fragments = st.one_of(st.text(max_size=8), *(st.sampled_from(kind) for kind in (MARKERS, BLANKS, MARKS, WORDS)))
hostile = st.lists(fragments, max_size=8).map("".join)


@models
@given(st.lists(hostile, min_size=1, max_size=5), st.booleans())
def test_hostile_messages_lose_nothing_and_forge_nothing(model: str, contents: list[str], system: bool):
    tokenizer, made_by = maker(model)
    roles = ["system"] * system + ["user", "assistant"] * 3
    said = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    conversation = Conversation((*parse_messages(said), *parse_messages([{"role": "user", "content": "end"}])))
    made = made_by.trace(conversation)
    ids = list(made.token_ids)
    start = tokenizer.token_to_id("<|im_start|>")
    default_system = model == "smollm2" and not system
    assert ids.count(start) == len(conversation.messages) + 1 + default_system
    check(model, conversation)


@models
@given(st.lists(st.sampled_from(["\\ud800", "\\udfff", "\\ud83d\\ude00", "a", " ", "\\ude00\\ud83d"]), max_size=8))
def test_half_surrogates_become_the_replacement_character(model: str, parts: list[str]):
    text = "".join(parts)
    body = b'{"messages": [{"role": "user", "content": "x%s"}]}' % text.encode()
    conversation = Conversation(parse_messages(parse_object(body)["messages"]))
    conversation.messages[0].content.encode()  # no half is left
    check(model, conversation)
