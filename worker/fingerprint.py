"""The identity of a model: what boundary digests and snapshot files are bound to."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from worker.gguf_file import GgufFile
from worker.model_error import ModelError
from worker.safetensors_weights import tensor_spans, weight_files

_WHOLE_BYTES = 512 << 20  # models up to this size are hashed whole, in about half a second at most
_PAGE_BYTES = 64 << 10
_PAGES = 8  # of each tensor of a larger model


def fingerprint(path: Path) -> str:
    """32 hex digits that name the weights and the config of the model at `path`, on any machine.

    Covers: of a GGUF file its content, thus its tokenizer and chat template too, and not its name; of a directory
    `config.json`, and the names and content of the weight files. Times and places do not count. A model of more
    than 512 MiB is sampled: its headers whole, and of every tensor 8 pages of 64 KiB, from its first byte to its
    last. Any training changes that; a change of a few values may not.

    Raises `ModelError` for files that cannot be read.
    """
    state = blake2b(digest_size=16, person=b"prefixd-model")
    if path.is_dir():
        config = path / "config.json"
        files = [(file.name, file) for file in (config, *weight_files(path))]
    else:
        files = [("gguf", path)]
    try:
        whole = sum(file.stat().st_size for _, file in files) <= _WHOLE_BYTES
        for name, file in files:
            size = file.stat().st_size
            state.update(f"{len(name)}:{name}:{size}:".encode())
            parts = [(0, size)] if whole else _sample(file, size)
            with (
                file.open("rb") as opened,
                mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
                memoryview(data) as view,
            ):
                for start, end in parts:
                    state.update(view[start:end])
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelError(f"{path}: {error}") from error
    return state.hexdigest()


def text_fingerprint(path: Path) -> str:
    """As `fingerprint`, of the tokenizer and the chat templates that lie beside the weights in a directory.

    A GGUF file holds its own. Raises `ModelError`.
    """
    state = blake2b(digest_size=16, person=b"prefixd-text")
    patterns = (
        "tokenizer*",
        "vocab*",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template*",
    )
    try:
        files = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
        for file in sorted(files):
            state.update(f"{len(file.name)}:{file.name}:{file.stat().st_size}:".encode())
            state.update(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from error
    return state.hexdigest()


def _sample(file: Path, size: int) -> Iterable[tuple[int, int]]:
    """The parts [start, end) of a large model's file that its fingerprint covers."""
    if file.suffix == ".json":
        return [(0, size)]
    if file.suffix == ".safetensors":
        header_end, tensors = tensor_spans(file)
    else:
        gguf = GgufFile(file)
        header_end, tensors = gguf.data_start, [(each.start, each.end) for each in gguf.tensors.values()]
    return [(0, header_end), *(page for start, end in tensors for page in _pages(start, end))]


def _pages(start: int, end: int) -> Iterable[tuple[int, int]]:
    if end - start <= _PAGES * _PAGE_BYTES:
        return [(start, end)]
    last = end - _PAGE_BYTES
    starts = (start + (last - start) * index // (_PAGES - 1) for index in range(_PAGES))
    return [(first, first + _PAGE_BYTES) for first in starts]
