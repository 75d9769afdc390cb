"""Our activations against the same formulas in float64, and against themselves in other company."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from worker.activations import gated_norm, gelu_times, sigmoid_times, soft_cap

EPS = 1e-6
WEIGHT = torch.randn(11, generator=torch.Generator().manual_seed(7))
CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "gelu": (gelu_times, lambda x, y: F.gelu(x, approximate="tanh") * y),
    "sigmoid": (sigmoid_times, lambda x, y: torch.sigmoid(x) * y),
    "norm": (
        lambda x, y: gated_norm(x, y, WEIGHT.to(torch.float32), EPS),
        lambda x, y: F.rms_norm(x.view(len(x), -1, 11), (11,), WEIGHT.to(x.dtype), EPS).flatten(1) * F.silu(y),
    ),
    "cap": (lambda x, _: soft_cap(x, 3.0), lambda x, _: 3.0 * torch.tanh(x / 3.0)),
}


def rows(seed: int) -> Tensor:
    # Not a multiple of any vector's length, and up to some 15 either way.
    return torch.randn(9, 77, generator=torch.Generator().manual_seed(seed)) * 5


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_formula(name: str) -> None:
    ours, formula = CASES[name]
    x, y = rows(1), rows(2)
    expected = formula(x.double(), y.double())
    assert (ours(x, y) - expected).abs().max() < 2e-6 * expected.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_same_bits_alone_and_in_company(name: str) -> None:
    ours, _ = CASES[name]
    x, y = rows(3), rows(4)
    together = ours(x, y)
    for row in range(len(x)):
        assert torch.equal(ours(x[row : row + 1], y[row : row + 1])[0], together[row])


@pytest.mark.parametrize("name", CASES)
def test_other_types_go_through_torch(name: str) -> None:
    ours, formula = CASES[name]
    x, y = rows(5).bfloat16(), rows(6).bfloat16()
    found = ours(x, y)
    expected = formula(x.double(), y.double())
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


def test_far_ends_are_finite() -> None:
    far = torch.tensor([[-1e30, -200.0, 0.0, 200.0]])
    assert sigmoid_times(far, torch.ones(1, 4)).tolist() == [[0.0, 0.0, 0.5, 1.0]]
    assert gelu_times(far[:, 1:], torch.ones(1, 3)).tolist() == [[0.0, 0.0, 200.0]]
