"""The logits of a pass, and the choice of tokens from them."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from protocol.messages import TokenLogprob
from worker.draws import draw_rows
from worker.sampling import Sampler

if TYPE_CHECKING:
    from worker.runner import Runner

log = logging.getLogger(__name__)

_DRAWN_TOGETHER = ("cuda",)  # on these devices, as each draw there is many small steps


class NotFinite(ValueError):
    """The model gave logits of which none can be chosen."""


class LogitRows:
    """The rows of logits [rows, vocab] of one pass, and the largest of each."""

    def __init__(self, logits: Tensor, runner: Runner) -> None:
        self.logits = logits
        self._best, self._most = runner.largest(logits)
        self._drawn: dict[int, int] = {}

    def draw(self, samplers: Sequence[Sampler]) -> None:
        """Draw the tokens of all rows that want nothing else together, where that is faster than one by one."""
        rows = [row for row, sampler in enumerate(samplers) if sampler.is_plain_draw]
        rows = [row for row in rows if math.isfinite(self._most[row])]
        if not rows or self.logits.device.type not in _DRAWN_TOGETHER:
            return
        try:
            adjusted, draws = zip(*(samplers[row].wish(self.logits[row]) for row in rows), strict=True)
            self._drawn = dict(zip(rows, draw_rows(torch.stack(adjusted), draws), strict=True))
        except torch.AcceleratorError:
            raise  # the device is lost, and the worker with it
        except Exception:
            log.debug("drawing together failed", exc_info=True)  # left to `choose`, where it costs one request

    def choose(self, row: int, sampler: Sampler) -> tuple[int, TokenLogprob | None]:
        """The next token of one row. Raises `NotFinite` where the model gave none to choose from."""
        if not math.isfinite(self._most[row]):
            raise NotFinite("the model's logits are not finite")
        if sampler.is_plain_greedy:
            return self._best[row], None
        if row in self._drawn:
            return self._drawn[row], None
        return sampler.choose(self.logits[row])
