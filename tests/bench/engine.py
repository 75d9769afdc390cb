"""Times the CUDA engine on random weights of an 8B dense or a 9B hybrid shape: `python tests/bench/engine.py`.

Everything is measured in this process, without HTTP: passes from their call to the token id on the host, and whole
requests from the engine's inbox to the event that carries the first token. The floor of a pass is computed from
ceilings measured in the same run: a device copy and a large matrix product; the last column is the time over it. The
one before is what vLLM 0.24 did at the same work on one H100, from the client side, states of a hybrid kept on a grid
of 272 tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_passes import Bench, Goal, Row
from engine_requests import Served
from kernel_times import write_kernel_times
from random_model import HYBRID_SHAPE, SHAPE

PROFILED = ((1000, 600), (7168, 200), (32768, 250), (0, 2048), (0, 8192))  # tokens cached and new


class Prefill(NamedTuple):
    """The first token of a prompt, in passes alone."""

    work: str
    cached: int
    new: int
    goal: Goal


@dataclass(frozen=True)
class Plan:
    """What is measured of a shape, and against which goals."""

    shape: Mapping[str, Any]
    prefills: tuple[Prefill, ...]
    decode: Mapping[int, Goal]  # by batch: a token of each sequence
    head_tokens: int  # the first message, before those of a conversation; 0: there is none
    turns: int
    growing: Goal
    shortened: Goal  # where there is a head, which is what is left
    windows: Goal
    cold: Mapping[int, Goal]  # by tokens of the prompt
    cold_message_tokens: int | None  # messages of this length; None: one holds all
    housekeeping: Goal  # copies on the device; on the host, what restoring and keeping take


PLANS = {
    "dense": Plan(
        shape=SHAPE,
        prefills=(
            Prefill("first token, 32k cached + 250 new", 32768, 250, Goal(30, 158)),
            Prefill("first token, 7k cached + 200 new", 7168, 200, Goal(15, 45)),
            Prefill("first token, 32k cached + 1 new", 32768, 1, Goal(30, 158)),
            Prefill("cold 2k", 0, 2048, Goal(60, 82)),
            Prefill("cold 8k", 0, 8192, Goal(220, 247)),
            Prefill("cold 32k", 0, 32768, Goal(1450, 1309)),
        ),
        decode={1: Goal(6.0, 6.5), 8: Goal(6.3, 6.7), 32: Goal(7.2, 7.2), 64: Goal()},
        head_tokens=0,
        turns=20,
        growing=Goal(30, 158),
        shortened=Goal(),
        windows=Goal(15, 45),
        cold={2048: Goal(60, 82), 8192: Goal(220, 247), 32768: Goal(1450, 1309)},
        cold_message_tokens=None,
        housekeeping=Goal(0.2),
    ),
    "hybrid": Plan(
        shape=HYBRID_SHAPE,
        prefills=(
            Prefill("first token, 32k cached + 250 new", 32768, 250, Goal(30, 221)),
            Prefill("first token, 7k cached + 200 new", 7168, 200, Goal(18, 111)),
            Prefill("first token, 1k cached + 600 new", 1000, 600, Goal(18, 216)),
            Prefill("cold 2k", 0, 2048, Goal(80, 160)),
            Prefill("cold 8k", 0, 8192, Goal(240, 255)),
            Prefill("cold 32k", 0, 32768, Goal(1050, 1057)),
        ),
        decode={1: Goal(6.2, 6.6), 8: Goal(6.5, 6.8), 32: Goal(7.4, 7.5), 64: Goal()},
        head_tokens=1000,
        turns=16,
        growing=Goal(30, 221),
        shortened=Goal(18, 216),
        windows=Goal(18, 111),
        cold={2048: Goal(80, 160), 8192: Goal(240, 255), 32768: Goal(1050, 1057)},
        cold_message_tokens=400,
        housekeeping=Goal(0.5),
    ),
}


def measure_passes(bench: Bench, plan: Plan) -> None:
    bench.fill()
    for prefill in plan.prefills:
        bench.prefill_row(*prefill)
    for length in (256, 1024):
        for batch, goal in plan.decode.items():
            bench.decode_row(batch, length, goal)
    for batch in (1, 8):
        bench.decode_row(batch, 32768, Goal())
    bench.copy_row(plan.housekeeping)


class Requests:
    """Whole requests through the engine. Texts that begin differently have nothing in common."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self.bench = bench
        self.plan = plan
        self.served = Served(bench)
        self.texts = [bench.ids[i:] + bench.ids[:i] for i in range(0, 4 * 512, 512)]
        self.head = self.texts[3][: plan.head_tokens]

    def measure(self) -> None:
        self.growing()
        if self.head:
            self.shortened(250)
            self.shortened(600)
        self.windows()
        for tokens, goal in self.plan.cold.items():
            self.cold(tokens, goal)
        for batch, goal in self.plan.decode.items():
            self.decode(batch, goal)
        for name in ("restore", "commit"):
            self.bench.report(f"engine: {name} (host)", [self.served.mean_ms(name)], self.plan.housekeeping)

    def growing(self) -> None:
        """A long conversation gets longer."""
        history = [self.head] if self.head else []
        history += [self.texts[0][i : i + 250] for i in range(0, 28_000, 250)]
        self.served.first_token(history)
        begin, times = sum(map(len, history)), []
        for turn in range(self.plan.turns):
            depth = begin + 250 * turn
            history.append(self.texts[1][250 * turn : 250 * (turn + 1)])
            times.append(self.served.first_token(history, depth))
        end = begin + 250 * self.plan.turns
        work = f"engine: growing conversation, {begin // 1000}k-{end // 1000}k + 250"
        self.bench.report(work, times, self.plan.growing)
        share = self.served.store.snapshot_bytes / (end * self.bench.token_bytes)
        print(f"  snapshots along the conversation: {share:.3f} of its keys and values")

    def shortened(self, new: int) -> None:
        """A client cuts everything behind the head and sends `new` tokens instead."""
        times = []
        for turn in range(6):
            middle = self.texts[2][1000 * turn + new :][:200]
            messages = [self.head, middle, self.texts[1][1000 * turn :][: new - 200]]
            times.append(self.served.first_token(messages, len(self.head)))
        self.bench.report(f"engine: shortened behind 1,000, + {new}", times, self.plan.shortened)

    def windows(self) -> None:
        """Three conversations take turns."""
        windows = [[self.texts[w][i : i + 200] for i in range(0, 7200, 200)] for w in (1, 2, 3)]
        for window in windows:
            self.served.first_token(window)
        times = []
        for turn in range(6):
            for window in windows:
                depth = sum(map(len, window))
                window.append(self.texts[2][4000 + 200 * turn :][:200])
                times.append(self.served.first_token(window, depth))
        self.bench.report("engine: three windows, 7k + 200", times, self.plan.windows)

    def cold(self, tokens: int, goal: Goal) -> None:
        """A prompt of which nothing is known, nor kept."""
        size = tokens - 3  # what `Served` puts behind the messages
        each = self.plan.cold_message_tokens or size
        messages = [self.texts[3][i : min(i + each, size)] for i in range(0, size, each)]
        repeat = max(self.bench.repeat // 3, 3)
        times = [self.served.first_token(messages, cache=False) for _ in range(repeat)]
        parts = f", messages of {each}" if len(messages) > 1 else ""
        self.bench.report(f"engine: cold {tokens // 1024}k{parts}", times, goal)

    def decode(self, batch: int, goal: Goal) -> None:
        """Each token of sequences that all run at the same time."""
        prompts = [self.bench.ids[i * 50 : i * 50 + 256] for i in range(batch)]
        self.served.token_ms(prompts)
        times = self.served.token_ms(prompts)
        self.bench.report(f"engine: per token, batch {batch}, 256-512 tokens", times, goal)


def profile(bench: Bench, file: Path) -> None:
    """Write where the time of some passes goes."""
    for cached, new in PROFILED:
        write_kernel_times(f"{cached} + {new}", partial(bench.first_token, cached, new), file)
    decode = partial(bench.runner.decode, [5], [bench.blocks[:10]], [256], [10])
    write_kernel_times("decode, batch 1", decode, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=PLANS, default="dense", help="(default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=10, help="runs of each prefill row")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--profile", type=Path, help="write kernel times of some passes here")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("worker.journal").setLevel(logging.WARNING)
    torch.set_grad_enabled(False)
    plan = PLANS[options.shape]
    bench = Bench(plan.shape, options.repeat)
    gc.collect()
    gc.freeze()
    import triton

    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy {bench.bytes_per_ms / 1e9:.2f} TB/s, product {bench.flops_per_ms / 1e9:.0f} TFLOP/s")
    print(json.dumps(bench.start))
    print(Row.title())
    measure_passes(bench, plan)
    Requests(bench, plan).measure()
    if options.profile:
        profile(bench, options.profile)
    if options.json:
        rows = [asdict(row) for row in bench.rows]
        options.json.write_text(json.dumps({"card": card, **bench.start, "rows": rows}))


if __name__ == "__main__":
    main()
