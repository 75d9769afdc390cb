"""What attention needs to know of a layer, whatever computes it."""

from __future__ import annotations

from typing import NamedTuple

from worker.cpu_kernels import PoolRows
from worker.model_shape import AttentionLayer


class LayerPlan(NamedTuple):
    """What a pass needs to know of one attention layer."""

    shape: AttentionLayer
    rotary: int  # place of its rotary factors among those of a pass
    window: int  # how many tokens a row sees, its own the last of them; 0 for all
    stores: bool  # its rows bring keys and values
    arrays: tuple[PoolRows, PoolRows] | None  # its keys and values, where they can be had as arrays
