"""Our model definitions compute what `transformers` computes, from both kinds of files, densely and paged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import LLAMA3_ROPE, make_tiny, save_tiny, write_gguf
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from worker.heads import HeadNorms, split_heads
from worker.kv_cache import BLOCK_TOKENS, KVCache
from worker.model_config import load_config
from worker.model_runner import ModelRunner
from worker.models.llama import Attend, LlamaModel
from worker.row_check import RowCounts
from worker.weights import iter_weights

CPU = torch.device("cpu")
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


def load(path: Path) -> LlamaModel:
    config = load_config(path)
    return LlamaModel(config, iter_weights(path, config), torch.float32, CPU, config.max_position_embeddings)


def some_ids(seed: int, count: int = TOKENS) -> Tensor:
    return torch.randint(96, (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def reference_logits(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids[None]).logits[0]
    return logits


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    worst = (found - expected).abs().max() / expected.abs().max()
    assert worst < TOLERANCE, f"off by {worst:.1e} of the largest logit"


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
    model, ids = load(path), some_ids(1)
    found = model.logits(model.forward(ids, attend_densely(model)))
    assert_close(found, reference_logits(reference, ids))


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


def paged(model: LlamaModel, key_multiple: int = 512) -> ModelRunner:
    cache = KVCache(model.config, 40, torch.float32, CPU)
    # What lies in blocks that nobody owns must not show.
    cache.memories[0][:, :, :, 1:].normal_(generator=torch.Generator().manual_seed(9))
    return ModelRunner(model, cache, RowCounts((64,), (4, 8), key_multiple, True, True))


def prefill(runner: ModelRunner, ids: Tensor, blocks: list[int], cuts: list[int]) -> Tensor:
    """Logits of all rows, computed in passes that end at `cuts`."""
    rows = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        rows.append(runner.prefill(ids[start:end].tolist(), blocks, start)[: end - start])
    return torch.stack([runner.head_row(row) for row in torch.cat(rows)])


@pytest.mark.parametrize(
    "blocks", [[1, 2, 3, 4], [9, 3, 30, 17], [36, 37, 38, 39]], ids=["run", "scattered", "end of pool"]
)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_prefill_in_chunks_through_the_pool(tmp_path: Path, family: str, blocks: list[int]) -> None:
    assert len(blocks) * BLOCK_TOKENS >= TOKENS
    reference = save_tiny(tmp_path, family)
    ids = some_ids(2)
    found = prefill(paged(load(tmp_path)), ids, blocks, cuts=[1, 38, 64, 96])
    assert_close(found, reference_logits(reference, ids))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_decoding_sequences_of_different_lengths_together(tmp_path: Path, family: str) -> None:
    reference = save_tiny(tmp_path, family)
    runner = paged(load(tmp_path))
    # The middle one crosses from one block into the next, and reads a table with a gap.
    prompts = [some_ids(3, 5), some_ids(4, 62), some_ids(5, 90)]
    tables = [[11], [12, 20, 13], [14, 15, 16]]
    continuations = [some_ids(seed, 5) for seed in (6, 7, 8)]
    for prompt, table in zip(prompts, tables, strict=True):
        prefill(runner, prompt, table, cuts=list(range(64, len(prompt), 64)))
    for step in range(5):
        found = runner.decode(
            [int(tail[step]) for tail in continuations], tables, [len(prompt) + step for prompt in prompts]
        )
        for row, prompt, tail in zip(found, prompts, continuations, strict=True):
            whole = torch.cat([prompt, tail[: step + 1]])
            assert_close(row, reference_logits(reference, whole)[-1])


def test_keys_past_one_multiple_of_attention(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "llama")
    ids = some_ids(10, 200)
    runner = paged(load(tmp_path), key_multiple=64)
    found = prefill(runner, ids, [5, 6, 7, 30, 31, 9, 10], cuts=[64, 128, 150])
    assert_close(found, reference_logits(reference, ids))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.no_grad()
def test_bfloat16_weights_stay_near(tmp_path: Path, family: str) -> None:
    reference = save_tiny(tmp_path, family, dtype=torch.bfloat16)
    config, ids = load_config(tmp_path), some_ids(11)
    model = LlamaModel(config, iter_weights(tmp_path, config), torch.bfloat16, CPU, 512)
    found = model.logits(model.forward(ids, attend_densely(model)))
    expected = reference_logits(reference.float(), ids)
    assert (found - expected).abs().max() / expected.abs().max() < 0.05
