"""Requests in each dialect: the path and the body of conversations as they are given."""

from __future__ import annotations

from typing import Any

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
PATHS = (CHAT, PLAIN, RESPONSES, MESSAGES, COUNT)
USER = {"role": "user", "content": "hi"}


def chat(*messages: object, **fields: object) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": list(messages), **fields}


def anthropic(*messages: object, **fields: object) -> tuple[str, dict[str, Any]]:
    return MESSAGES, {"messages": list(messages), "max_tokens": 9, **fields}


def responses(*items: object, **fields: object) -> tuple[str, dict[str, Any]]:
    return RESPONSES, {"input": list(items), **fields}


def say(content: object, role: str = "user") -> dict[str, object]:
    return {"role": role, "content": content}
