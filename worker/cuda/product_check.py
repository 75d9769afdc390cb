"""Which row counts of a library's matrix products give a row the same bits, found out on the card at start."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from worker.cuda.decoder import CudaDecoder
from worker.cuda.ops import Ops, PaddedRows

log = logging.getLogger(__name__)

LISTED = (*range(128, 2049, 128), *range(2304, 4097, 256), *range(4608, 8193, 512))
_REFERENCES = (8192, 2048, 512, 128)  # one of these is what the others are compared with


class ProductRows(NamedTuple):
    """`counts`: the rows that a prefill pass may have. `padded`: what products of other bits at such a count run at."""

    counts: tuple[int, ...]
    padded: PaddedRows


@torch.inference_mode()
def check_products(model: CudaDecoder[Any], ops: Ops, listed: tuple[int, ...] = LISTED) -> ProductRows:
    """Find the counts at which each weight shape of a layer gives the same rows, wherever a row stands.

    A shape that does not at some count is computed with the next larger one of its own instead, the others are not. A
    single count is always equal to itself at equal positions, which padding keeps.
    """
    generator = torch.Generator(model.device).manual_seed(0)
    rows = max(listed)
    counts = set(listed)
    padded: dict[tuple[int, int, int], int] = {}
    for weight in model.products():
        outputs, inputs = weight.shape
        x = torch.randn((rows, inputs), generator=generator, device=model.device, dtype=torch.float32)
        x = x.to(weight.dtype)
        equal = max((_equal(ops, x, weight, listed, r) for r in _REFERENCES if r in listed), key=len)
        equal = equal or {rows}
        failed = sorted(set(listed) - equal)
        log.info("row check of %s: %s", (outputs, inputs), f"not equal at {failed}" if failed else "all equal")
        if len(equal) == 1:
            log.warning("row check: of %s no two row counts are equal", (outputs, inputs))
        counts = {count for count in counts if count <= max(equal)}
        padded |= {(c, outputs, inputs): min(e for e in equal if e > c) for c in failed if c < max(equal)}
    return ProductRows(tuple(sorted(counts)), padded)


def _equal(ops: Ops, x: Tensor, weight: Tensor, listed: tuple[int, ...], reference: int) -> set[int]:
    """The counts whose rows equal those of products of `reference` rows."""
    expected = torch.cat([ops.product(part, weight) for part in torch.split(x, reference)])
    equal = set()
    for count in listed:
        starts = {0, (len(x) - count) // 2 // 8 * 8, len(x) - count}
        if all(
            torch.equal(ops.product(x[start : start + count], weight), expected[start : start + count])
            for start in starts
        ):
            equal.add(count)
    return equal
