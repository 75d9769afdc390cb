"""Documents and search results of an Anthropic body as text, with tags around them: what they say stays apart.

Left out is the wish for citations: an answer tells the same without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gateway.canonical import parse_content, wrong

KINDS = ("document", "search_result")


def told(content: object, where: str) -> object:
    """Content whose documents and search results are blocks of text. Raises `RequestError`."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": text(block, f"{where}.{at}")}
        if isinstance(block, dict) and block.get("type") in KINDS
        else block
        for at, block in enumerate(content)
    ]


def text(block: dict[str, Any], where: str) -> str:
    """One of these as text. Raises `RequestError` naming the field that is wrong."""
    lines = _document(block, where) if block["type"] == "document" else _search_result(block, where)
    return "\n".join((f"<{block['type']}>", *lines, f"</{block['type']}>"))


def _document(block: dict[str, Any], where: str) -> Iterator[str]:
    for name in ("title", "context"):
        if block.get(name) is not None:
            yield f"<{name}>{_string(block, name, where)}</{name}>"
    yield f"<document_content>\n{_source(block.get('source'), f'{where}.source')}\n</document_content>"


def _source(source: object, where: str) -> str:
    if not isinstance(source, dict):
        raise wrong(where, "must be an object")
    match source.get("type"):
        case "text":
            return _string(source, "data", where)
        case "content":
            content = source.get("content")
            if not isinstance(content, str | list):
                raise wrong(f"{where}.content", "must be a string or a list of blocks")
            return parse_content(content, f"{where}.content")
        case kind:
            raise wrong(where, f"has type {kind!r}: this model takes text only, so send the document's text")


def _search_result(block: dict[str, Any], where: str) -> Iterator[str]:
    for name in ("source", "title"):
        yield f"<{name}>{_string(block, name, where)}</{name}>"
    if not isinstance(block.get("content"), list):
        raise wrong(f"{where}.content", "must be a list of blocks")
    yield parse_content(block["content"], f"{where}.content")


def _string(holder: dict[str, Any], name: str, where: str) -> str:
    value = holder.get(name)
    if not isinstance(value, str):
        raise wrong(f"{where}.{name}", "must be a string")
    return value
