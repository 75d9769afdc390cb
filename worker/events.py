"""What happened to the cache last, numbered without gaps: whoever reads it page by page knows what it missed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from protocol.control import CacheEvent, EventKind, EventPage

REMEMBERED_EVENTS = 20_000
DIGEST_HEX = 8  # of a digest that is shown: enough to tell apart, too short to be the key


class EventLog:
    """The last events, the first of all being number 1. Touched by the engine's thread alone."""

    def __init__(self, limit: int = REMEMBERED_EVENTS, clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since 1970: events are compared with what other programs wrote down."""
        self._events: deque[CacheEvent] = deque(maxlen=limit)
        self._clock = clock
        self._count = 0

    def add(
        self,
        kind: EventKind,
        cause: str = "",
        *,
        slot: int | None = None,
        digest: bytes = b"",
        tokens: int = 0,
        request_id: str = "",
        tier: str = "",
        part: str = "",
    ) -> None:
        self._count += 1
        shown = digest.hex()[:DIGEST_HEX]
        event = CacheEvent(self._count, self._clock(), kind, cause, slot, shown, tokens, request_id, tier, part)
        self._events.append(event)

    def page(self, epoch: str, after: int | None, limit: int) -> EventPage:
        """Up to `limit` events that follow number `after`, oldest first; none of those there are if it is None."""
        if after is None or after >= self._count:
            return EventPage(epoch, [], self._count, 0)
        oldest = self._count - len(self._events) + 1
        missed = max(oldest - after - 1, 0)
        skipped = max(after + 1 - oldest, 0)
        events = list(islice(self._events, skipped, skipped + max(limit, 1)))
        return EventPage(epoch, events, events[-1].number, missed)
