"""Rows drawn together are what each is drawn alone, by the plain form of the sampler."""

import pytest
import torch

from protocol.messages import Sampling
from worker.draws import draw_rows
from worker.sampling import Sampler

VOCAB = 300
KINDS = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1e-30},
    {"temperature": 1.5, "top_k": 1},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 1000},
]


def noise(rows: int, seed: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(12))
def test_rows_drawn_together_are_those_drawn_alone(seed):
    logits = noise(len(KINDS), seed)
    alone, together = ([Sampler(Sampling(9, seed=seed, **kind), 0, ()) for kind in KINDS] for _ in range(2))
    expected = [sampler.choose(row)[0] for sampler, row in zip(alone, logits, strict=True)]
    wishes = [sampler.wish(row) for sampler, row in zip(together, logits, strict=True)]
    assert draw_rows(torch.stack([row for row, _ in wishes]), [draw for _, draw in wishes]) == expected


def test_a_row_does_not_depend_on_those_beside_it():
    logits = noise(40, 1)
    wishes = [Sampler(Sampling(9, seed=i, **KINDS[i % 8]), 0, ()).wish(logits[i])[1] for i in range(40)]
    whole = draw_rows(logits, wishes)
    assert whole == [draw_rows(logits[i : i + 1], wishes[i : i + 1])[0] for i in range(40)]
    assert len(set(whole)) > 20


def test_draws_follow_the_distribution():
    wanted = torch.tensor([0.5, 0.3, 0.2, 0.0])
    sampler = Sampler(Sampling(9, temperature=1.0, seed=3), 0, ())
    wishes = [sampler.wish(wanted.log())[1] for _ in range(2000)]
    drawn = torch.tensor(draw_rows(wanted.log().repeat(2000, 1), wishes))
    shares = torch.bincount(drawn, minlength=4) / 2000
    assert shares[3] == 0
    assert torch.allclose(shares, wanted, atol=0.05)
