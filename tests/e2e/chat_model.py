"""Random models of a few layers that a gateway can talk to: the default model's tokenizer and template, no sense."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tiny_models import save_tiny

from gateway.model_files import load_model_files
from protocol.model_path import resolve_model

CONTEXT = 16384
END_ID = 2  # <|im_end|>
# What a family needs besides the sizes they have in common.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    # Three layers of four recur; a state is as large as the keys and values of some 200 tokens.
    "qwen3_5": {"head_dim": 16, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "gemma4": {
        "head_dim": 16,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "sliding_window": 100,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "final_logit_softcapping": 30.0,
    },
}


def make_chat_model(folder: Path, seed: int = 0, family: str = "llama") -> Path:
    """Write the model; its logits depend on all of the prompt, so that a wrong state shows in a few tokens."""
    files = load_model_files(resolve_model("smollm2-135m-instruct"))
    folder.mkdir(parents=True)
    vocab_size = files.tokenizer.get_vocab_size()
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": END_ID,
        **FAMILIES[family],
    }
    if family == "gemma4":
        sizes["vocab_size_per_layer_input"] = vocab_size
    save_tiny(folder, family, seed=seed, **sizes)
    files.tokenizer.save(str(folder / "tokenizer.json"))
    config = {**files.special_tokens, "chat_template": files.templates["default"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


_TEXT = """
the river carried small boats past green hills while people on both sides walked to market with bread fish apples and
cloth every morning before light rain came over mountain roads where old horses rested under tall trees near stone
houses built by hands that knew wood iron glass and fire long ago when winter stayed late children learned songs
numbers letters stars weather about moving water cold wind warm sand deep snow
"""


def words(seed: object, count: int) -> str:
    """So many common words, the same for the same seed: about as many tokens."""
    return " ".join(random.Random(str(seed)).choices(_TEXT.split(), k=count))
