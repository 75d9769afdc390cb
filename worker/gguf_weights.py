"""The tensors of a GGUF file under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from worker.dequantize import dequantize
from worker.gguf_file import GgufFile, GgufTensor
from worker.model_config import ModelConfig
from worker.model_error import ModelError

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Read with the config where they matter; the second holds angles that older converters wrote down.
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
_KEPT_AS_STORED = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


class GgufWeights:
    """Reads one file; `shapes` holds the shape of each tensor by its Hugging Face name."""

    def __init__(self, path: Path, config: ModelConfig) -> None:
        self._file = GgufFile(path)
        self._config = config
        self._stored = {
            _hugging_face_name(name): tensor
            for name, tensor in self._file.tensors.items()
            if not _NOT_WEIGHTS.fullmatch(name)
        }
        self.shapes = {name: tensor.shape for name, tensor in self._stored.items()}

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors in the order in which they are stored, each in memory of its own."""
        for name, stored in self._stored.items():
            yield name, self._unpermute(name, self._values(stored))

    def _values(self, stored: GgufTensor) -> Tensor:
        raw = torch.frombuffer(
            self._file.map, dtype=torch.uint8, offset=stored.start, count=stored.end - stored.start
        )
        dtype = _KEPT_AS_STORED.get(stored.kind)
        if dtype is not None:
            return raw.view(dtype).view(stored.shape).clone()
        try:
            return dequantize(raw, stored.kind, stored.shape)
        except NotImplementedError as error:
            raise ModelError(f"{stored.name}: no way to read type {stored.kind.name}") from error

    def _unpermute(self, name: str, tensor: Tensor) -> Tensor:
        """Rows of q and k in the rotary order of Hugging Face.

        llama.cpp turns neighbouring rows (2i, 2i + 1) of a Llama head together, Hugging Face rows i and
        i + head_dim / 2, so converted files of this one architecture have them interleaved.
        """
        if self._config.architecture != "llama" or ".self_attn." not in name:
            return tensor
        projection = name.rsplit(".", 2)[1]
        if projection not in ("q_proj", "k_proj"):
            return tensor
        heads = self._config.num_heads if projection == "q_proj" else self._config.num_kv_heads
        pairs = tensor.view(heads, -1, 2, *tensor.shape[1:])
        return pairs.transpose(1, 2).reshape(tensor.shape)


def _hugging_face_name(name: str) -> str:
    """The name in a Hugging Face checkpoint; unknown ones stay as they are, to be reported as they stand."""
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{suffix}"
    return name
