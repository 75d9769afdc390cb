"""`events`: what happens to the cache, one line each, until interrupted. What could not be told is told as missed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from cachectl.asking import Asked, ask
from protocol.control import CacheEvent, EventPage
from protocol.control_client import ControlClient

PERIOD_SECONDS = 0.25
_WORDS = {"stale": "stale drop"}
_TIER_WORDS = {"write": "to", "load": "from", "drop": "from", "fail": "to", "evict": "still in"}


def events(client: ControlClient, asked: Asked) -> bool:
    """Those to come; with `--past N`, first the last N that the worker remembers."""
    for said in _follow(client, asked.past):
        print(json.dumps(said) if asked.json else _line(said), flush=True)
    return True


def _follow(client: ControlClient, past: int) -> Iterator[dict[str, Any]]:
    """Events as the worker has them, `{"missed": n}` where some were forgotten first, `{"restarted": epoch}`."""
    page = ask(client, EventPage, "events")
    epoch, after = page.epoch, max(page.last - past, 0)
    is_backlog = True  # nobody misses what is older than what was asked for
    while True:
        page = ask(client, EventPage, "events", after=after)
        if page.epoch != epoch:
            epoch, after, is_backlog = page.epoch, 0, False
            yield {"restarted": epoch}
            continue  # the numbers were another worker's
        if page.missed and not is_backlog:
            yield {"missed": page.missed}
        yield from map(asdict, page.events)
        after = page.last
        if not page.events:
            is_backlog = False
            time.sleep(PERIOD_SECONDS)


def _line(said: dict[str, Any]) -> str:
    if "restarted" in said:
        return f"the worker started again (epoch {said['restarted']}): what the one before did last may be missing"
    if "missed" in said:
        return f"missed {said['missed']} events: they came faster than they could be told"
    event = CacheEvent(**said)
    clock = time.strftime("%H:%M:%S", time.localtime(event.time)) + f".{int(event.time % 1 * 1000):03}"
    parts = [
        f"slot {event.slot}" if event.slot is not None else "",
        event.digest,
        f"{event.tokens} tokens" if event.tokens else "",
        event.part,
        event.cause,
        _tier(event),
        f"request {event.request_id}" if event.request_id else "",
    ]
    what = _WORDS.get(event.kind, event.kind)
    return f"{clock}  {event.number:>6}  {what:<10}  " + "  ".join(part for part in parts if part)


def _tier(event: CacheEvent) -> str:
    """Where it happened, if that was a slower tier."""
    return f"{_TIER_WORDS.get(event.kind, 'in')} {event.tier}" if event.tier else ""
