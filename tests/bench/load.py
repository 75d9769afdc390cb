"""Load on one gateway process: tiny requests a second, and the latency that it adds to streams.

    load.py [--base-url URL] [--streams 1,64,512] [--tokens N] [--seconds S]

Behind the gateway stands a worker without a model, over the real sockets, so that the gateway is what is measured.
The baseline, in the same run and asked by the same client, is a bare aiohttp handler that streams the same chunks.
Every token's text is the time at which it was sent: `delay` is from there to the client. With --base-url a server of
yours is measured in the gateway's place; where its answers hold no times, there are no delays.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop
from load_peers import TICKS, TICKS_A_SECOND, add_ticks, tick
from server_process import running

sys.path.append(str(Path(__file__).parents[1] / "gateway"))
from tiny_model import tiny_tokenizer, write_model_dir

ASKERS = 16  # that ask one tiny request after the other
RAMP_SECONDS = 3.0  # in which the streams of one level begin
_TICK = re.compile(rb"~(\d{5})")


@dataclass
class Seen:
    """What clients saw of one server at one level; seconds."""

    first: list[float] = field(default_factory=list)  # from asking to the first token's coming
    delay: list[float] = field(default_factory=list)  # from each later token's sending to its coming


class Server:
    """One of the two that are compared."""

    def __init__(self, session: aiohttp.ClientSession, name: str, url: str, model: str) -> None:
        self.name, self._session, self._url, self._model = name, session, url, model

    def _body(self, tokens: int, stream: bool) -> dict[str, object]:
        messages = [{"role": "user", "content": "Hello there!"}]
        return {"model": self._model, "messages": messages, "max_tokens": tokens, "stream": stream}

    async def _post(self, tokens: int, stream: bool) -> aiohttp.ClientResponse:
        url, body = self._url + "/v1/chat/completions", self._body(tokens, stream)
        return await self._session.post(url, json=body, raise_for_status=True)

    async def requests_a_second(self, seconds: float) -> float:
        """Of one token each, asked by some clients without a pause."""
        count, end = 0, time.monotonic() + seconds

        async def ask() -> None:
            nonlocal count
            while time.monotonic() < end:
                async with await self._post(1, stream=False) as response:
                    await response.read()
                count += 1

        await asyncio.gather(*(ask() for _ in range(ASKERS)))
        return count / seconds

    async def streams(self, count: int, tokens: int) -> Seen:
        """So many at a time, which begin one after the other."""
        seen = Seen()

        async def follow(number: int) -> None:
            await asyncio.sleep(RAMP_SECONDS * number / count)
            asked, begun = time.monotonic(), False
            async with await self._post(tokens, stream=True) as response:
                async for data in response.content.iter_any():
                    now = tick()
                    for match in _TICK.finditer(data):
                        if begun:
                            seen.delay.append((now - int(match[1])) % TICKS / TICKS_A_SECOND)
                        else:
                            begun = True
                            seen.first.append(time.monotonic() - asked)

        await asyncio.gather(*map(follow, range(count)))
        return seen


@contextlib.asynccontextmanager
async def servers(base_url: str | None) -> AsyncIterator[list[Server]]:
    """The bare handler, and the gateway or what is asked for instead."""
    here, python = Path(__file__).parent, sys.executable
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(120))
        )

        async def start(command: list[str], port: int) -> str:
            url = f"http://127.0.0.1:{port}"
            await stack.enter_async_context(running(command, url + "/ready", os.devnull))
            return url

        peers = [python, str(here / "load_peers.py")]
        port = free_port()
        bare = Server(session, "bare handler", await start([*peers, "bare", str(port)], port), "load")
        if base_url is not None:
            yield [bare, Server(session, base_url, base_url, await _model(session, base_url))]
            return
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pfx")))
        model = write_model_dir(folder / "load")
        add_ticks(tiny_tokenizer()).save(str(model / "tokenizer.json"))
        worker = await asyncio.create_subprocess_exec(*peers, "worker", str(folder / "run"))
        stack.callback(worker.kill)
        port = free_port()
        flags = ["--model", str(model), "--run-dir", str(folder / "run"), "--port", str(port), "--no-absorb"]
        command = [python, "-m", "gateway.cli", "gateway", *flags, "--log-level", "warning"]
        yield [bare, Server(session, "gateway", await start(command, port), "load")]


async def _model(session: aiohttp.ClientSession, base_url: str) -> str:
    async with session.get(base_url + "/v1/models", raise_for_status=True) as response:
        return str((await response.json())["data"][0]["id"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


async def measure(arguments: argparse.Namespace) -> None:
    async with servers(arguments.base_url) as (bare, other):
        row("", bare.name, other.name, "added", "ratio")
        rates = [await server.requests_a_second(arguments.seconds) for server in (bare, other)]
        row(
            f"tiny requests a second, {ASKERS} askers",
            *(f"{rate:.0f}" for rate in rates),
            "",
            f"{rates[1] / rates[0]:.2f}",
        )
        for count in arguments.streams:
            seen = [await server.streams(count, arguments.tokens) for server in (bare, other)]
            for name, values in (("first token", [s.first for s in seen]), ("delay", [s.delay for s in seen])):
                if all(values):
                    for share, of in ((50, statistics.median), (99, late)):
                        compare(f"{count} streams, {name}, p{share}", *map(of, values))


def compare(name: str, bare: float, other: float) -> None:
    row(name, *(f"{1e3 * each:.2f} ms" for each in (bare, other, other - bare)), f"{other / bare:.2f}")


def row(*cells: str) -> None:
    print(f"{cells[0]:36}" + "".join(f"{cell:>16}" for cell in cells[1:]), flush=True)


def late(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", help="a server to measure instead of a gateway of our own")
    parser.add_argument("--streams", type=lambda text: list(map(int, text.split(","))), default=[1, 64, 512])
    parser.add_argument("--tokens", type=int, default=25, help="of each stream, five a second")
    parser.add_argument("--seconds", type=float, default=5.0, help="of tiny requests")
    uvloop.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
