"""A small random model with a context of 128k tokens and the tokenizer and chat template of a model with tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tiny_models import save_tiny

CONTEXT = 131_072


def make_model(folder: Path, tokenizer: Path) -> Path:
    """Write it. `tokenizer` is a folder with the two files of a Qwen3 tokenizer."""
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    ids = {token["content"]: int(number) for number, token in config["added_tokens_decoder"].items()}
    save_tiny(
        folder,
        "qwen3",
        vocab_size=max(ids.values()) + 1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=ids[config["eos_token"]],
    )
    return folder
