"""What the service asks of every dialect, and what all of them tell about a turn's use of the cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from gateway import sse
from gateway.prefill import Prefilled
from gateway.turn import Delta, Turn
from protocol.errors import ServeError
from protocol.messages import Accepted, Completed

_WORST_FIRST = ("miss", "partial", "hit")


class Answer(ABC):
    """One request's answer in one dialect.

    It is asked either for `whole`, or for a stream: `opening` once, `events` for everything that comes, then
    `closing`, or `broken` at any moment instead.
    """

    keep_alive: ClassVar[bytes] = sse.KEEP_ALIVE  # sent into a silence

    @abstractmethod
    def whole(self, deltas: Sequence[Delta], turn: Turn) -> dict[str, Any]:
        """The body for a request that asked for no stream, made of all deltas of a turn that is done."""

    @abstractmethod
    def opening(self, turn: Turn) -> bytes:
        """What follows the headers at once. The turn may not have been accepted yet."""

    def progress(self, news: Sequence[Prefilled]) -> bytes:
        """How far prompts are computed, where the client has asked to be told."""
        return b""

    @abstractmethod
    def events(self, gained: Sequence[Delta]) -> bytes:
        """What a turn has just gained, in order."""

    @abstractmethod
    def closing(self, turn: Turn) -> bytes:
        """The end of a turn that is done, with its usage where the dialect has it, and where it started from."""

    @abstractmethod
    def broken(self, error: ServeError) -> bytes:
        """The end of a stream that must not be taken for a whole answer."""


def cached_tokens(turn: Turn) -> int:
    """Prompt tokens that were restored, as far as that is known."""
    return sum(found.depth for found in (turn.accepted | turn.completed).values())


def written_tokens(turn: Turn) -> int:
    """Prompt tokens that were computed and kept for others, once the turn is done."""
    return sum(max(done.kept - done.depth, 0) for done in turn.completed.values())


def cache_report(turn: Turn) -> dict[str, Any]:
    """Where a completed turn started from, and how long it waited; of several prompts the one served worst.

    `exact` is false if any of them started from what was computed with other numerics.
    """
    prompt, final = min(turn.completed.items(), key=lambda item: _rank(item[1]))
    accepted = turn.accepted.get(prompt)
    return {
        "outcome": final.outcome,
        "depth": final.depth,
        "reason": final.reason,
        "exact": all(each.exact for each in turn.completed.values()),
        "diverged_message": accepted.diverged_message if accepted else None,
        "diverged_token": accepted.diverged_token if accepted else None,
        "queue_seconds": final.queue_seconds,
        "prefill_seconds": final.prefill_seconds,
    }


def cache_line(turn: Turn) -> str | None:
    """The value of `x-prefixd-cache`; None while any prompt has not been looked up."""
    found: list[Accepted | Completed] = []
    for prompt in range(turn.prompts):
        known = turn.completed.get(prompt) or turn.accepted.get(prompt)
        if known is None:
            return None
        found.append(known)
    worst = min(found, key=_rank)
    inexact = "" if all(each.exact for each in found) else "; exact=no"
    return f"{worst.outcome}; depth={worst.depth}; reason={worst.reason}{inexact}"


def cache_comment(turn: Turn) -> bytes:
    """The same as a comment line of a stream."""
    return sse.comment(f"prefixd outcome={cache_line(turn) or 'unknown'}")


def _rank(found: Accepted | Completed) -> tuple[int, int]:
    return _WORST_FIRST.index(found.outcome), found.depth
