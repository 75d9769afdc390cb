"""Choosing a token from one row of logits."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Sampling
from worker.sampling import Sampler, describe

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 0.0])


def sampler(prompt=(), choice=0, **changes) -> Sampler:
    return Sampler(Sampling(16, **{"seed": 7, **changes}), choice, prompt)


def draws(count=2000, logits=LOGITS, **changes) -> Counter[int]:
    drawing = sampler(**changes)
    return Counter(drawing.choose(logits)[0] for _ in range(count))


def test_temperature_zero_is_the_largest():
    assert sampler(temperature=0.0).choose(LOGITS) == (1, None)
    assert sampler(temperature=0.0).is_plain_greedy


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1.0},
        {"logprobs": 0},
        {"logit_bias": {1: 1.0}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
    ],
)
def test_what_is_not_plain_greedy(changes):
    assert not sampler(**{"temperature": 0.0, **changes}).is_plain_greedy


def test_draws_follow_the_distribution():
    expected = torch.softmax(LOGITS / 0.8, 0)
    counts = draws(20_000, temperature=0.8)
    for token, probability in enumerate(expected.tolist()):
        # Six standard deviations: the seed is fixed, so this holds always or never.
        assert abs(counts[token] - 20_000 * probability) < 6 * math.sqrt(20_000 * probability) + 1


def test_top_k_top_p_and_min_p_cut_the_tail():
    assert set(draws(top_k=2)) == {1, 2}
    assert set(draws(top_k=1)) == {1}
    assert set(draws(top_k=99)) == set(range(5))
    share = torch.softmax(LOGITS, 0)
    assert set(draws(top_p=float(share[1]) - 0.01)) == {1}
    assert set(draws(top_p=float(share[1]) + 0.01)) == {1, 2}
    assert set(draws(min_p=float(share[0] / share[1]) + 0.01)) == {1, 2}
    assert set(draws(min_p=1.0)) == {1}


def test_equal_seeds_draw_equally_and_choices_apart():
    one, same, other = sampler(), sampler(), sampler(choice=1)
    flat = torch.zeros(1000)
    tokens = [[each.choose(flat)[0] for _ in range(20)] for each in (one, same, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    unseeded = [[s.choose(flat)[0] for _ in range(20)] for s in (sampler(seed=None), sampler(seed=None))]
    assert unseeded[0] != unseeded[1]


def test_penalties_count_what_was_generated():
    penalised = sampler(temperature=0.0, frequency_penalty=0.6)
    chosen = []
    for _ in range(4):
        token, _ = penalised.choose(LOGITS)
        penalised.accept(token)
        chosen.append(token)
    assert chosen == [1, 1, 2, 1]  # 3.0, 2.4, then 1.8 against 2.0, then 1.8 against 1.4


def test_a_presence_penalty_counts_once_and_not_the_prompt():
    penalised = sampler(prompt=[1], temperature=0.0, presence_penalty=1.5)
    assert penalised.choose(LOGITS)[0] == 1
    penalised.accept(1)
    assert penalised.choose(LOGITS)[0] == 2
    penalised.accept(2)
    assert penalised.choose(LOGITS)[0] == 1


def test_a_repetition_penalty_counts_the_prompt_and_turns_no_sign():
    logits = torch.tensor([-1.0, -1.5, -3.0])
    assert sampler(prompt=[0], temperature=0.0, repetition_penalty=2.0).choose(logits)[0] == 1
    assert sampler(prompt=[2], temperature=0.0, repetition_penalty=0.2).choose(logits)[0] == 2


def test_a_bias_moves_the_choice_and_not_the_logprobs():
    biased = sampler(temperature=0.0, logit_bias={3: 100.0, 99: 5.0}, logprobs=1)
    token, logprob = biased.choose(LOGITS)
    assert token == logprob.token_id == 3
    assert logprob.logprob == pytest.approx(float(torch.log_softmax(LOGITS.double(), 0)[3]))
    assert logprob.top[0][0] == 1
    assert LOGITS[3] == -1.0, "the row itself is changed"


def test_logprobs_are_the_models_own_in_falling_order():
    described = describe(LOGITS, 2, 3)
    assert [token for token, _ in described.top] == [1, 2, 0]
    assert sum(math.exp(value) for _, value in describe(LOGITS, 0, 5).top) == pytest.approx(1.0)
    assert len(describe(LOGITS, 0, 99).top) == 5
    assert describe(LOGITS, 0, 0).top == ()
    assert describe(torch.tensor([0.0, -math.inf]), 1, 2).logprob == -1e30


@given(
    logits=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=40),
    temperature=st.floats(0, 3),
    top_k=st.integers(0, 50),
    top_p=st.floats(0.001, 1.0),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_whatever_is_asked_for_gives_a_token(logits, temperature, top_k, top_p, min_p, seed):
    row = torch.tensor(logits)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    token, _ = sampler(**options).choose(row)
    assert 0 <= token < len(row)
    if top_k:
        assert float(row[token]) >= float(row.sort(descending=True).values[min(top_k, len(row)) - 1])
    # A row's choice does not depend on the rows beside it: it is given alone.
    assert sampler(**options).choose(row.clone())[0] == token
