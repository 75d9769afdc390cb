"""The tensors of a Hugging Face directory: one safetensors file, or shards with an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.model_error import ModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, sorted by name. Raises `ModelError` where there are none."""
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    index = directory / _INDEX
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except FileNotFoundError as error:
        raise ModelError(f"{directory}: neither {_SINGLE} nor {_INDEX}") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not an index of safetensors files") from error
    files = []
    for name in sorted(names, key=str):
        # Shards lie beside their index: a downloaded file does not get to name others on this machine.
        if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_file():
            raise ModelError(f"{index}: weight_map names {name!r}, which is no file in this directory")
        files.append(directory / name)
    return files


def tensor_spans(path: Path) -> tuple[int, list[tuple[int, int]]]:
    """Where the header ends, and the bytes [start, end) of each tensor. Raises `ModelError` if it is damaged."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {size} bytes")
            header = json.loads(file.read(size))
        data = 8 + size
        return data, [
            (data + entry["data_offsets"][0], data + entry["data_offsets"][1])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: not a safetensors file: {error}") from error


class SafetensorsWeights:
    """Reads the files of one model; `shapes` holds the shape of each tensor by name."""

    def __init__(self, directory: Path) -> None:
        self._files = weight_files(directory)
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in self._files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    if name in self.shapes:
                        raise ModelError(f"{path}: {name} stands in another file too")
                    self.shapes[name] = tuple(file.get_slice(name).get_shape())

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors, file by file, each in memory of its own."""
        for path in self._files:
            with _opened(path) as file:
                for name in file.keys():  # noqa: SIM118
                    tensor: Tensor = file.get_tensor(name)
                    if tensor.dtype not in _FLOATING:
                        raise ModelError(f"{name}: no way to compute with {tensor.dtype} weights")
                    # What safe_open gives is a view of the mapped file, which others may overwrite.
                    yield name, tensor.clone()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: {error}") from error
