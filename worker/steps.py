"""What the scheduler asks of the engine: one step at a time, carried out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from worker.sequences import Choice, Request

# Blocks to copy (source, target) before the step writes: copy-on-write of partly filled shared blocks.
Copies = tuple[tuple[int, int], ...]


class StateUse(NamedTuple):
    """What a prefill pass does with recurrent states.

    It goes on in `entry`, to which `source` is copied first if there is one, and after its first `rows` tokens it
    copies the state to `target`, for each (rows, target) of `captures`. `cuts`, rising: after how many of its tokens
    a boundary lies within it. A recurrence that is computed in chunks begins anew at each.
    """

    entry: int
    source: int | None
    captures: tuple[tuple[int, int], ...]
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute prompt tokens [start, end) of one request. `states` is set where the model recurs."""

    request: Request
    start: int
    end: int
    copies: Copies
    states: StateUse | None = None


@dataclass(frozen=True, slots=True)
class Decode:
    """Compute the next token of each choice."""

    choices: tuple[Choice, ...]
    copies: Copies


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy these blocks of a choice, and its recurrent state, to the host before anything else is written.

    They are free already.
    """

    choice: Choice
    blocks: tuple[int, ...]
    entry: int | None = None


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Put a choice's saved blocks back, into these, and its recurrent state into its new entry."""

    choice: Choice
    blocks: tuple[int, ...]


Step = Prefill | Decode | SwapOut | SwapIn


def requests_of(step: Step) -> list[Request]:
    """Whose work a step is: they fail with it."""
    match step:
        case Prefill(request):
            return [request]
        case Decode(choices):
            return list(dict.fromkeys(choice.request for choice in choices))
        case SwapOut(choice) | SwapIn(choice):
            return [choice.request]
