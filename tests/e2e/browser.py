"""A headless Chromium, driven over its debugging protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


class Tab:
    """One page. What it logs, throws and asks for is kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.troubles: list[str] = []
        self.requested: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._loaded = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """A command's result."""
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(_WAIT_SECONDS):
            return await answer

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)
        async with asyncio.timeout(_WAIT_SECONDS):
            await self._loaded.wait()

    async def value(self, script: str) -> Any:
        """What an expression is worth in the page."""
        result = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait for an expression to be true."""
        async with asyncio.timeout(_WAIT_SECONDS):
            while not (value := await self.value(script)):  # noqa: ASYNC110 (another process is waited for)
                await asyncio.sleep(_POLL_SECONDS)
            return value

    async def screenshot(self) -> bytes:
        """A PNG of the whole page."""
        taken = await self.send("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(taken["data"])

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        async for received in self._socket:
            message = json.loads(received.data)
            match message:
                case {"id": number, **rest}:
                    answer = self._answers.pop(number)
                    if "error" in rest:
                        answer.set_exception(AssertionError(str(rest["error"])))
                    else:
                        answer.set_result(rest["result"])
                case {"method": "Page.loadEventFired"}:
                    self._loaded.set()
                case {"method": "Log.entryAdded", "params": {"entry": entry}}:
                    self.troubles.append(entry["text"])
                case {"method": "Runtime.exceptionThrown", "params": params}:
                    self.troubles.append(str(params))
                case {"method": "Network.requestWillBeSent", "params": {"request": request}}:
                    self.requested.append(request["url"])


@asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """A tab of a browser of its own, which leaves nothing behind."""
    assert CHROMIUM is not None
    profile = Path(tempfile.mkdtemp(prefix="pfx-chromium-"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "--window-size=1240,1500"]
    flags += ["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *flags, "about:blank", stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(_WAIT_SECONDS):
            while not (written := _port(profile)):
                assert process.returncode is None, "chromium does not start"
                await asyncio.sleep(_POLL_SECONDS)
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{written}/json/list") as response:
                [page] = [each for each in await response.json() if each["type"] == "page"]
            async with http.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                try:
                    yield tab
                finally:
                    await tab.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        shutil.rmtree(profile, ignore_errors=True)


def _port(profile: Path) -> str:
    """The port it listens on, once it has written it down."""
    file = profile / "DevToolsActivePort"
    return file.read_text().partition("\n")[0] if file.exists() else ""
