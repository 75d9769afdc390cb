"""Times the CUDA engine on random weights of the 8B dense shape: `python tests/bench/engine.py`.

Everything is measured in this process, without HTTP: passes from their call to the token id on the host, and whole
requests from the engine's inbox to the event that carries the first token. The floor of a pass is computed from
ceilings measured in the same run: a device copy and a large matrix product; the last column is the time over it. The
one before is what vLLM 0.24 did at the same work on one H100, from the client side.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import queue
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
import triton
from kernel_times import write_kernel_times
from random_model import SHAPE, random_weights

from protocol.digest import link_digest, root_digest
from protocol.messages import Accepted, Boundary, Failed, Generate, Sampling, Tokens
from worker.block_pool import BlockPool
from worker.control import Control
from worker.cuda.dense import DenseModel
from worker.cuda.product_check import check_products
from worker.cuda.runner import CudaRunner
from worker.cuda.tiles import tiles_for
from worker.cuda.triton_ops import TritonOps
from worker.engine import Engine
from worker.io import FromGateway, WorkerSockets
from worker.journal import Journal
from worker.kv_cache import BLOCK_TOKENS, KVCache, block_bytes
from worker.metrics import WorkerMetrics
from worker.model_config import parse_config
from worker.scheduler import Scheduler
from worker.snapshots import SnapshotStore

CONTEXT = 34816  # longest sequence here
PROFILED = ((7168, 200), (32768, 250), (0, 2048), (0, 8192))  # tokens cached and new


@dataclass(frozen=True)
class Row:
    """One line of the table, in milliseconds."""

    work: str
    median: float
    best: float
    floor: float | None
    must: float | None
    vllm: float | None


class Bench:
    """A loaded model and what was measured on it."""

    def __init__(self, repeat: int) -> None:
        self.device = torch.device("cuda")
        self.repeat = repeat
        self.rows: list[Row] = []
        self.bytes_per_ms, self.flops_per_ms = ceilings(self.device)
        self.config = parse_config(SHAPE)
        started = time.monotonic()
        model = DenseModel(
            self.config,
            random_weights(self.config, self.device, torch.bfloat16),
            torch.bfloat16,
            self.device,
            CONTEXT,
        )
        torch.cuda.synchronize()
        loaded = time.monotonic()
        tiles = tiles_for(self.device)
        counts, padded = check_products(model, TritonOps(tiles))
        ops = TritonOps(tiles, padded=padded)
        checked = time.monotonic()
        blocks = 65 * (CONTEXT // BLOCK_TOKENS) // 8
        cache = KVCache(self.config, blocks, torch.bfloat16, self.device)
        self.runner = CudaRunner(model, cache, ops, counts)
        torch.cuda.synchronize()
        self.start = {
            "weights_s": loaded - started,
            "row_check_s": checked - loaded,
            "graphs_s": time.monotonic() - checked,
            "row_counts": counts,
            "padded": self.runner.row_counts.padded,
        }
        self.layer_weights = sum(
            w.numel() for layer in model.layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        self.head_weights = model.head.weight.numel()
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(self.config.vocab_size, (CONTEXT,), generator=generator).tolist()
        order = torch.randperm(blocks - 1, generator=generator) + 1
        self.blocks: list[int] = order.tolist()  # as they lie after a while of serving

    def first_token(self, cached: int, new: int) -> int:
        """Prefill `new` tokens behind `cached` ones that are in the pool already; the first token's id."""
        end, start = cached + new, cached
        while start < end:
            part = self.ids[start : min(start + self.runner.max_prefill_rows, end)]
            hidden = self.runner.prefill(part, self.blocks, start)
            start += len(part)
        logits = self.runner.head_row(hidden[len(part) - 1])
        return self.runner.largest(logits.unsqueeze(0))[0][0]

    def prefill_row(self, work: str, cached: int, new: int, must: float, vllm: float) -> None:
        keys = cached * new + new * (new + 1) / 2
        attention = 4 * keys * self.config.num_heads * self.config.head_dim * self.config.num_layers
        products = max(
            2 * new * self.layer_weights / self.flops_per_ms, 2 * self.layer_weights / self.bytes_per_ms
        )
        floor = products + attention / self.flops_per_ms
        self.add(work, lambda: self.first_token(cached, new), floor, must, vllm)

    def decode_row(self, batch: int, length: int, must: float | None, vllm: float | None) -> None:
        each = -(-(length + 64) // BLOCK_TOKENS)
        tables = [self.blocks[i * each : (i + 1) * each] for i in range(batch)]
        lengths, tokens = [length] * batch, self.ids[:batch]

        def step() -> None:
            nonlocal lengths, tokens
            tokens = self.runner.largest(self.runner.decode(tokens, tables, lengths))[0]
            lengths = [length + (n + 1 - length) % 60 for n in lengths]

        kv = batch * length * 2 * self.config.num_kv_heads * self.config.head_dim * self.config.num_layers
        floor = 2 * (self.layer_weights + self.head_weights + kv) / self.bytes_per_ms
        self.add(f"decode step, batch {batch}, {length} tokens each", step, floor, must, vllm, repeat=50)

    def add(
        self,
        work: str,
        run: Callable[[], object],
        floor: float | None,
        must: float | None,
        vllm: float | None,
        repeat: int | None = None,
    ) -> None:
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        times = []
        for _ in range(repeat or self.repeat):
            started = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - started))
        self.report(work, times, floor, must, vllm)

    def report(
        self, work: str, times: Sequence[float], floor: float | None, must: float | None, vllm: float | None
    ) -> None:
        self.rows.append(Row(work, statistics.median(times), min(times), floor, must, vllm))
        print(line(self.rows[-1]), flush=True)


