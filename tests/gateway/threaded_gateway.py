"""A gateway and a fake worker that run in a thread of their own."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

from aiohttp import web
from fake_worker import FakeWorker

from gateway.app import build_runner
from gateway.config import GatewaySettings
from gateway.prompts import PromptMaker
from gateway.service import Gateway
from gateway.worker_client import WorkerClient
from protocol.endpoints import work_endpoint
from protocol.rundir import prepare_run_dir


class ThreadedGateway:
    """For clients that are not asynchronous."""

    def __init__(self, maker: PromptMaker, model_dir: Path) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="pfx"))
        prepare_run_dir(self.run_dir)
        self._settings = GatewaySettings(model=str(model_dir), run_dir=self.run_dir, absorb=False)
        self._maker = maker
        self._ready: Future[str] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> ThreadedGateway:
        self._thread.start()
        self.url = self._ready.result(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        shutil.rmtree(self.run_dir)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.worker = FakeWorker(self.run_dir)
        await self.worker.start()
        client = WorkerClient(work_endpoint(self.run_dir), beat_seconds=0.05)
        self.gateway = Gateway(self._settings, self._maker, client)
        runner = build_runner(self.gateway)
        await client.start()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        while client.why_not_ready() is not None:  # noqa: ASYNC110 (nothing to wait on)
            await asyncio.sleep(0.005)
        self._ready.set_result(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await self._stop.wait()
        await runner.cleanup()
        self.gateway.close()
        await client.close()
        await self.worker.stop()
