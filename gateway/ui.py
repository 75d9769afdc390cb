"""The status page at `/ui`: one static file, and a stream of what it shows. No prompt, no token and no key is in it."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from gateway import sse
from protocol.control_client import CommandRefused, ControlClient
from protocol.errors import CapacityError, WorkerUnavailable

PAGE = Path(__file__).with_name("ui.html")
PERIOD_SECONDS = 1.0
MOST_VIEWERS = 16
MOST_SLOTS = 4096  # shown
_PAGE_SLOTS = 500
_REQUESTS = 40
_LATENCIES = ("ttft", "tpot", "queue", "prefill", "restore")
_SLOT_FIELDS = (
    "slot", "state", "digest", "kind", "tokens", "messages", "own_bytes", "pinned", "busy", "hits",
    "used_age_seconds", "parent_slot", "tiers",
)  # fmt: skip
_REQUEST_FIELDS = (
    "request_id", "age_seconds", "state", "outcome", "reason", "depth", "prompt_tokens", "completion_tokens",
    "queue_seconds", "prefill_seconds", "decode_seconds", "diverged_message", "diverged_token",
)  # fmt: skip


class Ui:
    """What the page shows, read once a period however many look at it."""

    def __init__(
        self,
        open_control: Callable[[], ControlClient],
        exposition: Callable[[], bytes],
        why_not_ready: Callable[[], str | None],
        is_stopping: Callable[[], bool],
    ) -> None:
        """`exposition` is what a scrape of the metrics shows; it and `open_control` may wait for the worker."""
        self._open_control = open_control
        self._exposition = exposition
        self._why_not_ready = why_not_ready
        self._is_stopping = is_stopping
        self._page = PAGE.read_bytes()
        self._headers = _headers(self._page)
        self._viewers = 0
        self._read_at = float("-inf")
        self._shown: dict[str, Any] = {}
        self._reading = asyncio.Lock()

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=self._headers)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """One event a period with everything, until the viewer leaves or the gateway stops."""
        async with self._seat():
            response = web.StreamResponse(headers={**self._headers, **sse.HEADERS})
            await response.prepare(request)
            while not self._is_stopping():
                await response.write(sse.data(await self._latest()))
                await asyncio.sleep(PERIOD_SECONDS)
            await response.write_eof()
            return response

    @asynccontextmanager
    async def _seat(self) -> AsyncIterator[None]:
        """Raises `CapacityError` where too many look already."""
        if self._viewers >= MOST_VIEWERS:
            raise CapacityError(f"{MOST_VIEWERS} look at the status page already")
        self._viewers += 1
        try:
            yield
        finally:
            self._viewers -= 1

    async def _latest(self) -> dict[str, Any]:
        async with self._reading:
            if time.monotonic() - self._read_at >= PERIOD_SECONDS / 2:
                self._shown = await asyncio.to_thread(self._read)
                self._read_at = time.monotonic()
            return self._shown

    def _read(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "time": time.time(),
            "problem": self._why_not_ready(),
            "latency": latencies(self._exposition().decode()),
        }
        try:
            with self._open_control() as control:
                shown |= {  # all of it or nothing: a worker may stop answering in between
                    "stats": control.ask("stats"),
                    "slots": [_chosen(slot, _SLOT_FIELDS) for slot in _slots(control)],
                    "requests": [
                        _chosen(each, _REQUEST_FIELDS)
                        for each in _list(control.ask("recent", limit=_REQUESTS), "requests")
                    ],
                    "verify": control.ask("verify"),
                }
        except (WorkerUnavailable, CommandRefused) as error:
            shown["problem"] = shown["problem"] or str(error)
        return shown


def latencies(text: str) -> dict[str, dict[str, list[list[float]]]]:
    """Histograms of a metrics exposition: by name and outcome ("" where there is none), pairs of bound and count.

    Bounds rise; counts are of all observations up to them, added up over all other labels. The last bound, which has
    none, is left out of the pairs' bounds: it is -1.
    """
    found: dict[str, dict[str, dict[float, float]]] = {name: {} for name in _LATENCIES}
    wanted = {f"prefixd_{name}_seconds": name for name in _LATENCIES}
    for family in text_string_to_metric_families(text):
        name = wanted.get(family.name)
        for sample in family.samples if name else ():
            if sample.name.endswith("_bucket"):
                counts = found[str(name)].setdefault(sample.labels.get("outcome", ""), {})
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
    return {
        name: {
            outcome: [[-1.0 if bound == float("inf") else bound, counts[bound]] for bound in sorted(counts)]
            for outcome, counts in outcomes.items()
        }
        for name, outcomes in found.items()
    }


def _slots(control: ControlClient) -> list[Mapping[str, Any]]:
    slots: list[Mapping[str, Any]] = []
    cursor: object = 0
    while isinstance(cursor, int) and len(slots) < MOST_SLOTS:
        page = control.ask("list", cursor=cursor, limit=_PAGE_SLOTS)
        slots += _list(page, "slots")
        cursor = page.get("next_cursor") if isinstance(page, dict) else None
    return slots


def _list(data: object, name: str) -> list[Mapping[str, Any]]:
    """A list of an answer. A worker of another release, which has none, shows as one without."""
    found = data.get(name) if isinstance(data, dict) else None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _chosen(row: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {name: row[name] for name in fields if name in row}


def _headers(page: bytes) -> dict[str, str]:
    """Nothing but the page's own script and style runs, and it may talk to its own server alone."""
    [script], [style] = (_sources(page, tag) for tag in (b"script", b"style"))
    policy = {
        "default-src": "'none'",
        "script-src": script,
        "style-src": style,
        "connect-src": "'self'",
        "img-src": "data:",  # an icon that is empty, so that none is asked for
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
    }
    return {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


def _sources(page: bytes, tag: bytes) -> list[str]:
    """The digests by which a policy knows the inline elements of one tag."""
    found = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
    return [f"'sha256-{base64.b64encode(sha256(each).digest()).decode()}'" for each in found]
