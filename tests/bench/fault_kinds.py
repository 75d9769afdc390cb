"""The faults: how each is brought about, and what else is worth telling of it."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

sys.path.append(str(Path(__file__).parents[1] / "e2e"))  # daemon.py, http_client.py

from daemon import BIN, FAULTY, Daemon, metrics, until
from fault_clients import Seen
from http_client import Client, user

_CGROUPS = Path("/sys/fs/cgroup")
_ALLOWANCE_BYTES = 4 << 20
_DISK_BYTES = 1 << 20
_PROBE_SECONDS = 2.0
_UNREAD_SECONDS = 3
_BEGUN_EVENTS = 10
_OTHER_VERSION = (
    "import sys, protocol.codec as c; c.PROTOCOL_VERSION += 1; from gateway.main import main; sys.exit(main())"
)


class NotHere(Exception):
    """This fault cannot be brought about on this machine. The message says why."""


@dataclass(slots=True)
class Stage:
    """One daemon with a fault. `ends` is closed when it is over."""

    daemon: Daemon
    client: Client
    ends: ExitStack
    url: str = ""  # where clients ask, if not of the daemon
    remarks: list[str] = field(default_factory=list)

    def kill(self, role: str, number: int) -> None:
        [process] = self.daemon.processes(role)
        os.kill(process, number)

    def wait_begun(self, seen: Sequence[Seen]) -> None:
        """Until all of these requests run, and those that are streams have told something."""

        def begun() -> bool:
            streams = all(each.events >= _BEGUN_EVENTS for each in seen if each.streamed)
            return streams and self.daemon.stats()["requests_running"] == len(seen)

        until(begun, "all are being answered")

    def is_answered(self) -> bool:
        """Whether a small request is, within moments."""
        body = json.dumps({"messages": [user("Hello")], "max_tokens": 1})
        connection = http.client.HTTPConnection(urlsplit(self.client.url).netloc, timeout=_PROBE_SECONDS)
        try:
            connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


Bring = Callable[[Stage], float | None]  # when the fault came, where that is not at once


@dataclass(frozen=True, slots=True)
class Fault:
    """`when`: while requests are open, before they come, or before each of them. `cuts`: a connection may just end, as
    nobody is left who could say why. `lives`: the daemon is to serve again.
    """

    name: str
    bring: Bring
    when: Literal["during", "before", "each"] = "during"
    given: Sequence[str] = ()
    is_faulty: bool = False
    is_fresh: bool = False  # nobody has asked anything of the worker before
    small_disk: bool = False
    cuts: bool = False
    lives: bool = True
    kills_worker: bool = False
    after: Callable[[Stage], str] = lambda stage: "; ".join(stage.remarks)

    def flags(self, folder: Path) -> list[str]:
        return [*self.given, *(["--disk-cache", str(folder / "disk")] if self.small_disk else [])]

    def program(self, folder: Path) -> list[Path | str]:
        """The command before its flags."""
        program: list[Path | str] = [BIN / "prefixd", "serve"]
        if self.is_faulty:
            program = [*FAULTY]
        return [*_on_small_disk(folder / "disk"), *program] if self.small_disk else program


@contextmanager
def staged(fault: Fault, model: str) -> Iterator[Stage]:
    """A daemon that serves, before the fault."""
    with ExitStack() as ends:
        folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="pfx-fault-")))
        daemon = Daemon(model, *fault.flags(folder), program=fault.program(folder))
        ends.callback(daemon.close)
        stage = Stage(daemon, daemon.wait_ready(), ends)
        if not fault.is_fresh:
            stage.client.chat([user("Hello")])
        yield stage


def _on_small_disk(folder: Path) -> list[Path | str]:
    """What has a command see a small disk at `folder`, which nobody else sees and which goes with it."""
    unshare = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.getuid() else [])]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        raise NotHere("no namespaces of mounts")
    folder.mkdir(mode=0o700)
    mount = f'mount -t tmpfs -o mode=0700,size={_DISK_BYTES} none {folder} && exec "$@"'
    return [*unshare, "sh", "-c", mount, "sh"]


def _starve_worker(stage: Stage) -> float:
    """The kernel may give it little more memory, and it wants more: the OOM killer comes. When it came."""
    [process] = stage.daemon.processes("worker")
    v1 = _CGROUPS / "memory"
    group = (v1 if v1.is_dir() else _CGROUPS) / f"prefixd-fault-{process}"
    try:
        group.mkdir()
        stage.ends.callback(_remove_group, group)
        (group / ("memory.limit_in_bytes" if v1.is_dir() else "memory.max")).write_text(str(_ALLOWANCE_BYTES))
        (group / "cgroup.procs").write_text(str(process))
    except OSError as error:
        raise NotHere(f"no group of processes with a limit of memory ({error.strerror})") from error
    stage.ends.callback(stage.client.send([user("word " * 4000)], max_tokens=1).close)
    until(lambda: process not in stage.daemon.processes("worker"), "the kernel has killed it")
    return time.monotonic()


def _remove_group(group: Path) -> None:
    with suppress(OSError):
        until(lambda: not (group / "cgroup.procs").read_text().strip(), "its process is gone", 10)
        group.rmdir()


def _why_it_died(stage: Stage) -> str:
    """What the supervisor said of the process that died."""
    found = re.findall(r"died \((.*)\): starting it again", stage.daemon.log())
    return f"log: {found[0]}" if found else ""


def _fail_prefill(memory: bool) -> Bring:
    return lambda stage: stage.daemon.ask("fault", what="fail_prefill", after=0, memory=memory)


def _hang(step: str) -> Bring:
    return lambda stage: stage.daemon.ask("fault", what="hang", step=step)


def _same_worker(stage: Stage) -> str:
    return "the same worker goes on" if "died" not in stage.daemon.log() else "THE WORKER DIED"


def _ask_a_stranger(stage: Stage) -> None:
    """A gateway that speaks another version of the protocol, as after an upgrade of one side."""
    model = stage.daemon.process.args[stage.daemon.process.args.index("--model") + 1]
    command = [
        sys.executable,
        "-c",
        _OTHER_VERSION,
        "--port",
        "0",
        "--run-dir",
        stage.daemon.run_dir,
        "--model",
        model,
    ]
    log = stage.ends.enter_context((stage.daemon.folder / "stranger").open("w+"))
    process = stage.ends.enter_context(subprocess.Popen(list(map(str, command)), stderr=log))
    stage.ends.callback(process.terminate)
    said = Path(log.name)
    until(lambda: "do not understand each other" in said.read_text(), "it knows that it is not understood")
    stage.url = said.read_text().split("listening on ")[1].split()[0]
    stage.remarks.append("asked of the other gateway; the daemon's own serves on")


def _terminate(stage: Stage) -> None:
    stage.daemon.terminate()
    until(lambda: stage.client.get("/ready").status == 503, "it says that it stops")
    stage.remarks.append(f"a new request: {stage.client.chat([user('Me too')]).status}")


def _terminate_twice(stage: Stage) -> None:
    _terminate(stage)
    stage.daemon.terminate()


def _how_it_exited(stage: Stage) -> str:
    code = stage.daemon.wait_exit()
    left = [*stage.daemon.processes(), *(path.name for path in stage.daemon.run_dir.glob("*.sock"))]
    return "; ".join(
        [*stage.remarks, f"exit code {code}", f"left behind: {left}" if left else "nothing left behind"]
    )


def _how_it_exits_hung(stage: Stage) -> str:
    stage.daemon.terminate()
    return _how_it_exited(stage)


def _read_nothing(stage: Stage) -> None:
    """A client that asks for much and reads none of it."""
    slow = stage.ends.enter_context(socket.socket())
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = urlsplit(stage.client.url).netloc.split(":")
    slow.connect((host, int(port)))
    fields = {"stream": True, "max_tokens": 4000, "ignore_eos": True, "logprobs": True, "top_logprobs": 20, "n": 8}
    body = json.dumps({"messages": [user("Tell me all.")], **fields}).encode()
    slow.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )


def _was_cut_off(stage: Stage) -> str:
    until(lambda: "cut off a client that read nothing" in stage.daemon.log(), "the slow client is cut off")
    stage.daemon.wait_idle()
    return f"it was cut off after {_UNREAD_SECONDS} s (unread_seconds) and its work ended"


def _fill_queue(stage: Stage) -> None:
    for number in range(2):
        connection = stage.client.send([user(f"Tell me a story, {number}.")], max_tokens=3000, ignore_eos=True)
        stage.ends.callback(connection.close)
    until(lambda: stage.daemon.stats()["requests_waiting"] == 1, "one runs and one waits")


def _full_disk(stage: Stage) -> str:
    failed = {
        name: int(count)
        for name, count in metrics(stage.client).items()
        if name.startswith("prefixd_tier_failures_total") and count
    }
    assert failed, "the disk was never full"
    return f"counted: {failed}; {_same_worker(stage)}"


def _nothing(stage: Stage) -> None:
    """The fault is there from the start."""


FAULTS = (
    Fault(
        "worker killed (kill -9)",
        lambda s: s.kill("worker", signal.SIGKILL),
        kills_worker=True,
        after=_why_it_died,
    ),
    Fault("worker killed by the kernel for want of memory", _starve_worker, kills_worker=True, after=_why_it_died),
    Fault("exception in a prefill", _fail_prefill(False), when="each", is_faulty=True, after=_same_worker),
    Fault("no memory in a prefill", _fail_prefill(True), when="each", is_faulty=True, after=_same_worker),
    Fault(
        "worker stopped (SIGSTOP)",
        lambda s: s.kill("worker", signal.SIGSTOP),
        kills_worker=True,
        after=_why_it_died,
    ),
    *(
        Fault(
            f"{'first ' if is_fresh else ''}{step} step that never ends",
            _hang(step),
            when="before",
            is_faulty=True,
            is_fresh=is_fresh,
            kills_worker=True,
            after=_why_it_died,
        )
        for is_fresh in (True, False)
        for step in ("prefill", "decode")
    ),
    Fault(
        "SIGTERM while a step never ends",
        _hang("prefill"),
        when="before",
        is_faulty=True,
        lives=False,
        after=_how_it_exits_hung,
    ),
    Fault("gateway killed (kill -9)", lambda s: s.kill("gateway", signal.SIGKILL), cuts=True, after=_why_it_died),
    Fault("gateway stopped (SIGSTOP)", lambda s: s.kill("gateway", signal.SIGSTOP), cuts=True, after=_why_it_died),
    Fault("disk of the cache full", _nothing, when="before", small_disk=True, after=_full_disk),
    Fault("gateway of another protocol version", _ask_a_stranger, when="before"),
    Fault("SIGTERM", _terminate, lives=False, after=_how_it_exited),
    Fault("SIGTERM twice", _terminate_twice, lives=False, after=_how_it_exited),
    Fault(
        "client that reads nothing",
        _read_nothing,
        given=("--unread-seconds", str(_UNREAD_SECONDS)),
        after=_was_cut_off,
    ),
    Fault(
        "queue full", _fill_queue, when="before", given=("--max-running", "1", "--max-waiting", "1"), lives=False
    ),
    Fault("run directory removed", lambda s: shutil.rmtree(s.daemon.run_dir), cuts=True, after=_why_it_died),
)
