"""What the next turn of a conversation will send, as far as it is known when the answer ends."""

from __future__ import annotations

from dataclasses import replace

from gateway.conversation import Conversation, Message
from gateway.prompts import PromptMaker
from gateway.reply import Reply
from gateway.tenants import ANYONE, Tenant
from protocol.errors import RequestError
from protocol.messages import Absorb, ModelInfo

_PROBE = Message("user", "And then?")
_RESULT = Message("tool", "Done.")


def next_turn(
    maker: PromptMaker,
    model: ModelInfo,
    request_id: str,
    conversation: Conversation,
    reply: Reply,
    tenant: Tenant = ANYONE,
) -> Absorb | None:
    """The conversation with its answer as a client will echo it, up to the end of that answer.

    The ids are those of rendering it as history, with another message behind: what was generated may be written
    otherwise there, and only these ids will be asked for. Behind calls that message is a tool's result. None where
    the template gives the answer no end of its own.
    """
    messages, answer = conversation.messages, reply.message()
    if conversation.continues:
        begun = messages[-1]
        said = (begun.content + reply.text).strip() if answer.tool_calls else begun.content + reply.text.rstrip()
        messages = messages[:-1]
        answer = replace(answer, content=said, reasoning=begun.reasoning or answer.reasoning)
    if not answer.content and not answer.tool_calls:
        return None
    history = (*messages, answer)
    following = replace(_RESULT, tool_call_id=answer.tool_calls[0].id) if answer.tool_calls else _PROBE
    try:
        prompt = maker.chat(replace(conversation, messages=(*history, following)), model, tenant)
    except RequestError:
        return None  # the template takes no such turn, or the context is full
    # The first one: a later one that counts as many messages is inside the message behind the answer.
    end = next((at for at, boundary in enumerate(prompt.boundaries) if boundary.messages == len(history)), None)
    if end is None:
        return None
    boundaries = prompt.boundaries[: end + 1]
    return Absorb(request_id, prompt.token_ids[: boundaries[-1].end], boundaries, tenant.cache)
