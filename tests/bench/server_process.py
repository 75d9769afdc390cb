"""Start a server for the length of a measurement, and know how long it took to get ready."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import aiohttp

READY_SECONDS = 600.0
STOP_SECONDS = 60.0


@asynccontextmanager
async def running(command: Sequence[str], ready_url: str, log: str = os.devnull) -> AsyncIterator[float]:
    """Run `command` until the block ends. Gives the seconds until `ready_url` answered 200."""
    started = time.perf_counter()
    with open(log, "wb") as output:  # noqa: ASYNC230 (nothing else runs yet)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        await _until_ready(process, ready_url, log)
        yield time.perf_counter() - started
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


@asynccontextmanager
async def own_prefixd(flags: Sequence[str] = ()) -> AsyncIterator[tuple[str, float]]:
    """A prefixd of our own on a free port: its base URL, and the seconds until it was ready."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="prefixd-bench-") as run_dir:
        prefixd = [sys.executable, "-m", "gateway.cli", "serve", "--port", str(port), "--run-dir", run_dir, *flags]
        log = os.path.join(run_dir, "log")
        async with running(prefixd, f"http://127.0.0.1:{port}/ready", log) as seconds:
            yield f"http://127.0.0.1:{port}", seconds


def split_command(text: str) -> list[str]:
    """A command line as a shell would split it, with `NAME=VALUE` prefixes for its environment."""
    words = shlex.split(text)
    return ["env", *words] if words and "=" in words[0] else words


async def _until_ready(process: asyncio.subprocess.Process, url: str, log: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            if process.returncode is not None:
                with open(log, errors="replace") as output:  # noqa: ASYNC230
                    raise SystemExit(f"the server stopped before it was ready:\n{output.read()[-2000:]}")
            with suppress(aiohttp.ClientError):
                async with session.get(url) as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.05)
    raise SystemExit(f"{url} was not ready within {READY_SECONDS:g} s")
