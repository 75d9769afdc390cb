"""Where a client plays: an empty home, a project, a daemon with written answers, and a record of what was said."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from daemon import DEADLINE_SECONDS, Daemon, metrics, until
from http_client import Client
from wire import Exchange, Usage, Wire

WORD = "marzipan"
LONG = "and on " * 400
NOTE = f"The word of the day is {WORD}.\n"
_COMPUTED, _DEVICE = (f"prefixd_cache_tokens_total{{source={source}}}" for source in ("computed", "device"))
_GENERATED = "prefixd_generated_tokens_total"


def call(name: str, thought: str = "", **arguments: Any) -> str:
    """An answer that calls a client's tool, as the model's template has it."""
    said = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return f"{said}<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass(frozen=True)
class Run:
    """One command of a client that has ended, and its requests for tokens."""

    output: str  # standard output
    code: int
    answers: list[Exchange]
    usages: list[Usage]  # of each answer
    refused: list[Exchange]  # with a status of 400
    seconds: float

    def reuse(self) -> list[float]:
        """The share of each prompt that was not computed."""
        return [usage.cached / usage.prompt for usage in self.usages]

    def reuse_after_cut(self) -> float:
        """The same for the try that followed the one that the wire has cut."""
        [cut] = [at for at, answer in enumerate(self.answers) if answer.cut]
        return next(
            share
            for answer, share in list(zip(self.answers, self.reuse(), strict=True))[cut + 1 :]
            if answer.has_tools
        )

    def events(self) -> list[dict[str, Any]]:
        """The output of a client that writes a JSON object a line."""
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]


class Stage:
    """One client's. `close` ends what it has started."""

    def __init__(self, daemon: Daemon, client: Client, answers: Path, folder: Path, clients: Path) -> None:
        self._folder = folder
        self.daemon = daemon
        self.client = client
        self.clients = clients
        self.home, self.project = folder / "home", folder / "project"
        self.home.mkdir(parents=True)
        self.note = self.add_project("project")
        self.other_note = self.note.with_name("other.txt")
        self.other_note.write_text(NOTE)
        self.rows: list[tuple[str, Run]] = []
        self.environment: dict[str, str] = {}
        self._answers = answers
        self._started: list[subprocess.Popen[str]] = []
        self.wire = Wire(client.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            _kill(process)
        self.wire.close()

    def add_project(self, name: str) -> Path:
        """Make a folder that a client works in; the path of the note in it."""
        folder = self._folder / name
        folder.mkdir()
        (folder / "note.txt").write_text(NOTE)
        return folder / "note.txt"

    def script(self, *answers: tuple[str, str]) -> None:
        """Answer with the text of the first pattern found in what is new in a prompt."""
        self._answers.write_text(json.dumps(answers))

    def start(self, *command: str, folder: Path | None = None) -> subprocess.Popen[str]:
        """Start a command that the stage ends if nobody else does."""
        node = self.clients / "node_modules" / ".bin"
        environment = {
            "PATH": f"{node}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            **self.environment,
        }
        process = subprocess.Popen(
            command,
            cwd=folder or self.project,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, *command: str, label: str = "", folder: Path | None = None) -> Run:
        """Run a command to its good end. All accounts of what it used must agree, and no answer be an error."""
        [run] = self.run_together(lambda: self.start(*command, folder=folder))
        assert run.code == 0, (run.output, self.daemon.log())
        assert run.refused == []
        if label:
            self.rows.append((label, run))
        return run

    def run_into_refusal(self, *command: str, label: str) -> Run:
        """The same for a command of which the daemon refuses something, whatever that means to the client."""
        [run] = self.run_together(lambda: self.start(*command))
        assert run.refused
        if run.answers:
            self.rows.append((label, run))
        return run

    def run_together(self, *starts: Callable[[], subprocess.Popen[str]]) -> list[Run]:
        """Run commands at once, to any end; the requests of all stand in each run."""
        before, asked = metrics(self.client), len(self.wire.exchanges)
        began = time.monotonic()
        processes = [start() for start in starts]
        outputs = _outputs(processes)
        seconds = time.monotonic() - began
        self.daemon.wait_idle()
        asked_for = [exchange for exchange in self.wire.exchanges[asked:] if exchange.is_answer]
        assert asked_for, outputs
        answers = [exchange for exchange in asked_for if exchange.status != 400]
        refused = [exchange for exchange in asked_for if exchange.status == 400]
        usages = [self._usage(answer) for answer in answers]
        self._check_metrics(before, usages)
        return [
            Run(output, process.returncode, answers, usages, refused, seconds)
            for process, output in zip(processes, outputs, strict=True)
        ]

    def until_answering(self, count: int = 1) -> Exchange:
        """Wait until so many answers have begun; the latest."""
        return until(
            lambda: [a for a in self.wire.answers() if a.first_seconds is not None][count - 1 :],
            "an answer has begun",
        )[-1]

    def kill(self, process: subprocess.Popen[str]) -> None:
        """End a client without warning; returns when its request has ended, too."""
        _kill(process)
        self.daemon.wait_idle()

    def _usage(self, answer: Exchange) -> Usage:
        """What the worker counted, which must be what the client was told."""
        assert answer.status == 200, (answer.sent, answer.received)
        assert answer.is_whole or answer.cut
        assert answer.errors() == []
        explained = self.daemon.ask("explain", request_id=answer.request_id)
        counted = Usage(explained["prompt_tokens"], explained["depth"], explained["completion_tokens"])
        # None: the client did not ask, or never got that far.
        assert answer.usage() in (counted, None) or answer.cut
        return counted

    def _check_metrics(self, before: dict[str, float], usages: list[Usage]) -> None:
        after = metrics(self.client)
        gained = {name: after[name] - before[name] for name in (_COMPUTED, _DEVICE, _GENERATED)}
        assert gained[_DEVICE] == sum(usage.cached for usage in usages)
        assert gained[_COMPUTED] == sum(usage.prompt - usage.cached for usage in usages)
        assert gained[_GENERATED] == sum(usage.output for usage in usages)


def _outputs(processes: list[subprocess.Popen[str]]) -> list[str]:
    """Read all to their ends, at once."""
    found: dict[int, str] = {}

    def read(at: int) -> None:
        try:
            found[at], _ = processes[at].communicate(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(processes[at].pid, signal.SIGKILL)
            found[at], _ = processes[at].communicate()

    threads = [threading.Thread(target=read, args=(at,)) for at in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[at] for at in range(len(processes))]


def _kill(process: subprocess.Popen[str]) -> None:
    """With all that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
