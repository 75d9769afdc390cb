"""Write a checkpoint of random weights in the real layout, to measure with: `random_model.py DIRECTORY`.

Its shape is that of an 8B dense model, of a 9B hybrid (the text part of a Qwen3.5), of a Gemma 4 with sliding layers,
or of another `config.json`. The tokenizer, and with it the chat template, is copied from a folder or made of a .gguf
file; the vocabulary is as large as the tokenizer's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gateway.model_files import load_model_files
from worker.model_config import ModelConfig, parse_config
from worker.weight_names import weight_names

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 49152,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
HYBRID_SHAPE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 49152,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
}
SLIDING_SHAPE = {  # Gemma 4 E4B: every 6th layer sees everything
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "vocab_size": 49152,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "num_kv_shared_layers": 18,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {"dense": SHAPE, "hybrid": HYBRID_SHAPE, "sliding": SLIDING_SHAPE}
VOCABULARY_MULTIPLE = 64  # as real models are padded
SHARD_BYTES = 2 << 30
WRITERS = 4
_COPIED = ("tokenizer.json", "tokenizer.json.gz", "tokenizer_config.json", "chat_template.jinja")


def random_weights(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model, made on the device."""
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in weight_names(config).items():
        tensor = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        yield name, 1 + 0.1 * tensor if len(shape) == 1 else 0.02 * tensor


def write_model(directory: Path, tokenizer: Path, shape: Mapping[str, Any], device: torch.device) -> None:
    """Everything that a model's directory holds. Files of the same names are replaced."""
    directory.mkdir(parents=True, exist_ok=True)
    tokens = _write_tokenizer(directory, tokenizer)
    fields = {**shape, "vocab_size": -(-tokens // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE}
    (directory / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
    _write_weights(directory, parse_config(fields), device)


def _write_tokenizer(directory: Path, source: Path) -> int:
    """Copy or make it; returns how many tokens it has."""
    files = load_model_files(source)
    if source.is_dir():
        for name in _COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, directory / name)
    else:
        files.tokenizer.save(str(directory / "tokenizer.json"))
        fields = {**files.special_tokens, "chat_template": files.templates["default"]}
        (directory / "tokenizer_config.json").write_text(json.dumps(fields, indent=2) + "\n")
    return int(files.tokenizer.get_vocab_size(with_added_tokens=True))


def _write_weights(directory: Path, config: ModelConfig, device: torch.device) -> None:
    """Shards of about `SHARD_BYTES`, some written while the next are made, and their index."""
    shards = list(_shards(random_weights(config, device, torch.bfloat16)))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(WRITERS) as pool:
        for written in [
            pool.submit(_write_shard, shard, directory / name) for shard, name in zip(shards, names, strict=True)
        ]:
            written.result()
    index = {tensor: name for shard, name in zip(shards, names, strict=True) for tensor in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}, indent=2) + "\n")


def _shards(weights: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    for name, tensor in weights:
        shard[name] = tensor
        if sum(each.nbytes for each in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def _write_shard(shard: dict[str, Tensor], file: Path) -> None:
    save_file({name: tensor.cpu() for name, tensor in shard.items()}, file, {"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model's folder or .gguf file")
    parser.add_argument("--shape", choices=SHAPES, default="dense", help="(default: %(default)s)")
    parser.add_argument("--config", type=Path, help="config.json of another shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    started = time.perf_counter()
    shape = json.loads(options.config.read_text()) if options.config else SHAPES[options.shape]
    write_model(options.directory, options.tokenizer, shape, torch.device(options.device))
    size = sum(file.stat().st_size for file in options.directory.iterdir())
    print(f"{options.directory}: {size / 1e9:.1f} GB in {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
