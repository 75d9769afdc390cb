"""What a worker says of itself while it starts, serves and stops."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from protocol.messages import ModelInfo
from protocol.notify import Notifier
from protocol.rundir import prepare_run_dir
from worker.config import WorkerSettings
from worker.main import STAGE_SECONDS, Worker
from worker.step_watch import StepWatch
from worker.steps import Decode

MODEL = ModelInfo("f", "tiny", "float32", "cpu", 64, 4096, 1, 1, 1, 1, True)


class Manager:
    """The service manager's end of a notify socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.notifier = Notifier({"NOTIFY_SOCKET": str(path)})

    def heard(self) -> list[str]:
        said = []
        while True:
            try:
                said += self._socket.recv(4096).decode().splitlines()
            except BlockingIOError:
                return said

    def close(self) -> None:
        self.notifier.close()
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(tmp_path / "notify")
    yield manager
    manager.close()


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def worker(tmp_path: Path, manager: Manager, now: list[float]) -> Iterator[Worker]:
    run_dir = tmp_path / "run"
    prepare_run_dir(run_dir)
    worker = Worker(WorkerSettings(run_dir=run_dir), manager.notifier)
    worker.sockets.time = SimpleNamespace(awake=lambda: now[0], tick=lambda: None)  # type: ignore[assignment]
    worker._stage_began = now[0]
    worker.sockets.start()
    yield worker
    worker.sockets.stop()


def said(worker: Worker) -> tuple[str, str]:
    beat = worker.heartbeat()
    return beat.phase, beat.detail


def test_a_part_of_the_start_that_does_not_end_is_a_failure_with_its_name(
    worker: Worker, manager: Manager, now: list[float]
):
    now[0] += STAGE_SECONDS
    assert said(worker) == ("starting", "")
    worker.loading("loading weights, 10%")
    now[0] += STAGE_SECONDS
    assert said(worker) == ("loading", "loading weights, 10%")
    worker.loading("warming up")
    now[0] += STAGE_SECONDS
    assert said(worker) == ("loading", "warming up"), "each has its own time"
    assert "WATCHDOG=trigger" not in manager.heard()
    now[0] += 1
    cause = f"warming up has been going on for {STAGE_SECONDS + 1:.0f} s"
    assert said(worker) == ("failed", cause)
    assert manager.heard() == ["WATCHDOG=trigger", f"STATUS={cause}"]


def test_one_that_does_not_get_as_far_as_its_weights(worker: Worker, now: list[float]):
    now[0] += STAGE_SECONDS + 1
    assert said(worker) == ("failed", "starting has been going on for 601 s")


def test_once_it_serves_its_steps_are_watched_and_not_its_age(worker: Worker, now: list[float]):
    watch = StepWatch(lambda: now[0])
    engine = SimpleNamespace(watch=watch, running_count=1, waiting_count=2)
    worker.ready(engine, MODEL)  # type: ignore[arg-type]
    now[0] += 10 * STAGE_SECONDS
    watch.turned()
    assert said(worker) == ("ready", "")
    decode = Decode((SimpleNamespace(length=1),), ())  # type: ignore[arg-type]
    with watch.step(decode):
        pass
    with watch.step(decode):
        now[0] += 5
        assert said(worker)[0] == "hung"
        worker.phase = "stopping"
        assert said(worker)[0] == "stopping"
