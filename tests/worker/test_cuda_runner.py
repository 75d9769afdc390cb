"""The passes of the CUDA backend with its operations in plain torch, as any machine can run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny_models import make_tiny, save_tiny

from worker.cuda.dense import DenseModel, is_served
from worker.cuda.ops import Places, TorchOps, last_rows
from worker.cuda.product_check import check_products
from worker.cuda.runner import CudaRunner
from worker.kv_cache import KVCache
from worker.model_config import load_config
from worker.model_error import ModelError
from worker.weights import iter_weights

CPU = torch.device("cpu")
PROMPT = 150
FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
BLOCKS = [9, 3, 30, 17, 22, 5, 40]


def load(path: Path) -> DenseModel:
    config = load_config(path)
    return DenseModel(config, iter_weights(path, config), torch.float32, CPU, 512)


def runner(path: Path) -> CudaRunner:
    model = load(path)
    return CudaRunner(model, KVCache(model.config, 64, torch.float32, CPU), TorchOps(), (128, 256))


def prompt(count: int = PROMPT) -> list[int]:
    return torch.randint(96, (count,), generator=torch.Generator().manual_seed(0)).tolist()


def first_logits(run: CudaRunner, ids: list[int], blocks: list[int], start: int = 0) -> torch.Tensor:
    hidden = run.prefill(ids[start:], blocks, start)
    return run.head_row(hidden[len(ids) - start - 1])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_transformers(tmp_path: Path, family: str):
    # Qwen2 derives its head size, 16, from the hidden size.
    changes = {"hidden_size": 96} if family == "qwen2" else {}
    reference, ids = save_tiny(tmp_path, family, **changes), prompt()
    run = runner(tmp_path)
    expected = reference(torch.tensor([ids])).logits[0]
    assert error(first_logits(run, ids, BLOCKS), expected[-1]) < 1e-4
    run.prefill(ids[:70], BLOCKS, 0)
    assert error(first_logits(run, ids, BLOCKS, start=70), expected[-1]) < 1e-4


@torch.no_grad()
def test_decode_goes_on_from_prefill(tmp_path: Path):
    reference, ids = save_tiny(tmp_path, "qwen3"), prompt(80)
    run = runner(tmp_path)
    expected = reference(torch.tensor([ids])).logits[0]
    others = [50, 51, 52]
    run.prefill(ids[:77], BLOCKS, 0)
    run.prefill(ids[:33], others, 0)
    found = run.decode([ids[77], ids[33]], [BLOCKS, others], [77, 33])
    assert error(found[0], expected[77]) < 1e-4
    assert error(found[1], expected[33]) < 1e-4
    best, most = run.largest(found)
    assert best == found.argmax(-1).tolist()
    assert most == found.max(-1).values.tolist()
    assert error(run.decode([ids[78]], [BLOCKS], [78])[0], expected[78]) < 1e-4


def test_what_is_served(tmp_path: Path):
    make_tiny("llama")
    save_tiny(tmp_path, "llama", head_dim=24)
    config = load_config(tmp_path)
    assert not is_served(config, torch.bfloat16)
    with pytest.raises(ModelError):
        DenseModel(config, iter_weights(tmp_path, config), torch.float32, CPU, 512)


def test_products_whose_rows_differ_at_a_count_run_at_another(tmp_path: Path):
    class Fickle(TorchOps):
        """A library whose rows are others at one count, and of one shape in its smallest product."""

        def product(self, x: Any, weight: Any) -> Any:
            wrong = len(x) == 384 or (len(x) == 128 and weight.shape[1] == 80)
            return x[:, :1] + len(x) * wrong

    model = load_tiny(tmp_path)
    counts, padded = check_products(model, Fickle(), (128, 256, 384, 512))
    shapes = {tuple(weight.shape) for weight in model.products()}
    assert counts == (128, 256, 384, 512)
    assert padded == {
        **{(384, *shape): 512 for shape in shapes},
        **{(128, *shape): 256 for shape in shapes if shape[1] == 80},
    }
    assert any(shape[1] == 80 for shape in shapes)

    class Odd(TorchOps):
        """A library whose rows depend on their number in every way."""

        def product(self, x: Any, weight: Any) -> Any:
            return x[:, :1] + len(x)

    counts, padded = check_products(model, Odd(), (128, 256, 512))
    assert counts[-1] in {padded.get((count, *shape), count) for count in counts for shape in shapes}
    for shape in shapes:
        assert len({padded.get((count, *shape), count) for count in counts}) == 1


def test_a_padded_product_has_the_rows_of_the_larger_one():
    x, weight = torch.randn(5, 7), torch.randn(3, 7)
    found = TorchOps({(5, 3, 7): 9}).product(x, weight)
    assert found.shape == (5, 3)
    assert torch.equal(found, torch.nn.functional.linear(torch.cat([x, torch.zeros(4, 7)]), weight)[:5])


def test_what_products_run_at_is_told(tmp_path: Path):
    model = load_tiny(tmp_path)
    padded = {(128, 64, 64): 256}
    told = CudaRunner(model, KVCache(model.config, 8, torch.float32, CPU), TorchOps(padded), (128, 256)).row_counts
    assert told.padded == ((128, 64, 64, 256),)


def load_tiny(path: Path) -> DenseModel:
    save_tiny(path, "llama")
    return load(path)


@torch.no_grad()
def test_a_long_pass_ends_in_the_last_rows_alone(tmp_path: Path):
    """What the last layer adds to other rows nobody reads: they need not be right, their keys and values do."""

    class Counting(TorchOps):
        rows: ClassVar[list[int]] = []

        def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            self.rows.append(len(gate_up))
            return super().gate(gate_up)

    reference, ids = save_tiny(tmp_path, "qwen3"), prompt(300)
    model = load(tmp_path)
    run = CudaRunner(model, KVCache(model.config, 64, torch.float32, CPU), Counting(), (128, 256, 384))
    blocks = list(range(20, 31))
    expected = reference(torch.tensor([ids])).logits[0]
    hidden = run.prefill(ids[:290], blocks, 0)
    assert Counting.rows == [384] * (len(model.layers) - 1) + [128]
    assert error(run.head_row(hidden[289]), expected[289]) < 1e-4
    hidden = run.prefill(ids[290:], blocks, 290)
    assert Counting.rows[-1] == 128
    assert error(run.head_row(hidden[9]), expected[-1]) < 1e-4


@pytest.mark.parametrize(("start", "rows", "first"), [(7, 300, 172), (0, 129, 1), (0, 0, 0)])
def test_the_last_rows_are_rows_of_the_pass(start: int, rows: int, first: int):
    positions = torch.arange(384, dtype=torch.int32) + start
    none = torch.empty(0)
    places = Places(positions, none, none, none, torch.tensor([start, rows], dtype=torch.int32))
    index, last = last_rows(places, 128)
    assert index.tolist() == list(range(first, first + 128))
    assert last.span.tolist() == [start + first, 128]
    assert last.positions.tolist() == [start + row for row in index.tolist()]
