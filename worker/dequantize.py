"""Quantised GGUF blocks to float32, with the bits that the `gguf` package gives.

The types that people ship have their own torch code, several times as fast; the others go through the package.
Products and sums are rounded one by one, never fused, so that both ways agree.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as dequantize_slowly
from torch import Tensor

Kind = GGMLQuantizationType

_CHUNK_VALUES = 1 << 18  # what is worked on at a time: temporaries stay in the CPU's cache


def dequantize(raw: Tensor, kind: Kind, shape: tuple[int, ...]) -> Tensor:
    """The values of `raw` (uint8, whole blocks of `kind`) as float32. Raises `NotImplementedError` by type."""
    block, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = raw.view(-1, block_bytes)
    unpack = _UNPACKERS.get(kind)
    if unpack is None:
        return torch.from_numpy(dequantize_slowly(blocks.numpy(), kind)).reshape(shape)
    values = torch.empty(len(blocks), block, dtype=torch.float32)
    step = _CHUNK_VALUES // block
    for start in range(0, len(blocks), step):
        unpack(blocks[start : start + step], values[start : start + step])
    return values.view(shape)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as a float32 column."""
    return blocks[:, at : at + 2].view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """The low halves of all bytes, then the high ones, along the last dimension."""
    low, high = out.chunk(2, dim=-1)
    low.copy_(packed & 15)
    high.copy_(packed >> 4)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """16 for each set bit of the 32 from byte `at` on, lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks[:, at : at + 4, None] >> shifts & 1) << 4).flatten(1)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks, 2)).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks, 4)).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8))
    out.mul_(_half(blocks, 0))


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum of the 8 groups of 32 of a Q4_K or Q5_K block, float32 [blocks, 8, 1].

    Twelve bytes hold sixteen 6-bit numbers: scales 0-3 and minima 0-3 in the low bits of bytes 0-7, the low halves
    of the other eight in bytes 8-11, and their upper two bits on top of bytes 0-7.
    """
    first, second, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat([first & 63, rest & 15 | first >> 6 << 4], dim=1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 6 << 4], dim=1)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * minima)[..., None]


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _k_scales(blocks)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), out.view(-1, 4, 64))
    out.view(-1, 8, 32).mul_(scales).sub_(minima)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    scales, minima = _k_scales(blocks)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), out.view(-1, 4, 64))
    # Bit g of the 32 bytes belongs to group g.
    bits = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    out.view(-1, 8, 32).add_(bits << 4).mul_(scales).sub_(minima)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), out.view(-1, 2, 128))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    bits = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    out.view(-1, 2, 4, 32).add_(bits << 4).sub_(32)
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    out.view(-1, 16, 16).mul_(scales[..., None])


_UNPACKERS: dict[Kind, Callable[[Tensor, Tensor], None]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q8_0: _q8_0,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
}
