"""Prefill attention on a CPU against plain double precision, and the same bits however rows are grouped."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker import attention_kernels
from worker.attention_kernels import EVERYTHING, attend_prefill

BLOCK = 32
KV_HEADS = 2


@pytest.fixture(params=["float32", "bfloat16 in pairs", "bfloat16 widened"])
def kind(request, monkeypatch):
    if request.param == "bfloat16 in pairs" and not attention_kernels.HAS_PAIRS:
        pytest.skip("this processor has no bfloat16 product")
    if request.param == "bfloat16 widened":
        monkeypatch.setattr(attention_kernels, "HAS_PAIRS", False)
    return request.param


class Case:
    """Queries of `rows` tokens from `first` on, over a pool whose blocks lie in any order."""

    def __init__(self, kind, rows, first, group=3, dim=64, window=EVERYTHING, seed=0):
        random = np.random.default_rng(seed)
        self.rows, self.first, self.window, self.dim = rows, first, window, dim
        self.heads = KV_HEADS * group
        used = -(-(first + rows) // BLOCK)
        self.blocks = random.permutation(used + 3)[:used].astype(np.int64)
        pool = random.standard_normal((2, KV_HEADS, (used + 3) * BLOCK, dim), dtype=np.float32)
        self.queries = random.standard_normal((self.heads, rows, dim), dtype=np.float32)
        self.wide = pool
        if kind != "float32":
            narrow = torch.from_numpy(pool).bfloat16()
            self.wide = narrow.float().numpy()
            pool = narrow.view(torch.uint16).numpy()
        self.keys, self.values = pool[0], pool[1]

    def run(self, start=0, end=None, threads=2, padding=0):
        """Rows [start, end) as a pass of their own."""
        end = self.rows if end is None else end
        queries = np.full((self.heads, end - start + padding, self.dim), 7, np.float32)
        queries[:, : end - start] = self.queries[:, start:end]
        out = np.zeros((end - start + padding, self.heads, self.dim), np.float32)
        first = self.first + start
        attend_prefill(
            queries, end - start, self.keys, self.values, self.blocks, BLOCK, first, self.window, threads, out
        )
        return out

    def expected(self):
        tokens = self.first + self.rows
        where = (self.blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()[:tokens]
        group = self.heads // KV_HEADS
        keys, values = (np.repeat(part[:, where].astype(np.float64), group, axis=0) for part in self.wide)
        scores = self.queries.astype(np.float64) @ keys.transpose(0, 2, 1) / math.sqrt(self.dim)
        back = (self.first + np.arange(self.rows))[:, None] - np.arange(tokens)
        scores[:, (back < 0) | (back >= self.window)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ values).transpose(1, 0, 2)


TOLERANCE = {"float32": 3e-6, "bfloat16 in pairs": 2e-2, "bfloat16 widened": 3e-6}


@pytest.mark.parametrize(
    ("rows", "first", "group", "dim", "window"),
    [
        (1, 0, 3, 64, EVERYTHING),
        (70, 0, 1, 16, EVERYTHING),
        (33, 95, 4, 128, EVERYTHING),
        (40, 500, 3, 64, 100),
        (17, 63, 8, 256, 32),
        (5, 31, 2, 64, 1),
    ],
)
def test_rows_are_those_of_plain_attention(kind, rows, first, group, dim, window):
    case = Case(kind, rows, first, group, dim, window)
    np.testing.assert_allclose(case.run(), case.expected(), atol=TOLERANCE[kind], rtol=0)


def test_large_scores_do_not_overflow(kind):
    case = Case(kind, 9, 120)
    case.queries *= np.float32(300)
    out = case.run()
    assert np.isfinite(out).all()
    if "pairs" not in kind:  # there, rounded queries may well see another key as the greatest
        np.testing.assert_allclose(out, case.expected(), atol=1e-3, rtol=0)


def test_padding_rows_are_left_alone(kind):
    case = Case(kind, 6, 40)
    padded = case.run(padding=26)
    np.testing.assert_array_equal(padded[:6], case.run())
    np.testing.assert_array_equal(padded[6:], np.zeros_like(padded[6:]))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("seen", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_grouping_of_rows(seen, data):
    rows = data.draw(st.integers(2, 90))
    first = data.draw(st.integers(0, 200))
    window = data.draw(st.sampled_from([1, 31, 32, 33, 64, 100, EVERYTHING]))
    group = data.draw(st.sampled_from([1, 3, 4]))
    case = Case(seen, rows, first, group, 16, window)
    whole = case.run()
    cuts = sorted({0, rows, *data.draw(st.lists(st.integers(1, rows - 1), max_size=4))})
    threads = data.draw(st.integers(1, 3))
    parts = [case.run(start, end, threads) for start, end in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_what_later_tokens_hold_does_not_matter(kind):
    """A pass reads whole blocks: what an earlier owner left behind the last row must not show."""
    case = Case(kind, 20, 50)
    before = case.run()
    last = case.first + case.rows
    behind = case.blocks[last // BLOCK] * BLOCK + last % BLOCK
    case.keys[:, behind : behind + 5] = case.keys[:, :5]
    case.values[:, behind : behind + 5] = case.values[:, :5]
    np.testing.assert_array_equal(case.run(), before)
