"""What the gateway needs of a model: tokenizer, chat templates, special tokens and end tokens. No weights."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from gateway.gguf_metadata import read_metadata
from gateway.gguf_tokenizer import build_tokenizer
from protocol.errors import SettingsError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """`templates` by name: `default`, and others such as `tool_use`. `special_tokens` are template variables."""

    tokenizer: Tokenizer
    templates: dict[str, str] = field(default_factory=dict)
    special_tokens: dict[str, Any] = field(default_factory=dict)
    end_token_ids: frozenset[int] = frozenset()


def load_model_files(path: Path, chat_template: Path | None = None) -> ModelFiles:
    """Read a `.gguf` file or a directory. Raises `SettingsError` naming what is missing or not supported."""
    if path.is_dir():
        files = _from_directory(path)
    elif path.suffix == ".gguf":
        files = _from_gguf(path)
    else:
        raise SettingsError(f"model: {path} is neither a directory nor a .gguf file")
    if chat_template is None:
        return files
    templates = {"default": _text(chat_template)}
    return ModelFiles(files.tokenizer, templates, files.special_tokens, files.end_token_ids)


def _from_gguf(path: Path) -> ModelFiles:
    metadata = read_metadata(path, lambda key: key.startswith("tokenizer."))
    if "tokenizer.ggml.tokens" not in metadata:
        raise SettingsError(f"model: {path} holds no tokenizer")
    tokens = metadata["tokenizer.ggml.tokens"]
    special: dict[str, str] = {}
    for name in ("bos", "eos", "unknown", "padding"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[{"unknown": "unk", "padding": "pad"}.get(name, name) + "_token"] = tokens[token_id]
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = frozenset(end for end in named if isinstance(end, int))
    prefix = "tokenizer.chat_template"
    templates = {
        key.removeprefix(prefix).removeprefix(".") or "default": value
        for key, value in metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    }
    return ModelFiles(build_tokenizer(metadata), templates, special, ends)


def _from_directory(path: Path) -> ModelFiles:
    tokenizer = _tokenizer_json(path)
    config = _json(path / "tokenizer_config.json")
    special = {
        name: text
        for source in (_json(path / "special_tokens_map.json"), config)  # the first is the older place
        for name in _SPECIAL_NAMES
        if (text := _token_text(source.get(name))) is not None
    }
    _add_declared(tokenizer, config, special)
    generation, model = _json(path / "generation_config.json"), _json(path / "config.json")
    named = generation.get("eos_token_id", model.get("eos_token_id"))
    ends = {end for end in (named if isinstance(named, list) else [named]) if isinstance(end, int)}
    eos = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if eos is not None:
        ends.add(eos)
    variables: dict[str, Any] = special | _further_tokens(path, config)
    return ModelFiles(tokenizer, _templates(path, config), variables, frozenset(ends))


def _tokenizer_json(path: Path) -> Tokenizer:
    file, packed = path / "tokenizer.json", path / "tokenizer.json.gz"
    try:
        if file.is_file():
            return Tokenizer.from_file(str(file))
        if packed.is_file():
            return Tokenizer.from_buffer(gzip.decompress(packed.read_bytes()))
    except Exception as error:  # the library raises plain Exception
        raise SettingsError(f"model: cannot read {file}: {error}") from error
    raise SettingsError(f"model: {path} has no tokenizer.json")


def _token_text(value: object) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) and text else None


def _further_tokens(path: Path, config: dict[str, Any]) -> dict[str, list[str]]:
    """The list of special tokens without a name, which some templates pick from by number."""
    name = "additional_special_tokens"
    for source in (config, _json(path / "special_tokens_map.json")):
        if isinstance(listed := source.get(name), list):
            return {name: [text for each in listed if (text := _token_text(each)) is not None]}
    return {}


def _add_declared(tokenizer: Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Add the tokens that only the configuration says are added, where they have ids: else their text is cut up."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    declared = config.get("added_tokens_decoder")
    listed = declared.items() if isinstance(declared, dict) else ()
    for token_id, token in sorted(((int(k), v) for k, v in listed if k.isdecimal()), key=itemgetter(0)):
        text = _token_text(token)
        if text is None or text in known:
            continue
        own = tokenizer.token_to_id(text)
        if token_id == (tokenizer.get_vocab_size() if own is None else own):
            flags = {flag: bool(token.get(flag)) for flag in _FLAGS}
            tokenizer.add_tokens([AddedToken(text, **flags)])
            known.add(text)
    named = [text for text in special.values() if text not in known and tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens(named)


def _templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """From `chat_template.jinja` and its siblings, else from the tokenizer's or the processor's configuration."""
    found: dict[str, str] = {}
    for value in (_json(path / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if isinstance(value, str):
            found["default"] = value
        elif isinstance(value, list):
            found |= dict(_named(entry) for entry in value)
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        found[file.stem] = _text(file)
    if (path / "chat_template.jinja").is_file():
        found["default"] = _text(path / "chat_template.jinja")
    return found


def _named(entry: object) -> tuple[str, str]:
    match entry:
        case {"name": str(name), "template": str(template)}:
            return name, template
    raise SettingsError("chat_template: an entry of the list in tokenizer_config.json has no name or no template")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"chat_template: cannot read {path}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"model: {path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}
