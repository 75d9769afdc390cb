"""Daemons that several tests share, and the references that their answers are compared with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "worker"))  # tiny_models.py
sys.path.append(str(Path(__file__).parents[1] / "gateway"))  # anthropic_stream.py, responses_grammar.py

from chat_model import END_ID, FAMILIES, make_chat_model
from daemon import Daemon, metrics
from http_client import Client
from reference import Reference, of_directory, of_gguf

from protocol.model_path import EMBEDDED_MODEL, resolve_model

# Memory for some 14,000 tokens, and for some 2,000: of a hybrid's memory half is for states.
_SMALL = {"llama": "7MiB", "qwen3_5": "7MiB", "gemma4": "21MiB"}
_TIGHT = {"llama": "1MiB", "qwen3_5": "1MiB", "gemma4": "3MiB"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one family come one after the other: its daemons are started once, and ended before the next ones."""
    places = {family: place for place, family in enumerate(FAMILIES)}

    def place(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        here = item.path.parent == Path(__file__).parent
        return places.get(callspec.params.get("family"), -1) if here and callspec else -1

    items.sort(key=place)


@dataclass(frozen=True)
class Served:
    """A ready daemon and a client of it."""

    daemon: Daemon
    client: Client


Serve = Callable[..., Served]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's random model."""
    return cache(
        lambda family: make_chat_model(tmp_path_factory.mktemp("model") / f"tiny-{family}", family=family)
    )


@pytest.fixture(scope="session")
def references(folders: Callable[[str], Path]) -> Callable[[str], Reference]:
    """`transformers` with a family's random model."""
    return cache(lambda family: of_directory(folders(family), END_ID))


@pytest.fixture(scope="session")
def chat_model(folders: Callable[[str], Path]) -> Path:
    """The folder of the random model whose layers all attend to everything."""
    return folders("llama")


@pytest.fixture(scope="session")
def family() -> str:
    """The family of the models that a test plays on; a test of several has it as a parameter."""
    return "llama"


@pytest.fixture
def reference(family: str, references: Callable[[str], Reference]) -> Reference:
    return references(family)


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


# Daemons for all tests of a session; each test finds nothing running and nothing stored, while counters go on


@pytest.fixture
def served(_plain: Served) -> Served:
    """The random model with plenty of slots and memory."""
    return emptied(_plain)


@pytest.fixture
def real(_real: Served) -> Served:
    """The embedded model with float32 values, as the reference has them."""
    return emptied(_real)


@pytest.fixture
def packed(_packed: Served) -> Served:
    """The embedded model with packed weights, as it is by default; answers are absorbed."""
    return emptied(_packed)


@pytest.fixture
def strict(_strict: Served) -> Served:
    """The random model under two names and no other; one request at a time runs, while two may wait."""
    return emptied(_strict)


@pytest.fixture(scope="session")
def _plain(chat_model: Path) -> Iterator[Served]:
    yield from serving(chat_model, "--ui")


@pytest.fixture(scope="session")
def _real() -> Iterator[Served]:
    yield from serving(EMBEDDED_MODEL, "--kv-memory", "1GiB", "--dtype", "float32")


@pytest.fixture(scope="session")
def _packed() -> Iterator[Served]:
    yield from serving(EMBEDDED_MODEL, "--kv-memory", "512MiB", "--absorb")


@pytest.fixture(scope="session")
def _strict(chat_model: Path) -> Iterator[Served]:
    names = ["--strict-model", "--served-model-name", "house", "--served-model-name", "org/name"]
    yield from serving(chat_model, "--max-running", "1", "--max-waiting", "2", *names)


def serving(model: Path | str, *flags: str) -> Iterator[Served]:
    """For a fixture to yield from."""
    daemon = Daemon(model, *flags)
    try:
        yield Served(daemon, daemon.wait_ready())
    finally:
        daemon.close()


def emptied(served: Served) -> Served:
    """Nothing runs and nothing is stored in it; counters go on."""
    served.daemon.wait_idle()
    served.daemon.flush()
    assert served.daemon.snapshots() == []
    return served


# Daemons of a family that verify every hit


class Verifying:
    """Those of one family at a time, each started when it is first wanted."""

    def __init__(self, folders: Callable[[str], Path]) -> None:
        self._folders = folders
        self._family = ""
        self._running: dict[tuple[str, ...], Served] = {}

    def serve(self, family: str, *flags: str) -> Served:
        if family != self._family:
            self.close()
            self._family = family
        if flags not in self._running:
            daemon = Daemon(self._folders(family), "--verify-hits", "1", *flags)
            try:
                self._running[flags] = Served(daemon, daemon.wait_ready())
            except BaseException:
                daemon.close()
                raise
        return self._running[flags]

    def close(self) -> None:
        """Before they end an operator asks each whether any hit was wrong."""
        running, self._running = self._running, {}
        said = [served.daemon.cachectl("verify", "--wait") for served in running.values()]
        for served in running.values():
            served.daemon.close()
        for command in said:
            assert command.returncode == 0, command.stdout + command.stderr


@pytest.fixture(scope="session")
def _verifying(folders: Callable[[str], Path]) -> Iterator[Verifying]:
    daemons = Verifying(folders)
    yield daemons
    daemons.close()


@pytest.fixture
def verifying(family: str, _verifying: Verifying) -> Iterator[Serve]:
    """The family's model served with such flags; after the test every hit has been verified."""
    used: list[tuple[Served, float]] = []

    def serve(*flags: str) -> Served:
        served = emptied(_verifying.serve(family, *flags))
        used.append((served, _hits(served)))
        return served

    yield serve
    for served, hits_before in used:
        _check_hits(served, hits_before)


@pytest.fixture
def roomy(verifying: Serve) -> Served:
    """Plenty of slots and memory."""
    return verifying("--kv-memory", "512MiB")


@pytest.fixture
def four_slots(verifying: Serve) -> Served:
    return verifying("--slots", "4", "--kv-memory", "128MiB")


@pytest.fixture
def two_slots(verifying: Serve, family: str) -> Served:
    """Two slots, and memory for some 14,000 tokens."""
    return verifying("--slots", "2", "--kv-memory", _SMALL[family])


@pytest.fixture
def one_slot(verifying: Serve, family: str) -> Served:
    return verifying("--slots", "1", "--kv-memory", _SMALL[family])


@pytest.fixture
def tight(verifying: Serve, family: str) -> Served:
    """Memory for some 2,000 tokens."""
    return verifying("--kv-memory", _TIGHT[family])


def _hits(served: Served) -> float:
    samples = metrics(served.client).items()
    return sum(n for name, n in samples if "cache_lookups_total" in name and "outcome=miss" not in name)


def _check_hits(served: Served, hits_before: float) -> None:
    """None was wrong or found stale, and all were verified: but for those that memory or the queue was too short for,
    or whose client had left.
    """
    stats = served.daemon.wait_idle()
    assert stats["slots"]["restoring"] == stats["slots"]["writing"] == stats["slots"]["reserved"] == 0
    assert not any(stats["stale_drops"].values())
    counts, hits = served.daemon.ask("verify"), _hits(served)
    assert counts["mismatched"] == counts["pending"] == 0
    assert hits - stats["requests"]["cancelled"] <= counts["verified"] + counts["skipped"] <= hits
    if not stats["evictions"]["blocks"]:  # there was room to compute them again
        assert counts["skipped"] == 0 or hits - hits_before > 60
        assert counts["verified"] > 0 or not hits
