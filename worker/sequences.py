"""A request and its choices while they run, and where each of them stands.

Mutable, and touched by the scheduler and its parts alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from protocol.messages import Boundary, FinishReason, Generate, Outcome, Reason

if TYPE_CHECKING:
    from concurrent.futures import Future

    from torch import Tensor

    from worker.grammar import Constraint
    from worker.sampling import Sampler
    from worker.slots import Reservation
    from worker.tiers.loading import Load

State = Literal["queued", "prefill", "decode", "finished", "cancelled", "failed"]


class Saved(NamedTuple):
    """Host copies of the blocks of a choice and of its recurrent state."""

    blocks: list[Tensor]
    state: Tensor | None


@dataclass(slots=True, eq=False)
class Choice:
    """One answer of a request.

    # [0, length)      keys and values are in `blocks`, and the recurrent state at `length` in `entry`
    # next_token       sampled, not computed yet: goes to position `length` in the next decode step
    """

    request: Request
    index: int
    sampler: Sampler
    blocks: list[int] = field(default_factory=list)
    entry: int | None = None  # set while it is on the device, where the model recurs
    length: int = 0
    next_token: int = -1
    generated: int = 0
    finished: FinishReason | None = None
    saved: Saved | None = None  # while swapped out
    no_room_at: int = -1  # as in `Request`, for its way back


@dataclass(slots=True, eq=False)
class Request:
    """One `Generate`, from its arrival to its last event.

    # [0, depth)         restored from a snapshot
    # [depth, computed)  prefilled here
    # [computed, total)  not computed yet: never committed
    # The recurrent state at `computed` is in entries[0], once the first pass has copied `entry_source` there.
    """

    sender: bytes
    message: Generate
    arrived: float
    caching: bool  # may read and write the cache
    constraint: Future[Constraint] | None = (
        None  # of which each choice follows a copy; it waits until this is there
    )
    state: State = "queued"
    outcome: Outcome = "miss"
    reason: Reason = "disabled"
    depth: int = 0
    slot: int | None = None  # restored from
    generation: int = 0  # of that slot then
    deepest_known: int = 0
    diverged_message: int | None = None
    diverged_token: int | None = None
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    tail_source: int | None = None  # restored block, partly filled, that the first pass copies; held until then
    entries: list[int] = field(default_factory=list)  # of recurrent state: its own, then its further choices'
    entry_source: int | None = None  # the first pass copies it to its own; held until then
    captures: list[tuple[Boundary, Reservation]] = field(default_factory=list)  # of the pass under way
    checkpoint: tuple[Boundary, int] | None = (
        None  # the last boundary passed and its entry, in case of an early end
    )
    wanted: list[Boundary] = field(default_factory=list)  # to be committed, rising
    committed: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    load: Load | None = None  # brings a deeper boundary from a slower tier, or has
    sources: dict[str, int] = field(default_factory=dict)  # of `depth` tokens those that came from slower tiers
    exact: bool = True  # False where it starts from what was computed with other numerics
    follows: Request | None = None  # is computing a prefix this one needs too
    follow_until: int = 0  # and has it when it reaches this position
    no_room_at: int = -1  # what `BlockPool.releases` was when there was no room for it
    cancel_cause: str = ""  # set once a choice was cut off
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
    def is_compiling(self) -> bool:
        """It cannot start yet, as its grammar is being compiled."""
        return self.constraint is not None and not self.constraint.done()

    @property
    def is_open(self) -> bool:
        return self.state in ("queued", "prefill", "decode")

    def seconds(self, now: float) -> tuple[float, float, float]:
        """Time spent queued, in prefill and in decode so far."""
        end = now if self.ended_at is None else self.ended_at
        admitted = end if self.admitted_at is None else self.admitted_at
        prefilled = end if self.prefilled_at is None else self.prefilled_at
        return admitted - self.arrived, max(prefilled - admitted, 0.0), max(end - prefilled, 0.0)


def pass_end(request: Request, rows: int, chunk: int) -> int:
    """Where the next prefill pass ends, of `rows` tokens at most, or of one chunk if that is more.

    At the prompt's end or whole chunks behind a boundary: the layout of a recurrence that is computed in chunks, which
    begin anew at boundaries, is then the same however a prompt is cut. Passes begin where others ended.
    """
    start = request.computed
    end = min(start + max(rows, chunk), request.total)
    if chunk == 1 or end == request.total:
        return end
    origin = max((b.end for b in request.message.boundaries if start < b.end <= end), default=start)
    return origin + (end - origin) // chunk * chunk


class Running:
    """Every admitted request or choice, in the place where it waits for its next step."""

    def __init__(self) -> None:
        self.prefilling: list[Request] = []
        self.decoding: list[Choice] = []
        self.swapped: list[Choice] = []

    @property
    def is_empty(self) -> bool:
        return not (self.prefilling or self.decoding or self.swapped)

    @property
    def choice_count(self) -> int:
        """Choices that run now or will once their prompt is computed."""
        to_come = sum(request.message.n for request in self.prefilling)
        return to_come + len(self.decoding) + len(self.swapped)

    def drop(self, choice: Choice) -> None:
        """Take a choice out; one that has left already stays away."""
        for places in (self.decoding, self.swapped):
            if choice in places:
                places.remove(choice)


def age(choice: Choice) -> tuple[float, int]:
    """Sorts choices, the oldest first."""
    return choice.request.arrived, choice.index
