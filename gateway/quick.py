"""Which bodies become prompts at once, on the event loop itself.

To hand a body to a thread and the prompt back takes a quarter of a millisecond, and while Python makes the prompt the
loop waits for it all the same. So a turn that says little more than the one before it is not handed over.
"""

from __future__ import annotations

from gateway.body_memory import BodyMemory
from gateway.demands import strict_tools
from protocol.errors import RequestError

_BYTES = 256 << 10  # a history of this size still has to be compared and rendered
_NEW_BYTES = 4 << 10  # to be parsed and encoded: about a millisecond
_MESSAGES = 500
# With these a few bytes may ask for much: for a grammar to be written, or for whatever a template does with them.
_OPEN_ENDED = ("response_format", "text", "output_config", "output_format", "chat_template_kwargs")
_UNFORCED = (None, "auto", {"type": "auto"})


def is_quick(bodies: BodyMemory, owner: str, body: bytes) -> bool:
    """Whether a body's prompt is made within a few milliseconds."""
    if len(body) > _BYTES:
        return False
    try:
        fields = bodies.glance(owner, body, _NEW_BYTES)
    except RequestError:
        return True  # and so is its refusal
    if fields is None or any(fields.get(name) is not None for name in _OPEN_ENDED):
        return False
    said = fields.get("messages", fields.get("input"))
    if isinstance(said, list) and len(said) > _MESSAGES:
        return False
    return fields.get("tool_choice") in _UNFORCED and not strict_tools(fields.get("tools"))
