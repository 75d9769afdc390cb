"""Hits are bit-identical to cold runs where layers recur (Qwen3.5) or slide and share keys (Gemma 4).

The comparison is that of `test_exactness.py`; what only such models can get wrong is broken on purpose at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_rig import (
    LENGTHS,
    VOCAB,
    Answer,
    Worker,
    assert_equal_after_flush,
    assert_equal_after_swapping,
    assert_equal_in_company,
    assert_equal_inside_messages,
    assert_long_answers_equal,
    cold_answers,
    ids,
    question,
    unequal_hits,
)
from snapshot_rig import Prompt, prompt
from tiny_models import save_tiny
from torch import Tensor

from protocol.messages import Absorb, Failed
from worker.io import FromGateway
from worker.models.qwen3_5 import Qwen3_5Model
from worker.steps import Copies, StateUse

STEPS = 6
WINDOW = 40
PACKED_SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("qwen3_5", {}),
    "sliding": ("gemma4", {"sliding_window": WINDOW}),
    "sharing": (
        "gemma4",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "sliding_window": WINDOW,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 3.0,
        },
    ),
}
CASES = [("hybrid", "float32"), ("hybrid", "bfloat16"), ("hybrid", "int4"), ("sliding", "float32")]
CASES += [("sharing", "float32"), ("sharing", "bfloat16")]


def serve(path: Path, kind: str, **settings: Any) -> Worker:
    family, changes = MODELS[kind]
    if settings.get("dtype") == "int4":
        changes = {**changes, **PACKED_SIZES}
    save_tiny(path, family, max_position_embeddings=1024, **changes)
    return Worker(path, **settings)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def worker(request, tmp_path_factory) -> Worker:
    kind, dtype = request.param
    return serve(tmp_path_factory.mktemp("model"), kind, dtype=dtype)


@pytest.fixture(scope="module")
def cold(worker) -> dict[int, Answer]:
    return cold_answers(worker, LENGTHS, STEPS)


def test_hits_alone_and_among_others(worker, cold):
    assert_equal_in_company(worker, cold)


def test_long_answers(worker):
    assert_long_answers_equal(worker)


def test_hits_after_eviction_and_a_new_commit(worker, cold):
    assert_equal_after_flush(worker, cold)


def test_hits_inside_messages(worker):
    assert_equal_inside_messages(worker)


@pytest.mark.parametrize("kind", MODELS)
def test_answers_after_swapping(tmp_path, kind):
    roomy = serve(tmp_path, kind, dtype="float32")
    store = roomy.engine._store
    states = 0 if store.states is None else 30 * store.state_bytes
    # Of a hybrid's memory at most half goes to states: as much again is KV.
    memory = 30 * store.block_bytes + states
    worker = Worker(tmp_path, dtype="float32", kv_memory=memory, slots=18, max_running=10)
    assert_equal_after_swapping(roomy, worker)


def conversation(turns: int, size: int = 23) -> Prompt:
    """A head and `turns` messages, of which no length is a multiple of anything."""
    return prompt(ids(1, 50), *(ids(100 + turn, size + turn) for turn in range(turns)), tail=ids(3, 4))


@pytest.mark.parametrize("kind", MODELS)
def test_every_turn_of_a_conversation_and_its_branches(tmp_path, kind):
    worker = serve(tmp_path, kind, dtype="float32", verify_hits=1.0)
    asked = {}
    for turns in range(1, 12):
        request = conversation(turns)
        cold = worker.serve(request, cache=False, max_tokens=STEPS)
        request_id = worker.ask(request, max_tokens=STEPS)
        worker.run()
        assert worker.answer(request_id) == cold
        asked[turns] = request_id
    depths = [worker.depth(request_id) for request_id in asked.values()]
    assert depths == [0, *(conversation(turns).last.end for turns in range(1, 11))]
    for again in (3, 7):  # somebody edits an earlier message, and then again
        for seed in (900, 901):
            request = prompt(
                ids(1, 50), *(ids(100 + turn, 23 + turn) for turn in range(again)), ids(seed, 30), tail=ids(3, 4)
            )
            cold = worker.serve(request, cache=False, max_tokens=STEPS)
            request_id = worker.ask(request, max_tokens=STEPS)
            worker.run()
            assert worker.answer(request_id) == cold
            assert worker.depth(request_id) > 0
    verify_all(worker)


def verify_all(worker: Worker) -> None:
    background = worker.engine._scheduler.background
    while not background.is_empty:
        worker.engine.turn(wait=False)
    assert background.verified > 0
    assert (background.mismatched, background.skipped) == (0, 0)
    worker.engine._store.check_invariants(())


@pytest.mark.parametrize("kind", MODELS)
def test_several_choices_of_one_prompt(tmp_path, kind):
    """Each goes on from a state of its own, and none moves another's on."""
    worker = serve(tmp_path, kind, dtype="float32")
    single = worker.serve(question(70), cache=False, max_tokens=20)
    worker.serve(question(70))
    request_id = worker.ask(question(70), max_tokens=20, n=3)
    worker.run()
    assert [worker.answer(request_id, choice) for choice in range(3)] == [single] * 3


