"""Tokens drawn for all rows of a decode step at once, on the device that their logits are on.

A row's token does not depend on the rows beside it: those that have to be sorted and those that have not are drawn
apart, and one row goes the way of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_ROWS = 16  # at once: ten copies in float64 are made on the way


class Draw(NamedTuple):
    """How one token is to be drawn. `chance` is the random number in [0, 1) that decides."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    chance: float

    @property
    def sorts(self) -> bool:
        """Whether only the likeliest tokens count."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def draw_rows(logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The token of each row of float32 logits [rows, vocab]."""
    tokens = [0] * len(draws)
    found: list[Tensor] = []
    order: list[int] = []
    for sorts in (False, True):
        rows = [row for row, draw in enumerate(draws) if draw.sorts == sorts]
        for some in (rows[first : first + _ROWS] for first in range(0, len(rows), _ROWS)):
            # One row alone would be summed up in another way.
            padded = some if len(some) > 1 else some * 2
            index = torch.tensor(padded, device=logits.device)
            found.append(_draw(logits.index_select(0, index), [draws[row] for row in padded], sorts)[: len(some)])
            order += some
    for row, token in zip(order, torch.cat(found).tolist() if found else [], strict=True):
        tokens[row] = token
    return tokens


def _draw(logits: Tensor, draws: Sequence[Draw], sorts: bool) -> Tensor:
    vocab, device = logits.shape[1], logits.device
    values, tokens = logits.sort(dim=-1, descending=True) if sorts else (logits, None)
    asked = torch.tensor(draws, dtype=torch.float64, device=device)
    temperature, top_k, top_p, min_p, chance = asked.unsqueeze(1).unbind(-1)
    exact = values.double()
    if sorts:
        place = torch.arange(vocab, device=device)
        exact = exact.masked_fill((place >= top_k) & (top_k > 0), -torch.inf)
    # The largest becomes 0 first: divided by a temperature next to nothing it would be infinite.
    exact = (exact - exact.amax(-1, keepdim=True)) / temperature
    probabilities = torch.softmax(exact, dim=-1)
    if sorts:
        least = min_p * probabilities[:, :1]
        probabilities = probabilities.masked_fill(probabilities < least, 0.0)
    cumulative = probabilities.cumsum(-1)
    # The smallest set whose mass reaches top_p: everything before the first such point, and that point.
    last = (cumulative < top_p * cumulative[:, -1:]).sum(-1, keepdim=True).clamp(max=vocab - 1)
    total = cumulative.gather(-1, last)
    # The product may round up to the total, behind which only impossible tokens could be left.
    point = torch.minimum(chance * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.minimum(torch.searchsorted(cumulative, point, right=True), last)
    return (index if tokens is None else tokens.gather(-1, index)).squeeze(-1)
