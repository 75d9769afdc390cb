"""The status page: what it may do, what it shows, and to whom."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import tomllib
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway import ui as module
from gateway.config import GatewaySettings
from gateway.metrics import ROUTES, GatewayMetrics
from gateway.ui import PAGE, Ui, latencies
from protocol.errors import WorkerUnavailable

SLOT = {
    "slot": 0, "state": "ready", "digest": "0badcafe", "kind": "head", "tokens": 40, "hits": 2,
    "tenant": "tenant-name", "session": "session-name", "used_age_seconds": 1.5,
}  # fmt: skip
REQUEST = {"request_id": "r1", "state": "finished", "outcome": "hit", "reason": "none", "committed": [40]}


class Control:
    """Stands in for a connection to the worker. Pages of two slots."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.slots = [{**SLOT, "slot": number} for number in range(5)]
        self.is_away = False
        self.silent_at = ""  # the verb that is not answered

    def __call__(self) -> Any:
        if self.is_away:
            raise WorkerUnavailable("no worker runs")
        return self

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def ask(self, verb: str, cursor: int = 0, limit: int = 0) -> object:
        self.asked.append(verb)
        if verb == self.silent_at:
            raise WorkerUnavailable("it does not answer")
        match verb:
            case "list":
                following = cursor + 2 if cursor + 2 < len(self.slots) else None
                return {"slots": self.slots[cursor : cursor + 2], "next_cursor": following}
            case "recent":
                return {"requests": [REQUEST]}
            case _:
                return {"verb": verb}


class Rig:
    """The page alone on a port, without a gateway."""

    def __init__(self) -> None:
        self.control = Control()
        self.problem: str | None = None
        self.stopping = False
        opened: Any = self.control
        self.ui = Ui(opened, lambda: b"", lambda: self.problem, lambda: self.stopping)


@pytest.fixture
async def rig(monkeypatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0.05)
    rig = Rig()
    app = web.Application()
    app.router.add_get("/ui", rig.ui.page)
    app.router.add_get("/ui/events", rig.ui.events)
    async with TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as rig.http:
        yield rig


