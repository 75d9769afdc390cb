"""When this backend runs a model, and how it is put together."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable

import torch

from worker.cuda import dense, hybrid, sliding
from worker.cuda.dense import DenseModel
from worker.cuda.hybrid import HybridModel
from worker.cuda.mixed_runner import MixedRunner
from worker.cuda.product_check import check_products
from worker.cuda.runner import CudaRunner
from worker.cuda.sliding import SlidingModel
from worker.cuda.tiles import tiles_for
from worker.kv_cache import KVCache
from worker.model_shape import ModelConfig
from worker.recurrent import StatePool

log = logging.getLogger(__name__)


CudaModel = DenseModel | HybridModel | SlidingModel


def model_class(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> type[CudaModel] | None:
    """What a model of this config and type is here; None where it runs layer by layer in torch."""
    served: list[tuple[type[CudaModel], bool]] = [
        (DenseModel, dense.is_served(config, dtype)),
        (HybridModel, hybrid.is_served(config, dtype)),
        (SlidingModel, sliding.is_served(config, dtype)),
    ]
    found = next((each for each, fits in served if fits), None)
    if device.type != "cuda" or found is None:
        return None
    if importlib.util.find_spec("triton") is None:
        log.warning("Triton is not installed: %s runs layer by layer in torch, slower", config.architecture)
        return None
    return found


def prepare(model: CudaModel) -> Callable[[KVCache, StatePool | None], CudaRunner]:
    """Check the card's products now. What is returned makes the runner, once there is memory for what it holds."""
    from worker.cuda.triton_mixed_ops import TritonMixedOps

    ops = TritonMixedOps(tiles_for(model.device))
    counts = check_products(model, ops)
    torch.cuda.empty_cache()  # what the check took is free for keys and values
    if isinstance(model, DenseModel):
        return lambda cache, _states: CudaRunner(model, cache, ops, counts)
    return lambda cache, states: MixedRunner(model, cache, ops, counts, states)
