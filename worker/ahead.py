"""Decode steps that are started before the tokens of the step before them have come back from the device.

The device then never waits for what the host does between two steps. A step may be started so early only if nothing can
come in between: the same choices go on, and each takes its most likely token, which the device knows already. Where a
choice turns out to have ended, its row was computed in vain: what it wrote lies behind everything that anybody reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from worker.scheduler import Scheduler
from worker.steps import Decode

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Follower(Protocol):
    """A runner that can go on by itself."""

    def follow(self, tables: list[list[int]]) -> Tensor | None:
        """Start the step after the last one, of the same sequences: each takes its largest logit's token.

        Logits as those of `Runner.decode`. The last step's are gone, but `Runner.largest` still knows its results.
        None where it cannot: nothing was done.
        """


class Ahead:
    """The decode step that has been started already, if there is one."""

    def __init__(self, scheduler: Scheduler, runner: object) -> None:
        self._scheduler = scheduler
        self._runner = runner if isinstance(runner, Follower) else None
        self._started: tuple[Decode, Tensor] | None = None

    @property
    def step(self) -> Decode | None:
        """What has to be carried out next, before anything else."""
        return None if self._started is None else self._started[0]

    def take(self, step: Decode) -> Tensor | None:
        """The logits of a step that was started; None for another one."""
        if self._started is None or self._started[0] is not step:
            return None
        logits = self._started[1]
        self._started = None
        return logits

    def start_after(self, step: Decode) -> None:
        """Start what follows a step that runs, if that is known."""
        assert self._started is None
        if self._runner is None:
            return
        following = self._scheduler.after(step)
        if following is None:
            return
        logits = self._runner.follow([choice.blocks for choice in following.choices])
        if logits is not None:
            self._started = following, logits
