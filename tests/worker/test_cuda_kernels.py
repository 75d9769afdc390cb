"""The Triton kernels against plain torch, and their promise: a row's bits do not depend on what runs beside it.

On a machine without a CUDA device they run in Triton's interpreter, if Triton is installed at all.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the interpreter's own

from worker.cuda.ops import Places, TorchOps  # noqa: E402
from worker.cuda.tiles import Tile, Tiles  # noqa: E402
from worker.cuda.triton_ops import TritonOps  # noqa: E402
from worker.heads import HeadNorms  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 32
SPLIT = 128
TILES = Tiles(
    prefill=Tile(64, 32, 0, 4, 2),
    decode=Tile(16, 32, 0, 4, 2),
    prefill_wide=Tile(32, 32, 0, 4, 2),
    decode_wide=Tile(16, 32, 0, 4, 2),
    prefill_widest=Tile(16, 32, 0, 4, 1),
    decode_widest=Tile(16, 32, 0, 4, 1),
    skinny={rows: Tile(rows, 32, 64, 4, 2) for rows in (16, 32)},
    skinny_gated={rows: Tile(rows, 32, 64, 4, 2) for rows in (16, 32)},
    processors=1,
)


def ops(**changes: Any) -> TritonOps:
    tiles = {field: getattr(TILES, field) for field in TILES.__slots__} | changes
    return TritonOps(Tiles(**tiles), prefill_split=SPLIT, decode_split=SPLIT)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor, tolerance: float = 4e-3) -> bool:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return float((found.float() - expected.float()).norm() / expected.float().norm()) < tolerance


def places(positions: list[int], tables: list[list[int]]) -> Places:
    at = torch.tensor(positions, dtype=torch.int32)
    angles = at.clamp(min=0)[:, None] * torch.linspace(1.0, 0.01, DIM // 2)
    cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), dim=-1)
    blocks, span = torch.tensor(tables, dtype=torch.int32), torch.tensor([positions[0], len(positions)])
    return Places(at.to(DEVICE), blocks.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE), span.int().to(DEVICE))


def sequence(start: int, rows: int, blocks: list[int]) -> Places:
    return places(list(range(start, start + rows)), [blocks])


def pool(blocks: int) -> Tensor:
    """Keys and values everywhere, and what is no number in the last block."""
    filled = noise(2, KV_HEADS, blocks, BLOCK, DIM, seed=3)
    filled[:, :, -1] = float("nan")
    return filled


def test_norms():
    x, y, weight = noise(5, 48), noise(5, 48, seed=1), noise(48, seed=2)
    assert close(ops().norm(x, weight, 1e-5), TorchOps().norm(x, weight, 1e-5))
    sums, expected_sums = x.clone(), x.clone()
    found = ops().add_norm(sums, y, weight, 1e-5)
    assert close(found, TorchOps().add_norm(expected_sums, y, weight, 1e-5))
    assert torch.equal(sums, expected_sums)


def test_gate():
    assert close(ops().gate(noise(3, 160)), TorchOps().gate(noise(3, 160)))


@pytest.mark.parametrize("padded", [{}, {(3, 48, 80): 8}])
def test_gated_product(padded: dict[tuple[int, int, int], int]):
    run = TritonOps(TILES, padded=padded)
    found = run.gated_product(noise(3, 160), noise(48, 80, seed=1))
    assert close(found, TorchOps().gated_product(noise(3, 160), noise(48, 80, seed=1)))


@pytest.mark.parametrize("dim", [16, 48])
def test_copying_a_block(dim: int):
    memory = noise(3, 2, KV_HEADS, 7, BLOCK, dim)
    expected = memory.clone()
    TorchOps().copy_block(expected, 1, 5)
    ops().copy_block(memory, 1, 5)
    assert torch.equal(memory, expected)
    pair = torch.tensor([4, 2], dtype=torch.int32, device=DEVICE)
    TorchOps().copy_named_block(expected, pair)
    ops().copy_named_block(memory, pair)
    assert torch.equal(memory, expected)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("has_norms", [True, False])
def test_turn_and_store(has_bias: bool, has_norms: bool):
    width = (HEADS + 2 * KV_HEADS) * DIM
    bias = noise(width, seed=4) if has_bias else None
    norms = HeadNorms(noise(DIM, seed=5), noise(DIM, seed=6), 1e-5) if has_norms else None
    where = places([40, -1, 3, 95], [[5, 2, 1], [0, 0, 0], [3, 0, 0], [4, 1, 6]])
    found_pool, expected_pool = pool(8), pool(8)
    found = ops().turn_and_store(noise(4, width), bias, norms, where, found_pool)
    expected = TorchOps().turn_and_store(noise(4, width), bias, norms, where, expected_pool)
    real = [0, 2, 3]
    assert close(found[real], expected[real])
    same = (found_pool == expected_pool) | (found_pool.isnan() & expected_pool.isnan())
    assert close(found_pool[:, :, :7], expected_pool[:, :, :7], 1e-3)
    assert same.float().mean() > 0.97  # all that was not written, and most of what was


# Splits are of 128 keys, tiles of 21 tokens by 32 keys: at, before and after their edges.
@pytest.mark.parametrize(("start", "rows"), [(0, 1), (0, 70), (31, 2), (100, 90), (127, 1), (128, 1), (250, 23)])
def test_prefill_attention(start: int, rows: int):
    blocks = [5, 3, 9, 1, 7, 2, 11, 4, 8, 6]
    where, keys = sequence(start, rows, [*blocks, *[0] * 6]), pool(13)
    keys[:, :, blocks[(start + rows) // BLOCK], (start + rows) % BLOCK :] = float("nan")
    q = noise(rows + 3, HEADS * DIM, seed=7)
    expected = TorchOps().attend_prefill(q, where, keys, start + rows)[:rows]
    # Few processors: one program walks all splits. Many: each split has one.
    walked = ops(processors=1).attend_prefill(q, where, keys, start + rows)[:rows]
    apart = ops(processors=1000).attend_prefill(q, where, keys, start + rows)[:rows]
    assert close(walked, expected)
    assert torch.equal(walked, apart)


def test_a_row_of_prefill_has_the_same_bits_in_every_pass():
    where, keys = [5, 3, 9, 1, 7, 2, 11, 4, 8, 6, *[0] * 6], pool(13)
    q = noise(300, HEADS * DIM, seed=7)
    whole = ops().attend_prefill(q, sequence(0, 300, where), keys, 300)
    for start, rows, processors in [(0, 33, 1), (33, 200, 1), (33, 200, 999), (250, 50, 999), (299, 1, 999)]:
        run = ops(processors=processors)
        some = q[start : start + rows]
        part = run.attend_prefill(some, sequence(start, rows, where), keys, start + rows)
        assert torch.equal(part, whole[start : start + rows]), (start, rows)
        # The same rows with padding among their positions, in a pass for longer sequences.
        padded = sequence(start, rows, where)
        more = torch.cat([padded.positions, torch.full((9,), -1, dtype=torch.int32, device=DEVICE)])
        wide = run.attend_prefill(
            torch.cat([some, noise(9, HEADS * DIM)]),
            Places(more, padded.tables, padded.cos, padded.sin, padded.span),
            keys,
            512,
        )
        assert torch.equal(wide[:rows], part), (start, rows)


def test_decode_attention():
    tables = [[5, 3, 9, 1, 7, 2, 11, 4], [0] * 8, [6, *[0] * 7], [8, 10, 3, 9, 0, 0, 0, 0]]
    where, keys = places([200, -1, 0, 127], tables), pool(13)
    q = noise(4, HEADS * DIM, seed=8)
    expected = TorchOps().attend_decode(q, where, keys, 256)
    found = ops().attend_decode(q, where, keys, 256)
    assert close(found, expected)
    assert not found[1].any()
    alone = ops().attend_decode(q[:1], places([200], tables[:1]), keys, 1024)
    assert torch.equal(alone[0], found[0])


def test_rows_that_are_part_of_longer_ones_values_normed_and_queries_alone():
    norms = HeadNorms(noise(DIM, seed=5), noise(DIM, seed=6), 1e-5)
    where = places([40, 95], [[5, 2, 1], [4, 1, 6]])
    wide = noise(2, (HEADS + 2 * KV_HEADS) * DIM + 48, seed=9)
    for width, stores in ((HEADS + 2 * KV_HEADS, True), (HEADS, False)):
        found_pool, expected_pool = pool(8), pool(8)
        asked: Any = {"stores": stores, "norm_values": True}
        found = ops().turn_and_store(wide[:, : width * DIM], None, norms, where, found_pool, **asked)
        expected = TorchOps().turn_and_store(wide[:, : width * DIM], None, norms, where, expected_pool, **asked)
        assert close(found, expected)
        assert close(found_pool[:, :, :7], expected_pool[:, :, :7], 1e-3)
        assert stores != torch.equal(found_pool[:, :, :7], pool(8)[:, :, :7])


@pytest.mark.parametrize("window", [1, 40, 129])
def test_a_window_hides_what_lies_before_it(window: int):
    """What it never sees may be anything, and where the rows of a pass begin shows in no bit."""
    blocks = [5, 3, 9, 1, 7, 2, 11, 4, 8, 6, *[0] * 6]
    keys, q = pool(13), noise(300, HEADS * DIM, seed=7)
    where = sequence(0, 300, blocks)
    whole = ops().attend_prefill(q, where, keys, 300, window)
    assert close(whole, TorchOps().attend_prefill(q, where, keys, 300, window))
    for start, rows in [(33, 200), (250, 50), (299, 1)]:
        hidden = keys.clone()
        for block in blocks[: (start + 1 - window) // BLOCK] if start + 1 > window else []:
            hidden[:, :, block] = float("nan")
        part = ops().attend_prefill(
            q[start : start + rows], sequence(start, rows, blocks), hidden, start + rows, window
        )
        assert torch.equal(part, whole[start : start + rows]), start
    tables, positions = [blocks, blocks, [0] * 16], [299, 40, -1]
    found = ops().attend_decode(q[:3], places(positions, tables), keys, 512, window)
    assert close(found, TorchOps().attend_decode(q[:3], places(positions, tables), keys, 512, window))
    assert not found[2].any()


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 128), (50, 48)])
def test_skinny_products(outputs: int, inputs: int):
    x, weight, plus = noise(20, inputs), noise(outputs, inputs, seed=1), noise(20, outputs, seed=2)
    run, reference = ops(), TorchOps()
    assert close(run.skinny(x, weight), reference.skinny(x, weight))
    assert close(run.skinny(x, weight, plus=plus), reference.skinny(x, weight, plus=plus))
    assert close(run.skinny(x, weight, dtype=torch.float32), reference.skinny(x, weight, dtype=torch.float32))
    both = noise(2 * outputs, inputs, seed=3)
    assert close(run.skinny_gate(x, both), reference.skinny_gate(x, both))
    summed = plus.clone()
    for rows in (1, 5, 16, 20):
        assert torch.equal(run.skinny(x[:rows], weight), run.skinny(x, weight)[:rows])
        assert torch.equal(run.skinny_gate(x[:rows], both), run.skinny_gate(x, both)[:rows])
    assert torch.equal(summed, plus)
