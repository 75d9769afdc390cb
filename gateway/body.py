"""HTTP bodies to JSON objects."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

import orjson

from protocol.errors import RequestError

MAX_DEPTH = 128  # what reads and writes JSON here goes down by calling itself, some of it 254 times at most
MAX_ITEMS = {"messages": 100_000, "input": 100_000, "tools": 2_000}  # far beyond what any client sends
_SURROGATES = re.compile("[\ud800-\udfff]")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in a body. Half a surrogate pair becomes U+FFFD. Raises `RequestError`."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        value = _with_surrogates(body, error)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    check_object(value)
    return value


def check_object(value: dict[str, Any], name: str = "", already: int = 0) -> None:
    """Raises `RequestError` for more, or more deeply nested, than is taken. `already` items of a list are not in it."""
    for each, most in MAX_ITEMS.items():
        if isinstance(items := value.get(each), list) and (count := len(items) + already * (each == name)) > most:
            raise RequestError(f"{each} holds {count} items, and at most {most} are taken", param=each)
    if is_too_deep(value):
        raise RequestError(f"the body is nested more than {MAX_DEPTH} deep")


def is_too_deep(value: object) -> bool:
    """Whether lists and objects lie in one another more than `MAX_DEPTH` deep."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def _with_surrogates(body: bytes, refusal: orjson.JSONDecodeError) -> Any:
    """Clients that cut text in the middle of a character send what strict JSON refuses: mend only that."""
    if b"\\u" not in body:
        raise RequestError(f"the body is not JSON: {refusal}") from refusal
    try:
        return mended(json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_int=whole))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {refusal}") from error


def mended(value: Any) -> Any:
    """A JSON value whose halves of surrogate pairs are U+FFFD: no encoder and no tokenizer takes them."""
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, list):
        return [mended(item) for item in value]
    if isinstance(value, dict):
        return {mended(key): mended(item) for key, item in value.items()}
    return value


def whole(digits: str) -> int | float:
    """A whole number, as a float where it has more than the 64 bits that can be written again."""
    value = int(digits)
    return value if -(1 << 63) <= value < 1 << 64 else float(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