async def take(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The next event."""
    async with asyncio.timeout(10):
        line = await response.content.readline()
        assert await response.content.readline() == b"\n"
    return json.loads(line.removeprefix(b"data: "))


async def test_only_the_page_itself_may_run_and_it_may_load_nothing(rig):
    async with rig.http.get("/ui") as response:
        page = await response.text()
        assert response.content_type == "text/html"
        headers = response.headers
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    for tag in ("script", "style"):
        [inner] = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert policy[f"{tag}-src"] == f"'sha256-{base64.b64encode(sha256(inner.encode()).digest()).decode()}'"
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert headers["Cache-Control"] == "no-store"
    # What such a policy would block, and what would reach other servers.
    assert not re.search(r"""https?:|//[a-z]|url\(|@import|\bstyle=|\son\w+=["']|innerHTML""", page)


async def test_an_event_has_all_that_is_shown_and_nothing_that_names_anybody(rig):
    async with rig.http.get("/ui/events") as response:
        assert response.content_type == "text/event-stream"
        shown = await take(response)
    assert (shown["stats"], shown["verify"]) == ({"verb": "stats"}, {"verb": "verify"})
    assert [slot["slot"] for slot in shown["slots"]] == [0, 1, 2, 3, 4]
    assert shown["requests"][0]["request_id"] == "r1"
    assert "tenant-name" not in json.dumps(shown)
    assert "session-name" not in json.dumps(shown)


async def test_events_go_on_and_tell_of_a_worker_that_is_away(rig):
    async with rig.http.get("/ui/events") as response:
        assert (await take(response))["problem"] is None
        rig.control.is_away = True
        while (shown := await take(response))["problem"] is None:
            pass
        assert (shown["problem"], "stats" in shown) == ("no worker runs", False)
        rig.problem = "the worker is loading"
        while (await take(response))["problem"] != "the worker is loading":
            pass
        rig.control.is_away, rig.problem = False, None
        while "stats" not in await take(response):
            pass


@pytest.mark.parametrize("verb", ["stats", "list", "recent", "verify"])
async def test_a_worker_that_stops_answering_in_between_is_not_shown_by_halves(rig, verb: str):
    rig.control.silent_at = verb
    async with rig.http.get("/ui/events") as response:
        shown = await take(response)
    assert shown["problem"] == "it does not answer"
    assert not shown.keys() & {"stats", "slots", "requests", "verify"}


async def test_a_crowd_of_viewers_asks_the_worker_no_more_often_than_one(rig, monkeypatch):
    monkeypatch.setattr(module, "PERIOD_SECONDS", 3600.0)
    viewers = [await rig.http.get("/ui/events") for _ in range(module.MOST_VIEWERS)]
    for viewer in viewers:
        await take(viewer)
    assert rig.control.asked.count("stats") == 1
    async with rig.http.get("/ui/events") as refused:
        assert refused.status == 500  # which the gateway's middleware makes a 429 of
    viewers.pop().close()
    async with asyncio.timeout(10):
        while (again := await rig.http.get("/ui/events")).status != 200:
            again.close()
    for viewer in [*viewers, again]:
        viewer.close()


async def test_streams_end_when_the_gateway_stops(rig):
    async with rig.http.get("/ui/events") as response:
        await take(response)
        rig.stopping = True
        async with asyncio.timeout(10):
            await response.content.read()


async def test_slots_past_a_limit_are_left_out(rig, monkeypatch):
    monkeypatch.setattr(module, "MOST_SLOTS", 4)
    async with rig.http.get("/ui/events") as response:
        assert len((await take(response))["slots"]) == 4


def test_latencies_are_read_from_what_a_scrape_shows(short_run_dir):
    metrics = GatewayMetrics(short_run_dir)
    try:
        for seconds in (0.001, 0.3, 999.0):
            metrics.ttft.labels("hit").observe(seconds)
        metrics.tpot.observe(0.003)
        found = latencies(metrics.exposition().decode())
    finally:
        metrics.close()
    hits = found["ttft"]["hit"]
    assert [count for bound, count in hits if bound in (0.005, 0.2, 0.4, 300)] == [1, 1, 2, 2]
    assert hits[-1] == [-1, 3]
    assert found["ttft"]["miss"][-1] == [-1, 0]
    assert found["tpot"][""][-1] == [-1, 1]
    assert found["restore"] == {}


def test_counts_are_added_up_over_other_labels():
    lines = "".join(
        f'prefixd_ttft_seconds_bucket{{outcome="hit",gateway="{gateway}",le="{bound}"}} {count}\n'
        for gateway in (1, 2)
        for bound, count in (("0.1", 2.0), ("+Inf", 5.0))
    )
    found = latencies(f"# TYPE prefixd_ttft_seconds histogram\n{lines}")
    assert found["ttft"] == {"hit": [[0.1, 4.0], [-1.0, 10.0]]}


def test_the_page_is_part_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert PAGE.name in project["tool"]["setuptools"]["package-data"]["gateway"]


# In a gateway


@pytest.fixture(params=["off", "on"])
def settings(request, model_dir: Path, short_run_dir: Path) -> GatewaySettings:
    return GatewaySettings(model=str(model_dir), run_dir=short_run_dir, ui=request.param == "on")


async def test_there_is_a_page_only_where_it_was_asked_for(served, settings):
    assert {"ui", "ui_events"} <= set(ROUTES)
    for path in ("/ui", "/ui/events"):
        async with served.http.get(served.url + path) as response:
            assert response.status == (200 if settings.ui else 404)
            if settings.ui and path == "/ui/events":
                shown = await take(response)
                assert shown["latency"]["ttft"]["hit"]
