"""Products in the repacked layout against plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from worker.linear import Linear

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("with_bias", [False, True])
def test_what_follows_a_product(dtype: torch.dtype, rows: int, with_bias: bool):
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(40, 24, generator=generator)
    bias = torch.randn(40, generator=generator) if with_bias else None
    x, other = torch.randn(rows, 24, generator=generator), torch.randn(rows, 40, generator=generator)
    linear = Linear(weight, bias, dtype, CPU)
    plain = F.linear(x, weight, bias)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for found, expected in [
        (linear(x), plain),
        (linear.silu(x), F.silu(plain)),
        (linear.plus(x, other), plain + other),
        (linear.times(x, other), plain * other),
    ]:
        assert found.dtype == x.dtype
        assert (found - expected).abs().max() < tolerance * plain.abs().max() * 4


def test_weight_bytes_are_those_of_the_type():
    weight = torch.randn(40, 24)
    assert Linear(weight, None, torch.float32, CPU).weight_bytes == 40 * 24 * 4
    assert Linear(weight, None, torch.bfloat16, CPU).weight_bytes == 40 * 24 * 2
