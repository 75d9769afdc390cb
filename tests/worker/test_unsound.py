"""Messages that are well-formed and still make no sense: refused or dropped, whoever holds the socket."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
import torch
from scheduler_rig import Rig, text
from snapshot_rig import prompt
from toy_model import VOCAB

from protocol.messages import Absorb, Boundary, Sampling
from worker.io import FromGateway
from worker.sampling import Sampler, unusable

DIGEST = bytes(16)
USUAL = Sampling(4, 0.7, 0.9, 5, 0.1, 0.2, -0.3, 1.1, {2: -100.0, 5: 100.0}, seed=7, logprobs=2)


def boundary(end: int) -> Boundary:
    return Boundary(end, DIGEST, "message", 1)


@pytest.mark.parametrize(
    ("ids", "ends", "problem"),
    [
        ([], [3], "token_ids is empty"),
        ([1, VOCAB], [2], "outside"),
        ([1, -1], [2], "outside"),
        ([1, 2, 3], [0], "do not rise"),
        ([1, 2, 3], [2, 2], "do not rise"),
        ([1, 2, 3], [4], "do not rise"),
        ([1, 2, 3], [-(1 << 70), 3], "do not rise"),
        ([1] * 300, [300], "more than fit"),
    ],
)
def test_what_cannot_be_absorbed_is_dropped_and_told(caplog, ids, ends, problem):
    rig = Rig()
    message = Absorb("r", array("i", ids), tuple(map(boundary, ends)))
    rig.sockets.inbox.put(FromGateway(b"gateway", message))
    rig.rest()
    assert rig.kept() == []
    assert problem in caplog.text
    rig.serve(prompt(text(1, 10)))
    assert rig.kept() == [10]


def test_usual_wishes_are_followed():
    assert unusable(USUAL) is None
    assert unusable(Sampling(1)) is None
    assert unusable(Sampling(1, temperature=0.0, top_p=1e-6, seed=-(1 << 80))) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": 1e300},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": 1e300},
        {"presence_penalty": 1e300},
        {"frequency_penalty": -1e300},
        {"logit_bias": {3: float("inf")}},
        {"logprobs": -1},
    ],
)
def test_wishes_that_no_choice_can_follow_are_refused_by_name(changes):
    rig = Rig()
    request = rig.generate(prompt(text(1, 10)), **changes)
    rig.run()
    [name] = changes
    assert name in rig.end(request).message
    assert rig.end(request).code == "invalid"
    assert unusable(replace(USUAL, **changes))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_not_refused_can_be_followed(seed):
    """The extremes of what is let in, in all mixtures, still choose a token."""
    dice = random.Random(seed)
    extremes = {
        "temperature": (0.0, 1e-300, 1e6),
        "top_p": (1e-300, 1.0),
        "top_k": (0, 1, 1 << 62),
        "min_p": (0.0, 1.0),
        "presence_penalty": (-1e6, 0.0, 1e6),
        "frequency_penalty": (-1e6, 0.0, 1e6),
        "repetition_penalty": (1e-6, 1.0, 1e6),
        "logit_bias": ({}, {0: 1e6, 1: -1e6, 1 << 40: 1.0, -1: 1.0}),
        "logprobs": (None, 0, 1 << 40),
    }
    for _ in range(100):
        sampling = Sampling(4, **{name: dice.choice(values) for name, values in extremes.items()})
        assert unusable(sampling) is None
        sampler = Sampler(sampling, 0, [1, 2, 3])
        for _ in range(3):
            token, _ = sampler.choose(torch.linspace(-5, 5, VOCAB))
            assert 0 <= token < VOCAB
            sampler.accept(token)
