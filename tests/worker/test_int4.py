"""Packed weights: what they stand for, and that both layouts compute with it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from worker.int4 import GROUP, PACKED_ROWS, Int4Linear, can_pack, quantize

CPU = torch.device("cpu")


def some_weight(out_features: int, in_features: int) -> Tensor:
    return torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(3)) * 0.02


@pytest.mark.parametrize(("dtype", "middle"), [(torch.bfloat16, 8), (torch.float16, 0)])
def test_values_are_within_half_a_level_of_the_weights(dtype: torch.dtype, middle: int):
    weight = some_weight(48, 4 * GROUP)
    quantized = quantize(weight, dtype, middle)
    half_level = quantized.scales.float().unsqueeze(-1) / 2
    # Scale and zero are rounded, which moves weights by up to 16 levels times the type's precision.
    slack = 32 * half_level * torch.finfo(dtype).eps + 1e-6
    error = (quantized.values() - weight).view(48, 4, GROUP).abs()
    assert (error <= half_level + slack).all()


def test_weights_that_lie_on_levels_are_kept_but_for_bfloat16():
    levels = torch.randint(0, 16, (16, 2, GROUP), generator=torch.Generator().manual_seed(4)).float()
    levels[..., 0], levels[..., 1] = 0, 15
    weight = (levels * 0.0078125 - 0.0625).view(16, 2 * GROUP)  # powers of two: exact in bfloat16
    assert torch.equal(quantize(weight, torch.bfloat16, 8).values(), weight)
    assert torch.equal(quantize(weight, torch.float16).values(), weight)


def test_weights_of_q4_1_are_kept():
    random = torch.Generator().manual_seed(8)
    levels = torch.randint(0, 16, (16, 3, GROUP), generator=random).float()
    levels[..., 3], levels[..., 17] = 0, 15  # its groups reach from the least to the greatest level
    scales = (torch.rand(16, 3, 1, generator=random) * 0.02).half().float()
    least = (torch.randn(16, 3, 1, generator=random) * 0.1).half().float()
    weight = (levels * scales + least).view(16, 3 * GROUP)
    assert torch.equal(quantize(weight, torch.float16).values(), weight)


def test_a_group_of_equal_weights_divides_by_no_zero():
    weight = torch.full((16, GROUP), 0.5)
    assert torch.equal(quantize(weight, torch.bfloat16, 8).values(), weight)
    assert torch.equal(quantize(weight, torch.float16).values(), weight)


@pytest.mark.parametrize("rows", [1, 4, PACKED_ROWS, PACKED_ROWS + 1, 64])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("in_tiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_layouts_compute_with_the_same_values(rows: int, with_bias: bool, in_tiles: bool, dtype: torch.dtype):
    weight = some_weight(64, 96)
    bias = torch.randn(64, generator=torch.Generator().manual_seed(5)) if with_bias else None
    linear = Int4Linear(weight, bias, dtype, CPU, in_tiles=in_tiles)
    x = torch.randn(rows, 96, generator=torch.Generator().manual_seed(6))
    other = torch.randn(rows, 64, generator=torch.Generator().manual_seed(7))
    quantized = quantize(weight, torch.float16) if in_tiles else quantize(weight, torch.bfloat16, 8)
    plain = F.linear(x, quantized.values(), bias)
    for found, expected in [
        (linear(x), plain),
        (linear.silu(x), F.silu(plain)),
        (linear.plus(x, other), plain + other),
        (linear.times(x, other), plain * other),
    ]:
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_be_parts_of_wider_ones(dtype: torch.dtype):
    packed = Int4Linear(some_weight(64, 96), None, dtype, CPU, in_tiles=False)
    wide = torch.randn(4, 128, generator=torch.Generator().manual_seed(6)).to(dtype)
    assert torch.equal(packed(wide[:, :96]), packed(wide[:, :96].contiguous()))


def test_shapes_the_product_cannot_take_are_known():
    assert can_pack(torch.empty(32, 64))
    assert not can_pack(torch.empty(33, 64))
    assert not can_pack(torch.empty(32, 65))
