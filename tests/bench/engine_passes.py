"""Times the passes of a model of random weights on a card, and computes the least time that they can take."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from random_model import random_weights

from worker.cuda.backend import model_class, prepare
from worker.kv_cache import BLOCK_TOKENS, KVCache, block_bytes
from worker.model_config import parse_config
from worker.model_shape import AttentionLayer, DeltaLayer
from worker.recurrent import StatePool
from worker.steps import StateUse
from worker.weight_names import LAYER_PREFIX, weight_names

CONTEXT = 34816  # longest sequence here
ENTRIES = 256  # of recurrent state
# Entries that a pass goes on in, starts from behind cached tokens, and keeps a snapshot in; those of decode, from here.
_RUNNING, _RESTORED, _KEPT, _DECODING = 1, 2, 3, 10
_DECODE_STEPS = 50


class Goal(NamedTuple):
    """Milliseconds: what must be reached, and what vLLM 0.24 takes."""

    must: float | None = None
    vllm: float | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table, in milliseconds."""

    work: str
    median: float
    best: float
    floor: float | None
    must: float | None
    vllm: float | None

    @classmethod
    def title(cls) -> str:
        names = ("median", "best", "floor", "must", "vLLM 0.24", "/ floor")
        return f"{'milliseconds':44}" + "".join(f"{name:>10}" for name in names)

    def __str__(self) -> str:
        over = self.floor and self.median / self.floor
        values = (self.median, self.best, self.floor, self.must, self.vllm, over)
        cells = (f"{'-':>10}" if value is None else f"{value:10.2f}" for value in values)
        return f"{self.work:44}" + "".join(cells)


