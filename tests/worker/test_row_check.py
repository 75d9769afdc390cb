"""The start-up check: what it keeps, and that it notices rows that depend on their company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny
from torch import Tensor

from worker.linear import Linear
from worker.model_config import load_config
from worker.models.llama import LlamaModel
from worker.row_check import DECODE_ROWS, LISTED_ROWS, MIN_PREFILL_ROWS, REFERENCE_ROWS, check_rows
from worker.weights import iter_weights

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> LlamaModel:
    save_tiny(tmp_path, "qwen3")
    config = load_config(tmp_path)
    return LlamaModel(config, iter_weights(tmp_path, config), torch.float32, CPU, 256)


@torch.no_grad()
def test_counts_are_listed_ones_and_prefill_has_the_reference(model: LlamaModel):
    counts = check_rows(model, torch.float32, 1024, deterministic=True)
    assert REFERENCE_ROWS in counts.prefill
    assert set(counts.prefill) | set(counts.decode) <= set(LISTED_ROWS)
    assert min(counts.prefill) >= MIN_PREFILL_ROWS
    assert counts.exact
    assert counts.batch_invariant


@torch.no_grad()
def test_a_count_whose_rows_differ_leaves_the_lists(model: LlamaModel, monkeypatch: pytest.MonkeyPatch):
    product = Linear.__call__

    def depends_on_company(self: Linear, x: Tensor) -> Tensor:
        y = product(self, x)
        return y * (1 + 2**-20) if len(x) in (16, 128) else y

    monkeypatch.setattr(Linear, "__call__", depends_on_company)
    counts = check_rows(model, torch.float32, 1024, deterministic=True)
    assert not {16, 128} & {*counts.prefill, *counts.decode}
    assert {32, 64, 256} <= set(counts.prefill)


@torch.no_grad()
def test_without_determinism_decode_may_run_every_count(model: LlamaModel, monkeypatch: pytest.MonkeyPatch):
    product = Linear.__call__
    monkeypatch.setattr(Linear, "__call__", lambda self, x: product(self, x) * (1 + len(x) * 2**-20))
    assert check_rows(model, torch.float32, 1024, deterministic=False).decode == tuple(
        count for count in LISTED_ROWS if count <= DECODE_ROWS
    )
    assert check_rows(model, torch.float32, 1024, deterministic=True).decode == (min(LISTED_ROWS),)
