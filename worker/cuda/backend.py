"""When this backend runs a model, and how it is put together."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch

from worker.cuda import dense, hybrid, sliding
from worker.cuda.dense import DenseModel
from worker.cuda.hybrid import HybridModel
from worker.cuda.mixed_runner import MixedRunner
from worker.cuda.needs import bytes_needed
from worker.cuda.product_check import check_products
from worker.cuda.runner import CudaRunner
from worker.cuda.sliding import SlidingModel
from worker.cuda.tiles import tiles_for
from worker.kv_cache import KVCache
from worker.model_shape import DeltaLayer, ModelConfig
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


class Prepared(NamedTuple):
    """Makes the runner once there is memory for what it holds, of which `needed_bytes` are to be left to its passes."""

    make: Callable[[KVCache, StatePool | None], CudaRunner]
    needed_bytes: int


def prepare(model: CudaModel) -> Prepared:
    """Check the card's products, and try how much memory passes take."""
    from worker.cuda.triton_mixed_ops import TritonMixedOps

    tiles = tiles_for(model.device)
    counts, padded = check_products(model, TritonMixedOps(tiles))

    def make(cache: KVCache, states: StatePool | None, capture: bool = True) -> CudaRunner:
        ops = TritonMixedOps(tiles, padded=padded)
        if isinstance(model, DenseModel):
            return CudaRunner(model, cache, ops, counts, capture)
        return MixedRunner(model, cache, ops, counts, states, capture)

    recurs = any(isinstance(layer, DeltaLayer) for layer in model.config.layers)
    cache = KVCache(model.config, 2, model.dtype, model.device)
    trial = make(cache, StatePool(model.config, 2, model.device) if recurs else None, capture=False)
    return Prepared(make, bytes_needed(trial, recurs))