class Bench:
    """A loaded model and what was measured on it."""

    def __init__(self, shape: Mapping[str, Any], repeat: int) -> None:
        """Raises `SystemExit` where the CUDA backend does not run such a model."""
        self.repeat = repeat
        self.rows: list[Row] = []
        self.config = parse_config(shape)
        device = torch.device("cuda")
        loaded_class = model_class(self.config, torch.bfloat16, device)
        if loaded_class is None:
            raise SystemExit("the CUDA backend, which needs Triton, does not run this model")
        self.bytes_per_ms, self.flops_per_ms = ceilings(device)
        started = time.monotonic()
        weights = random_weights(self.config, device, torch.bfloat16)
        model = loaded_class(self.config, weights, torch.bfloat16, device, CONTEXT)
        torch.cuda.synchronize()
        loaded = time.monotonic()
        make_runner, _ = prepare(model)
        checked = time.monotonic()
        blocks = 33 * (CONTEXT // BLOCK_TOKENS) // 4
        cache = KVCache(self.config, blocks, torch.bfloat16, device)
        recurs = any(isinstance(layer, DeltaLayer) for layer in self.config.layers)
        self.states = StatePool(self.config, ENTRIES, device) if recurs else None
        self.state_bytes = self.states.layout.entry_bytes if self.states else 0
        self.token_bytes = block_bytes(self.config, torch.bfloat16) // BLOCK_TOKENS
        self.runner = make_runner(cache, self.states)
        torch.cuda.synchronize()
        self.start = {
            "weights_s": loaded - started,
            "row_check_s": checked - loaded,
            "graphs_s": time.monotonic() - checked,
            "row_counts": self.runner.row_counts.prefill,
            "padded": self.runner.row_counts.padded,
            "state_bytes": self.state_bytes,
            "kv_bytes_per_token": self.token_bytes,
        }
        self.layer_weights = sum(
            math.prod(size)
            for name, size in weight_names(self.config).items()
            if name.startswith(LAYER_PREFIX) and len(size) == 2
        )
        self.head_weights = self.config.vocab_size * self.config.hidden_size
        self.attention_layers = sum(isinstance(layer, AttentionLayer) for layer in self.config.layers)
        generator = torch.Generator().manual_seed(0)
        self.ids: list[int] = torch.randint(self.config.vocab_size, (CONTEXT,), generator=generator).tolist()
        order = torch.randperm(blocks - 1, generator=generator) + 1
        self.blocks: list[int] = order.tolist()  # as they lie after a while of serving

    def fill(self) -> None:
        """Put keys and values of a long prompt in the pool, and a state in the entry that prompts start from."""
        self.first_token(0, 33018)
        if self.states is not None:
            self.states.memory[_RESTORED].normal_(std=0.1)

    def first_token(self, cached: int, new: int) -> int:
        """Prefill `new` tokens behind `cached` ones that are in the pool already; the first token's id."""
        end, start = cached + new, cached
        source: int | None = _RESTORED if cached else 0
        while start < end:
            part = self.ids[start : min(start + self.runner.max_prefill_rows, end)]
            # A snapshot is made before the last few tokens, as of a conversation's newest message.
            last = start + len(part) == end and len(part) > 4
            kept = ((len(part) - 4, _KEPT),) if last else ()
            use = StateUse(_RUNNING, source, kept, tuple(rows for rows, _ in kept))
            hidden = self.runner.prefill(part, self.blocks, start, use)
            start, source = start + len(part), None
        logits = self.runner.head_row(hidden[len(part) - 1])
        return self.runner.largest(logits.unsqueeze(0))[0][0]

    def prefill_row(self, work: str, cached: int, new: int, goal: Goal) -> None:
        keys = cached * new + new * (new + 1) / 2
        attention = 4 * keys * self.config.num_heads * self.config.head_dim * self.attention_layers
        products = max(
            2 * new * self.layer_weights / self.flops_per_ms, 2 * self.layer_weights / self.bytes_per_ms
        )
        floor = products + attention / self.flops_per_ms
        self.add(work, lambda: self.first_token(cached, new), goal, floor)

    def decode_row(self, batch: int, length: int, goal: Goal) -> None:
        each = -(-(length + 64) // BLOCK_TOKENS)
        tables = [self.blocks[i * each : (i + 1) * each] for i in range(batch)]
        entries = range(_DECODING, _DECODING + batch)
        lengths, tokens = [length] * batch, self.ids[:batch]

        def step() -> None:
            nonlocal lengths, tokens
            tokens = self.runner.largest(self.runner.decode(tokens, tables, lengths, entries))[0]
            lengths = [length + (n + 1 - length) % 60 for n in lengths]

        weights = 2 * (self.layer_weights + self.head_weights)
        floor = (weights + batch * (length * self.token_bytes + 2 * self.state_bytes)) / self.bytes_per_ms
        self.add(f"decode step, batch {batch}, {length} tokens each", step, goal, floor, _DECODE_STEPS)

    def copy_row(self, goal: Goal) -> None:
        """What a restore copies on the device: a state, or a block that is filled in part."""
        states, cache = self.states, self.runner.cache
        if states is not None:
            self.report("copy of a state (device)", [device_ms(lambda: states.copy(2, 3))], goal)
        else:
            work = "copy of a partly filled block (device)"
            self.report(work, [device_ms(lambda: cache.copy_block(1, 2))], goal)

    def add(
        self, work: str, run: Callable[[], object], goal: Goal, floor: float, repeat: int | None = None
    ) -> None:
        """Time so many runs, or `self.repeat`."""
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        times = []
        for _ in range(repeat or self.repeat):
            started = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - started))
        self.report(work, times, goal, floor)

    def report(self, work: str, times: Sequence[float], goal: Goal, floor: float | None = None) -> None:
        self.rows.append(Row(work, statistics.median(times), min(times), floor, *goal))
        print(self.rows[-1], flush=True)


def ceilings(device: torch.device) -> tuple[float, float]:
    """Bytes moved a millisecond by a device copy, and operations a millisecond of a large product."""
    source = torch.randn(1 << 28, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_ms = device_ms(lambda: target.copy_(source))
    moved = 2 * source.numel() * source.element_size()
    a = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    product_ms = device_ms(lambda: a @ a)
    return moved / copy_ms, 2 * 8192**3 / product_ms


def device_ms(run: Callable[[], object]) -> float:
    """Median of ten runs by device events."""
    times = []
    for _ in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])
