"""The recurrence: the formula, the same bits wherever rows are cut, and states that only their own rows move on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tiny
from torch import Tensor

from worker.delta_rule import DeltaWeights
from worker.model_config import parse_config
from worker.model_shape import DeltaLayer, ModelConfig
from worker.recurrent import Capture, Recurrence, StateLayout, StatePool

CPU = torch.device("cpu")
SHAPE = DeltaLayer(k_heads=2, v_heads=6, k_dim=10, v_dim=21, taps=4)
LAYERS = (0, 1, 2)  # the first three of four recur


def config(shape: DeltaLayer = SHAPE) -> ModelConfig:
    tiny = parse_config(make_tiny("qwen3_5").config.to_dict())
    return replace(tiny, layer_shapes=(shape,) * 3 + tiny.layers[3:])


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(shape: DeltaLayer = SHAPE) -> DeltaWeights:
    decay = -noise(shape.v_heads, seed=2).exp()
    return DeltaWeights(noise(shape.taps, shape.channels, seed=1), decay, noise(shape.v_heads, seed=3))


def rows(count: int, shape: DeltaLayer = SHAPE, seed: int = 4) -> tuple[Tensor, Tensor]:
    return noise(count, shape.channels, seed=seed), noise(count, 2 * shape.v_heads, seed=seed + 1)


def pool(entries: int, shape: DeltaLayer = SHAPE, wide: bool = False) -> StatePool:
    """Entries of noise, so that one which is mixed up with another cannot go unseen."""
    made = StatePool(config(shape), entries, CPU)
    made.memory = noise(*made.memory.shape, seed=9).to(torch.float64 if wide else torch.float32)
    return made


def run(recur: Recurrence, given: tuple[Tensor, Tensor], by: DeltaWeights) -> Tensor:
    """All layers of a pass; their outputs side by side."""
    return torch.stack([recur(layer, *given, by) for layer in LAYERS])


@pytest.mark.parametrize(
    "shape", [SHAPE, DeltaLayer(1, 1, 32, 16, 2), DeltaLayer(3, 3, 7, 64, 3)], ids=["grouped", "one head", "odd"]
)
def test_the_kernel_is_the_formula(shape: DeltaLayer) -> None:
    by, given = weights(shape), rows(50, shape)
    narrow, wide = pool(1, shape), pool(1, shape, wide=True)
    found = run(Recurrence.prefill(narrow, 0, 50), given, by)
    # A pool of another type than float32 goes through the plain formula.
    exact = run(
        Recurrence.prefill(wide, 0, 50),
        (given[0].double(), given[1].double()),
        DeltaWeights(*(w.double() for w in by)),
    )
    assert (found - exact).abs().max() < 1e-5 * exact.abs().max()
    assert (narrow.memory - wide.memory).abs().max() < 1e-5 * wide.memory.abs().max()


def test_the_formula_forgets_and_corrects() -> None:
    """By hand: one head of one key and one value, a convolution that passes the newest input on."""
    shape = DeltaLayer(k_heads=1, v_heads=1, k_dim=1, v_dim=1, taps=2)
    by = DeltaWeights(torch.tensor([[0.0] * 3, [1.0] * 3]), torch.tensor([-1.0]), torch.tensor([0.0]))
    memory = StatePool(config(shape), 1, CPU)
    memory.memory[0] = torch.tensor([0.0, 0.0, 0.0, 8.0]).repeat(3)
    inputs, gates = torch.tensor([[50.0, 50.0, 4.0]]), torch.tensor([[0.0, 0.0]])
    out = run(Recurrence.prefill(memory, 0, 1), (inputs, gates), by)
    value = 4 / (1 + 2.718281828**-4)
    kept = 8 * 0.5  # exp(-softplus(0)) is a half
    expected = kept + 0.5 * (value - kept)
    assert torch.allclose(out, torch.tensor(expected), rtol=1e-5)
    assert torch.allclose(memory.memory[0], torch.tensor([50.0, 50.0, 4.0, expected]).repeat(3), rtol=1e-5)


@pytest.mark.parametrize("wide", [False, True], ids=["kernel", "plain"])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_cuts_give_the_same_bits(wide: bool, data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 12 if wide else 90))
    cuts = sorted(data.draw(st.sets(st.integers(1, total))) - {total})
    inputs, gates = rows(total)
    whole, parts = pool(1, wide=wide), pool(1, wide=wide)
    expected = run(Recurrence.prefill(whole, 0, total), (inputs, gates), weights())
    found = [
        run(Recurrence.prefill(parts, 0, end - start), (inputs[start:end], gates[start:end]), weights())
        for start, end in zip([0, *cuts], [*cuts, total], strict=True)
    ]
    assert torch.equal(torch.cat(found, dim=1), expected)
    assert torch.equal(parts.memory, whole.memory)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_padding_moves_nothing_and_comes_out_as_zero(data: st.DataObject) -> None:
    real, padding = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 9))
    inputs, gates = rows(real + padding)
    inputs[real:], gates[real:] = torch.nan, torch.nan
    padded, bare = pool(2), pool(2)
    found = run(Recurrence.prefill(padded, 1, real), (inputs, gates), weights())
    expected = run(Recurrence.prefill(bare, 1, real), (inputs[:real], gates[:real]), weights())
    assert torch.equal(found[:, :real], expected)
    assert not found[:, real:].any()
    assert torch.equal(padded.memory, bare.memory)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_sequences_decoded_together_are_as_each_alone(data: st.DataObject) -> None:
    entries = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=6, unique=True))
    inputs, gates = rows(len(entries))
    together, alone = pool(6), pool(6)
    before = together.memory.clone()
    found = run(Recurrence(together, entries), (inputs, gates), weights())
    for row, entry in enumerate(entries):
        one = (inputs[row : row + 1], gates[row : row + 1])
        assert torch.equal(run(Recurrence(alone, [entry]), one, weights())[:, 0], found[:, row])
    assert torch.equal(together.memory, alone.memory)
    others = [entry for entry in range(6) if entry not in entries]
    assert torch.equal(together.memory[others], before[others])
    assert not torch.equal(together.memory[entries[0]], before[entries[0]])


def test_a_decode_step_has_the_bits_of_a_prefill_row() -> None:
    inputs, gates = rows(20)
    stepped, whole = pool(1), pool(1)
    expected = run(Recurrence.prefill(whole, 0, 20), (inputs, gates), weights())
    steps = [run(Recurrence(stepped, [0]), (inputs[i : i + 1], gates[i : i + 1]), weights()) for i in range(20)]
    assert torch.equal(torch.cat(steps, dim=1), expected)
    assert torch.equal(stepped.memory, whole.memory)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_a_captured_state_is_that_of_a_pass_that_ends_there(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 40))
    at = sorted(data.draw(st.sets(st.integers(1, total), max_size=3)))
    inputs, gates = rows(total)
    captured, plain = pool(5), pool(5)
    recur = Recurrence.prefill(captured, 0, total, [Capture(end, 1 + i) for i, end in enumerate(at)])
    found = run(recur, (inputs, gates), weights())
    assert torch.equal(found, run(Recurrence.prefill(plain, 0, total), (inputs, gates), weights()))
    assert torch.equal(captured.memory[0], plain.memory[0])
    assert torch.equal(captured.memory[4], plain.memory[4])
    for i, end in enumerate(at):
        shorter = pool(1)
        shorter.memory[0] = pool(5).memory[0]
        run(Recurrence.prefill(shorter, 0, end), (inputs[:end], gates[:end]), weights())
        assert torch.equal(captured.memory[1 + i], shorter.memory[0])


@pytest.mark.parametrize(
    ("entries", "captures"),
    [([0, 1], [Capture(1, 2)]), ([0, 0], [Capture(3, 2)]), ([0, 0], [Capture(0, 2)])],
    ids=["of two sequences", "past the end", "before the start"],
)
def test_captures_that_mean_nothing_are_refused(entries: list[int], captures: list[Capture]) -> None:
    with pytest.raises(ValueError, match="capture"):
        Recurrence(pool(3), entries, captures)


def test_narrow_rows_go_through_the_plain_formula_with_a_wide_state() -> None:
    inputs, gates = (x.bfloat16() for x in rows(10))
    narrow, wide = pool(1), pool(1)
    found = run(Recurrence.prefill(narrow, 0, 10), (inputs, gates), weights())
    expected = run(Recurrence.prefill(wide, 0, 10), (inputs.float(), gates.float()), weights())
    assert found.dtype == torch.bfloat16
    assert (found - expected).abs().max() < 0.01 * expected.abs().max()
    assert (narrow.memory - wide.memory).abs().max() < 1e-5 * wide.memory.abs().max()


@pytest.mark.parametrize("gate", [-200.0, -30.0, 19.9, 20.1, 200.0])
def test_extreme_gates_stay_finite_and_right(gate: float) -> None:
    inputs, gates = rows(5)
    gates[:] = gate
    narrow, wide = pool(1), pool(1, wide=True)
    found = run(Recurrence.prefill(narrow, 0, 5), (inputs, gates), weights())
    exact = DeltaWeights(*(w.double() for w in weights()))
    expected = run(Recurrence.prefill(wide, 0, 5), (inputs.double(), gates.double()), exact)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_entries_are_cleared_copied_saved_and_loaded_whole() -> None:
    states = pool(4)
    before = states.memory.clone()
    saved = states.save(1)
    states.copy(1, 2)
    states.clear(1)
    assert not states.memory[1].any()
    assert torch.equal(states.memory[2], before[1])
    states.load(3, saved)
    assert torch.equal(states.memory[3], before[1])
    assert torch.equal(states.memory[0], before[0])


def test_the_layout_counts_every_byte() -> None:
    layout = StateLayout(config())
    assert layout.entry_bytes == 4 * 3 * (3 * SHAPE.channels + 6 * 10 * 21)
    assert layout.entry_bytes == pool(1).memory[0].nbytes
    spans = [layout.span(layer) for layer in LAYERS]
    assert [span.start for span in spans] == [0, spans[0].stop, spans[1].stop]
    assert spans[-1].stop == layout.entry_floats


def test_a_model_without_recurrent_layers_has_no_layout() -> None:
    fields: dict[str, Any] = make_tiny("llama").config.to_dict()
    with pytest.raises(ValueError, match="llama has no recurrent layers"):
        StateLayout(parse_config(fields))
