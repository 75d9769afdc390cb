"""Daemons that several tests share, and the references that their answers are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "worker"))  # tiny_models.py
sys.path.append(str(Path(__file__).parents[1] / "gateway"))  # anthropic_stream.py, responses_grammar.py

from chat_model import END_ID, make_chat_model
from daemon import Daemon
from http_client import Client
from reference import Reference, of_directory, of_gguf

from protocol.model_path import EMBEDDED_MODEL, resolve_model


@dataclass(frozen=True)
class Served:
    """A ready daemon and a client of it."""

    daemon: Daemon
    client: Client


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the random model."""
    return make_chat_model(tmp_path_factory.mktemp("model") / "tiny-chat")


@pytest.fixture(scope="session")
def reference(chat_model: Path) -> Reference:
    """`transformers` with the random model."""
    return of_directory(chat_model, END_ID)


@pytest.fixture(scope="session")
def real_reference() -> Reference:
    """`transformers` with the embedded model."""
    return of_gguf(resolve_model(EMBEDDED_MODEL))


@pytest.fixture
def start(chat_model: Path) -> Iterator[Callable[..., Daemon]]:
    """Start a daemon with flags of one's own; it ends with the test."""
    with ExitStack() as daemons:

        def start(*flags: str, model: Path | str = chat_model, run_dir: Path | None = None) -> Daemon:
            daemon = Daemon(model, *flags, run_dir=run_dir)
            daemons.callback(daemon.close)
            return daemon

        yield start


@pytest.fixture
def served(_roomy: Served) -> Served:
    """The random model with plenty of slots and memory, and an empty cache."""
    return _emptied(_roomy)


@pytest.fixture
def few_slots(_few_slots: Served) -> Served:
    """The random model with seven slots, and an empty cache."""
    return _emptied(_few_slots)


@pytest.fixture
def two_slots(_two_slots: Served) -> Served:
    """The random model with two slots and memory for some 14,000 tokens, and an empty cache."""
    return _emptied(_two_slots)


@pytest.fixture
def one_slot(_one_slot: Served) -> Served:
    """The random model with a single slot, and an empty cache."""
    return _emptied(_one_slot)


@pytest.fixture
def tight(_tight: Served) -> Served:
    """The random model with KV memory for some 2,000 tokens, and an empty cache."""
    return _emptied(_tight)


@pytest.fixture
def real(_real: Served) -> Served:
    """The embedded model with float32 values, as the reference has them, and an empty cache."""
    return _emptied(_real)


@pytest.fixture(scope="session")
def _roomy(chat_model: Path) -> Iterator[Served]:
    yield from _serve(chat_model)


@pytest.fixture(scope="session")
def _few_slots(chat_model: Path) -> Iterator[Served]:
    yield from _serve(chat_model, "--slots", "7")


@pytest.fixture(scope="session")
def _two_slots(chat_model: Path) -> Iterator[Served]:
    yield from _serve(chat_model, "--slots", "2", "--kv-memory", "7MiB")


@pytest.fixture(scope="session")
def _one_slot(chat_model: Path) -> Iterator[Served]:
    yield from _serve(chat_model, "--slots", "1")


@pytest.fixture(scope="session")
def _tight(chat_model: Path) -> Iterator[Served]:
    yield from _serve(chat_model, "--kv-memory", "1MiB")


@pytest.fixture(scope="session")
def _real() -> Iterator[Served]:
    yield from _serve(EMBEDDED_MODEL, "--kv-memory", "1GiB", "--dtype", "float32")


def _serve(model: Path | str, *flags: str) -> Iterator[Served]:
    daemon = Daemon(model, *flags)
    try:
        yield Served(daemon, daemon.wait_ready())
    finally:
        daemon.close()


def _emptied(served: Served) -> Served:
    """Nothing runs and nothing is stored; counters go on."""
    served.daemon.wait_idle()
    served.daemon.flush()
    assert served.daemon.snapshots() == []
    return served
