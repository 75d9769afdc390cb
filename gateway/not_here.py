"""What requests for something that is not served are told: above all those of APIs whose servers store something."""

from __future__ import annotations

from collections.abc import Collection

_STORED = "nothing is stored here: send the whole conversation with each request"
_BATCHES = "there are no batches here: send each of the requests by itself"
_FILES = "no files are stored here: send their text in the request"
_WORDS = {
    "/v1/responses/": _STORED,
    "/v1/conversations": _STORED,
    "/v1/chat/completions/": _STORED,
    "/v1/assistants": _STORED,
    "/v1/threads": _STORED,
    "/v1/messages/batches": _BATCHES,
    "/v1/batches": _BATCHES,
    "/v1/files": _FILES,
    "/v1/uploads": _FILES,
    "/v1/vector_stores": _FILES,
}


def words(path: str, served: Collection[str]) -> str:
    """Why there is nothing at a path. `served` are those at which there is something."""
    meant = next(
        (each for each in (path.rstrip("/"), f"/v1{path}", path.removeprefix("/v1")) if each in served), None
    )
    if meant is not None and meant != path:
        return f"there is nothing at {path}, but at {meant}"
    why = next(
        (why for start, why in _WORDS.items() if path.startswith(start)), "/openapi.json tells what there is"
    )
    return f"there is nothing at {path}; {why}"
