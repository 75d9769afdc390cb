"""`warm FILE`: has a prompt computed in advance, by a request like any other, and pins what was kept of it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cachectl.asking import Asked, ask, show
from protocol.control import Explanation, SlotInfo
from protocol.control_client import CommandRefused, ControlClient
from protocol.errors import SettingsError, WorkerUnavailable

APIS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
_ANSWER_TOKENS = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}
_MOST_BYTES = 256 << 20  # four times what gateways take if not told otherwise
_NOT_SENT = ("stream", "stream_options", "n", "max_completion_tokens", "cache_prompt")


def warm(client: ControlClient, asked: Asked) -> bool:
    """Pin the deepest snapshot of the prompt; of a text, that of the system message it becomes.

    Raises `SettingsError` for a file that is no prompt, `WorkerUnavailable` where no gateway answers, and
    `CommandRefused` where it refuses the prompt or nothing was kept of it.
    """
    body, is_text = _prompt(asked.file)
    api = asked.api or _api_of(body)
    started = time.monotonic()
    request_id = _post(asked.url, APIS[api], _only_prefill(body, api), _key(asked.api_key_file))
    seconds = time.monotonic() - started
    explained = ask(client, Explanation, "explain", request_id=request_id)
    pinned = ask(client, SlotInfo, "pin", request_id=request_id, head=is_text)
    computed = explained.prompt_tokens - explained.depth
    show(
        asked,
        asdict(pinned),
        lambda: (
            f"pinned slot {pinned.slot} ({pinned.tokens} tokens): computed {computed} of "
            f"{explained.prompt_tokens} prompt tokens in {seconds:.1f} s"
        ),
    )
    return True


def _prompt(file: Path) -> tuple[dict[str, Any], bool]:
    """The request in a file, and whether it was plain text: a request, a list of messages, or a system message."""
    try:
        with file.open("rb") as opened:
            read = opened.read(_MOST_BYTES + 1)
        text = read.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: cannot be read: {error}") from error
    if len(read) > _MOST_BYTES:
        raise SettingsError(f"{file}: is longer than {_MOST_BYTES} bytes")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    match value:
        case dict():
            return value, False
        case list():
            return {"messages": value}, False
    if not text.strip():
        raise SettingsError(f"{file}: there is no prompt in it")
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "Hello"}]
    return {"messages": messages}, True


def _api_of(body: Mapping[str, Any]) -> str:
    """The API that a request is made for, as far as its fields tell."""
    if "input" in body:
        return "responses"
    return "messages" if "system" in body else "chat"


def _only_prefill(body: Mapping[str, Any], api: str) -> dict[str, Any]:
    """The request with an answer of one token, all at once, and with the cache whatever it says."""
    kept = {name: value for name, value in body.items() if name not in _NOT_SENT}
    return {**kept, _ANSWER_TOKENS[api]: 1}


def _key(file: Path | None) -> dict[str, str]:
    """Headers with an API key, in both of the usual forms."""
    if file is None:
        return {}
    try:
        key = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file}: cannot be read: {error}") from error
    return {"Authorization": f"Bearer {key}", "x-api-key": key}


def _post(url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    """Send the request and wait for its answer, however long it takes: the id it has in the worker."""
    target = urlsplit(url)
    connect = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}.get(target.scheme)
    if connect is None or not target.hostname:
        raise SettingsError(f"url: {url} is not that of an HTTP server")
    try:
        try:
            port = target.port
        except ValueError as error:
            raise SettingsError(f"url: {url}: {error}") from error
        connection = connect(target.hostname, port)
        try:
            data = json.dumps(body).encode()
            connection.request(
                "POST", target.path.rstrip("/") + path, data, {"Content-Type": "application/json", **headers}
            )
            response = connection.getresponse()
            answer = response.read()
        finally:
            connection.close()
    except (OSError, http.client.HTTPException) as error:
        raise WorkerUnavailable(f"no gateway answers at {url}: {error}") from error
    if response.status != 200:
        raise CommandRefused(f"the gateway answered {response.status}: {_message(answer)}")
    request_id: str = response.getheader("x-request-id", "")
    return request_id


def _message(answer: bytes) -> str:
    """What an error says, in any of the dialects."""
    try:
        return str(json.loads(answer)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return answer.decode(errors="replace")[:200]
