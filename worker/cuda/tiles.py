"""Every choice that depends on the card's architecture, in one place, pinned: bits depend on some of them.

Tried on Hopper alone (H100, H200). Cards with less shared memory take the smaller shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PREFILL_SPLIT = 4096  # keys of one split of prefill attention, from absolute multiples
DECODE_SPLIT = 256  # keys of one split of decode attention
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # rows that decode runs at
GRAPH_PREFILL_ROWS = 512  # passes up to here are captured: the host takes 10 ms to start one launch by launch
SHARED_PREFILL_ROWS = 512  # rows of a prefill pass while others decode
# Decode's rows in a product: each batch takes the least of these that holds it.
SKINNY_ROWS = (16, 32, 64)


@dataclass(frozen=True, slots=True)
class Tile:
    """How one kernel is cut: `rows` by `columns` results a program, `depth` of the sum a step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Tiles:
    """The shapes of all kernels that have one. Of attention: query rows by keys.

    `early`: kernels of a decode step start while the one before still runs (compute capability 9.0 and later).
    """

    prefill: Tile
    decode: Tile
    prefill_wide: Tile  # heads of 256
    decode_wide: Tile
    prefill_widest: Tile  # heads of 512
    decode_widest: Tile
    skinny: dict[int, Tile]  # by the rows of `SKINNY_ROWS`
    skinny_gated: dict[int, Tile]  # two products side by side
    processors: int
    hopper: bool = False  # prefill attention has a kernel of its own (compute capability 9.0)
    early: bool = False
    ahead: int = 0  # inputs whose weights a product that starts early has brought to the cache

    def prefill_for(self, head_dim: int) -> Tile:
        """The shape of prefill attention for heads of this size."""
        return self.prefill if head_dim <= 128 else self.prefill_wide if head_dim <= 256 else self.prefill_widest

    def decode_for(self, head_dim: int) -> Tile:
        """The shape of decode attention for heads of this size."""
        return self.decode if head_dim <= 128 else self.decode_wide if head_dim <= 256 else self.decode_widest


def tiles_for(device: torch.device) -> Tiles:
    """The shapes for the card at hand."""
    properties = torch.cuda.get_device_properties(device)
    processors, early = properties.multi_processor_count, properties.major >= 9
    if properties.major == 9 or (properties.major, properties.minor) in ((8, 0), (10, 0), (10, 3)):
        return _roomy(processors, early, hopper=properties.major == 9)
    return _small(processors, early)


def _roomy(processors: int, early: bool, hopper: bool) -> Tiles:
    """For 160 kB of shared memory and more."""
    return Tiles(
        prefill=Tile(128, 128, 0, 8, 2),
        decode=Tile(16, 128, 0, 4, 2),
        # Measured on an H100: the fastest of five shapes by a quarter. With splits half as long, 8192 rows took an
        # eighth more.
        prefill_wide=Tile(128, 64, 0, 8, 2),
        decode_wide=Tile(16, 64, 0, 4, 2),
        prefill_widest=Tile(64, 32, 0, 8, 2),
        decode_widest=Tile(16, 32, 0, 4, 2),
        skinny={rows: Tile(rows, 64, 128, 4, 6) for rows in SKINNY_ROWS},
        skinny_gated={rows: Tile(rows, 64, 128, 4, 4) for rows in SKINNY_ROWS},
        processors=processors,
        hopper=hopper,
        early=early,
        ahead=256 if early else 0,
    )


def _small(processors: int, early: bool) -> Tiles:
    """For 100 kB of shared memory."""
    return Tiles(
        prefill=Tile(64, 32, 0, 4, 2),
        decode=Tile(16, 32, 0, 4, 2),
        prefill_wide=Tile(32, 32, 0, 4, 2),
        decode_wide=Tile(16, 32, 0, 4, 2),
        prefill_widest=Tile(16, 32, 0, 4, 1),
        decode_widest=Tile(16, 32, 0, 4, 1),
        skinny={rows: Tile(rows, 32, 64, 4, 3) for rows in SKINNY_ROWS},
        skinny_gated={rows: Tile(rows, 32, 64, 4, 3) for rows in SKINNY_ROWS},
        processors=processors,
        early=early,
    )
