"""A real daemon: `prefixd serve` in processes of its own, with its logs, its metrics and its control socket."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from http_client import Client

from protocol.control_client import CommandRefused, ControlClient
from protocol.errors import WorkerUnavailable

BIN = Path(sys.executable).parent
FAULTY = (sys.executable, Path(__file__).with_name("faulty_daemon.py"), "serve")  # does wrong on command
DEADLINE_SECONDS = 120.0  # generous: machines are shared, and nothing here is a measurement
_READY_SECONDS = 300.0  # the first daemon of a machine compiles its kernels
_POLL_SECONDS = 0.02
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


def until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> Any:
    """Wait for something that other processes bring about, and return the true value."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"gave up waiting: {what}"
        time.sleep(_POLL_SECONDS)
    return value


class Daemon:
    """One `prefixd serve`. `close` leaves nothing behind, whatever the test did to it."""

    def __init__(
        self,
        model: Path | str,
        *flags: str,
        run_dir: Path | None = None,
        program: Sequence[Path | str] = (BIN / "prefixd", "serve"),
    ) -> None:
        # Not below pytest's folder: the path of a Unix socket is short.
        self.folder = Path(tempfile.mkdtemp(prefix="pfx"))
        self.run_dir = run_dir or self.folder / "run"
        serve = [*program, "--port", "0", "--model", model, "--run-dir", self.run_dir]
        # A random model is too small to gain by a second thread: on a busy machine it costs much to wait for one.
        threads = ["--threads", "1"] if isinstance(model, Path) else []
        # Idle work comes when it may: a test that does not ask for it knows to the token what is kept.
        command = [*serve, "--no-absorb", *threads, *flags]
        # What else the tests run with says nothing of what a user's daemon has.
        ours = ("PREFIXD_", "OMP_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        self._log = self.folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    # Life

    def wait_listening(self) -> Client:
        """A client, as soon as the gateway listens; the worker may still be loading."""

        def address() -> re.Match[str] | None:
            assert self.process.poll() is None, self.log()
            return re.search(r"listening on (http://\S+)", self.log())

        return Client(until(address, "the gateway listens")[1].rstrip(","))

    def wait_ready(self) -> Client:
        client = self.wait_listening()

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log()
            return client.get("/ready").status == 200

        until(is_ready, "the daemon is ready", _READY_SECONDS)
        return client

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def restart_worker(self, number: signal.Signals) -> None:
        """End the worker by a signal and wait until the next one serves."""
        epoch = self.stats()["epoch"]
        [worker] = self.processes("worker")
        os.kill(worker, number)

        def is_new() -> bool:
            try:
                return bool(self.stats()["epoch"] != epoch)
            except (WorkerUnavailable, CommandRefused):
                return False

        until(is_new, "another worker serves")
        self.wait_ready()

    def wait_exit(self) -> int:
        return self.process.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        """End every process that belongs to this daemon, without asking: how it ends by itself is for its own tests."""
        try:
            self.process.kill()
            self.process.wait(10)
        finally:
            for process_id in self.processes():
                with suppress(ProcessLookupError):  # the children end with their parent
                    os.kill(process_id, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """Everything written to standard output and standard error."""
        return self._log.read_text(errors="replace")

    def processes(self, role: str = "") -> list[int]:
        """Ids of the living processes of this daemon; `role` is a word of their command line."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                words = _command_line(entry)
                mine = any(str(self.run_dir) in word for word in words)
                if mine and (not role or role in words):
                    found.append(int(entry.name))
        return found

    # What it says about itself

    def ask(self, verb: str, **args: object) -> Any:
        """One command over the control socket."""
        with ControlClient(self.run_dir, 30.0) as control:
            return control.ask(verb, **args)

    def cachectl(self, *words: str | int) -> subprocess.CompletedProcess[str]:
        """Run the installed command."""
        command = [str(BIN / "cachectl"), "--run-dir", str(self.run_dir), *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)

    def flush(self) -> None:
        """Forget everything, as between two tests."""
        for slot in self.snapshots():
            if slot["pinned"]:
                self.ask("unpin", slot=slot["slot"])
        self.ask("flush")

    def snapshots(self) -> list[dict[str, Any]]:
        return self.ask("list", limit=10_000)["slots"]

    def stats(self) -> dict[str, Any]:
        return self.ask("stats")

    def is_idle(self) -> bool:
        stats = self.stats()
        return stats["requests_running"] == stats["requests_waiting"] == 0

    def wait_idle(self) -> dict[str, Any]:
        """Wait until no request runs or waits, and no hit is to be verified any more."""
        with ControlClient(self.run_dir, 30.0) as control:
            deadline = time.monotonic() + DEADLINE_SECONDS
            while True:
                stats: Any = control.ask("stats")
                counts: Any = control.ask("verify")
                if stats["requests_running"] == stats["requests_waiting"] == counts["pending"] == 0:
                    return control.ask("stats")
                assert time.monotonic() < deadline, f"it does not come to rest: {stats}, {counts}"
                time.sleep(_POLL_SECONDS)

    def is_reachable(self) -> bool:
        try:
            self.ask("health")
        except WorkerUnavailable:
            return False
        return True


def metrics(client: Client) -> dict[str, float]:
    """All samples of `/metrics` by name and labels: `name{a=x,b=y}`, labels in alphabetical order."""
    samples: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(client.get("/metrics").raw.decode()):
        pairs = ",".join(f"{key}={text}" for key, text in sorted(_LABEL.findall(labels)))
        samples[f"{name}{{{pairs}}}" if pairs else name] = float(value)
    return samples


def _command_line(process: Path) -> list[str]:
    try:
        return [word.decode(errors="replace") for word in (process / "cmdline").read_bytes().split(b"\0")]
    except OSError:
        return []  # it has just ended
