"""A request and its choices while they run. Mutable, and touched by the scheduler alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from protocol.messages import Boundary, FinishReason, Generate, Outcome, Reason

if TYPE_CHECKING:
    from torch import Tensor

    from worker.sampling import Sampler

State = Literal["queued", "prefill", "decode", "finished", "cancelled", "failed"]


@dataclass(slots=True, eq=False)
class Choice:
    """One answer of a request.

    # [0, length)      keys and values are in `blocks`
    # next_token       sampled, not computed yet: goes to position `length` in the next decode step
    """

    request: Request
    index: int
    sampler: Sampler
    blocks: list[int] = field(default_factory=list)
    length: int = 0
    next_token: int = -1
    generated: int = 0
    finished: FinishReason | None = None
    saved: Tensor | None = None  # host copy of the blocks while swapped out


@dataclass(slots=True, eq=False)
class Request:
    """One `Generate`, from its arrival to its last event.

    # [0, depth)         restored from a snapshot
    # [depth, computed)  prefilled here
    # [computed, total)  not computed yet: never committed
    """

    sender: bytes
    message: Generate
    arrived: float
    state: State = "queued"
    outcome: Outcome = "miss"
    reason: Reason = "disabled"
    depth: int = 0
    slot: int | None = None  # restored from
    deepest_known: int = 0
    diverged_message: int | None = None
    diverged_token: int | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    wanted: list[Boundary] = field(default_factory=list)  # to be committed, rising
    committed: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    follows: Request | None = None  # is computing a prefix this one needs too
    follow_until: int = 0  # and has it when it reaches this position
    admitted_at: float | None = None
    prefilled_at: float | None = None
    ended_at: float | None = None

    @property
    def request_id(self) -> str:
        return self.message.request_id

    @property
    def total(self) -> int:
        """Tokens of the prompt."""
        return len(self.message.token_ids)

    @property
    def generated(self) -> int:
        return sum(choice.generated for choice in self.choices)

    @property
    def is_open(self) -> bool:
        return self.state in ("queued", "prefill", "decode")

    def seconds(self, now: float) -> tuple[float, float, float]:
        """Time spent queued, in prefill and in decode so far."""
        end = now if self.ended_at is None else self.ended_at
        admitted = end if self.admitted_at is None else self.admitted_at
        prefilled = end if self.prefilled_at is None else self.prefilled_at
        return admitted - self.arrived, max(prefilled - admitted, 0.0), max(end - prefilled, 0.0)
