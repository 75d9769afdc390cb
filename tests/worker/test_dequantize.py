"""Our block code and the `gguf` package agree on every type that the package reads."""

from __future__ import annotations

import gguf
import numpy
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from worker.dequantize import dequantize

UNQUANTISED = {"F32", "F16", "F64", "I8", "I16", "I32", "I64"}


def package_reads(kind: GGMLQuantizationType) -> bool:
    try:
        gguf.dequantize(numpy.zeros((1, GGML_QUANT_SIZES[kind][1]), numpy.uint8), kind)
    except NotImplementedError:
        return False
    return True


KINDS = [kind for kind in GGML_QUANT_SIZES if kind.name not in UNQUANTISED and package_reads(kind)]


def test_the_types_people_ship_are_among_them() -> None:
    assert {
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
    } <= {kind.name for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_any_bytes_give_the_values_of_the_package(kind: GGMLQuantizationType) -> None:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    # More than one chunk of the block code, and no whole number of chunks.
    blocks_per_row, rows = 8, (1 << 21) // (8 * block) + 3
    generator = numpy.random.default_rng(kind.value)
    raw = generator.integers(0, 256, (rows, blocks_per_row * block_bytes), numpy.uint8)
    with numpy.errstate(all="ignore"):  # random scales are infinite or not a number at times
        expected = torch.from_numpy(gguf.dequantize(raw, kind))
        found = dequantize(torch.from_numpy(raw).flatten(), kind, (rows, blocks_per_row * block))
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    usual = expected.isfinite()
    assert usual.float().mean() > 0.5
    # As integers: 0.0 and -0.0 are different weights to a comparison of bits.
    assert torch.equal(found.view(torch.int32)[usual], expected.view(torch.int32)[usual])
    assert torch.equal(found.isfinite(), usual)


def test_an_unreadable_type_raises_by_name() -> None:
    kind = GGMLQuantizationType.Q8_K
    with pytest.raises(NotImplementedError, match="Q8_K"):
        dequantize(torch.zeros(GGML_QUANT_SIZES[kind][1], dtype=torch.uint8), kind, (1, 256))
