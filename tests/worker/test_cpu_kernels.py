"""Our row kernels against the same formulas in torch, in float64, and against themselves in other company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from worker.attention_kernels import EVERYTHING
from worker.cpu_kernels import rms_norm_rows, store_rows
from worker.decode_kernels import attend_rows
from worker.model_shape import Rope
from worker.rope import Rotary, inverse_frequencies

BLOCK = 32
BLOCKS = 128
EPS = 1e-5
NONE = np.empty(0, np.float32)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Rows of a decode step over a pool of random keys and values."""

    def __init__(
        self, heads: int, kv_heads: int, dim: int, lengths: list[int], norms: bool, window: int = 0
    ) -> None:
        count = len(lengths)
        self.window = window
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.lengths = np.array(lengths, np.int64)
        self.qkv = noise(count + 1, heads + 2 * kv_heads, dim)
        angles = noise(count + 1, dim // 2, seed=1)
        self.cos = angles.cos().repeat(1, 2)
        self.sin = torch.cat((-angles.sin(), angles.sin()), -1)
        self.keys = noise(kv_heads, BLOCKS * BLOCK, dim, seed=2)
        self.values = noise(kv_heads, BLOCKS * BLOCK, dim, seed=3)
        self.weights = (noise(dim, seed=4), noise(dim, seed=5)) if norms else None
        # Every row has blocks of its own, in no order.
        order = torch.randperm(BLOCKS - 1, generator=torch.Generator().manual_seed(6)) + 1
        each = (BLOCKS - 1) // count
        self.tables = np.stack([order[i * each : (i + 1) * each].numpy() for i in range(count)])

    def run(self, parts: int = 1) -> Tensor:
        out = torch.full((len(self.qkv), self.heads, self.dim), torch.nan)
        q_weight, k_weight = (w.numpy() for w in self.weights) if self.weights else (NONE, NONE)
        arrays = (x.numpy() for x in (self.qkv, self.cos, self.sin))
        pool = self.keys.numpy(), self.values.numpy()
        last = self.tables[np.arange(len(self.lengths)), self.lengths // BLOCK]
        tokens = last * BLOCK + self.lengths % BLOCK
        stored = tokens if self.qkv.shape[1] > self.heads else tokens[:0]
        queries = np.empty((self.heads, len(self.qkv), self.dim), np.float32)
        store_rows(*arrays, q_weight, k_weight, EPS, *pool, stored, queries)
        window = self.window or EVERYTHING
        for part in range(parts):
            attend_rows(queries, *pool, self.tables, self.lengths, BLOCK, window, part, parts, out.numpy())
        return out

    def turned(self, row: int, first: int, last: int, weight: Tensor | None) -> Tensor:
        x = self.qkv[row, first:last].double()
        if weight is not None:
            x = F.rms_norm(x, (self.dim,), weight.double(), EPS)
        exchanged = x.roll(self.dim // 2, -1)
        return x * self.cos[row].double() + exchanged * self.sin[row].double()

    def expected(self, row: int) -> Tensor:
        q_weight, k_weight = self.weights or (None, None)
        queries = self.turned(row, 0, self.heads, q_weight)
        length = int(self.lengths[row])
        tokens = (torch.from_numpy(self.tables[row])[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[
            : length + 1
        ]
        keys, values = self.keys[:, tokens].double(), self.values[:, tokens].double()
        if self.qkv.shape[1] > self.heads:
            keys[:, -1] = self.turned(row, self.heads, self.heads + self.kv_heads, k_weight)
            values[:, -1] = self.qkv[row, self.heads + self.kv_heads :].double()
        keys, values = keys[:, -self.window :], values[:, -self.window :]
        mixed = F.scaled_dot_product_attention(queries[None, :, None], keys[None], values[None], enable_gqa=True)
        return mixed[0, :, 0]


@pytest.mark.parametrize("window", [0, 1, 32, 33, 470])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 32), (8, 1, 128)])
def test_decode_attention_is_the_formula(heads: int, kv_heads: int, dim: int, norms: bool, window: int):
    case = Case(heads, kv_heads, dim, [0, 1, 31, 32, 500], norms, window)
    wanted = [case.expected(row) for row in range(5)]
    found = case.run()
    for row in range(5):
        assert (found[row] - wanted[row]).abs().max() < 2e-5
    assert found[5].isnan().all()  # padding is left alone


@pytest.mark.parametrize("parts", [2, 3])
def test_decode_attention_has_the_same_bits_however_it_is_split(parts: int):
    case = Case(6, 2, 32, [0, 50, 200, 77], norms=False)
    assert torch.equal(case.run(parts)[:4], case.run()[:4])


@pytest.mark.parametrize("window", [0, 1, 33, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (6, 1, 32), (2, 2, 128), (8, 2, 24)])
def test_a_bfloat16_pool_is_stored_rounded_and_read_as_what_it_holds(heads, kv_heads, dim, window):
    case = Case(heads, kv_heads, dim, [0, 50, 200, 63, 64], norms=True, window=window)
    case.run()  # stores the new keys and values
    stored = case.keys.bfloat16(), case.values.bfloat16()
    case.keys, case.values = case.keys.bfloat16().view(torch.uint16), case.values.bfloat16().view(torch.uint16)
    narrow = case.run()
    assert torch.equal(case.keys.view(torch.bfloat16), stored[0])
    assert torch.equal(case.values.view(torch.bfloat16), stored[1])
    for parts in (2, 3):
        assert torch.equal(case.run(parts)[:5], narrow[:5])
    case.keys, case.values = stored[0].float(), stored[1].float()
    case.qkv = case.qkv[:, :heads].contiguous()
    assert (narrow[:5] - case.run()[:5]).abs().max() < 0.05  # queries and weights are rounded too


@pytest.mark.parametrize("window", [0, 40])
def test_rows_of_queries_alone_read_what_is_there(window: int):
    case = Case(6, 2, 32, [0, 50, 200], norms=True, window=window)
    case.qkv = case.qkv[:, :6].contiguous()
    keys, values = case.keys.clone(), case.values.clone()
    found = case.run()
    assert torch.equal(case.keys, keys)
    assert torch.equal(case.values, values)
    for row in range(3):
        assert (found[row] - case.expected(row)).abs().max() < 2e-5


def test_new_keys_and_values_are_stored_and_nothing_else():
    case = Case(4, 2, 32, [40, 3], norms=False)
    keys, values = case.keys.clone(), case.values.clone()
    case.run()
    for row, length in enumerate(case.lengths):
        token = case.tables[row, length // BLOCK] * BLOCK + length % BLOCK
        keys[:, token] = case.turned(row, 4, 6, None).float()
        values[:, token] = case.qkv[row, 6:]
    assert torch.equal(case.values, values)
    assert (case.keys - keys).abs().max() < 1e-6


def test_a_row_has_the_same_bits_alone_and_in_company():
    together = Case(9, 3, 64, [100, 7, 260, 64], norms=True)
    alone = Case(9, 3, 64, [100, 7, 260, 64], norms=True)
    found = together.run()
    for row in range(4):
        single = Case(9, 3, 64, [100, 7, 260, 64], norms=True)
        single.qkv = alone.qkv[row : row + 1]
        single.cos, single.sin = alone.cos[row : row + 1], alone.sin[row : row + 1]
        single.lengths, single.tables = alone.lengths[row : row + 1], alone.tables[row : row + 1]
        assert torch.equal(single.run()[0], found[row])


@pytest.mark.parametrize("norms", [False, True])
def test_prefill_rows_are_turned_and_stored_as_decode_does(norms: bool):
    case = Case(6, 2, 32, [0, 1, 2, 3], norms)
    queries = torch.empty(6, 5, 32)
    tokens = np.array([70, 71, 200, 33], np.int64)
    before = case.values.clone()
    q_weight, k_weight = (w.numpy() for w in case.weights) if case.weights else (NONE, NONE)
    arrays = (x.numpy() for x in (case.qkv, case.cos, case.sin))
    store_rows(*arrays, q_weight, k_weight, EPS, case.keys.numpy(), case.values.numpy(), tokens, queries.numpy())
    q_norm, k_norm = case.weights or (None, None)
    for row in range(5):
        assert (queries[:, row] - case.turned(row, 0, 6, q_norm)).abs().max() < 1e-5
    for row, token in enumerate(tokens):
        assert (case.keys[:, token] - case.turned(row, 6, 8, k_norm)).abs().max() < 1e-5
        assert torch.equal(case.values[:, token], case.qkv[row, 8:])
    untouched = np.setdiff1d(np.arange(BLOCKS * BLOCK), tokens)
    assert torch.equal(case.values[:, untouched], before[:, untouched])


def test_rotary_factors_do_not_depend_on_what_else_is_asked_for():
    rope = Rope(head_dim=24, theta=1e4, pairs=7, span=14)
    rotary = Rotary(rope, 131_072, torch.device("cpu"))
    positions = torch.tensor([0, 1, 63, 64, 4095, 131_071])
    cos, sin = rotary.rows(positions)
    angles = positions[:, None].float() * inverse_frequencies(rope)
    assert (cos - angles.double().cos().repeat(1, 2)).abs().max() < 1e-7
    assert (sin - torch.cat((-angles.double().sin(), angles.double().sin()), 1)).abs().max() < 1e-7
    for row, position in enumerate(positions):
        alone = Rotary(rope, 131_072 + row, torch.device("cpu")).rows(position[None])
        assert torch.equal(alone[0][0], cos[row])
        assert torch.equal(alone[1][0], sin[row])


def test_norm_is_the_formula():
    x, weight = noise(7, 96) * 3, noise(96, seed=1)
    out = torch.empty_like(x)
    rms_norm_rows(x.numpy(), weight.numpy(), EPS, out.numpy())
    assert (out - F.rms_norm(x.double(), (96,), weight.double(), EPS)).abs().max() < 1e-5
