"""How far the prompts of a turn have been computed, for clients that want to see it move."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from protocol.messages import Generate


class Prefilled(NamedTuple):
    """`computed` tokens of a prompt's `total` are there, the first `cached` of them restored."""

    prompt: int  # its place in the turn
    total: int
    cached: int
    computed: int
    seconds: float  # since it was accepted


class PrefillWatch:
    """Holds the latest news of each prompt until they are taken."""

    def __init__(self, requests: Sequence[Generate]) -> None:
        self._totals = [len(request.token_ids) for request in requests]
        self._started: dict[int, tuple[int, float]] = {}  # tokens restored, and when (monotonic)
        self._news: dict[int, Prefilled] = {}

    def accepted(self, prompt: int, cached: int) -> None:
        self._started[prompt] = cached, time.monotonic()
        self.reached(prompt, cached)

    def reached(self, prompt: int, computed: int) -> None:
        """More of a prompt is computed. Nothing is told of one that has not been accepted."""
        if prompt in self._started:
            cached, since = self._started[prompt]
            seconds = time.monotonic() - since
            self._news[prompt] = Prefilled(prompt, self._totals[prompt], cached, computed, seconds)

    def answered(self, prompt: int) -> None:
        """There is a token, so all of the prompt is computed; the last news of it."""
        self.reached(prompt, self._totals[prompt])
        self._started.pop(prompt, None)

    def take(self) -> list[Prefilled]:
        """What is new since this was last asked."""
        news, self._news = self._news, {}
        return list(news.values())
