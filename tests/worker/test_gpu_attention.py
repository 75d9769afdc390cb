"""Prefill attention's kernel for Hopper: what it computes, and that a row's bits depend on the row alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from worker.cuda.ops import Places, TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper card"
    ),
]
DEVICE = torch.device("cuda")
KV_HEADS, BLOCK, BLOCKS, SPLIT = 2, 32, 45, 256
TOKENS = 1300
SHAPES = [(128, 4), (128, 3), (64, 1), (256, 4), (256, 1)]  # head size, query heads of a group
# At, before and after the edges of blocks, of tiles of 64 or 128 keys and of splits. Tiles have 128 rows of a group.
PASSES = [(0, 1), (0, 128), (31, 2), (100, 190), (127, 1), (128, 130), (255, 2), (256, 1), (600, 700), (1299, 1)]


def places(start: int, rows: int, padding: int = 0) -> Places:
    generator = torch.Generator().manual_seed(1)
    table = torch.randperm(BLOCKS - 1, generator=generator).int()[None].to(DEVICE)
    positions = torch.arange(start, start + rows + padding, dtype=torch.int32, device=DEVICE)
    positions[rows:] = -1
    none = torch.empty(0, device=DEVICE)
    return Places(positions, table, none, none, torch.tensor([start, rows], dtype=torch.int32, device=DEVICE))


def pool_of(dim: int, stop: int) -> Tensor:
    """Keys and values everywhere, and no numbers behind the first `stop` tokens of the sequence."""
    generator = torch.Generator().manual_seed(2)
    pool = torch.randn(2, KV_HEADS, BLOCKS, BLOCK, dim, generator=generator).to(DEVICE, torch.bfloat16)
    blocks = places(0, 1).tables[0].tolist()
    for position in range(stop, (BLOCKS - 1) * BLOCK):
        pool[:, :, blocks[position // BLOCK], position % BLOCK] = float("nan")
    return pool


def queries(dim: int, group: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(TOKENS + 1, KV_HEADS * group * dim, generator=generator).to(DEVICE, torch.bfloat16)


def run(processors: int, hopper: bool = True) -> object:
    """Few processors: one program walks all splits. Many: each split has one."""
    from worker.cuda.tiles import tiles_for
    from worker.cuda.triton_ops import TritonOps

    tiles = replace(tiles_for(DEVICE), processors=processors, hopper=hopper)
    return TritonOps(tiles, prefill_split=SPLIT)


@pytest.mark.parametrize(("dim", "group"), SHAPES)
def test_prefill_attention_is_that_of_the_plain_form(dim: int, group: int):
    walks, parts, all_queries = run(1), run(10_000), queries(dim, group)
    for start, rows in PASSES:
        pool, where = pool_of(dim, start + rows), places(start, rows)
        q = all_queries[start : start + rows]
        expected = TorchOps().attend_prefill(q.float(), where, pool.nan_to_num().float(), start + rows)
        found = walks.attend_prefill(q, where, pool, start + rows)
        assert float((found.float() - expected).norm() / expected.norm()) < 5e-3, (start, rows)
        assert torch.equal(found, parts.attend_prefill(q, where, pool, start + rows)), (start, rows)
    assert walks._hoppers[dim] is not None
    assert parts._hoppers[dim] is not None


@pytest.mark.parametrize(("dim", "group"), SHAPES)
def test_a_row_has_the_same_bits_in_every_pass(dim: int, group: int):
    q, pool = queries(dim, group)[:TOKENS], pool_of(dim, TOKENS)
    whole = run(1).attend_prefill(q, places(0, TOKENS), pool, TOKENS)
    for processors in (1, 10_000):
        kernels = run(processors)
        for start, rows in PASSES:
            some = torch.cat([q[start : start + rows], q[:9]])
            found = kernels.attend_prefill(some, places(start, rows, padding=9), pool, TOKENS)
            assert torch.equal(found[:rows], whole[start : start + rows]), (processors, start, rows)