@pytest.mark.parametrize("kind", MODELS)
def test_an_absorbed_answer_is_where_the_next_turn_starts(tmp_path, kind):
    worker = serve(tmp_path, kind, dtype="float32", verify_hits=1.0)
    worker.serve(conversation(2))
    answered = conversation(3)
    job = Absorb("a", answered.ids[: answered.last.end], answered.boundaries)
    worker.sockets.inbox.put(FromGateway(b"gateway", job))
    worker.engine.turn(wait=False)
    while not worker.engine._scheduler.background.is_empty:
        worker.engine.turn(wait=False)
    request = conversation(4)
    cold = worker.serve(request, cache=False, max_tokens=STEPS)
    request_id = worker.ask(request, max_tokens=STEPS)
    worker.run()
    assert worker.depth(request_id) == answered.last.end
    assert worker.answer(request_id) == cold
    verify_all(worker)


def test_followers_start_where_their_leader_was_captured(tmp_path):
    worker = serve(tmp_path, "hybrid", dtype="float32")
    requests = [prompt(ids(1, 500), ids(50 + index, 20), tail=(1, 2)) for index in range(4)]
    cold = [worker.serve(request, cache=False, max_tokens=STEPS) for request in requests]
    asked = [worker.ask(request, max_tokens=STEPS) for request in requests]
    worker.run()
    assert [worker.depth(request_id) for request_id in asked] == [0, 500, 500, 500]
    assert [worker.answer(request_id) for request_id in asked] == cold


@pytest.mark.parametrize("broken_layer", [0, 3])
def test_a_pass_that_failed_half_way_leaves_nothing_behind(tmp_path, monkeypatch, broken_layer):
    worker = serve(tmp_path, "hybrid", dtype="float32")
    request = conversation(6)
    cold = worker.serve(request, cache=False, max_tokens=STEPS)
    worker.serve(conversation(3))

    layer = worker.runner.model.layers[broken_layer]
    monkeypatch.setattr(layer, "down", None)  # its state has moved on by then, the next layer's has not
    failed = worker.ask(request, max_tokens=STEPS)
    worker.run()
    assert isinstance(worker.sockets.events[failed][-1], Failed)
    monkeypatch.undo()

    worker.engine._store.check_invariants(())
    again = worker.ask(request, max_tokens=STEPS)
    worker.run()
    assert worker.depth(again) == 50, "of the conversation only the head is still trusted"
    assert worker.answer(again) == cold


@pytest.mark.parametrize("kind", MODELS)
def test_values_that_are_no_numbers_stay_with_the_request_that_has_them(tmp_path, kind):
    """Its blocks come free with them in it, and the next request's last one is read beyond its tokens."""
    worker = serve(tmp_path, kind, dtype="float32", kv_memory="2MiB")
    cold = worker.serve(question(70), cache=False, max_tokens=STEPS)
    prefill, memories = worker.runner.prefill, worker.runner.cache.memories

    def spoil(token_ids: Sequence[int], blocks: list[int], *rest: Any) -> Tensor:
        hidden: Tensor = prefill(token_ids, blocks, *rest)
        for memory in memories:
            memory[:, :, :, blocks] = torch.nan
        return hidden * torch.nan

    worker.runner.prefill = spoil
    spoilt = worker.ask(conversation(3))
    worker.run()
    worker.runner.prefill = prefill
    assert isinstance(worker.sockets.events[spoilt][-1], Failed)
    assert worker.serve(question(70), max_tokens=STEPS) == cold
    assert not any(memory.isnan().any() for memory in memories)
    assert worker.serve(conversation(3), max_tokens=STEPS) == worker.serve(
        conversation(3), cache=False, max_tokens=STEPS
    )


