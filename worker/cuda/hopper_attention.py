"""Prefill attention by the kernel for Hopper, where it serves and does what it should."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from worker.cuda.ops import Places

log = logging.getLogger(__name__)

ROWS = 128
# Keys of a tile by head size: bits depend on it. More stages find no room in shared memory.
_KEYS = {64: 128, 128: 128, 256: 64}
_STAGES = 2
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 240, 24  # of a thread; what is left of 65536 is the other consumer's
_COLUMNS = 64  # that 128 bytes hold
_TOLERANCE = 0.01


class HopperAttention:
    """Launches the kernel. What it asks of a layer's pool is made once and kept: there are as many as layers."""

    def __init__(self) -> None:
        """Raises `ImportError` or `AttributeError` where this Triton has another Gluon, or none."""
        self._kernel = importlib.import_module("worker.cuda.hopper_kernels").prefill_kernel
        gluon = importlib.import_module("triton.experimental.gluon")
        self._descriptor = importlib.import_module(f"{gluon.__name__}.nvidia.hopper").TensorDescriptor
        self._layout = gluon.language.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        self._pools: dict[int, Any] = {}

    @staticmethod
    def serves(pool: Tensor, window: int | None) -> bool:
        """Whether it computes attention over this pool."""
        block, dim = pool.shape[3:]
        return window is None and _KEYS.get(dim, 0) >= block and _KEYS[dim] % block == 0 and pool.is_contiguous()

    def launch(
        self,
        q: Tensor,
        places: Places,
        pool: Tensor,
        out: Tensor,
        parts: Tensor,
        sums: Tensor,
        grid: tuple[int, int, int],
        each: int,
        split: int,
    ) -> None:
        """As `attention_kernels.prefill_kernel`, in tiles of `ROWS` rows."""
        _, kv_heads, blocks, block, dim = pool.shape
        heads = q.shape[1] // dim
        self._kernel[grid](
            q,
            self._rows_of(pool),
            places.tables,
            places.span,
            out,
            parts,
            sums,
            len(places.positions),
            each,
            blocks * block,
            math.log2(math.e) / math.sqrt(dim),
            heads,
            heads // kv_heads,
            dim,
            block,
            split,
            _KEYS[dim],
            _STAGES,
            _CONSUMER_REGISTERS,
            _PRODUCER_REGISTERS,
            num_warps=4,
        )

    def _rows_of(self, pool: Tensor) -> Any:
        known = self._pools.get(pool.data_ptr())
        if known is None or known.base.shape[0] * known.base.shape[1] != pool.numel():
            rows = pool.view(-1, pool.shape[4])
            known = self._descriptor.from_tensor(rows, [pool.shape[3], _COLUMNS], self._layout)
            self._pools[pool.data_ptr()] = known
        return known


def try_hopper(
    attend: Callable[[Tensor, Places, Tensor, int, HopperAttention | None], Tensor], device: torch.device, dim: int
) -> HopperAttention | None:
    """The launcher, if `attend` gives with it what it gives without; None, with the reason logged, where not.

    Gluon is Triton's experimental language: a release may change it, and a model is to be served all the same.
    """
    start, rows, block = 1000, 90, 32
    stop = start + rows
    generator = torch.Generator(device).manual_seed(0)
    try:
        hopper = HopperAttention()
        pool = torch.randn(2, 1, 41, block, dim, generator=generator, device=device).to(torch.bfloat16)
        q = torch.randn(128, 2 * dim, generator=generator, device=device).to(torch.bfloat16)
        table = torch.arange(39, -1, -1, dtype=torch.int32, device=device)
        # No numbers at all after the sequence's end, in its last block and in the next one.
        table[stop // block + 1] = 40
        pool[:, :, 40], pool[:, :, int(table[stop // block]), stop % block :] = math.nan, math.nan
        positions = torch.arange(start, start + len(q), dtype=torch.int32, device=device)
        span = torch.tensor([start, rows], dtype=torch.int32, device=device)
        none = torch.empty(0, device=device)
        places = Places(positions, table.unsqueeze(0), none, none, span)
        expected, found = (attend(q, places, pool, stop, each)[:rows].float() for each in (None, hopper))
        error = float((found - expected).norm() / expected.norm())
    except Exception as failure:
        log.warning("the kernel for Hopper does not run (%s): prefill is slower", failure)
        return None
    if not error < _TOLERANCE:
        log.warning("the kernel for Hopper is off by %.3g: it is not used, and prefill is slower", error)
        return None
    return hopper
