"""Times the CUDA engine on random weights of the 9B hybrid shape: `python tests/bench/gpu_hybrid.py`.

As `engine.py` does it: in this process, passes from their call to the token id on the host, and whole requests from
the engine's inbox to the event that carries the first token. The column of vLLM 0.24 is what that did at the same work
on one H100, from the client side, its states kept on a grid of 272 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import triton
from engine import Bench, Row, Served, ceilings, device_ms
from kernel_times import write_kernel_times
from random_model import HYBRID_SHAPE, random_weights

from worker.block_pool import BlockPool
from worker.cuda.hybrid import HybridModel
from worker.cuda.mixed_runner import MixedRunner
from worker.cuda.product_check import check_products
from worker.cuda.tiles import tiles_for
from worker.cuda.triton_mixed_ops import TritonMixedOps
from worker.kv_cache import BLOCK_TOKENS, KVCache, block_bytes
from worker.model_config import parse_config
from worker.recurrent import StatePool
from worker.steps import StateUse

CONTEXT = 34816  # longest sequence here
ENTRIES = 256
ATTENTION_LAYERS = 8
PROFILED = ((1000, 600), (7168, 200), (32768, 250), (0, 8192))  # tokens cached and new


class HybridBench(Bench):
    """A loaded hybrid and what was measured on it."""

    def __init__(self, repeat: int) -> None:
        self.device = torch.device("cuda")
        self.repeat = repeat
        self.rows: list[Row] = []
        self.bytes_per_ms, self.flops_per_ms = ceilings(self.device)
        self.config = parse_config(HYBRID_SHAPE)
        started = time.monotonic()
        weights = random_weights(self.config, self.device, torch.bfloat16)
        model = HybridModel(self.config, weights, torch.bfloat16, self.device, CONTEXT)
        torch.cuda.synchronize()
        loaded = time.monotonic()
        tiles = tiles_for(self.device)
        counts, padded = check_products(model, TritonMixedOps(tiles))
        ops = TritonMixedOps(tiles, padded=padded)
        checked = time.monotonic()
        blocks = 33 * (CONTEXT // BLOCK_TOKENS) // 4
        cache = KVCache(self.config, blocks, torch.bfloat16, self.device)
        self.states = StatePool(self.config, ENTRIES, self.device)
        self.runner = MixedRunner(model, cache, ops, counts, self.states)
        torch.cuda.synchronize()
        self.start = {
            "weights_s": loaded - started,
            "row_check_s": checked - loaded,
            "graphs_s": time.monotonic() - checked,
            "row_counts": counts,
            "padded": self.runner.row_counts.padded,
            "state_bytes": self.states.layout.entry_bytes,
            "kv_bytes_per_token": block_bytes(self.config, torch.bfloat16) // BLOCK_TOKENS,
        }
        self.layer_weights = sum(
            w.numel() for layer in model.layers for w in (layer.first, layer.out, layer.gate_up, layer.down)
        )
        self.head_weights = self.config.vocab_size * self.config.hidden_size
        generator = torch.Generator().manual_seed(0)
        self.ids: list[int] = torch.randint(self.config.vocab_size, (CONTEXT,), generator=generator).tolist()
        order = torch.randperm(blocks - 1, generator=generator) + 1
        self.blocks: list[int] = order.tolist()  # as they lie after a while of serving

    def first_token(self, cached: int, new: int) -> int:
        """Prefill `new` tokens behind `cached` ones that are in the pool already; the first token's id."""
        end, start = cached + new, cached
        source: int | None = 2 if cached else 0
        while start < end:
            part = self.ids[start : min(start + self.runner.max_prefill_rows, end)]
            # A snapshot is made before the last few tokens, as of a conversation's newest message.
            last = start + len(part) == end and len(part) > 4
            kept = ((len(part) - 4, 3),) if last else ()
            use = StateUse(1, source, kept, tuple(rows for rows, _ in kept))
            hidden = self.runner.prefill(part, self.blocks, start, use)
            start, source = start + len(part), None
        logits = self.runner.head_row(hidden[len(part) - 1])
        return self.runner.largest(logits.unsqueeze(0))[0][0]

    def prefill_row(self, work: str, cached: int, new: int, must: float | None, vllm: float | None) -> None:
        keys = cached * new + new * (new + 1) / 2
        attention = 4 * keys * self.config.num_heads * self.config.head_dim * ATTENTION_LAYERS
        products = max(
            2 * new * self.layer_weights / self.flops_per_ms, 2 * self.layer_weights / self.bytes_per_ms
        )
        floor = products + attention / self.flops_per_ms
        self.add(work, lambda: self.first_token(cached, new), floor, must, vllm)

    def decode_row(self, batch: int, length: int, must: float | None, vllm: float | None) -> None:
        each = -(-(length + 64) // BLOCK_TOKENS)
        tables = [self.blocks[i * each : (i + 1) * each] for i in range(batch)]
        lengths, tokens = [length] * batch, self.ids[:batch]
        entries = list(range(10, 10 + batch))

        def step() -> None:
            nonlocal lengths, tokens
            tokens = self.runner.largest(self.runner.decode(tokens, tables, lengths, entries))[0]
            lengths = [length + (n + 1 - length) % 60 for n in lengths]

        kv = batch * length * 2 * self.config.num_kv_heads * self.config.head_dim * ATTENTION_LAYERS
        moved = 2 * (self.layer_weights + self.head_weights + kv) + 2 * batch * self.states.layout.entry_bytes
        floor = moved / self.bytes_per_ms
        self.add(f"decode step, batch {batch}, {length} tokens each", step, floor, must, vllm, repeat=30)


def first_token(served: Served, messages: Sequence[Sequence[int]], depth: int) -> float:
    """Milliseconds to the first token of a prompt that starts from a snapshot of `depth` tokens, or it says so."""
    request_id, asked = served.ask(messages)
    served.run()
    if served.sockets.depths[request_id] != depth:
        print(f"  started from {served.sockets.depths[request_id]} of {depth} tokens")
    return 1e3 * (served.sockets.tokens[request_id][0] - asked)


def serve_rows(bench: HybridBench) -> None:
    """Whole requests through the engine."""
    served, repeat = Served(bench, BlockPool(ENTRIES, 1), bench.states.layout.entry_bytes), bench.repeat
    words = [list(bench.ids[i:]) + list(bench.ids[:i]) for i in range(0, 4 * 512, 512)]
    head = words[3][:1000]
    history = [head, *(words[0][i : i + 250] for i in range(0, 28_000, 250))]
    served.first_token(history)
    times = []
    for turn in range(16):
        depth = sum(map(len, history))
        history.append(words[1][250 * turn : 250 * (turn + 1)])
        times.append(first_token(served, history, depth))
    bench.report("engine: growing conversation, 29k-33k + 250", times, None, 30, 221)
    for new in (250, 600):
        times = []
        for turn in range(6):
            shortened = [head, words[2][1000 * turn + new :][:200], words[1][1000 * turn :][: new - 200]]
            times.append(first_token(served, shortened, len(head)))
        bench.report(f"engine: shortened behind 1,000, + {new}", times, None, 18, 216)
    windows = [[words[w][i : i + 200] for i in range(0, 7200, 200)] for w in (1, 2, 3)]
    for window in windows:
        served.first_token(window)
    times = []
    for turn in range(6):
        for window in windows:
            depth = sum(map(len, window))
            window.append(words[2][4000 + 200 * turn :][:200])
            times.append(first_token(served, window, depth))
    bench.report("engine: three windows, 7k + 200", times, None, 18, 111)
    for name, size, must, vllm in (("2k", 2048, 80, 160), ("8k", 8192, 240, 255), ("32k", 32768, 1050, 1057)):
        part = words[3][: size - 3]
        messages = [part[i : i + 400] for i in range(0, len(part), 400)]
        times = [served.first_token(messages, cache=False) for _ in range(max(repeat // 3, 3))]
        bench.report(f"engine: cold {name}, messages of 400", times, None, must, vllm)
    for batch, must, vllm in ((1, 6.2, 6.6), (8, 6.5, 6.8), (32, 7.4, 7.5)):
        prompts = [bench.ids[i * 50 : i * 50 + 256] for i in range(batch)]
        served.token_ms(prompts)
        times = served.token_ms(prompts)
        bench.report(f"engine: per token, batch {batch}, 256-512 tokens", times, None, must, vllm)
    bench.report("engine: restore (host)", [served.mean_ms("restore")], None, 0.5, None)
    bench.report("engine: commit (host)", [served.mean_ms("commit")], None, 0.5, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=10, help="runs of each prefill row")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--profile", type=Path, help="write kernel times of some passes here")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("worker.journal").setLevel(logging.WARNING)
    torch.set_grad_enabled(False)
    bench = HybridBench(options.repeat)
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
    bench.states.memory[2].normal_(std=0.1)
    bench.prefill_row("first token, 32k cached + 250 new", 32768, 250, 30, 221)
    bench.prefill_row("first token, 7k cached + 200 new", 7168, 200, 18, 111)
    bench.prefill_row("first token, 1k cached + 600 new", 1000, 600, 18, 216)
    bench.prefill_row("cold 2k", 0, 2048, 80, 160)
    bench.prefill_row("cold 8k", 0, 8192, 240, 255)
    bench.prefill_row("cold 32k", 0, 32768, 1050, 1057)
    for batch, must, vllm in ((1, 6.2, 6.6), (8, 6.5, 6.8), (32, 7.4, 7.5), (64, None, None)):
        bench.decode_row(batch, 256, must, vllm)
    bench.decode_row(1, 32768, None, None)
    copies = device_ms(lambda: bench.states.copy(2, 3))
    bench.report("copy of a state (device)", [copies], None, 0.5, None)
    serve_rows(bench)
    if options.profile:
        for cached, new in PROFILED:
            write_kernel_times(f"{cached} + {new}", partial(bench.first_token, cached, new), options.profile)
        tables, entries = [bench.blocks[:10]], [10]
        decode = partial(bench.runner.decode, [5], tables, [256], entries)
        write_kernel_times("decode, batch 1", decode, options.profile)
    if options.json:
        rows = [asdict(row) for row in bench.rows]
        options.json.write_text(json.dumps({"card": card, **bench.start, "rows": rows}))


if __name__ == "__main__":
    main()
