"""Our model definitions compute what `transformers` computes, from both kinds of files, densely and paged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dense_caller import CPU, error, load, reference_logits, some_ids
from paged_rig import assert_decoded_together, paged, prefill
from tiny_models import LLAMA3_ROPE, make_tiny, save_tiny, write_gguf
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from worker.heads import HeadNorms, split_heads
from worker.kv_cache import BLOCK_TOKENS
from worker.model_config import load_config
from worker.models.llama import Attend, LlamaModel
from worker.weights import iter_weights

# Of the largest logit. Float32 sums in another order differ by 1e-6 of it; a wrong formula by far more than this.
TOLERANCE = 2e-5
# Positions go past the 64 that the scaled variant was first trained on.
TOKENS = 100
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2}),
    ("llama", {"rope_parameters": LLAMA3_ROPE}),
    ("llama", {"rope_parameters": LINEAR_ROPE}),
    ("mistral", {"num_key_value_heads": 1}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("qwen3", {}),
    ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
]


def attend_densely(model: LlamaModel) -> Attend:
    """Causal attention over the rows of this pass: the plain formula, apart from the pool's code."""
    cos, sin = model.rotary.rows(torch.arange(TOKENS))

    def attend(_layer: int, qkv: Tensor, norms: HeadNorms | None) -> Tensor:
        q, k, v = split_heads(qkv, model.config.num_kv_heads, norms, cos, sin)
        group = q.shape[1] // k.shape[1]
        keys, values = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) / q.shape[-1] ** 0.5
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        shares = F.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        return torch.einsum("hqk,khd->qhd", shares, values).flatten(1)

    return attend


@pytest.mark.parametrize("stored", ["safetensors", "gguf"])
@pytest.mark.parametrize(("family", "changes"), VARIANTS)
@torch.no_grad()
def test_every_logit_of_a_prompt(tmp_path: Path, family: str, changes: dict[str, Any], stored: str) -> None:
    reference = make_tiny(family, **changes)
    if stored == "gguf":
        path = tmp_path / "model.gguf"
        write_gguf(path, reference, **_gguf_rope(reference))
    else:
        path = tmp_path
        save_tiny(path, family, **changes)
    model, ids = load(path), some_ids(1, TOKENS)
    found = model.logits(model.forward(ids, attend_densely(model)))
    assert error(found, reference_logits(reference, ids)) < TOLERANCE


def _gguf_rope(model: Any) -> dict[str, Any]:
    """How llama.cpp's converter writes the rotary scaling of a model."""
    rope = model.config.rope_parameters
    match rope["rope_type"]:
        case "linear":
            prefix = f"{model.config.model_type}.rope.scaling"
            return {"metadata": {f"{prefix}.type": "linear", f"{prefix}.factor": rope["factor"]}}
        case "llama3":
            plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
            scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](model.config, CPU)
            return {"extra": {"rope_freqs.weight": plain / scaled}}
    return {}


@pytest.mark.parametrize(
    "blocks", [[1, 2, 3, 4], [9, 3, 30, 17], [36, 37, 38, 39]], ids=["run", "scattered", "end of pool"]
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_prefill_in_chunks_through_the_pool(tmp_path: Path, family: str, blocks: list[int]) -> None:
    assert len(blocks) * BLOCK_TOKENS >= TOKENS
    reference = save_tiny(tmp_path, family)
    ids = some_ids(2, TOKENS)
    found = prefill(paged(tmp_path, blocks=40), ids, blocks, cuts=[1, 38, 64, 96])
    assert error(found, reference_logits(reference, ids)) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_decoding_sequences_of_different_lengths_together(tmp_path: Path, family: str) -> None:
    reference = save_tiny(tmp_path, family)
    assert_decoded_together(paged(tmp_path), reference, TOLERANCE)


def test_keys_past_one_multiple_of_attention(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama")
    ids = some_ids(10, 200)
    runner = paged(tmp_path, key_multiple=64)
    found = prefill(runner, ids, [5, 6, 7, 30, 31, 9, 10], cuts=[64, 128, 150])
    assert error(found, reference_logits(reference, ids)) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_bfloat16_weights_stay_near(tmp_path: Path, family: str) -> None:
    reference = save_tiny(tmp_path, family, dtype=torch.bfloat16)
    config, ids = load_config(tmp_path), some_ids(11, TOKENS)
    model = LlamaModel(config, iter_weights(tmp_path, config), torch.bfloat16, CPU, 512)
    found = model.logits(model.forward(ids, attend_densely(model)))
    expected = reference_logits(reference.float(), ids)
    assert error(found, expected) < 0.05
