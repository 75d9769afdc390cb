"""The small conversations by which a template's habits are learned, and what becomes of them.

Each message has words in it that can be found again, so what a template does with it is seen rather than guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.conversation import Conversation, Message, ToolCall
from gateway.renderer import Renderer
from gateway.template import ChatTemplate, Rendered
from gateway.template_form import Habits

TOOL = {
    "type": "function",
    "function": {
        "name": "probefunction",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probekey": {"type": "string", "description": "p"}}},
    },
}
CALL = ToolCall("call_0123456789abcdef", "probefunction", {"probekey": "probevalue"})
OTHER_CALL = ToolCall("call_fedcba9876543210", "probefunction", {"probekey": "othervalue"})
SYSTEM, USER = Message("system", "systemprobe"), Message("user", "firstprobe")
ANSWER, NEXT = Message("assistant", "answerprobe"), Message("user", "secondprobe")
INNER, SECOND = Message("system", "innerprobe"), Message("system", "furtherprobe")
CALLING = Message("assistant", "", (CALL,))
OTHER_CALLING = Message("assistant", "", (OTHER_CALL,))
RESULT = Message("tool", "resultprobe", tool_call_id=CALL.id)
OTHER_RESULT = Message("tool", "otherprobe", tool_call_id=OTHER_CALL.id)

PLAIN = (USER, ANSWER, NEXT)
CHATS = (PLAIN, (SYSTEM, *PLAIN), (USER,))
TWO_SYSTEMS = (SYSTEM, SECOND, *PLAIN)
TWO_ANSWERS = (USER, ANSWER, Message("assistant", "furtheranswer"), NEXT)
ASKED = (USER, CALLING, RESULT)
SHORT_IDS = (USER, Message("assistant", "", (replace(CALL, id="1"),)), replace(RESULT, tool_call_id="1"))
TOOL_CHATS = ((*ASKED, ANSWER, NEXT), (SYSTEM, *ASKED, ANSWER, NEXT), ASKED)
BOTH = (USER, Message("assistant", ANSWER.content, (CALL,)), RESULT)
THOUGHT = (USER, Message("assistant", ANSWER.content, (CALL,), reasoning="thoughtprobe"), RESULT)
PARALLEL = (USER, Message("assistant", "", (CALL, OTHER_CALL)), RESULT, OTHER_RESULT)
USER_FOLLOWS = ((USER, NEXT), (*ASKED, NEXT))
INNER_SYSTEM = ((USER, ANSWER, INNER, NEXT), (*PLAIN, INNER), (*ASKED, INNER))
ENDINGS = ((SYSTEM,), (USER,), (USER, ANSWER), (USER, CALLING), ASKED, (*PLAIN, INNER))
FOLLOWING = {
    "head": (),
    "user": (ANSWER, OTHER_CALLING, NEXT, INNER),
    "assistant": (NEXT, INNER),
    "calls": (RESULT,),
    "tool": (ANSWER, OTHER_CALLING, NEXT, INNER),
    "system": (ANSWER, OTHER_CALLING, NEXT),
}
EMPTY = (
    (USER, Message("assistant", ""), NEXT),
    (Message("user", ""), ANSWER, NEXT),
    (*ASKED[:2], replace(RESULT, content=""), ANSWER, NEXT),
)


def text_of_probe(
    template: ChatTemplate, habits: Habits, conversation: Conversation, reply: bool = True
) -> str | None:
    try:
        return Renderer(template, habits).run(conversation, reply).text
    except Exception:  # whatever a foreign template's code raises means: not like this
        return None


def as_conversation(messages: Sequence[Message]) -> Conversation:
    """A probe, with tools where it calls any."""
    return Conversation(tuple(messages), (TOOL,) if any(m.tool_calls for m in messages) else ())


def rendered_probe(renderer: Renderer, conversation: Conversation) -> Rendered | None:
    """The render of what was said, without the start of an answer."""
    try:
        return renderer.run(conversation, reply=False)
    except Exception:  # whatever a foreign template's code raises means: not like this
        return None
