"""The supervisor, with small processes in place of gateway and worker, and what `serve` refuses beforehand."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import cli, serve, supervisor
from gateway.config import GatewaySettings, ServeSettings
from gateway.supervisor import Child, ChildFailed, Health, Supervisor
from protocol.rundir import CONTROL_SOCKET, lock_run_dir, prepare_run_dir
from protocol.settings import to_flags
from worker.config import WorkerSettings

# Says it is ready by a file, and notes its start and its SIGTERM in a journal.
LIVES = """
import os, pathlib, signal, sys, time
name, folder = sys.argv[1], pathlib.Path(sys.argv[2])
def note(word):
    with open(folder / "journal", "a") as journal:
        journal.write(f"{word} {name}\\n")
def stop(*_):
    note("stop")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("start")
written = folder / f"{name}.new"
written.write_text(str(os.getpid()))
written.rename(folder / f"{name}.pid")  # whoever finds it finds all of it
while True:
    time.sleep(60)
"""
DEAF = LIVES.replace("signal.signal(signal.SIGTERM, stop)", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
SLOW = LIVES.replace(
    "signal.signal(signal.SIGTERM, stop)",
    "signal.signal(signal.SIGTERM, lambda *_: (note('asked'), signal.signal(signal.SIGTERM, stop)))",
)
DIES = LIVES.replace(
    "while True:", "sys.stderr.write('loading\\nno such tensor: lm_head\\n')\nsys.exit(3)\nwhile True:"
)


class Look:
    """A probe: ready once the file is there, if there is nothing else to say."""

    def __init__(self, file, state=None):
        self.file, self.state, self.lives = file, state, 0

    def begin(self):
        self.lives += 1

    async def __call__(self):
        return self.state or Health("ready" if self.file.exists() else "starting")


class Stage:
    """A gateway and a worker of our making under a real supervisor."""

    def __init__(self, folder):
        self.folder = folder
        self.said = []
        self.ready = asyncio.Event()

    def child(self, name, program, stop_seconds=20.0, state=None):
        command = [sys.executable, "-S", "-E", "-c", program, name, str(self.folder)]
        return Child(name, command, Look(self.folder / f"{name}.pid", state), stop_seconds)

    def supervise(self, *children):
        return self.supervise_groups(*([child] for child in children))

    def supervise_groups(self, *groups):
        self.supervisor = Supervisor(groups, self.said.append, self.ready.set)
        return asyncio.create_task(self.supervisor.run())

    def journal(self):
        path = self.folder / "journal"
        return path.read_text().splitlines() if path.exists() else []

    def process_id(self, name):
        return int((self.folder / f"{name}.pid").read_text())

    async def until(self, condition):
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 (files and processes raise no events)
                await asyncio.sleep(0.01)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "FIRST_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "PROBE_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "WATCH_SECONDS", 0.01)
    stage = Stage(tmp_path)
    yield stage
    left = [path for path in tmp_path.glob("*.pid") if is_running(int(path.read_text()))]
    assert left == [], "a child outlived its supervisor"


def is_running(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process_id}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def test_children_start_and_stop_in_order(stage):
    running = stage.supervise(stage.child("gateway", LIVES), stage.child("worker", LIVES))
    await asyncio.wait_for(stage.ready.wait(), 30)
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert stage.journal() == ["start gateway", "start worker", "stop gateway", "stop worker"]
    assert stage.supervisor.killed == []


async def test_it_knows_whether_a_signal_stopped_it(stage):
    """Where it was to go on in another run directory, it ends all the same."""
    for told in (False, True):
        supervised = Supervisor([[]], lambda line: None, lambda: None)
        running = asyncio.create_task(supervised.run())
        await asyncio.sleep(0)
        if told:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            supervised.stop()
        await running
        assert supervised.was_told is told


async def test_an_interrupt_stops_it_as_well(stage):
    running = stage.supervise(stage.child("gateway", LIVES))
    await asyncio.wait_for(stage.ready.wait(), 30)
    os.kill(os.getpid(), signal.SIGINT)
    await running
    assert stage.journal()[-1] == "stop gateway"


async def test_a_worker_that_dies_after_it_was_ready_is_started_again(stage):
    running = stage.supervise(stage.child("gateway", LIVES), stage.child("worker", LIVES))
    await asyncio.wait_for(stage.ready.wait(), 30)
    for deaths in range(1, supervisor.MAX_FAILED_STARTS + 2):  # more often than failed starts would be forgiven
        os.kill(stage.process_id("worker"), signal.SIGKILL)
        (stage.folder / "worker.pid").unlink()
        await stage.until(lambda: sum("ready again" in line for line in stage.said) == deaths)  # noqa: B023
    assert any("killed by SIGKILL" in line for line in stage.said)
    assert stage.journal().count("start gateway") == 1
    os.kill(os.getpid(), signal.SIGTERM)
    await running


async def test_a_child_that_hangs_is_killed_and_started_again(stage):
    """Even one that the kernel has stopped, which no other signal ends."""
    child = stage.child("worker", DEAF)
    running = stage.supervise(stage.child("gateway", LIVES), child)
    await asyncio.wait_for(stage.ready.wait(), 30)
    first = stage.process_id("worker")
    os.kill(first, signal.SIGSTOP)
    (stage.folder / "worker.pid").unlink()
    child.probe.state = Health("hung", "it has been silent for 15 s")
    await stage.until(lambda: child.probe.lives == 2)
    child.probe.state = None
    await stage.until(lambda: "the worker is ready again" in stage.said)
    assert stage.said[0].startswith(
        "the worker died (killed, as it has been silent for 15 s): starting it again in"
    )
    assert not is_running(first)
    assert stage.journal().count("start gateway") == 1
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(stage.process_id("worker"), signal.SIGKILL)
    await running


async def test_a_look_that_says_less_than_before_kills_nobody(stage):
    """Loading is no state that a ready child comes back to, but one that a heartbeat could be late in leaving."""
    child = stage.child("worker", LIVES)
    running = stage.supervise(child)
    await asyncio.wait_for(stage.ready.wait(), 30)
    child.probe.state = Health("starting")
    await asyncio.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert stage.journal() == ["start worker", "stop worker"]


async def test_those_of_a_group_are_stopped_together(stage):
    """Each has its time, and none waits for the time of another."""
    gateways = [stage.child(name, SLOW, stop_seconds=3600) for name in ("one", "two")]
    running = stage.supervise_groups(gateways, [stage.child("worker", LIVES)])
    await asyncio.wait_for(stage.ready.wait(), 30)
    os.kill(os.getpid(), signal.SIGTERM)
    await stage.until(lambda: {"asked one", "asked two"} <= set(stage.journal()))
    assert "stop worker" not in stage.journal()
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert sorted(stage.journal()[-3:-1]) == ["stop one", "stop two"]
    assert stage.journal()[-1] == "stop worker"


async def test_a_worker_that_dies_at_every_start_ends_the_daemon_with_the_cause(stage):
    starting = Health("starting")
    running = stage.supervise(stage.child("gateway", LIVES), stage.child("worker", DIES, state=starting))
    with pytest.raises(ChildFailed, match="worker does not start: exit code 3: no such tensor: lm_head"):
        await asyncio.wait_for(running, 30)
    assert stage.journal().count("start worker") == supervisor.MAX_FAILED_STARTS
    assert stage.journal()[-1] == "stop gateway"


async def test_refused_settings_are_not_tried_again(stage):
    refuses = DIES.replace("exit(3)", f"exit({supervisor.EXIT_REFUSED})")
    with pytest.raises(ChildFailed, match="no such tensor"):
        await asyncio.wait_for(stage.supervise(stage.child("worker", refuses, state=Health("starting"))), 30)
    assert stage.journal() == ["start worker"]


async def test_a_failure_that_a_living_worker_owns_up_to_is_the_cause(stage, monkeypatch):
    monkeypatch.setattr(supervisor, "FAILED_SECONDS", 0.05)
    child = stage.child("worker", LIVES, state=Health("failed", "not enough memory for the weights"))
    with pytest.raises(ChildFailed, match="not enough memory for the weights"):
        await asyncio.wait_for(stage.supervise(child), 30)


async def test_a_child_that_ignores_its_time_is_killed(stage):
    running = stage.supervise(stage.child("gateway", LIVES), stage.child("worker", DEAF, stop_seconds=0.05))
    await asyncio.wait_for(stage.ready.wait(), 30)
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert any("killing it" in line for line in stage.said)
    assert stage.supervisor.killed == ["worker"]


async def test_a_second_signal_leaves_a_child_little_time(stage, monkeypatch):
    monkeypatch.setattr(supervisor, "HURRY_SECONDS", 0.05)
    running = stage.supervise(stage.child("gateway", DEAF, stop_seconds=3600), stage.child("worker", DEAF, 3600))
    await asyncio.wait_for(stage.ready.wait(), 30)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    assert stage.supervisor.killed == [], "as it was told to"


async def test_a_second_signal_reaches_a_child_that_takes_its_time(stage):
    """The gateway ends what is open at its second SIGTERM; it is not killed for that."""
    running = stage.supervise(stage.child("gateway", SLOW, stop_seconds=3600))
    await asyncio.wait_for(stage.ready.wait(), 30)
    os.kill(os.getpid(), signal.SIGTERM)
    await stage.until(lambda: "asked gateway" in stage.journal())
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert stage.journal() == ["start gateway", "asked gateway", "stop gateway"]
    assert not any("killing" in line for line in stage.said)


async def test_a_signal_during_the_start_stops_it_too(stage):
    running = stage.supervise(stage.child("gateway", LIVES, state=Health("starting")))
    await stage.until(lambda: stage.journal() == ["start gateway"])
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    assert stage.journal() == ["start gateway", "stop gateway"]


SUPERVISES = """
import asyncio, sys
from gateway.supervisor import Child, Health, Supervisor
class Probe:
    def begin(self):
        pass
    async def __call__(self):
        return Health("ready")
