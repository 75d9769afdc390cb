"""The engine on the CUDA backend of hybrids and sliding windows. Opt in with `-m gpu`; CI has no such device."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_rig import (
    Worker,
    assert_equal_after_swapping,
    assert_equal_in_company,
    assert_equal_inside_messages,
    cold_answers,
    ids,
    question,
    unequal_hits,
)
from gpu_rig import LENGTHS, MIXED, assert_equal_in_conversation, models, on_a_card
from snapshot_rig import prompt
from torch import Tensor

from protocol.messages import Boundary, Generate, Sampling
from worker.sequences import Request, pass_end
from worker.steps import StateUse

pytestmark = on_a_card
LONG = [16384, 20001, 32769]
STEPS = 8
LAST = 16_500
path = models(MIXED)


@pytest.fixture(scope="module")
def worker(path: Path) -> Worker:
    started = Worker(path, device="cuda", kv_memory="6GiB", slots=1024, verify_hits=1.0)
    assert type(started.runner).__name__ == "MixedRunner"
    return started


def test_logits_are_those_of_the_plain_form(worker: Worker):
    from worker.cuda.mixed_ops import TorchMixedOps
    from worker.cuda.mixed_runner import MixedRunner
    from worker.kv_cache import KVCache
    from worker.recurrent import StatePool

    model, device = worker.runner.model, torch.device("cuda")
    states = StatePool(model.config, 3, device) if worker.runner.states else None
    plain = MixedRunner.__new__(MixedRunner)
    plain.__dict__.update(worker.runner.__dict__)
    plain.cache, plain.states, plain._mixed_ops = (
        KVCache(model.config, 40, torch.bfloat16, device),
        states,
        TorchMixedOps(),
    )
    plain._pools, plain._ops = plain._layer_pools(plain.cache), plain._mixed_ops
    plain._captured, plain._decode_graphs, plain._prefill_graphs = [], None, None
    tokens, table = ids(1, 700), list(range(1, 26))
    use = StateUse(1, 0, (), (37, 300))
    found = worker.runner.head_row(worker.runner.prefill(tokens, table, 0, use)[699])
    expected = plain.head_row(plain.prefill(tokens, table, 0, use)[699])
    assert relative(found, expected) < 0.03
    found = worker.runner.decode([5], [table], [700], [1])[0]
    expected = plain.decode([5], [table], [700], [1])[0]
    assert relative(found, expected) < 0.03
    if states is not None:
        worker.runner.states.clear(1)


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_states_at_boundaries_are_the_same_whatever_passes_they_were_made_in(worker: Worker):
    """Kept from one run over all, and from short passes that begin at every boundary; bit for bit."""
    run = worker.runner
    if run.states is None:
        pytest.skip("nothing recurs")
    tokens, chance = ids(9, LAST), random.Random(3)
    ends = sorted(
        {37, 64, 65, 128, 130, 500, 8191, 8192, 8193, *chance.sample(range(600, LAST - 70), 30), LAST - 64}
    )
    boundaries = tuple(Boundary(end, bytes(16), "message", index) for index, end in enumerate(ends))
    table = list(range(1, LAST // 32 + 2))
    entries = {end: 3 + place for place, end in enumerate(ends)}
    run.states.memory.normal_()
    run.states.clear(0)

    def passes(start: int, stop: int, rows: int, source: int, kept: dict[int, int]) -> Tensor:
        """Prefill [start, stop) into entry 1 and `kept`; the last row's logits."""
        message = Generate("r", array("i", tokens[:stop]), boundaries, Sampling(1))
        request = Request(b"", message, 0.0, caching=True, computed=start)
        use_source: int | None = source
        while request.computed < stop:
            begin, end = request.computed, pass_end(request, rows, run.state_chunk)
            captures = tuple((at - begin, to) for at, to in kept.items() if begin < at <= end)
            cuts = tuple(at - begin for at in ends if begin < at < end)
            hidden = run.prefill(tokens[begin:end], table, begin, StateUse(1, use_source, captures, cuts))
            use_source, request.computed = None, end
        return run.head_row(hidden[end - begin - 1]).clone()

    whole = passes(0, LAST, run.max_prefill_rows, 0, entries)
    last, keys = run.states.memory[1].clone(), [pool[:, :, :, table].clone() for pool in run.cache.memories]
    assert torch.isfinite(last).all()
    first = run.states.memory[[entries[end] for end in ends]].clone()
    scratch = 3 + len(ends)
    for rows in (100, 512, 2048):
        for place, end in enumerate(ends[:-1]):
            target = ends[place + 1]
            passes(end, target, rows, entries[end], {target: scratch})
            assert torch.equal(run.states.memory[scratch], first[place + 1]), (rows, end)
        assert torch.equal(passes(0, LAST, rows, 0, {}), whole)
        assert torch.equal(run.states.memory[1], last)
    for end in (130, 8193):
        assert torch.equal(passes(end, LAST, 700, entries[end], {}), whole)
        assert torch.equal(run.states.memory[1], last)
    assert torch.equal(run.states.memory[[entries[end] for end in ends]], first), "a kept state was written to"
    assert all(torch.equal(a, b[:, :, :, table]) for a, b in zip(keys, run.cache.memories, strict=True))
    assert not run.states.memory[0].any()


def test_hits_alone_and_among_others(worker: Worker):
    assert_equal_in_company(worker, cold_answers(worker, LENGTHS, STEPS))


def test_hits_inside_messages(worker: Worker):
    assert_equal_inside_messages(worker)


@pytest.mark.parametrize("tail", [1, 250])
def test_hits_on_long_prompts(worker: Worker, tail: int):
    assert unequal_hits(worker, LONG, tail) == []


def test_a_conversation_is_the_same_with_and_without_the_cache(worker: Worker):
    history = assert_equal_in_conversation(worker)
    # Somebody goes back behind the head, and somebody edits an earlier message.
    for kept in (1, 12):
        asked = prompt(*history[:kept], ids(900 + kept, 130), tail=ids(5, 4))
        cold = worker.serve(asked, cache=False, max_tokens=16)
        request_id = worker.ask(asked, max_tokens=16)
        worker.run()
        assert worker.depth(request_id) > 0
        assert worker.answer(request_id) == cold
    background = worker.engine._scheduler.background
    while not background.is_empty:
        worker.engine.turn(wait=False)
    assert background.verified > 0
    assert background.mismatched == 0


def test_several_choices_and_answers_after_swapping(path: Path, worker: Worker):
    single = worker.serve(question(70), cache=False, max_tokens=20)
    worker.serve(question(70))
    request_id = worker.ask(question(70), max_tokens=20, n=3)
    worker.run()
    # Three rows run at another count than one: that changes nothing either.
    assert [worker.answer(request_id, choice) for choice in range(3)] == [single] * 3
    store = worker.engine._store
    states = 0 if store.states is None else 30 * store.state_bytes
    small: Any = Worker(
        path,
        device="cuda",
        kv_memory=2 * states or 30 * store.block_bytes,
        slots=18,
        max_running=10,
        max_model_len=2048,
    )
    if store.states is not None:
        # States take half of it: leave as few blocks as the others have.
        spare = small.engine._store.pool.free_count - 30
        small.engine._store.pool.allocate(spare)
    assert_equal_after_swapping(worker, small)
