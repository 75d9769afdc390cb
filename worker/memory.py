"""How much memory the KV pool gets, and what that is worth in tokens."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from protocol.errors import SettingsError
from protocol.sizes import format_size
from worker.kv_cache import BLOCK_TOKENS

log = logging.getLogger(__name__)

_CPU_SHARE, _CPU_MOST = 0.25, 4 << 30  # a CPU's memory is everybody's
_CUDA_SHARE = 0.85  # of what is free once the weights are loaded; the rest is for activations


def pool_blocks(kv_memory: int | str, block_bytes: int, device: torch.device, max_model_len: int) -> int:
    """Blocks of the pool, the reserved one included. Says so where one context does not fit.

    Raises `SettingsError` where the budget is too small to serve anything.
    """
    budget = kv_memory if isinstance(kv_memory, int) else _auto(device)
    blocks = budget // block_bytes
    if blocks < 3:
        raise SettingsError(
            f"kv_memory: {format_size(budget)} is less than 3 blocks of {format_size(block_bytes)} "
            f"({BLOCK_TOKENS} tokens each)"
        )
    tokens = (blocks - 1) * BLOCK_TOKENS
    log.info(
        "kv memory: %s = %d blocks of %d tokens (%s each), %d tokens in all",
        format_size(blocks * block_bytes),
        blocks,
        BLOCK_TOKENS,
        format_size(block_bytes),
        tokens,
    )
    if tokens < max_model_len:
        log.warning(
            "kv_memory holds %d tokens, less than one snapshot at the full context of %d: longer prompts are refused",
            tokens,
            max_model_len,
        )
    return blocks


def _auto(device: torch.device) -> int:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE)
    return min(int(_available_bytes() * _CPU_SHARE), _CPU_MOST)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30
