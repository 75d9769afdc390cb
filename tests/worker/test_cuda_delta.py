"""The delta rule's Triton kernels against plain torch, and the same bits whatever passes a prompt is cut into.

On a machine without a CUDA device they run in Triton's interpreter, if Triton is installed at all.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the interpreter's own

from worker.cuda.chunk_plan import ChunkPlan, plan_size  # noqa: E402
from worker.cuda.mixed_ops import DeltaNet, States, TorchMixedOps  # noqa: E402
from worker.cuda.tiles import Tile, Tiles  # noqa: E402
from worker.cuda.triton_mixed_ops import TritonMixedOps  # noqa: E402
from worker.delta_rule import DeltaWeights  # noqa: E402
from worker.model_shape import DeltaLayer  # noqa: E402
from worker.steps import StateUse  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.float16
# On a card the sizes that are served; the interpreter has no time for them.
SIZES = (128, 128) if torch.cuda.is_available() else (16, 32)
SHAPE = DeltaLayer(2, 4, *SIZES, taps=4)
TOTAL = 200
CUTS = (37, 38, 130)
ENTRIES = 7
TOLERANCE = 4e-3
TILE = Tile(16, 32, 0, 4, 1)
OPS = TritonMixedOps(
    Tiles(TILE, TILE, TILE, TILE, TILE, TILE, skinny={16: TILE}, skinny_gated={16: TILE}, processors=1)
)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def net() -> DeltaNet:
    rule = DeltaWeights(
        0.5 * noise(SHAPE.taps, SHAPE.channels, seed=1),
        -noise(SHAPE.v_heads, seed=2).exp(),
        noise(SHAPE.v_heads, seed=3) - 2,
    )
    return DeltaNet(SHAPE, rule, 1 + 0.1 * noise(SHAPE.v_dim, seed=4), 1e-6, start=48)


def mixed(rows: int = TOTAL) -> Tensor:
    return noise(rows, net().width, seed=5, dtype=DTYPE)


def memory() -> Tensor:
    """Entries of noise, so that one which is mixed up with another cannot go unseen."""
    floats = net().tail_floats + SHAPE.v_heads * SHAPE.k_dim * SHAPE.v_dim
    return noise(ENTRIES, 48 + floats + 16, seed=6)


def prefill(
    run: TorchMixedOps | TritonMixedOps, rows: Tensor, use: StateUse, into: Tensor, spare: int = 0
) -> Tensor:
    plan = ChunkPlan.of(len(rows), use)
    capacity = plan.chunks + spare
    packed = np.zeros(plan_size(capacity), np.int32)
    plan.pack(capacity, packed)
    # What comes after the real rows is no number.
    padded = torch.cat([rows, torch.full((20, rows.shape[1]), float("nan"), dtype=DTYPE, device=DEVICE)])
    out = run.recur_prefill(padded, net(), States(into, torch.from_numpy(packed).to(DEVICE), capacity))
    return out[: len(rows)]


USE = StateUse(entry=3, source=1, captures=((37, 4), (130, 5)), cuts=CUTS)


def test_prefill_is_the_formula():
    found_in, expected_in = memory(), memory()
    found = prefill(OPS, mixed(), USE, found_in)
    expected = prefill(TorchMixedOps(), mixed(), USE, expected_in)
    assert error(found, expected) < TOLERANCE
    for entry in (3, 4, 5):
        assert error(found_in[entry], expected_in[entry]) < TOLERANCE
        assert not torch.equal(found_in[entry], memory()[entry])
    for entry in (0, 1, 2, 6):
        assert torch.equal(found_in[entry], memory()[entry]), "an entry that is nobody's business was written"


@pytest.mark.parametrize("ends", [(37,), (102, 194), (37, 38, 102, 130)])
def test_passes_of_other_lengths_give_the_same_bits(ends: tuple[int, ...]):
    """They end at boundaries, of which not all have a state kept, or whole chunks behind one."""
    whole_in, parts_in = memory(), memory()
    whole = prefill(OPS, mixed(), USE, whole_in)
    start, parts = 0, []
    for end in (*ends, TOTAL):
        cuts = tuple(cut - start for cut in CUTS if start < cut < end)
        captures = tuple((at - start, to) for at, to in USE.captures if start < at <= end)
        use = StateUse(3, 1 if start == 0 else None, captures, cuts)
        parts.append(prefill(OPS, mixed()[start:end], use, parts_in, spare=3))
        start = end
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(parts_in, whole_in)


@pytest.mark.parametrize("boundary", [37, 38, 130])
def test_a_kept_state_is_where_another_sequence_goes_on(boundary: int):
    states = memory()
    captures = ((boundary, 4),)
    whole = prefill(OPS, mixed(), StateUse(3, 1, captures, CUTS), states)
    cuts = tuple(cut - boundary for cut in CUTS if cut > boundary)
    again = prefill(OPS, mixed()[boundary:], StateUse(6, 4, (), cuts), states)
    assert torch.equal(again, whole[boundary:])
    span = slice(net().start, -16)  # this layer's part of an entry
    assert torch.equal(states[6, span], states[3, span])


def test_decode_goes_on_from_prefill():
    found_in, expected_in = memory(), memory()
    rows = mixed(3)
    used = torch.tensor([3, 0, 5], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([200, -1, 130], dtype=torch.int32, device=DEVICE)
    for states in (found_in, expected_in):
        prefill(OPS, mixed(), USE, states)
    real = [0, 2]
    for _ in range(5):
        found = OPS.recur_decode(rows, net(), States(found_in, used), positions)
        expected = TorchMixedOps().recur_decode(rows, net(), States(expected_in, used), positions)
        assert error(found[real], expected[real]) < 2e-3
    assert error(found_in[[3, 5]], expected_in[[3, 5]]) < 1e-4
    assert torch.equal(found_in[0], memory()[0])
    alone_in = memory()
    prefill(OPS, mixed(), USE, alone_in)
    for _ in range(5):
        alone = OPS.recur_decode(rows[:1], net(), States(alone_in, used[:1]), positions[:1])
    assert torch.equal(alone[0], found[0])
    assert torch.equal(alone_in[3], found_in[3])


def test_chunks_of_keys_that_are_all_alike_stay_finite():
    """Nothing is forgotten and every key is the last one again: the inverse has its largest entries."""
    rows = mixed(1).expand(64, -1).contiguous()
    rows[:, net().gates_at : net().gates_at + SHAPE.v_heads] = -20
    rows[:, net().gates_at + SHAPE.v_heads :] = 20
    found_in, expected_in = memory(), memory()
    use = StateUse(3, 1, ())
    found, expected = prefill(OPS, rows, use, found_in), prefill(TorchMixedOps(), rows, use, expected_in)
    assert error(found, expected) < 0.02
    assert error(found_in[3], expected_in[3]) < 0.02


def test_gates_and_joins():
    plain = TorchMixedOps()
    gate, x = noise(3, 200, seed=1, dtype=DTYPE)[:, 40:], noise(3, 160, seed=2, dtype=DTYPE)
    assert error(OPS.sigmoid_gate(gate, x), plain.sigmoid_gate(gate, x)) < TOLERANCE
    assert error(OPS.gelu_gate(gate, x), plain.gelu_gate(gate, x)) < TOLERANCE
    y, after, before = noise(3, 160, seed=3, dtype=DTYPE), noise(160, seed=4), noise(160, seed=5)
    found_x, expected_x = x.clone(), x.clone()
    found = OPS.join_norm(found_x, y, after, before, 1e-5, 0.7)
    assert error(found, plain.join_norm(expected_x, y, after, before, 1e-5, 0.7)) < TOLERANCE
    assert error(found_x, expected_x) < 1e-3
    OPS.join(found_x, y, after, 1e-5)
    plain.join(expected_x, y, after, 1e-5)
    assert error(found_x, expected_x) < 1e-3
