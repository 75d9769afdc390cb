"""Which weight type may be the default: perplexity on a page of text for each, as a ratio to float32.

    quality.py [--model PATH_OR_NAME] [--text FILE] [--tokens N]

Every type runs the kernels it serves with: packed weights once as prefill runs them and once as decode does.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "20000")

import torch
from torch import Tensor

from gateway.model_files import load_model_files
from protocol.model_path import EMBEDDED_MODEL, resolve_model
from worker.kv_cache import BLOCK_TOKENS, KVCache
from worker.model_config import load_config
from worker.model_runner import ModelRunner
from worker.models.llama import LlamaModel
from worker.row_check import check_rows
from worker.weights import iter_weights

CPU = torch.device("cpu")
README = Path(__file__).parents[2] / "README.md"


def runner(path: Path, dtype: str, tokens: int) -> ModelRunner:
    config = load_config(path)
    product = torch.float32 if dtype == "float32" else torch.bfloat16
    model = LlamaModel(config, iter_weights(path, config), product, CPU, tokens + 1, packed=dtype == "int4")
    cache = KVCache(config, tokens // BLOCK_TOKENS + 3, product, CPU)
    return ModelRunner(model, cache, check_rows(model, product, tokens + 1, deterministic=True))


def losses_by_prefill(run: ModelRunner, ids: list[int]) -> Tensor:
    blocks = list(range(1, run.cache.num_blocks))
    losses = []
    for start in range(0, len(ids) - 1, run.max_prefill_rows):
        part = ids[start : min(start + run.max_prefill_rows, len(ids) - 1)]
        hidden = run.prefill(part, blocks, start)[: len(part)]
        for row, target in zip(hidden, ids[start + 1 :], strict=False):
            losses.append(-torch.log_softmax(run.head_row(row).double(), 0)[target])
    return torch.stack(losses)


def losses_by_decode(run: ModelRunner, ids: list[int]) -> Tensor:
    blocks = list(range(1, run.cache.num_blocks))
    return torch.stack(
        [
            -torch.log_softmax(run.decode([token], [blocks], [position])[0].double(), 0)[ids[position + 1]]
            for position, token in enumerate(ids[:-1])
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--text", type=Path, default=README)
    parser.add_argument("--tokens", type=int, default=1500)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    path = resolve_model(options.model)
    ids = load_model_files(path).tokenizer.encode(options.text.read_text()).ids[: options.tokens]
    print(f"{len(ids)} tokens of {options.text.name}, {path.name}")
    print(f"{'type':10} {'kernels':8} {'perplexity':>10} {'ratio':>7}")
    baseline = None
    for dtype in ("float32", "bfloat16", "int4"):
        run = runner(path, dtype, len(ids))
        for kernels, losses in (("prefill", losses_by_prefill), ("decode", losses_by_decode)):
            perplexity = float(losses(run, ids).mean().exp())
            baseline = baseline or perplexity
            print(f"{dtype:10} {kernels:8} {perplexity:10.4f} {perplexity / baseline:7.4f}", flush=True)


if __name__ == "__main__":
    main()
