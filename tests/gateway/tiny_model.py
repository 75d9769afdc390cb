"""A byte-level model folder made from a few lines of text, and the same as a GGUF file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END_ID = 2
TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' and '</think>' in message.content %}"
    "{{- '<|im_start|>assistant\\n<think>' + message.content.split('</think>')[0].split('<think>')[-1] }}"
    "{{- '</think>' + message.content.split('</think>')[-1] + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_TEXT = [
    "The quick brown fox jumps over the lazy dog. Hello world, hello there! It's 2024, don't we'll see?",
    "system user assistant tool message answer question what is the capital of France? Paris.",
    "def main():\n    return {'a': 1}\n\n\n    for i in range(10):\n        print(i)\n",
    "größe naïve café 日本語 😀 emoji   spaces\t\ttabs\r\n",
] * 4


@cache
def tiny_tokenizer() -> Tokenizer:
    """Digits split one by one, then byte-level, as SmolLM2 has it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.add_tokens(list(PLAIN_ADDED))
    return tokenizer


def write_model_dir(path: Path) -> Path:
    """The files of a Hugging Face folder that a gateway reads."""
    path.mkdir(parents=True, exist_ok=True)
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, END_ID]}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def write_gguf(path: Path, pre: str = "smollm") -> Path:
    """The tokenizer of `tiny_tokenizer` as GGUF metadata."""
    description = json.loads(tiny_tokenizer().to_str())
    vocabulary = description["model"]["vocab"] | {t["content"]: t["id"] for t in description["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    kinds = [3 if token in SPECIAL else 4 if token in PLAIN_ADDED else 1 for token in tokens]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in description["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(END_ID)
    writer.add_chat_template(TEMPLATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