children = [Child(name, [sys.executable, "-c", sys.argv[1], name, sys.argv[2]], Probe(), 5) for name in ("a", "b")]
asyncio.run(Supervisor([children], print, lambda: None).run())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells children of their parent's death")
async def test_children_die_with_a_supervisor_that_is_killed(stage):
    parent = subprocess.Popen([sys.executable, "-c", SUPERVISES, DEAF, str(stage.folder)])  # noqa: ASYNC220
    await stage.until(lambda: len(stage.journal()) == 2 and len(list(stage.folder.glob("*.pid"))) == 2)
    children = [stage.process_id(name) for name in "ab"]
    assert all(map(is_running, children))
    parent.kill()
    parent.wait()
    await stage.until(lambda: not any(map(is_running, children)))


def serve_refused(capsys, *argv):
    """What `serve` says when it refuses, before it starts anything."""
    with pytest.raises(SystemExit) as stopped:
        sys.exit(cli.main(["serve", *map(str, argv)]))
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_serve_takes_the_settings_of_both_processes_and_gives_each_its_own():
    union = serve._union()
    settings_of = (ServeSettings, GatewaySettings, WorkerSettings)
    assert set(union.model_fields) == {name for process in settings_of for name in process.model_fields}
    settings = union(slots=3, port=1234)
    assert "--port=1234" in to_flags(settings, GatewaySettings)
    assert "--slots=3" in to_flags(settings, WorkerSettings)
    assert not any("slots" in flag for flag in to_flags(settings, GatewaySettings))


