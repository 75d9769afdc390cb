"""Which row counts of a library's matrix products give a row the same bits, found out on the card at start."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from worker.cuda.decoder import CudaDecoder
from worker.cuda.ops import Ops

log = logging.getLogger(__name__)

LISTED = (*range(128, 2049, 128), *range(2304, 4097, 256), *range(4608, 8193, 512))
_REFERENCES = (8192, 2048, 512, 128)  # one of these is what the others are compared with


@torch.inference_mode()
def check_products(model: CudaDecoder[Any], ops: Ops, listed: tuple[int, ...] = LISTED) -> tuple[int, ...]:
    """The counts at which every weight shape of a layer gives the same rows, wherever a row stands.

    At least one: a single count is always equal to itself at equal positions, which padding keeps.
    """
    generator = torch.Generator(model.device).manual_seed(0)
    rows = max(listed)
    left = set(listed)
    for weight in model.products():
        shape = (rows, weight.shape[1])
        x = torch.randn(shape, generator=generator, device=model.device, dtype=torch.float32).to(weight.dtype)
        left &= max((_equal(ops, x, weight, listed, r) for r in _REFERENCES if r in listed), key=len)
        failed = sorted(set(listed) - left)
        log.info("row check of %s: %s", tuple(weight.shape), f"not equal at {failed}" if failed else "all equal")
    if not left:
        log.warning("row check: no two row counts are equal, every prefill pass runs %d rows", rows)
    return tuple(sorted(left)) or (rows,)


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
