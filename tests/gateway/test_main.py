"""The gateway as a process of its own: it comes up without torch, serves, and stops when told."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import pytest
from fake_worker import Call, FakeWorker, ids_of

ARGUMENTS = ("-X", "dev", "-m", "gateway.main", "--host", "127.0.0.1", "--port", "0")


class Process:
    """A started gateway process and the address it says it listens on."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process, self.url = process, url

    async def ended(self) -> tuple[int, str]:
        """Its exit code and the rest of its log."""
        assert self.process.stderr is not None
        log = (await asyncio.wait_for(self.process.stderr.read(), 30)).decode()
        return await self.process.wait(), log


async def start(model: Path, run_dir: Path, *more: str) -> Process:
    options = (*ARGUMENTS, "--model", str(model), "--run-dir", str(run_dir), *more)
    process = await asyncio.create_subprocess_exec(sys.executable, *options, stderr=PIPE)
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while line := (await process.stderr.readline()).decode():
            if "listening on " in line:
                return Process(process, line.split("listening on ")[1].strip())
    raise AssertionError(f"it ended with {await process.wait()}")


async def test_it_serves_and_stops_on_sigterm(model_dir: Path, short_run_dir: Path, worker: FakeWorker):
    running = await start(model_dir, short_run_dir)
    async with aiohttp.ClientSession() as http:
        async with asyncio.timeout(30):
            while (await http.get(running.url + "/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        response = await http.post(running.url + "/v1/chat/completions", json=body)
        assert (await response.json())["choices"][0]["message"]["content"] == "Hello there!"
    running.process.send_signal(signal.SIGTERM)
    code, log = await running.ended()
    assert code == 0
    assert "Traceback" not in log


async def test_a_second_signal_ends_open_requests_with_an_error(
    model_dir: Path, short_run_dir: Path, worker: FakeWorker
):
    async def script(call: Call) -> None:
        await call.accept()
        await call.tokens(ids_of("going "))

    worker.script = script
    running = await start(model_dir, short_run_dir, "--grace-seconds", "60")
    async with aiohttp.ClientSession() as http:
        async with asyncio.timeout(30):
            while (await http.get(running.url + "/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        response = await http.post(running.url + "/v1/chat/completions", json=body)
        running.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            while (await http.get(running.url + "/ready")).status == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        running.process.send_signal(signal.SIGTERM)
        assert "shutting down" in await response.text()
    code, log = await running.ended()
    assert code == 0
    assert "Traceback" not in log


@pytest.mark.parametrize("options", [("--model", "/no/such/model"), ("--chat-template", "/no/such.jinja")])
async def test_a_wrong_setting_is_named(model_dir: Path, short_run_dir: Path, options: tuple[str, str]):
    arguments = ("-m", "gateway.main", "--port", "0", "--run-dir", str(short_run_dir), "--model", str(model_dir))
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, *options, stderr=PIPE)
    _, log = await process.communicate()
    assert process.returncode not in (0, None)
    assert options[0].strip("-").replace("-", "_") in log.decode()
    assert "Traceback" not in log.decode()


async def test_it_imports_no_torch():
    code = "import sys, gateway.main; sys.exit('torch' in sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0