@pytest.mark.parametrize(("killed", "code"), [([], 0), (["worker"], 1)])
def test_an_end_that_takes_killing_is_a_failure(monkeypatch, capsys, tmp_path, killed, code):
    class Ended:
        was_told = True

        def __init__(self, *_):
            self.killed = killed

        async def run(self):
            pass

    monkeypatch.setattr(serve, "Supervisor", Ended)
    monkeypatch.setattr(serve, "_have_model", lambda model: None)
    assert serve.main(["--port", "0", "--run-dir", str(tmp_path / "run")]) == code
    assert ("had to be killed, as it did not stop in time: worker" in capsys.readouterr().err) is bool(code)


def test_serve_names_a_setting_that_neither_process_has(capsys, tmp_path):
    assert "--slotz" in serve_refused(capsys, "--run-dir", tmp_path, "--slotz", 1)


def test_serve_names_the_model_that_is_not_there(capsys, tmp_path):
    assert "model: " in serve_refused(capsys, "--run-dir", tmp_path, "--model", tmp_path / "none.gguf")


def test_serve_names_a_port_that_is_taken(capsys, tmp_path):
    (tmp_path / "m.gguf").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = serve_refused(capsys, "--run-dir", tmp_path, "--model", tmp_path / "m.gguf", "--port", port)
    assert "port: " in message
    assert str(port) in message


def test_serve_names_the_daemon_that_holds_the_run_dir(capsys, tmp_path):
    prepare_run_dir(tmp_path)
    with lock_run_dir(tmp_path, "daemon"):
        message = serve_refused(capsys, "--run-dir", tmp_path)
    assert "run_dir: " in message
    assert str(os.getpid()) in message


def test_serve_names_a_run_dir_that_is_too_long(capsys, tmp_path):
    assert "run_dir: " in serve_refused(capsys, "--run-dir", tmp_path / ("x" * 100))


def test_sockets_of_a_killed_worker_go_and_those_of_a_living_one_stay(tmp_path):
    prepare_run_dir(tmp_path)
    (tmp_path / CONTROL_SOCKET).touch()
    with lock_run_dir(tmp_path, "worker"):
        serve._remove_sockets(tmp_path)
        assert (tmp_path / CONTROL_SOCKET).exists()
    serve._remove_sockets(tmp_path)
    assert not (tmp_path / CONTROL_SOCKET).exists()
