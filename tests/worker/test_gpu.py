"""The worker's passes on a CUDA device. Opt in with `-m gpu`; continuous integration has no such device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import make_tiny, save_tiny

from worker.kv_cache import KVCache
from worker.model_config import load_config
from worker.model_runner import ModelRunner
from worker.models.llama import LlamaModel
from worker.row_check import check_rows
from worker.weights import iter_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
PROMPT = 200
# A prefix has the same bits however it was cut; these cuts lie at, before and after edges of passes and blocks.
CUTS = (1, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 199)


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def runner(path: Path, dtype: torch.dtype) -> ModelRunner:
    config = load_config(path)
    device = torch.device("cuda")
    model = LlamaModel(config, iter_weights(path, config), dtype, device, 512)
    return ModelRunner(
        model, KVCache(config, 64, dtype, device), check_rows(model, dtype, 512, deterministic=True)
    )


def prompt() -> list[int]:
    return torch.randint(96, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()


def first_logits(run: ModelRunner, ids: list[int], blocks: list[int], start: int = 0) -> torch.Tensor:
    while start < len(ids):
        part = ids[start : start + run.max_prefill_rows]
        hidden = run.prefill(part, blocks, start)
        start += len(part)
    return run.head_row(hidden[len(part) - 1])


@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path: Path, family: str):
    reference = save_tiny(tmp_path, family)
    run, ids = runner(tmp_path, torch.float32), prompt()
    expected = reference(torch.tensor([ids])).logits[0, -1]
    found = first_logits(run, ids, list(range(1, 9))).cpu()
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hit_has_the_bits_of_a_cold_run(tmp_path: Path, family: str, dtype: torch.dtype):
    make_tiny(family)
    save_tiny(tmp_path, family)
    run, ids = runner(tmp_path, dtype), prompt()
    blocks = [9, 3, 30, 17, 22, 5, 40]
    cold = first_logits(run, ids, blocks)
    for cut in CUTS:
        run.cache.memories[0][:, :, :, 1:].normal_()
        first_logits(run, ids[:cut], blocks)
        assert torch.equal(first_logits(run, ids, blocks, start=cut), cold), cut


@torch.no_grad()
def test_a_decoded_row_has_the_same_bits_beside_others(tmp_path: Path, family: str):
    save_tiny(tmp_path, family)
    run, ids = runner(tmp_path, torch.bfloat16), prompt()
    tables = [list(range(1 + 8 * i, 9 + 8 * i)) for i in range(4)]
    for table in tables:
        first_logits(run, ids, table)
    alone = run.decode([7], tables[:1], [PROMPT])[0]
    assert torch.equal(run.decode([7, 8, 9, 10], tables, [PROMPT] * 4)[0], alone)
