"""What clients say about using a prompt again: names of sessions, and marks up to which they want it cached.

Worth a longer stay of what is kept, and never a match. What is no hint in the form told here is ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b

from gateway.conversation import Conversation
from protocol.messages import Boundary, Generate, Hint, Mark

SESSION_HEADERS = ("x-claude-code-session-id", "x-session-affinity")
MAX_MARKS = 4  # the API that has them allows no more; of more, the first and the deepest count

_SECONDS = {"5m": 300, "1h": 3600}
_DEFAULT = "5m"
_SESSION_BYTES = 4


def mark_seconds(*values: object) -> int:
    """The longest time that a `cache_control` of one of these objects, or of a list of them, asks for; 0 for none."""
    longest = 0
    for value in values:
        if isinstance(value, list):
            longest = max(longest, mark_seconds(*value))
        elif isinstance(value, dict):
            match value.get("cache_control"):
                case {"type": "ephemeral", "ttl": str(ttl)}:
                    longest = max(longest, _SECONDS.get(ttl, _SECONDS[_DEFAULT]))
                case {"type": "ephemeral"}:
                    longest = max(longest, _SECONDS[_DEFAULT])
    return longest


def user_of(metadata: object) -> str:
    """`metadata.user_id`, in which some clients put the names of device and session."""
    match metadata:
        case {"user_id": str(name)}:
            return name
    return ""


def hinted(
    request: Generate, conversation: Conversation | None, headers: Mapping[str, str], salt: str = ""
) -> Generate:
    """The request with its client's hints, if there are any. `salt` keeps sessions of tenants apart."""
    names = (conversation.session if conversation else "", *(headers.get(name, "") for name in SESSION_HEADERS))
    session = next((name for name in names if name), "")
    marks = _marks(conversation, request.boundaries) if conversation else ()
    if not session and not marks:
        return request
    return replace(request, hint=Hint(_digest(session, salt) if session else "", marks))


def _digest(session: str, salt: str) -> str:
    named = session.encode(errors="replace")
    return blake2b(named, digest_size=_SESSION_BYTES, key=bytes.fromhex(salt)).hexdigest()


def _marks(conversation: Conversation, boundaries: tuple[Boundary, ...]) -> tuple[Mark, ...]:
    """The boundary at the end of each marked message, or the next one where it has none of its own."""
    found: dict[int, int] = {}  # seconds by end
    if conversation.head_seconds:
        head = next((boundary for boundary in boundaries if boundary.kind == "head"), None)
        if head is not None:
            found[head.end] = conversation.head_seconds
    ahead = iter(boundaries)
    boundary = next(ahead, None)
    for count, message in enumerate(conversation.messages, 1):
        while boundary is not None and boundary.messages < count:
            boundary = next(ahead, None)
        if boundary is not None and message.mark_seconds:
            found[boundary.end] = max(message.mark_seconds, found.get(boundary.end, 0))
    marks = [Mark(end, seconds) for end, seconds in sorted(found.items())]
    return (*marks[:1], *marks[1:][-(MAX_MARKS - 1) :])
