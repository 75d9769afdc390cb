"""All weights of a model under their Hugging Face names, whichever files they come from, and its identity."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from worker.fingerprint import fingerprint as fingerprint
from worker.gguf_file import GgufFile
from worker.gguf_weights import GgufWeights
from worker.model_config import ModelConfig
from worker.model_error import ModelError
from worker.model_shape import AttentionLayer
from worker.safetensors_weights import SafetensorsWeights
from worker.weight_names import weight_names as weight_names

# Rotary angles that old checkpoints stored; we compute them.
_ROTARY_BUFFER = re.compile(r".*\brotary_emb\.inv_freq")
_NAMED_IN_ERRORS = 5
_AHEAD_VALUES, _MOST_AHEAD = 16 << 20, 8  # values and tensors that are read before they are asked for
_OF_MANY_PARTS = ("qwen3_5", "gemma4")
_KEYS_OR_VALUES = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.\w+")
# Checkpoints of models that see and hear put the text part under a name of its own.
_TEXT_PART = re.compile(r"^(model\.language_model\.|language_model\.model\.)|^language_model\.(?=lm_head\.)")
# What text alone does not need: other senses, and layers that only guess ahead.
_OTHER_PARTS = re.compile(
    r"(model\.)?(visual|vision_tower|embed_vision|audio_tower|embed_audio|multi_modal_projector)\..*|mtp\..*"
)


def iter_weights(path: Path, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `weight_names(config)` once, in stored order, in memory of its own.

    Floating types come as stored, quantised ones as float32. Names and shapes are checked before the first tensor
    is read; a few are read ahead of what is asked for. Raises `ModelError` naming tensors that are missing, unknown or
    of another shape.
    """
    source = SafetensorsWeights(path) if path.is_dir() else GgufWeights(path, config)
    expected = weight_names(config)
    found: dict[str, tuple[int, ...]] = {}
    for stored, shape in source.shapes.items():
        name = _text_name(stored, config)
        if name in found:
            raise ModelError(f"{path}: {stored} stands there under another name too")
        if not _ignored(name, config):
            found[name] = shape
    _check(path, expected, found)
    for stored, tensor in _ahead(source.read(), _count_ahead(source.shapes.values())):
        name = _text_name(stored, config)
        if name in expected:
            yield name, tensor


def stored_in_four_bits(path: Path) -> bool:
    """Whether all matrices of the layers are stored as Q4_1, which packed weights hold with the same values.

    Other kinds of four bits have other scales: packing them again would move their values.
    """
    return not path.is_dir() and all(
        tensor.kind == GGMLQuantizationType.Q4_1
        for name, tensor in GgufFile(path).tensors.items()
        if name.startswith("blk.") and len(tensor.shape) == 2
    )


def _ahead(tensors: Iterator[tuple[str, Tensor]], count: int) -> Iterator[tuple[str, Tensor]]:
    """Read so many tensors ahead, on a thread of its own with a single torch thread, while the consumer packs others.

    Copying and unpacking are bound by memory, so more threads gain nothing on a quiet machine, and their thousands
    of barriers cost seconds where another process wants a core: 0.35 s became 8 s for the 135M default model.
    """
    threads = torch.get_num_threads()
    coming: deque[Future[tuple[str, Tensor] | None]] = deque()
    try:
        with ThreadPoolExecutor(1, "weights", initializer=torch.set_num_threads, initargs=(1,)) as reader:
            coming.extend(reader.submit(next, tensors, None) for _ in range(count))
            while (item := coming.popleft().result()) is not None:
                coming.append(reader.submit(next, tensors, None))
                yield item
    finally:
        torch.set_num_threads(threads)  # what the reader was given holds for threads that begin later, too


def _count_ahead(shapes: Collection[tuple[int, ...]]) -> int:
    """How many tensors of such shapes may be held beside those that are packed: of a large model one."""
    usual = sorted(map(math.prod, shapes))[len(shapes) // 2]
    return min(max(_AHEAD_VALUES // usual, 1), _MOST_AHEAD)


def _text_name(stored: str, config: ModelConfig) -> str:
    """The name that a tensor of the text part has where there is no other part."""
    if config.architecture not in _OF_MANY_PARTS:
        return stored
    return _TEXT_PART.sub(lambda prefix: "model." if prefix[1] else "", stored, count=1)


def _ignored(name: str, config: ModelConfig) -> bool:
    # Some checkpoints store the tied head a second time.
    if config.tie_word_embeddings and name == "lm_head.weight":
        return True
    if config.architecture in _OF_MANY_PARTS and _OTHER_PARTS.fullmatch(name):
        return True
    # Some keep the unused projections of layers that read the keys and values of others.
    if (unused := _KEYS_OR_VALUES.fullmatch(name)) and int(unused[1]) < config.num_layers:
        layer = config.layers[int(unused[1])]
        return isinstance(layer, AttentionLayer) and layer.shares_kv_with is not None
    return _ROTARY_BUFFER.fullmatch(name) is not None


def _check(path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    if missing := [name for name in expected if name not in found]:
        raise ModelError(f"{path}: missing {_listed(missing)}")
    if extra := [name for name in found if name not in expected]:
        raise ModelError(f"{path}: holds {_listed(extra)}, which a model of this config does not have")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"{path}: {name} must be {list(shape)} and is {list(found[name])}")


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _NAMED_IN_ERRORS
    return ", ".join(names[:_NAMED_IN_ERRORS]) + (f" and {more} more" if more > 0 else "")
