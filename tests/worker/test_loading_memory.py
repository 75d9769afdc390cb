"""Loading a sharded checkpoint takes the memory of what is kept, and of the rest no more than it is busy with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from loaded_memory import HOARDED, WAYS
from tiny_models import save_tiny

_SHAPE = {"hidden_size": 512, "intermediate_size": 1408, "head_dim": 64, "num_attention_heads": 8}
_SIZES = {**_SHAPE, "num_key_value_heads": 4, "vocab_size": 4096, "dtype": torch.bfloat16}
_LAYER_BYTES = 6_000_000
_SHARD_BYTES = 16_000_000
# A shard is mapped while it is read. A layer is held as it was read, and several times over while it is repacked.
_BUSY_BYTES = _SHARD_BYTES + 8 * _LAYER_BYTES
_LEFT_BYTES = 1.5 * _LAYER_BYTES


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model, and one of a single layer of its kind."""
    large, small = (tmp_path_factory.mktemp("model") / name for name in ("large", "small"))
    save_tiny(large, "llama", shard_size=f"{_SHARD_BYTES // 1_000_000}MB", num_hidden_layers=16, **_SIZES)
    save_tiny(small, "llama", num_hidden_layers=1, **_SIZES)
    assert len(list(large.glob("*.safetensors"))) > 5
    return [large, small]


def test_no_second_copy_is_ever_held(folders: list[Path]) -> None:
    command = [sys.executable, Path(__file__).with_name("loaded_memory.py"), *folders, *WAYS, HOARDED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = dict(zip((*WAYS, HOARDED), map(json.loads, done.stdout.splitlines()), strict=True))
    stored = sum(shard.stat().st_size for shard in folders[0].glob("*.safetensors"))
    assert stored > 1.5 * _BUSY_BYTES, "a second copy would not be seen"
    assert found["device"]["held"] == 0
    assert found["bfloat16"]["held"] == pytest.approx(stored, rel=0.01)
    for way in WAYS:
        sizes = found[way]
        assert sizes["end"] < sizes["held"] + _LEFT_BYTES, (way, found)
        assert sizes["peak"] < sizes["held"] + _BUSY_BYTES, (way, found)
    assert found[HOARDED]["peak"] > stored, "the measure sees a second copy"
