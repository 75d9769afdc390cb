"""The engine on the CUDA backend of dense models. Opt in with `-m gpu`; continuous integration has no such device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from exact_rig import (
    Worker,
    assert_equal_in_company,
    assert_equal_inside_messages,
    cold_answers,
    ids,
    question,
    unequal_hits,
)
from gpu_rig import DENSE, LENGTHS, assert_equal_in_conversation, models, on_a_card
from snapshot_rig import prompt

from protocol.messages import Generate, Sampling, Tokens
from worker.io import FromGateway

pytestmark = on_a_card
LONG = [16384, 20001, 32767, 32768, 32769]
STEPS = 16
path = models(DENSE)


@pytest.fixture(scope="module")
def worker(path: Path) -> Worker:
    started = Worker(path, device="cuda", kv_memory="2GiB", slots=2048)
    assert type(started.runner).__name__ == "CudaRunner"
    return started


def test_logits_are_those_of_the_plain_form(worker: Worker):
    from worker.cuda.ops import TorchOps
    from worker.cuda.runner import CudaRunner
    from worker.kv_cache import KVCache

    run = worker.runner
    plain = CudaRunner.__new__(CudaRunner)
    plain.__dict__.update(run.__dict__)
    cache = KVCache(run.model.config, 40, torch.bfloat16, run.model.device)
    plain.cache, plain._pools, plain._ops = cache, list(cache.memories[0].unbind(0)), TorchOps()
    plain._captured, plain._decode_graphs = [], None
    tokens, table, fresh = ids(1, 700), list(range(1, 26)), list(range(1, 26))
    found = run.head_row(run.prefill(tokens, table, 0)[699])
    expected = plain.head_row(plain.prefill(tokens, fresh, 0)[699])
    assert float((found - expected).norm() / expected.norm()) < 0.03
    found = run.decode([5], [table], [700])[0]
    expected = plain.decode([5], [fresh], [700])[0]
    assert float((found - expected).norm() / expected.norm()) < 0.03


def test_hits_alone_and_among_others(worker: Worker):
    assert_equal_in_company(worker, cold_answers(worker, LENGTHS, STEPS))


def test_hits_inside_messages(worker: Worker):
    assert_equal_inside_messages(worker)


@pytest.mark.parametrize("tail", [1, 5, 250, 600])
def test_hits_on_long_prompts(worker: Worker, tail: int):
    assert unequal_hits(worker, LONG, tail) == []


def test_a_conversation_is_the_same_with_and_without_the_cache(worker: Worker):
    assert_equal_in_conversation(worker)


def test_a_prompt_past_the_pool_is_refused_and_nothing_else_fails(path: Path):
    small: Any = Worker(path, device="cuda", kv_memory="4MiB", max_model_len=16384)
    request_id = small.ask(prompt(ids(1, 12_000)))
    small.run()
    assert "kv" in str(small.sockets.events[request_id][-1]).lower()
    assert len(small.serve(prompt(ids(2, 300)), max_tokens=4)) == 4


def test_running_out_of_the_cards_memory_costs_one_request(worker: Worker):
    asked = question(12345)
    cold = worker.serve(asked, cache=False, max_tokens=STEPS)
    torch.cuda.empty_cache()
    _free, total = torch.cuda.mem_get_info()
    # Of this process alone: others may test on the same card.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (4 << 20)) / total)
    request_id = worker.ask(asked, cache=False)
    worker.run()
    assert worker.sockets.events[request_id][-1].code == "out_of_memory"
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert worker.serve(asked, max_tokens=STEPS) == cold
    assert worker.serve(asked, max_tokens=STEPS) == cold


def test_greedy_answers_are_the_same_when_steps_are_started_ahead(worker: Worker):
    """Log-probabilities keep steps from being started ahead: without them the tokens have to be the same."""
    asked = {length: question(length) for length in (5, 31, 64, 300, 700)}
    waited = {
        length: [score.token_id for score in worker.serve(each, max_tokens=60)] for length, each in asked.items()
    }
    ids_of = {}
    for length, each in asked.items():
        sampling = Sampling(60, temperature=0.0)
        message = Generate(f"plain{length}", each.ids, each.boundaries, sampling)
        worker.sockets.inbox.put(FromGateway(b"gateway", message))
        ids_of[length] = message.request_id
    worker.run()
    for length, request_id in ids_of.items():
        tokens = [t for e in worker.sockets.events[request_id] if isinstance(e, Tokens) for t in e.token_ids]
        assert tokens == waited[length], length
