"""When this backend runs a model, and how it is put together."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch

from worker.cuda.dense import DenseModel, is_served
from worker.cuda.product_check import check_products
from worker.cuda.runner import CudaRunner
from worker.cuda.tiles import tiles_for
from worker.kv_cache import KVCache
from worker.model_shape import ModelConfig

log = logging.getLogger(__name__)


def serves(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model of this config and type runs here, and not layer by layer in torch."""
    if device.type != "cuda" or not is_served(config, dtype):
        return False
    if importlib.util.find_spec("triton") is None:
        log.warning("Triton is not installed: %s runs layer by layer in torch, slower", config.architecture)
        return False
    return True


def prepare(model: DenseModel) -> Callable[[KVCache], CudaRunner]:
    """Check the card's products now. What is returned makes the runner, once there is memory for keys and values."""
    from worker.cuda.triton_ops import TritonOps

    ops = TritonOps(tiles_for(model.device))
    counts = check_products(model, ops)
    torch.cuda.empty_cache()  # what the check took is free for keys and values
    return lambda cache: CudaRunner(model, cache, ops, counts)
