"""What is behind a worker when it says that it is ready, and what its watch knows then."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exact_rig import Worker, question
from tiny_models import save_tiny

from worker.block_pool import BlockPool
from worker.cuda.dense import DenseModel
from worker.cuda.hybrid import HybridModel
from worker.cuda.mixed_ops import TorchMixedOps
from worker.cuda.mixed_runner import MixedRunner
from worker.cuda.ops import TorchOps
from worker.cuda.runner import CudaRunner
from worker.engine import Engine
from worker.kv_cache import BLOCK_TOKENS, KVCache
from worker.metrics import WorkerMetrics
from worker.model_config import load_config
from worker.outbox import Outbox
from worker.recurrent import StatePool
from worker.snapshots import SnapshotStore
from worker.step_watch import LEAST_SECONDS, StepWatch
from worker.steps import Decode, Prefill, Step, SwapIn, SwapOut
from worker.warm_up import ROWS
from worker.weights import iter_weights

CPU = torch.device("cpu")
CONTEXT = 512


def learned(watch: StepWatch) -> set[str]:
    """Kinds of steps."""
    return {kind for kind, _ in watch._longest}


def assert_nothing_held(engine: Engine) -> None:
    store = engine._store
    assert store.pool.used_count == 0
    assert store.states is None or store.states.used_count == 0
    assert not any(memory.any() for memory in engine._runner.cache.memories), (
        "free blocks are zero, as at the start"
    )
    store.check_invariants((), ())


def dense(path: Path) -> CudaRunner:
    config = load_config(path)
    model = DenseModel(config, iter_weights(path, config), torch.float32, CPU, CONTEXT)
    return CudaRunner(model, KVCache(config, 20, torch.float32, CPU), TorchOps(), (128, 256))


def hybrid(path: Path) -> CudaRunner:
    config = load_config(path)
    model = HybridModel(config, iter_weights(path, config), torch.float32, CPU, CONTEXT)
    states = StatePool(config, 3, CPU)
    return MixedRunner(model, KVCache(config, 20, torch.float32, CPU), TorchMixedOps(), (128, 256), states)


def engine_of(runner: Any, context_tokens: int = CONTEXT) -> Engine:
    """What of an engine steps need."""
    states = getattr(runner, "states", None)
    recurring = {"states": BlockPool(len(states.memory), 1), "state_bytes": 4} if states else {}
    store = SnapshotStore(4, BlockPool(runner.cache.num_blocks, BLOCK_TOKENS), 1, **recurring)
    scheduler = SimpleNamespace(context_tokens=context_tokens, after=lambda step: None)
    nothing: Any = None
    silent = Outbox(lambda sender, message: None)
    return Engine(nothing, scheduler, store, runner, nothing, WorkerMetrics(), outbox=silent)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma4"])
def test_a_worker_that_is_built_knows_what_its_steps_take(tmp_path: Path, family: str):
    save_tiny(tmp_path, family)
    worker = Worker(tmp_path)
    engine = worker.engine
    try:
        assert learned(engine.watch) == {"prefill", "decode", "swap"}
        assert_nothing_held(engine)
        for kind in ("prefill", "decode"):
            assert worker.count("prefixd_step_seconds_count", kind=kind) == 0, "clients' steps only"
        assert worker.serve(question(40))
        assert worker.count("prefixd_step_seconds_count", kind="prefill") == 1
    finally:
        engine.close()


@pytest.mark.parametrize(("family", "runner"), [("llama", dense), ("qwen3_5", hybrid)])
def test_the_runners_of_a_card_are_warmed_up_by_the_same_steps(tmp_path: Path, family: str, runner: Any):
    save_tiny(tmp_path, family)
    engine = engine_of(runner(tmp_path))
    engine.warm_up()
    assert learned(engine.watch) == {"prefill", "decode", "swap"}
    assert_nothing_held(engine)


class Runs:
    """A runner that notes what it is asked, over real memory."""

    max_prefill_rows = 256
    states = None

    def __init__(self, path: Path, blocks: int = 20) -> None:
        self.cache = KVCache(load_config(path), blocks, torch.float32, CPU)
        self.asked: list[tuple[str, int]] = []

    def note(self, step: Step) -> None:
        match step:
            case Prefill(_, start, end):
                assert start == 0
                self.asked.append(("prefill", end))
            case Decode((choice,)):
                self.asked.append(("decode", choice.length))
            case SwapOut(choice, blocks) | SwapIn(choice, blocks):
                assert set(blocks) <= set(choice.blocks)
                self.asked.append(("swap", len(blocks)))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_tiny(tmp_path, "llama")
    return tmp_path


def test_what_is_slow_once_is_not_learned(model: Path):
    runs = Runs(model)
    engine, now = engine_of(runs), [0.0]
    engine.watch = StepWatch(lambda: now[0])

    def run(step: Step) -> None:
        now[0] += 0.5 if len(runs.asked) > 1 else 30.0
        runs.note(step)

    engine._run = run  # type: ignore[assignment, method-assign]
    engine.warm_up()
    assert runs.asked == [*[("prefill", ROWS), ("decode", ROWS)] * 2, ("swap", 3), ("swap", 3)]
    with engine.watch.step(Prefill(None, 0, ROWS, ())):  # type: ignore[arg-type]
        now[0] += LEAST_SECONDS + 0.1
        assert engine.watch.verdict() is not None


@pytest.mark.parametrize(
    ("blocks", "context", "rows"), [(3, CONTEXT, 63), (20, 5, 4), (20, 2, 1), (20, ROWS + 1, ROWS)]
)
def test_it_fits_in_little_memory_and_in_a_short_context(model: Path, blocks: int, context: int, rows: int):
    runs = Runs(model, blocks)
    engine = engine_of(runs, min(context, (blocks - 1) * BLOCK_TOKENS))
    engine._run = runs.note  # type: ignore[assignment, method-assign]
    engine.warm_up()
    assert max(rows for kind, rows in runs.asked if kind == "prefill") == rows
    assert_nothing_held(engine)


def test_a_step_that_fails_ends_the_start_and_holds_nothing(model: Path):
    runs = Runs(model)
    engine = engine_of(runs)

    def run(step: Step) -> None:
        runs.note(step)
        if isinstance(step, Decode):
            raise MemoryError("no room for logits")

    engine._run = run  # type: ignore[assignment, method-assign]
    with pytest.raises(MemoryError):
        engine.warm_up()
    assert_nothing_held(engine)