class Sockets:
    """Takes what the engine sends, and when."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[FromGateway] = queue.SimpleQueue()
        self.tokens: dict[str, list[float]] = defaultdict(list)
        self.depths: dict[str, int] = {}

    def send(self, _sender: bytes, message: object) -> None:
        if isinstance(message, Tokens):
            self.tokens[message.request_id].append(time.perf_counter())
        elif isinstance(message, Accepted):
            self.depths[message.request_id] = message.depth
        elif isinstance(message, Failed):
            raise RuntimeError(message.message)


class Served:
    """The engine with its scheduler and store around a runner, driven by hand."""

    def __init__(self, bench: Bench, states: BlockPool | None = None, state_bytes: int = 0) -> None:
        """`states`: the entries of recurrent state, of `state_bytes` each, where the model recurs."""
        runner = bench.runner
        size = block_bytes(bench.config, torch.bfloat16)
        self.pool = BlockPool(runner.cache.num_blocks, BLOCK_TOKENS)
        self.store = SnapshotStore(512, self.pool, size, states=states, state_bytes=state_bytes)
        self.block_bytes = size
        self.sockets, self.metrics = Sockets(), WorkerMetrics()
        scheduler = Scheduler(
            epoch="e",
            store=self.store,
            pool=self.pool,
            metrics=self.metrics,
            journal=Journal(),
            emit=self.sockets.send,
            max_model_len=CONTEXT,
            vocab_size=bench.config.vocab_size,
            max_prefill_rows=runner.max_prefill_rows,
            shared_prefill_rows=runner.shared_prefill_rows,
            max_running=64,
            max_waiting=256,
            caching=True,
            state_chunk=runner.state_chunk,
        )
        sockets, control = cast(WorkerSockets, self.sockets), cast(Control, None)
        self.engine = Engine(sockets, scheduler, self.store, runner, control, self.metrics)
        self._asked = 0

    def ask(self, messages: Sequence[Sequence[int]], max_tokens: int = 1, cache: bool = True) -> tuple[str, float]:
        """Put a prompt of these messages and a short suffix in the inbox: its id, and when."""
        self._asked += 1
        token_ids, boundaries, digest = array("i"), [], root_digest("model", "")
        for index, message in enumerate(messages):
            part = array("i", message)
            token_ids.extend(part)
            digest = link_digest(digest, part)
            boundaries.append(Boundary(len(token_ids), digest, "message" if index else "head", index + 1))
        token_ids.extend((1, 2, 3))
        sampling = Sampling(max_tokens, temperature=0.0)
        request = Generate(f"r{self._asked}", token_ids, tuple(boundaries), sampling, cache_prompt=cache)
        asked = time.perf_counter()
        self.sockets.inbox.put(FromGateway(b"gateway", request))
        return request.request_id, asked

    def run(self) -> None:
        """Until all is answered."""
        self.engine.turn(wait=False)
        while self.engine.running_count or self.engine.waiting_count:
            self.engine.turn(wait=False)

    def first_token(self, messages: Sequence[Sequence[int]], cache: bool = True) -> float:
        """Milliseconds from asking to the first token."""
        request_id, asked = self.ask(messages, cache=cache)
        self.run()
        return 1e3 * (self.sockets.tokens[request_id][0] - asked)

    def token_ms(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Mean milliseconds between the tokens of each of these requests, while all of them decode."""
        # While others still start, the first ones decode: a step after each prefill pass.
        asked = [self.ask([part], 128 + 4 * len(prompts), cache=False)[0] for part in prompts]
        self.run()
        begin = max(self.sockets.tokens[request_id][0] for request_id in asked)
        means = []
        for request_id in asked:
            times = [at for at in self.sockets.tokens[request_id] if at > begin][:100]
            means.append(1e3 * (times[-1] - times[0]) / (len(times) - 1))
        return means

    def mean_ms(self, name: str) -> float:
        """Mean of a histogram of seconds."""
        total = self.metrics.registry.get_sample_value(f"prefixd_{name}_seconds_sum") or 0.0
        return 1e3 * total / (self.metrics.registry.get_sample_value(f"prefixd_{name}_seconds_count") or 1.0)


