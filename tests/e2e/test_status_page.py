"""The status page in a real browser, in front of a real daemon.

`PREFIXD_SCREENSHOTS` names a folder for pictures of it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from chat_model import words
from conftest import Served
from http_client import assistant, system, user

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no browser here (Debian package chromium)")

ROWS = "[...document.querySelectorAll('#recent tr')].map(row => [...row.cells].map(cell => cell.textContent))"
SECRET = "marzipanic"


async def test_the_page_follows_what_happens(served: Served):
    messages = [system(f"{words('status', 90)} {SECRET}"), user(words("first", 60))]
    answer = await asyncio.to_thread(served.client.chat, messages)
    async with browser() as tab:
        await tab.open(f"{served.client.url}/ui")
        await tab.until("document.getElementById('phase')?.textContent === 'ready'")
        await tab.until(f"({ROWS})[0][0] === {answer.request_id!r}")
        outcome, _, reason = answer.outcome
        state, *why = (await tab.value(f"({ROWS})[0]"))[2:5]
        assert (state, why[0], why[1].partition(" at ")[0]) == ("finished", outcome, reason)

        messages += [assistant(answer.text), user(words("second", 30))]
        again = await asyncio.to_thread(served.client.chat, messages)
        assert again.outcome[0] == "hit"
        row = await tab.until(f"({ROWS}).find(row => row[0] === {again.request_id!r} && row[2] === 'finished')")
        assert (row[3], int(row[5]), int(row[6])) == ("hit", again.cached_tokens, again.prompt_tokens)
        assert (await tab.value(f"({ROWS})[0][0]")) == again.request_id

        stats = await asyncio.to_thread(served.daemon.stats)
        assert await tab.value("document.querySelectorAll('#map i').length") == sum(stats["slots"].values())
        await tab.until(f"document.querySelectorAll('#map .ready').length === {stats['snapshots']}")
        await tab.until(f"document.getElementById('snapshots').textContent === '{stats['snapshots']}'")
        await tab.until(
            "[...document.querySelectorAll('#latencies td')].some(c => c.textContent === 'first token, hit')"
        )

        shown = await tab.value("document.documentElement.outerHTML + document.body.innerText")
        assert SECRET not in shown
        assert words("second", 30)[:40] not in shown
        await _in_both_schemes(tab)
        # It asked its own server alone, and nothing was refused or failed.
        assert tab.troubles == []
        assert {url for url in tab.requested if not url.startswith("data:")} == {
            f"{served.client.url}/ui",
            f"{served.client.url}/ui/events",
        }
        # A script that came in all the same would not run.
        injected = (
            "const s = document.createElement('script'); s.append('window.ran = 1'); document.head.append(s)"
        )
        await tab.value(f"(() => {{ try {{ {injected} }} catch {{}} }})()")
        assert await tab.value("window.ran === undefined")
        assert tab.troubles


async def _in_both_schemes(tab) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        await tab.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        colours.add(await tab.value("getComputedStyle(document.body).backgroundColor"))
        if folder := os.environ.get("PREFIXD_SCREENSHOTS"):
            Path(folder, f"{scheme}.png").write_bytes(await tab.screenshot())  # noqa: ASYNC240
    assert len(colours) == 2
