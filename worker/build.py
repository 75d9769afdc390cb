"""Puts a worker together: device, model, row counts, KV memory, scheduler and engine."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from protocol.errors import SettingsError
from protocol.messages import ModelInfo
from protocol.sizes import format_size
from worker.block_pool import BlockPool
from worker.config import WorkerSettings
from worker.control import Control
from worker.cuda.backend import CudaModel, prepare
from worker.cuda.backend import model_class as cuda_class
from worker.engine import Engine
from worker.fingerprint import fingerprint
from worker.io import WorkerSockets
from worker.journal import Journal
from worker.kv_cache import BLOCK_TOKENS, KVCache, block_bytes
from worker.memory import slot_count, split_memory
from worker.metrics import StateCollector, WorkerMetrics
from worker.model_config import ModelConfig, load_config
from worker.model_runner import ModelRunner
from worker.model_shape import DeltaLayer
from worker.models import model_class
from worker.models.interface import Model
from worker.numerics import numerics_id
from worker.outbox import Outbox
from worker.recurrent import StateLayout, StatePool
from worker.row_check import check_rows
from worker.runner import Runner
from worker.scheduler import Scheduler
from worker.snapshots import SnapshotStore
from worker.step_watch import StepWatch
from worker.tiers.device_memory import PagedMemory
from worker.tiers.setup import identity_of, open_tiers
from worker.tiers.tiers import FAILURE_CAUSES, Tiers
from worker.vectors import HAS_PAIRS
from worker.weights import iter_weights, stored_in_four_bits, weight_names

log = logging.getLogger(__name__)

# Keys for each column of hidden rows: to attend to so many takes a row no longer than everything else does. Measured on
# a CPU, SmolLM2-135M: 4.7 in decode, 6.6 in prefill. Where not all layers attend, or MLPs are wide, it is more.
_ROW_KEYS = 4


def build(
    settings: WorkerSettings,
    path: Path,
    sockets: WorkerSockets,
    epoch: str,
    loading: Callable[[str], None],
) -> tuple[Engine, ModelInfo]:
    """Load everything. `loading` is told what is under way."""
    started, beside = time.monotonic(), ThreadPoolExecutor(1, thread_name_prefix="start")
    device = _device(settings.device)
    if settings.threads:
        torch.set_num_threads(_threads(settings.threads))
    torch.set_grad_enabled(False)
    config = load_config(path)
    dtype_name = _stored_as(settings.dtype, path, device)
    dtype = _product_dtype(dtype_name)
    max_model_len = _context(settings.max_model_len, config)
    weights_id = beside.submit(fingerprint, path)
    loading(f"loading weights of {path.name}")
    weights = _shown(iter_weights(path, config), len(weight_names(config)), loading)
    loaded = cuda_class(config, dtype, device) or model_class(config)
    model = loaded(config, weights, dtype, device, max_model_len, dtype_name == "int4")
    log.info(
        "%s: %d layers on %s, weights %s as %s, %.1f s",
        config.architecture,
        config.num_layers,
        device,
        format_size(model.weight_bytes),
        dtype_name,
        time.monotonic() - started,
    )
    loading("checking that rows do not depend on each other")
    kv_dtype = model.dtype
    make_runner, needed = _to_check(model, max_model_len, settings.deterministic)
    size = block_bytes(config, kv_dtype)
    recurs = any(isinstance(layer, DeltaLayer) for layer in config.layers)
    state_bytes = StateLayout(config).entry_bytes if recurs else 0
    slots = slot_count(settings.slots, recurs=recurs)
    most_states = slots + settings.max_running + 1  # one more for a job in idle time
    blocks, entries = split_memory(
        settings.kv_memory, size, state_bytes, most_states, device, max_model_len, needed_bytes=needed
    )
    cache = KVCache(config, blocks, kv_dtype, device)
    beside.submit(cache.touch_first)
    pool = BlockPool(blocks, BLOCK_TOKENS)
    states = StatePool(config, entries, device) if recurs else None
    store = SnapshotStore(
        slots,
        pool,
        size,
        divisible=not recurs,  # a sliding window too keeps all blocks
        states=BlockPool(entries, 1) if recurs else None,
        state_bytes=state_bytes,
    )
    metrics, journal = WorkerMetrics(), Journal()
    runner = make_runner(cache, states)
    model_id = _bind(weights_id.result(), f"{dtype_name}:{dtype}:{kv_dtype}")
    beside.shutdown()
    tiers = open_tiers(
        settings,
        store,
        PagedMemory(cache, states),
        lambda: identity_of(path, model_id, numerics_id(device, runner.row_counts)),
        wake=lambda: sockets.inbox.put(None),
        context_tokens=max_model_len,
    )
    outbox = Outbox(sockets.send, holds=device.type == "cuda")
    scheduler = Scheduler(
        epoch=epoch,
        store=store,
        pool=pool,
        metrics=metrics,
        journal=journal,
        emit=outbox.send,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        max_prefill_rows=runner.max_prefill_rows,
        shared_prefill_rows=runner.shared_prefill_rows,
        state_chunk=runner.state_chunk,
        max_running=min(settings.max_running, runner.max_decode_rows),
        max_waiting=settings.max_waiting,
        max_queue_seconds=settings.queue_seconds,
        caching=slots > 0,
        verify_hits=settings.verify_hits,
        differ=lambda kept, computed: not torch.equal(kept.view(torch.int32), computed.view(torch.int32)),
        tiers=tiers,
        wake=lambda: sockets.inbox.put(None),
    )
    info = ModelInfo(
        fingerprint=model_id,
        architecture=config.architecture,
        dtype=dtype_name,
        device=str(device),
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=size // BLOCK_TOKENS,
        kv_memory_bytes=blocks * size + entries * state_bytes,
        slots=slots,
        deterministic=runner.row_counts.batch_invariant,
    )
    _register(metrics, store, pool, scheduler, sockets, size, tiers)
    control = Control(
        model=info,
        model_name=settings.model,
        block_bytes=size,
        scheduler=scheduler,
        store=store,
        pool=pool,
        metrics=metrics,
        journal=journal,
        tiers=tiers,
    )
    watch = StepWatch(sockets.time.awake, sockets.time.starved, _ROW_KEYS * config.hidden_size)
    engine = Engine(
        sockets,
        scheduler,
        store,
        runner,
        control,
        metrics,
        tiers=tiers,
        watch=watch,
        outbox=outbox,
        check_each=settings.check_invariants,
    )
    loading("warming up")
    engine.warm_up()
    log.info("built in %.1f s", time.monotonic() - started)
    return engine, info


def _to_check(
    model: Model | CudaModel, max_model_len: int, deterministic: bool
) -> tuple[Callable[[KVCache, StatePool | None], Runner], int]:
    """What makes the model's runner once there is memory, and what its passes need of that.

    Row counts are found now on a CUDA device, whose passes take of the same memory, and else with the runner. On a CUDA
    device decode never depends on the batch, and there is nothing to be gained by letting it: `deterministic` is for a
    CPU.
    """
    if isinstance(model, CudaModel):
        return prepare(model)

    def make(cache: KVCache, states: StatePool | None) -> Runner:
        row_counts = check_rows(model, model.dtype, max_model_len, deterministic)
        return ModelRunner(model, cache, row_counts, states)

    return make, 0


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device: cuda was asked for, but torch finds no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _stored_as(name: str, path: Path, device: torch.device) -> str:
    """How weights are held, with `auto` decided: on a CPU packed if that is what the file holds, else in float32.

    Without products of our own for packed weights float32 takes less memory, and keeps the values of the file, which
    the scales of torch's packed product round.
    """
    if name == "int4" and device.type != "cpu":
        raise SettingsError("dtype: int4 runs on a CPU only")
    if name != "auto":
        return name
    if device.type != "cpu":
        return "bfloat16"
    return "int4" if HAS_PAIRS and stored_in_four_bits(path) else "float32"


def _product_dtype(stored_as: str) -> torch.dtype:
    """What prefill computes in. For packed weights bfloat16 only where the processor has instructions for it."""
    if stored_as == "int4":
        return torch.bfloat16 if HAS_PAIRS else torch.float32
    return torch.float32 if stored_as == "float32" else torch.bfloat16


def _threads(asked: int) -> int:
    """More threads than processors would wait for each other's turns 150 times a token."""
    processors = os.cpu_count() or asked
    if asked > processors:
        raise SettingsError(f"threads: {asked} is more than this machine's {processors} processors")
    return asked


