"""When a supervisor takes a process for ready, and when for hung."""

import shutil
import tempfile
from pathlib import Path

import pytest

from gateway import health
from gateway.health import SERVING, GatewayHealth, WorkerHealth
from protocol.errors import SettingsError, WorkerUnavailable
from protocol.notify import Notifier

PATIENCE = 3  # looks without a word


class Gateway:
    """What a gateway says, through the notifier that real ones use."""

    def __init__(self, run_dir, number=0):
        self.health = GatewayHealth(run_dir, number, hung_seconds=PATIENCE * health.WATCH_SECONDS)
        self.start()

    def start(self):
        self.health.begin()
        self.notifier = Notifier(dict(self.health.environment))
        assert self.notifier.beat_seconds == health.WATCH_SECONDS / 2

    def beat(self):
        self.notifier._next_beat = 0.0  # as if time had passed
        self.notifier.alive()

    async def state(self):
        return (await self.health()).state

    def close(self):
        self.notifier.close()
        self.health.close()


@pytest.fixture
def run_dir():
    path = Path(tempfile.mkdtemp(prefix="pfx"))
    yield path
    assert list(path.iterdir()) == []
    shutil.rmtree(path)


@pytest.fixture
def gateway(run_dir):
    gateway = Gateway(run_dir)
    yield gateway
    gateway.close()


async def test_a_gateway_is_ready_when_it_says_so(gateway):
    assert await gateway.state() == "starting"
    gateway.beat()
    assert await gateway.state() == "starting"
    gateway.notifier.ready("the worker is loading")
    assert await gateway.state() == "ready"
    assert gateway.health.listens
    assert not gateway.health.sees_worker
    gateway.notifier.status(SERVING)
    assert gateway.health.sees_worker
    gateway.notifier.status("the worker cannot be reached")
    assert not gateway.health.sees_worker


def test_its_socket_is_its_owners_alone(gateway, run_dir):
    assert [path.stat().st_mode & 0o777 for path in run_dir.iterdir()] == [0o600]


async def test_a_gateway_that_starts_may_be_silent_and_one_that_is_ready_may_not(gateway):
    for _ in range(3 * PATIENCE):
        assert await gateway.state() == "starting"
    gateway.notifier.ready("serving")
    for _ in range(PATIENCE + 1):
        assert await gateway.state() == "ready"
    gateway.beat()
    for _ in range(PATIENCE + 1):
        assert await gateway.state() == "ready"
    found = await gateway.health()
    assert found.state == "hung"
    assert found.cause == f"its event loop has been silent for {PATIENCE + 1} s"


async def test_a_word_that_somebody_else_has_listened_to_counts_too(gateway):
    """The worker's state is looked up in what the gateways say."""
    gateway.notifier.ready("serving")
    for _ in range(5 * PATIENCE):
        gateway.beat()
        assert gateway.health.listens
        assert await gateway.state() == "ready"


async def test_what_an_earlier_process_has_said_is_forgotten(gateway):
    gateway.notifier.ready(SERVING)
    gateway.notifier.close()
    gateway.start()
    assert await gateway.state() == "starting"
    assert not gateway.health.sees_worker


def test_a_path_that_is_too_long_is_named(tmp_path):
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    with pytest.raises(SettingsError, match="run_dir"):
        GatewayHealth(folder, 0, 15)


class Control:
    """Stands for the control socket: answers with the heartbeat's fields, or not at all."""

    beat = None

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, verb):
        assert verb == "health"
        if Control.beat is None:
            raise WorkerUnavailable("no worker answers")
        return Control.beat


@pytest.fixture
def worker(run_dir, gateway, monkeypatch):
    monkeypatch.setattr(health, "ControlClient", Control)
    monkeypatch.setattr(Control, "beat", None)
    other = Gateway(run_dir, 1)
    for each in (gateway, other):
        each.notifier.ready(SERVING)
    look = health._PROBE_TIMEOUT_SECONDS + health.WATCH_SECONDS
    yield WorkerHealth(run_dir, PATIENCE * look, [gateway.health, other.health])
    other.close()


def says(phase, detail=""):
    Control.beat = {"phase": phase, "detail": detail}


async def states(worker, looks=3 * PATIENCE):
    return [(await worker()).state for _ in range(looks)]


async def test_a_worker_that_loads_has_all_the_time_it_takes(worker):
    """Silent or not: while modules are imported and kernels compiled, no other thread may come to a word."""
    assert set(await states(worker)) == {"starting"}
    says("loading")
    assert set(await states(worker)) == {"starting"}
    Control.beat = None
    assert set(await states(worker)) == {"starting"}


async def test_a_start_has_an_end_even_where_the_worker_cannot_say_that_it_hangs(worker, monkeypatch):
    says("loading", "loading weights, 10%")
    now = [worker._began + health.START_SECONDS]
    monkeypatch.setattr(health.time, "monotonic", lambda: now[0])
    assert set(await states(worker)) == {"starting"}
    now[0] += 1
    found = await worker()
    assert (found.state, found.cause) == ("hung", "it has not come up in 1800 s")
    worker.begin()
    assert set(await states(worker)) == {"starting"}, "the next one has its own time"
    says("ready")
    assert await states(worker, 1) == ["ready"]
    now[0] += 2 * health.START_SECONDS
    assert await states(worker, 1) == ["ready"]


async def test_a_worker_is_ready_once_every_gateway_has_noticed(worker, gateway):
    says("ready")
    gateway.notifier.status("the worker is loading")
    assert await states(worker, 2) == ["starting"] * 2
    gateway.notifier.status(SERVING)
    assert await states(worker, 2) == ["ready"] * 2
    gateway.notifier.status("the worker cannot be reached")
    assert await states(worker, 2) == ["ready"] * 2, "what one gateway thinks later kills no worker"


async def test_a_gateway_that_starts_does_not_hold_the_worker_up(worker, gateway):
    gateway.health.begin()
    says("ready")
    assert await states(worker, 1) == ["ready"]


async def test_a_worker_that_falls_silent_hangs_after_so_many_looks_in_a_row(worker):
    says("ready")
    assert await states(worker, 1) == ["ready"]
    for _ in range(3):
        Control.beat = None
        assert await states(worker, PATIENCE - 1) == ["ready"] * (PATIENCE - 1)
        says("ready")
        assert await states(worker, 1) == ["ready"]
    Control.beat = None
    found = [await worker() for _ in range(PATIENCE)][-1]
    assert found.state == "hung"
    assert found.cause == "it has been silent for 6 s"
    worker.begin()
    assert set(await states(worker)) == {"starting"}


async def test_a_worker_that_falls_silent_before_any_gateway_has_noticed_it_hangs_too(worker, gateway):
    gateway.notifier.status("the worker is loading")
    says("ready")
    assert await states(worker, 1) == ["starting"]
    Control.beat = None
    assert (await states(worker, PATIENCE))[-1] == "hung"


async def test_a_step_that_hangs_is_left_time_to_come_back(worker):
    says("ready")
    assert await states(worker, 1) == ["ready"]
    says("hung", "a prefill step of 9 has been running for 4 s")
    assert set(await states(worker)) == {"ready"}


async def test_a_failure_that_it_owns_up_to_is_passed_on(worker):
    says("failed", "not enough memory")
    found = await worker()
    assert (found.state, found.cause) == ("failed", "not enough memory")
