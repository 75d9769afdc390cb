"""Choosing the next token from one row of logits.

Every step works on one row alone, in float64 where it could round, so that a choice never depends on which other
rows were computed beside it. Random draws come from one generator a choice, seeded by the request.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from protocol.messages import Sampling, TokenLogprob
from worker.draws import Draw
from worker.grammar import Constraint, GrammarError

_LARGEST = 1e6  # of what logits are multiplied with or added to: they stay finite
_SMALLEST_LOGPROB = -1e30  # stands for minus infinity, which JSON has no word for


def unusable(sampling: Sampling) -> str | None:
    """What of it cannot be followed; None if all can. A gateway asks for less, but anybody may hold a socket."""
    s = sampling
    for name, is_usable in (
        ("temperature", 0 <= s.temperature <= _LARGEST),
        ("top_p", 0 < s.top_p <= 1),
        ("top_k", s.top_k >= 0),
        ("min_p", 0 <= s.min_p <= 1),
        ("presence_penalty", abs(s.presence_penalty) <= _LARGEST),
        ("frequency_penalty", abs(s.frequency_penalty) <= _LARGEST),
        ("repetition_penalty", 1 / _LARGEST <= s.repetition_penalty <= _LARGEST),
        ("logit_bias", all(abs(bias) <= _LARGEST for bias in s.logit_bias.values())),
        ("logprobs", s.logprobs is None or s.logprobs >= 0),
    ):
        if not is_usable:
            return f"{name}: out of range"
    return None


class Sampler:
    """The state of one choice: its generator, the tokens that penalties look at, and its place in its grammar."""

    def __init__(
        self, sampling: Sampling, choice: int, prompt_ids: Sequence[int], constraint: Constraint | None = None
    ) -> None:
        self.sampling = sampling
        self._constraint = constraint
        self._seed = None if sampling.seed is None else sampling.seed + choice
        self._counts: Counter[int] = Counter()
        self._prompt = set(prompt_ids) if sampling.repetition_penalty != 1.0 else set()
        self._bias = list(sampling.logit_bias.items())

    @cached_property
    def _random(self) -> random.Random:
        """Made once something is drawn: it takes as long as all else of a sampler."""
        return random.Random(self._seed)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the largest logit and nothing else is asked for."""
        s = self.sampling
        free = self._constraint is None and s.logprobs is None
        return free and s.temperature == 0 and not self._bias and not self._penalised

    @property
    def is_plain_draw(self) -> bool:
        """Whether the choice is drawn, freely, and nothing else is asked for."""
        return self._constraint is None and self.sampling.logprobs is None and self.sampling.temperature > 0

    @property
    def ended(self) -> bool:
        """The grammar that the choice follows is complete."""
        return self._constraint is not None and self._constraint.ended

    @property
    def _penalised(self) -> bool:
        s = self.sampling
        return bool(s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0)

    def choose(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
        """The next token for float32 logits [vocab], and its log-probability where asked for.

        Raises `GrammarError` where the grammar cannot go on.
        """
        adjusted = self._adjust(logits) if self._bias or self._penalised else logits
        if self._constraint is not None:
            adjusted = _masked(adjusted, self._constraint.mask())
        token = int(adjusted.argmax()) if self.sampling.temperature == 0 else self._draw(adjusted)
        logprob = None if self.sampling.logprobs is None else describe(logits, token, self.sampling.logprobs)
        return token, logprob

    def accept(self, token: int) -> None:
        """Take in a generated token, for the penalties and the grammar."""
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._penalised:
            self._counts[token] += 1

    def _adjust(self, logits: Tensor) -> Tensor:
        adjusted = logits.clone()
        s = self.sampling
        if s.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(self._prompt | set(self._counts)), device=logits.device)
            if len(seen):
                values = adjusted[seen]
                adjusted[seen] = torch.where(
                    values > 0, values / s.repetition_penalty, values * s.repetition_penalty
                )
        if self._counts and (s.presence_penalty or s.frequency_penalty):
            tokens = torch.tensor(list(self._counts), device=logits.device)
            counts = torch.tensor(list(self._counts.values()), dtype=adjusted.dtype, device=logits.device)
            adjusted[tokens] -= s.presence_penalty + s.frequency_penalty * counts
        for token, bias in self._bias:
            if 0 <= token < len(adjusted):
                adjusted[token] += bias
        return adjusted

    def wish(self, logits: Tensor) -> tuple[Tensor, Draw]:
        """What `draw_rows` takes for the next token, from float32 logits [vocab]: the choice has to be a plain draw."""
        s = self.sampling
        adjusted = self._adjust(logits) if self._bias or self._penalised else logits
        return adjusted, Draw(s.temperature, s.top_k, s.top_p, s.min_p, self._random.random())

    def _draw(self, logits: Tensor) -> int:
        s = self.sampling
        values = logits.double().cpu()
        tokens = None
        if s.top_k > 0 or s.top_p < 1 or s.min_p > 0:
            values, tokens = values.topk(min(s.top_k, len(values)) if s.top_k > 0 else len(values))  # falling
        # The largest becomes 0 first: divided by a temperature next to nothing it would be infinite.
        probabilities = torch.softmax((values - values.max()) / s.temperature, dim=0)
        if s.min_p > 0:
            probabilities = probabilities[: int((probabilities >= s.min_p * probabilities[0]).sum())]
        cumulative = probabilities.cumsum(0)
        if s.top_p < 1:
            # The smallest set whose mass reaches top_p: everything before the first such point, and that point.
            cumulative = cumulative[: int((cumulative < s.top_p * cumulative[-1]).sum()) + 1]
        total = float(cumulative[-1])
        # The product may round up to the total, behind which only impossible tokens could be left.
        point = min(self._random.random() * total, math.nextafter(total, 0.0))
        index = min(int(torch.searchsorted(cumulative, point, right=True)), len(cumulative) - 1)
        return index if tokens is None else int(tokens[index])


def _masked(logits: Tensor, mask: bytearray) -> Tensor:
    """The logits of the tokens whose byte is not 0, all others impossible. Raises `GrammarError` where that is all."""
    allowed = torch.frombuffer(mask, dtype=torch.uint8).bool()
    if not allowed.any():
        raise GrammarError("it allows no token")
    return logits.masked_fill(~allowed.to(logits.device), -math.inf)


def describe(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Log-probabilities of the model itself, before penalties, grammar and temperature, from float32 logits [vocab]."""
    exact = logits.double().cpu()
    logprobs = exact - torch.logsumexp(exact, dim=0)
    best = logprobs.topk(min(top, len(logprobs)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(
        token_id=token,
        logprob=max(float(logprobs[token]), _SMALLEST_LOGPROB),
        top=tuple((index, max(value, _SMALLEST_LOGPROB)) for index, value in pairs),
    )
