"""How much memory KV and recurrent states get, and what that is worth in tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NamedTuple

import torch

from protocol.errors import SettingsError
from protocol.sizes import format_size
from worker.kv_cache import BLOCK_TOKENS

log = logging.getLogger(__name__)

_CPU_SHARE, _CPU_MOST = 0.25, 4 << 30  # a CPU's memory is everybody's
_CUDA_SHARE = 0.85  # of what is free on a card beside weights and passes, where it is not known what passes need
_SLOTS_WITH_STATES = 512
_SLOTS = 2048  # KV then goes before slots do; choosing what goes takes some 5 us of each snapshot
STATE_SHARE = 0.5  # of the budget, at most: a state costs as much as the KV of some thousand tokens
_FEWEST_STATES = 4  # the empty one, a sequence's, and two snapshots'


class Shares(NamedTuple):
    """What `kv_memory` buys: KV blocks and entries of recurrent state, the reserved one of each included."""

    blocks: int
    states: int


def slot_count(asked: int | None, *, recurs: bool) -> int:
    """How many snapshots are kept at most. `recurs`: each of them has a recurrent state of its own."""
    if asked is not None:
        return asked
    return _SLOTS_WITH_STATES if recurs else _SLOTS


def split_memory(
    kv_memory: int | str,
    block_bytes: int,
    state_bytes: int,
    most_states: int,
    device: torch.device,
    max_model_len: int,
    *,
    needed_bytes: int = 0,
) -> Shares:
    """Split the budget for good. Says so where one context does not fit.

    `needed_bytes`: what of the free memory of a card has to be left to the passes of the model, 0 where not known.

    `state_bytes`: one entry of recurrent state, 0 for models that have none. As many as could ever be used
    (`most_states`) are made, up to half of the budget; the rest is KV. Raises `SettingsError` where the budget is too
    small to serve anything, or more than the card has.
    """
    budget = _budget(kv_memory, device, needed_bytes)
    states = 0
    if state_bytes:
        states = min(most_states + 1, int(budget * STATE_SHARE) // state_bytes)
        if states < _FEWEST_STATES:
            raise SettingsError(
                f"kv_memory: half of {format_size(budget)} is less than {_FEWEST_STATES} recurrent states "
                f"of {format_size(state_bytes)}"
            )
        budget -= states * state_bytes
        log.info(
            "recurrent states: %s = %d of %s each, for sequences and snapshots",
            format_size(states * state_bytes),
            states - 1,
            format_size(state_bytes),
        )
    return Shares(_blocks(budget, block_bytes, max_model_len), states)


def _blocks(budget: int, block_bytes: int, max_model_len: int) -> int:
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


def _budget(asked: int | str, device: torch.device, needed_bytes: int) -> int:
    if device.type != "cuda":
        return asked if isinstance(asked, int) else min(int(_available_bytes() * _CPU_SHARE), _CPU_MOST)
    free, _total = torch.cuda.mem_get_info(device)
    left = max(free - needed_bytes, 0) if needed_bytes else int(free * _CUDA_SHARE)
    log.info("of %s free on the card %s are for keys, values and states", format_size(free), format_size(left))
    if not isinstance(asked, int):
        return left
    if asked > left:
        raise SettingsError(
            f"kv_memory: {format_size(asked)} is more than the {format_size(left)} that the card has for it: "
            f"{format_size(free)} are free beside the weights, and passes need the rest"
        )
    return asked


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30