def serve_rows(bench: Bench) -> None:
    """Whole requests through the engine."""
    served, repeat = Served(bench), bench.repeat
    words = [list(bench.ids[i:]) + list(bench.ids[:i]) for i in range(0, 4 * 512, 512)]

    def row(work: str, times: Sequence[float], must: float | None, vllm: float | None) -> None:
        bench.rows.append(Row(work, statistics.median(times), min(times), None, must, vllm))
        print(line(bench.rows[-1]), flush=True)

    history = [words[0][i : i + 250] for i in range(0, 28_000, 250)]
    served.first_token(history)
    times = []
    for turn in range(20):
        history.append(words[1][250 * turn : 250 * (turn + 1)])
        times.append(served.first_token(history))
    row("engine: growing conversation, 28k-33k + 250", times, 30, 158)
    length = sum(map(len, history))
    share = served.store.snapshot_bytes / (-(-length // BLOCK_TOKENS) * served.block_bytes)
    windows = [[words[w][i : i + 200] for i in range(0, 7200, 200)] for w in (1, 2, 3)]
    for window in windows:
        served.first_token(window)
    times = []
    for turn in range(6):
        for window in windows:
            window.append(words[2][4000 + 200 * turn :][:200])
            times.append(served.first_token(window))
    row("engine: three windows, 7k + 200", times, 15, 45)
    for name, size, must, vllm in (("2k", 2048, 60, 82), ("8k", 8192, 220, 247), ("32k", 32768, 1450, 1309)):
        part = words[3][: size - 3]
        times = [served.first_token([part], cache=False) for _ in range(max(repeat // 3, 3))]
        row(f"engine: cold {name}", times, must, vllm)
    for batch, must, vllm in ((1, 6.0, 6.5), (8, 6.3, 6.7), (32, 7.2, 7.2), (64, None, None)):
        prompts = [bench.ids[i * 50 : i * 50 + 256] for i in range(batch)]
        served.token_ms(prompts)
        row(f"engine: per token, batch {batch}, 256-512 tokens", served.token_ms(prompts), must, vllm)
    row("engine: restore (host)", [served.mean_ms("restore")], 0.2, None)
    row("engine: commit (host)", [served.mean_ms("commit")], 0.2, None)
    row(
        "copy of a partly filled block (device)",
        [device_ms(lambda: bench.runner.cache.copy_block(1, 2))],
        0.2,
        None,
    )
    print(f"snapshots along the conversation: {share:.3f} of its keys and values")


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


def line(row: Row) -> str:
    def cell(value: float | None) -> str:
        return f"{value:10.2f}" if value is not None else f"{'-':>10}"

    numbers = (row.median, row.best, row.floor, row.must, row.vllm)
    return f"{row.work:44}" + "".join(cell(value) for value in (*numbers, row.floor and row.median / row.floor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=10, help="runs of each prefill row")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--profile", type=Path, help="write kernel times of some passes here")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("worker.journal").setLevel(logging.WARNING)
    torch.set_grad_enabled(False)
    bench = Bench(options.repeat)
    gc.collect()
    gc.freeze()
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy {bench.bytes_per_ms / 1e9:.2f} TB/s, product {bench.flops_per_ms / 1e9:.0f} TFLOP/s")
    print(json.dumps(bench.start))
    print(
        f"{'milliseconds':44}{'median':>10}{'best':>10}{'floor':>10}{'must':>10}{'vLLM 0.24':>10}{'/ floor':>10}"
    )
    bench.first_token(0, 33018)  # fills the pool
    bench.prefill_row("first token, 32k cached + 250 new", 32768, 250, 30, 158)
    bench.prefill_row("first token, 7k cached + 200 new", 7168, 200, 15, 45)
    bench.prefill_row("first token, 32k cached + 1 new", 32768, 1, 30, 158)
    bench.prefill_row("cold 2k", 0, 2048, 60, 82)
    bench.prefill_row("cold 8k", 0, 8192, 220, 247)
    bench.prefill_row("cold 32k", 0, 32768, 1450, 1309)
    for length in (256, 1024):
        for batch, must, vllm in ((1, 6.0, 6.5), (8, 6.3, 6.7), (32, 7.2, 7.2), (64, None, None)):
            bench.decode_row(batch, length, must, vllm)
    bench.decode_row(1, 32768, None, None)
    bench.decode_row(8, 32768, None, None)
    serve_rows(bench)
    if options.profile:
        for cached, new in PROFILED:
            write_kernel_times(f"{cached} + {new}", partial(bench.first_token, cached, new), options.profile)
    if options.json:
        options.json.write_text(
            json.dumps({"card": card, **bench.start, "rows": [asdict(row) for row in bench.rows]})
        )


if __name__ == "__main__":
    main()
