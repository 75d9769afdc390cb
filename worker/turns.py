"""Whose turn it is: tenants that wait take turns, and each one's requests start in the order they came.

While a tenant waits, each other one has one turn at most before it: whoever has had a turn stands behind it then.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest

from protocol.messages import Generate
from worker.sequences import Request

_REMEMBERED = 64  # tenants; more only while that many wait


def taker(message: Generate) -> str:
    """Who takes a turn with this request."""
    return message.member or message.tenant


class Turns:
    """Remembers when each tenant had its last turn, as far as that says who comes before whom."""

    def __init__(self) -> None:
        self._turns = 0
        self._last: dict[str, int] = {}

    def order(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Requests that wait, given as they came, as they are to start."""
        lines: dict[str, list[Request]] = {}
        for request in waiting:
            lines.setdefault(taker(request.message), []).append(request)
        if len(lines) < 2:
            return waiting
        rising = sorted(lines, key=lambda name: self._last.get(name, 0))
        rounds = zip_longest(*(lines[name] for name in rising))
        return [request for request in chain.from_iterable(rounds) if request is not None]

    def took(self, request: Request, waiting: Sequence[Request]) -> None:
        """A request starts; `waiting` are those that still do not."""
        self._turns += 1
        self._last[taker(request.message)] = self._turns
        if len(self._last) > _REMEMBERED:
            # Who had a turn before all that wait now comes before them once, as who never had one does.
            least = min((self._last.get(taker(other.message), 0) for other in waiting), default=self._turns)
            self._last = {name: turn for name, turn in self._last.items() if turn > least}
