"""Model families, one file each, and which one an architecture belongs to."""

from __future__ import annotations

from worker.model_shape import Architecture, ModelConfig
from worker.models.gemma4 import Gemma4Model
from worker.models.llama import LlamaModel
from worker.models.qwen3_5 import Qwen3_5Model

ModelClass = type[LlamaModel] | type[Qwen3_5Model] | type[Gemma4Model]

_FAMILIES: dict[Architecture, ModelClass] = {
    "llama": LlamaModel,
    "qwen2": LlamaModel,
    "qwen3": LlamaModel,
    "qwen3_5": Qwen3_5Model,
    "gemma4": Gemma4Model,
}


def model_class(config: ModelConfig) -> ModelClass:
    """The class whose instances are models of this config; each is a `Model`."""
    return _FAMILIES[config.architecture]
