"""A gateway and a worker as a service manager runs them: each by itself, with a notify socket and a watchdog."""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from daemon import BIN, DEADLINE_SECONDS, until
from http_client import Client

from protocol.control_client import ControlClient
from protocol.errors import WorkerUnavailable

WATCHDOG_SECONDS = 1.0
KEEPALIVE_SECONDS = 0.2
# As MemoryDenyWriteExecute= does, where the kernel can: no memory becomes executable any more.
_DENY_WRITE_EXECUTE = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(65, 1, 0, 0, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


class Service:
    """One process and what it tells its manager."""

    def __init__(self, command: list[object], folder: Path, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = folder / f"{name}.{len(list(folder.iterdir()))}"
        self._socket.bind(str(path.with_suffix(path.suffix + ".notify")))
        environ = {each: value for each, value in os.environ.items() if not each.startswith("PREFIXD_")}
        environ |= {
            "NOTIFY_SOCKET": self._socket.getsockname(),
            "WATCHDOG_USEC": str(round(WATCHDOG_SECONDS * 1e6)),
        }
        self._heard: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        self._log = path.with_suffix(path.suffix + ".log")
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, env=environ)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def hear(self, seconds: float = DEADLINE_SECONDS) -> list[str]:
        """The assignments of the next message; none where it is silent for so long."""
        try:
            return self._heard.get(timeout=seconds)
        except queue.Empty:
            return []

    def hear_until(self, wanted: str) -> list[str]:
        """All assignments up to one that begins like this."""
        heard: list[str] = []
        while not any(assignment.startswith(wanted) for assignment in heard):
            message = self.hear()
            assert message, f"{wanted} was not said: {self.log()}"
            heard += message
        return heard

    def forget(self) -> None:
        """Drop what has been said and not been heard."""
        while not self._heard.empty():
            self._heard.get()

    def _listen(self) -> None:
        """Take messages as they come, as a manager does: its socket holds a few only."""
        while message := self._socket.recv(65536):
            self._heard.put(message.decode().splitlines())

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(DEADLINE_SECONDS)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._socket.sendto(b"", self._socket.getsockname())  # no more will come
        self._listener.join()
        self._socket.close()


class Services:
    """Both of them. `hold` lets the worker's passes hang until `release`."""

    def __init__(self, model: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pfx"))
        self.run_dir = self.folder / "run"
        self._model = model
        self._held = self.folder / "held"
        self._started: list[Service] = []
        try:
            self.worker = self.start_worker()
            program = [sys.executable, "-c", _DENY_WRITE_EXECUTE, sys.executable, BIN / "prefixd", "gateway"]
            options = ["--port", "0", "--keepalive-seconds", KEEPALIVE_SECONDS]
            self.gateway = self._start("gateway", [*program, *options])
            self.said = {"gateway": self.gateway.hear_until("READY"), "worker": self.worker.hear_until("READY")}
            address = re.search(r"listening on (http://\S+)", self.gateway.log())
            assert address, self.gateway.log()
            self.client = Client(address[1])
            self.wait_ready()
        except BaseException:
            self.close()
            raise

    def start_worker(self) -> Service:
        program = [sys.executable, Path(__file__).with_name("held_worker.py"), self._held]
        return self._start("worker", [*program, "--kv-memory", "8MiB", "--verify-hits", "1"])

    def _start(self, name: str, program: list[object]) -> Service:
        options = ["--run-dir", self.run_dir, "--model", self._model]
        service = Service([*program, *options], self.folder, name)
        self._started.append(service)
        return service

    def wait_ready(self) -> None:
        until(lambda: self.client.get("/ready").status == 200, "requests are served")

    def wait_idle(self) -> None:
        until(lambda: not self.stats()["requests_running"], "no request runs")

    def stats(self) -> dict:
        with ControlClient(self.run_dir, 30.0) as control:
            return control.ask("stats")

    def health(self) -> dict | None:
        """What the worker's socket thread says; None where there is none."""
        try:
            with ControlClient(self.run_dir, 30.0) as control:
                return control.ask("health")
        except WorkerUnavailable:
            return None

    def hold(self) -> None:
        self._held.touch()

    def release(self) -> None:
        self._held.unlink(missing_ok=True)

    def close(self) -> None:
        for service in self._started:
            service.close()
        shutil.rmtree(self.folder, ignore_errors=True)
