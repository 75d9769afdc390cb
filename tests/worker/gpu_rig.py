"""Small random models for the card, with heads of the sizes of real ones: the shapes of kernels depend on those."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_rig import Worker, ids
from snapshot_rig import prompt
from tiny_models import save_tiny

on_a_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Every length in the first passes, then the edges of tiles, splits and chunks, and of the longest pass.
LENGTHS = [
    *range(1, 131),
    *(edge + off for edge in (192, 256, 512, 640, 4096, 8192) for off in (-1, 0, 1)),
    12345,
]
_COMMON = {
    "hidden_size": 256,
    "intermediate_size": 640,
    "max_position_embeddings": 40960,
    "initializer_range": 0.1,
}
_DENSE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
_MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": (
        "qwen3_5",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        },
    ),
    "sharing": (
        "gemma4",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "global_head_dim": 512,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "sliding_window": 200,
            "hidden_size_per_layer_input": 64,
            "final_logit_softcapping": 30.0,
        },
    ),
}
DENSE = ("llama", "qwen2", "qwen3")
MIXED = tuple(_MIXED)


def save_model(directory: Path, kind: str) -> None:
    """Write one of `DENSE` or `MIXED`."""
    if kind in DENSE:
        # Qwen2 derives its head size, 32, from the hidden size.
        shape = {name: size for name, size in _DENSE.items() if kind != "qwen2" or name != "head_dim"}
        save_tiny(directory, kind, **_COMMON, **shape)
        return
    family, changes = _MIXED[kind]
    made = save_tiny(directory, family, **_COMMON, **changes)
    for name, weight in made.named_parameters():
        if family == "gemma4" and "q_norm" in name:
            # Its scores are not divided by anything: of random keys one alone would count, and which is chance.
            weight.data.mul_(0.05)
        elif name.endswith("A_log"):
            weight.data.sub_(5)  # or nothing is remembered for longer than a few tokens
    made.save_pretrained(directory)


def models(kinds: Sequence[str]) -> Any:
    """A fixture of a module: the folder of a model of each kind."""

    @pytest.fixture(scope="module", params=kinds)
    def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
        directory: Path = tmp_path_factory.mktemp(request.param)
        save_model(directory, request.param)
        return directory

    return path


def assert_equal_in_conversation(worker: Worker) -> list[list[int]]:
    """Every turn hits, and answers what it does without the cache. All messages, with the answers."""
    history: list[list[int]] = [ids(77_000, 900)]
    for turn in range(20):
        history.append(ids(100 + turn, 60 + 13 * turn))
        asked = prompt(*history, tail=ids(5, 4))
        request_id = worker.ask(asked, max_tokens=16)
        worker.run()
        assert (worker.depth(request_id) > 0) == (turn > 0)
        hit = worker.answer(request_id)
        assert hit == worker.serve(asked, cache=False, max_tokens=16), turn
        history.append([score.token_id for score in hit])
    return history
