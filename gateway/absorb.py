"""What the next turn of a conversation will send, as far as it is known when the answer ends."""

from __future__ import annotations

from dataclasses import replace

from gateway.conversation import Conversation, Message
from gateway.prompts import PromptMaker
from protocol.errors import RequestError
from protocol.messages import Absorb, ModelInfo

_PROBE = Message("user", "And then?")


def next_turn(
    maker: PromptMaker, model: ModelInfo, request_id: str, conversation: Conversation, answer: str
) -> Absorb | None:
    """The conversation with its answer as a client will echo it, up to the end of that answer.

    The ids are those of rendering it as history, with another message behind: what was generated may be written
    otherwise there, and only these ids will be asked for. None where the template gives the answer no end of its own.
    """
    messages = conversation.messages
    said = answer.strip()
    if conversation.continues:
        messages, said = messages[:-1], messages[-1].content + answer.rstrip()
    if not said:
        return None
    history = (*messages, Message("assistant", said))
    try:
        prompt = maker.chat(replace(conversation, messages=(*history, _PROBE)), model)
    except RequestError:
        return None  # the template takes no such turn, or the context is full
    ends = [at for at, boundary in enumerate(prompt.boundaries) if boundary.messages == len(history)]
    if not ends:
        return None
    boundaries = prompt.boundaries[: ends[-1] + 1]
    return Absorb(request_id, prompt.token_ids[: boundaries[-1].end], boundaries)