def test_states_make_room_for_newer_ones_and_hits_stay_exact(tmp_path, monkeypatch):
    """One sequence and four snapshots have states, so that somebody's is pushed out with every turn."""
    save_tiny(tmp_path, "qwen3_5", max_position_embeddings=1024)
    roomy = Worker(tmp_path, dtype="float32")
    store = roomy.engine._store
    monkeypatch.setattr("worker.memory.STATE_SHARE", 0.02)
    worker = Worker(tmp_path, dtype="float32", kv_memory=300 * store.state_bytes)
    states = worker.engine._store.states
    assert states is not None
    assert states.total_count == 5
    hits = 0
    for turns in range(1, 8):
        for who in (1, 2):
            request = prompt(ids(who, 30), *(ids(10 * who + turn, 20) for turn in range(turns)), tail=(1,))
            cold = roomy.serve(request, cache=False, max_tokens=STEPS)
            request_id = worker.ask(request, max_tokens=STEPS)
            worker.run()
            hits += worker.depth(request_id) > 0
            assert worker.answer(request_id) == cold
    assert hits >= 10
    assert worker.count("prefixd_snapshot_evictions_total", cause="states") > 0


# Builds with one rule broken: the comparison above finds each.


def around_passes(
    worker: Worker, change: Callable[[Sequence[int], StateUse], StateUse], after: Callable[[StateUse], None]
) -> None:
    prefill = worker.runner.prefill

    def changed(
        token_ids: Sequence[int], blocks: list[int], start: int, use: StateUse, copies: Copies = ()
    ) -> Tensor:
        result: Tensor = prefill(token_ids, blocks, start, change(token_ids, use), copies)
        after(use)
        return result

    worker.runner.prefill = changed


def states_in_bfloat16(worker: Worker) -> None:
    """A state is kept in fewer bits than it is carried in."""

    def rounded(use: StateUse) -> None:
        for _, target in use.captures:
            state = worker.runner.states.memory[target]
            state.copy_(state.bfloat16())

    around_passes(worker, lambda _, use: use, rounded)


def states_from_the_end_of_the_pass(worker: Worker) -> None:
    """A state is copied when the pass is over, under the position of its boundary."""

    def at_the_end(token_ids: Sequence[int], use: StateUse) -> StateUse:
        return use._replace(captures=tuple((len(token_ids), target) for _, target in use.captures))

    around_passes(worker, at_the_end, lambda use: None)


def states_without_the_last_inputs(worker: Worker) -> None:
    """The convolution's inputs before a boundary are not part of what is kept."""

    def cleared(use: StateUse) -> None:
        pool = worker.runner.states
        for _, target in use.captures:
            for start in pool.layout.starts.values():
                pool.memory[target, start : start + pool.layout.tail_floats] = 0

    around_passes(worker, lambda _, use: use, cleared)


def windows_within_a_pass(worker: Worker) -> None:
    """Windows hold for a prompt's first pass only."""
    attention = worker.runner._attention
    prefill, layers = attention.prefill, attention.layers
    open_layers = {index: plan._replace(window=0) for index, plan in layers.items()}

    def changed(blocks: list[int], start: int, *rest: Any) -> Any:
        attention.layers = open_layers if start else layers
        result = prefill(blocks, start, *rest)
        attention.layers = layers
        return result

    attention.prefill = changed


@pytest.mark.parametrize(
    ("breaks", "kind"),
    [
        (states_in_bfloat16, "hybrid"),
        (states_from_the_end_of_the_pass, "hybrid"),
        (states_without_the_last_inputs, "hybrid"),
        (windows_within_a_pass, "sliding"),
    ],
)
def test_a_broken_rule_is_found(tmp_path, breaks, kind):
    broken = serve(tmp_path, kind, dtype="float32")
    breaks(broken)
    lengths = range(WINDOW, 90)
    assert set(unequal_hits(broken, lengths, 5)) >= set(range(WINDOW + 5, 90))


def test_the_hybrid_forgets_nothing_that_is_compared(tmp_path):
    """Or a wrong state could not show: the first tokens of a prompt move the logits of its last."""
    worker = serve(tmp_path, "hybrid", dtype="float32")
    assert isinstance(worker.runner.model, Qwen3_5Model)
    same = ids(7, 100)
    answers = {worker.serve(prompt([first, *same]), cache=False) for first in range(10)}
    assert len(answers) == 10
    assert worker.model.vocab_size == VOCAB
    assert torch.isfinite(worker.runner.states.memory).all()
