"""Where the files of a model are: a path as given, or the embedded model in the cache."""

from __future__ import annotations

import os
from pathlib import Path

from protocol.errors import SettingsError

EMBEDDED_MODEL = "smollm2-135m-instruct"
EMBEDDED_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EMBEDDED_BYTES = 98_362_432


def cache_dir() -> Path:
    """Where files are kept that can be had again: under `$XDG_CACHE_HOME`, or `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "prefixd"


def embedded_model_file() -> Path:
    """Where the embedded model is kept once fetched."""
    return cache_dir() / "models" / EMBEDDED_FILE


def resolve_model(model: str) -> Path:
    """The model's directory or .gguf file. Raises `SettingsError` where there is none.

    A name stands for the embedded model even where a file of that name exists; `./NAME` is that file.
    """
    if model == EMBEDDED_MODEL:
        return _embedded()
    path = Path(model).expanduser()
    if not path.exists():
        raise SettingsError(f"model: {model} is neither a path nor the embedded model {EMBEDDED_MODEL}")
    if path.is_file() and path.suffix != ".gguf":
        raise SettingsError(f"model: {model} is neither a directory nor a .gguf file")
    if path.is_dir() and not (path / "config.json").is_file():
        raise SettingsError(f"model: directory {model} has no config.json")
    return path.absolute()


def _embedded() -> Path:
    path = embedded_model_file()
    try:
        size = path.stat().st_size
    except OSError:
        raise SettingsError(f"model: {EMBEDDED_MODEL} is not on this machine: run prefixd fetch") from None
    if size != EMBEDDED_BYTES:
        raise SettingsError(
            f"model: {path} has {size} bytes instead of {EMBEDDED_BYTES}: run prefixd fetch to replace it"
        )
    return path
