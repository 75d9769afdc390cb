"""A gateway on a real port, in front of a worker without a model."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from fake_worker import FakeWorker
from hypothesis import settings as hypothesis_settings
from served import Served
from tiny_model import write_model_dir

from gateway.app import build_runner
from gateway.config import GatewaySettings
from gateway.model_files import load_model_files
from gateway.prompts import PromptMaker
from gateway.service import Gateway
from gateway.worker_client import WorkerClient
from protocol.rundir import prepare_run_dir

# How long one example takes says nothing on a machine that is shared.
hypothesis_settings.register_profile("prefixd", deadline=None)
hypothesis_settings.load_profile("prefixd")

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip("the shared data folder is not here")
    return SHARED


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def maker(model_dir: Path) -> PromptMaker:
    return PromptMaker(load_model_files(model_dir))


@pytest.fixture
def short_run_dir() -> Iterator[Path]:
    """Short enough for a Unix socket, which pytest's own folders are not always."""
    path = Path(tempfile.mkdtemp(prefix="pfx"))
    prepare_run_dir(path)
    yield path
    shutil.rmtree(path)


@pytest.fixture
async def worker(short_run_dir: Path) -> AsyncIterator[FakeWorker]:
    fake = FakeWorker(short_run_dir)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
def settings(model_dir: Path, short_run_dir: Path) -> GatewaySettings:
    """Overridden by test modules that want others."""
    return GatewaySettings(model=str(model_dir), run_dir=short_run_dir, keepalive_seconds=30.0)


@pytest.fixture
async def served(settings: GatewaySettings, maker: PromptMaker, worker: FakeWorker) -> AsyncIterator[Served]:
    before = asyncio.all_tasks()
    client = WorkerClient(settings.work_at, beat_seconds=0.05)
    gateway = Gateway(settings, maker, client)
    runner = build_runner(gateway)
    await client.start()
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as http:
        running = Served(gateway, f"http://127.0.0.1:{runner.addresses[0][1]}", http)
        await running.ready()
        yield running
    assert not gateway.client._open, "a request was left open"
    await runner.cleanup()
    gateway.close()
    await client.close()
    await asyncio.sleep(0)
    known = before | {asyncio.current_task()}
    left = {task for task in asyncio.all_tasks() - known if "FakeWorker" not in repr(task)}
    assert not left, f"tasks were left behind: {left}"
