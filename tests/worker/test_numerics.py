"""The name of how bits are computed changes with what they depend on, and with nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from worker.numerics import numerics_id
from worker.row_check import RowCounts

ROWS = RowCounts((8, 16), (4, 8), 512, batch_invariant=True, exact=True)
CPU = torch.device("cpu")


def test_it_is_the_same_for_the_same():
    assert numerics_id(CPU, ROWS) == numerics_id(torch.device("cpu"), replace(ROWS))
    assert len(numerics_id(CPU, ROWS)) == 16


def test_row_counts_are_part_of_it():
    assert numerics_id(CPU, replace(ROWS, prefill=(16,))) != numerics_id(CPU, ROWS)
    assert numerics_id(CPU, replace(ROWS, padded=((8, 64, 64, 16),))) != numerics_id(CPU, ROWS)


@pytest.mark.parametrize("what", ["_version", "_processor", "_kernels"])
def test_libraries_processor_and_kernels_are_part_of_it(monkeypatch: pytest.MonkeyPatch, what: str):
    before = numerics_id(CPU, ROWS)
    monkeypatch.setattr(f"worker.numerics.{what}", lambda *_: "another")
    assert numerics_id(CPU, ROWS) != before


def test_the_number_of_threads_is_part_of_it(monkeypatch: pytest.MonkeyPatch):
    before = numerics_id(CPU, ROWS)
    monkeypatch.setattr("torch.get_num_threads", lambda: 3 + torch.get_num_interop_threads())
    assert numerics_id(CPU, ROWS) != before