def _context(asked: int | None, config: ModelConfig) -> int:
    """The longest sequence served: what was asked for, within what the model can do."""
    limit = config.max_position_embeddings
    if config.sliding_window is not None:
        limit = min(limit, config.sliding_window)
    if asked is not None and asked > limit:
        raise SettingsError(f"max_model_len: {asked} is more than this model's {limit}")
    return asked or limit


def _bind(weights: str, types: str) -> str:
    """The root of all digests: a state is of these weights and types, or it is another one."""
    return hashlib.blake2b(f"{weights}:{types}".encode(), digest_size=16).hexdigest()


def _shown(
    weights: Iterator[tuple[str, Tensor]], count: int, loading: Callable[[str], None]
) -> Iterator[tuple[str, Tensor]]:
    """Pass tensors on, with a bar on a terminal and the share done in the heartbeat."""
    told = 0
    bar = tqdm(weights, total=count, desc="weights", unit="tensor", disable=not sys.stderr.isatty())
    for number, item in enumerate(bar, start=1):
        share = number * 10 // count
        if share > told:
            told = share
            loading(f"loading weights, {share * 10}%")
        yield item


def _register(
    metrics: WorkerMetrics,
    store: SnapshotStore,
    pool: BlockPool,
    scheduler: Scheduler,
    sockets: WorkerSockets,
    size: int,
    tiers: Tiers | None,
) -> None:
    """Everything whose truth lies elsewhere and is read when scraped."""
    states = store.states

    def gauges() -> dict[str, tuple[str, str, dict[str, float]]]:
        return {
            "prefixd_slots": ("Slots by state", "state", dict(store.slot_states())),
            "prefixd_snapshots": ("Snapshots held", "", {"": store.snapshot_count}),
            "prefixd_snapshot_bytes": (
                "Bytes of distinct KV blocks that snapshots hold",
                "tier",
                {"device": store.snapshot_bytes, "host": 0, "disk": 0, **(tiers.held_bytes() if tiers else {})},
            ),
            "prefixd_kv_bytes": (
                "Bytes of the KV pool",
                "state",
                {"used": pool.used_count * size, "free": pool.free_count * size},
            ),
            "prefixd_state_bytes": (
                "Bytes of recurrent states",
                "state",
                {
                    "used": states.used_count * store.state_bytes if states else 0,
                    "free": states.free_count * store.state_bytes if states else 0,
                },
            ),
            "prefixd_tier_pending": (
                "Snapshots that are still to be copied to slower tiers",
                "",
                {"": tiers.pending if tiers else 0},
            ),
            "prefixd_requests_running": ("Requests in prefill or decode", "", {"": scheduler.running_count}),
            "prefixd_requests_waiting": ("Requests queued", "", {"": len(scheduler.waiting)}),
        }

    def counters() -> dict[str, tuple[str, str, dict[str, float]]]:
        return {
            "prefixd_snapshot_commits": ("Snapshots published", "", {"": store.commits}),
            "prefixd_snapshot_aborts": ("Reservations given back unpublished", "cause", dict(store.aborts)),
            "prefixd_snapshot_evictions": ("Snapshots removed", "cause", dict(store.evictions)),
            "prefixd_stale_drops": ("Entries found and then refused", "cause", dict(store.stale_drops)),
            "prefixd_tier_evictions": (
                "Parts of snapshots removed from a slower tier for room",
                "tier",
                {"host": 0, "disk": 0, **(tiers.evictions() if tiers else {})},
            ),
            "prefixd_tier_written_bytes": (
                "Bytes copied to a slower tier",
                "tier",
                {"host": 0, "disk": 0, **(tiers.written_bytes() if tiers else {})},
            ),
            "prefixd_tier_failures": (
                "Parts of snapshots that could not be written to a slower tier, or read from it",
                "cause",
                {cause: tiers.failures()[cause] if tiers else 0 for cause in FAILURE_CAUSES},
            ),
            "prefixd_dropped_frames": ("Messages dropped as not well-formed", "", {"": sockets.bad_frames}),
        }

    metrics.registry.register(StateCollector(gauges, counters))
