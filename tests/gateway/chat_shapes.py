"""Conversations of the shapes that clients send, and what they begin with."""

from __future__ import annotations

from dataclasses import replace

from gateway.conversation import Conversation, Message, ToolCall

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look something up.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string", "description": "what"}}},
    },
}
SYSTEM = Message("system", "Be brief. ")
NOTE = Message("system", "A note comes in between.")


def user(number: int) -> Message:
    return Message("user", f"  user {number} says\nhello ")


def answer(number: int) -> Message:
    return Message("assistant", f"answer {number}\n\nwith lines")


def calls(*numbers: int) -> Message:
    return Message(
        "assistant", "", tuple(ToolCall(f"call_{n}", "lookup", {"q": f"v{n}", "n": n}) for n in numbers)
    )


def result(number: int) -> Message:
    return Message("tool", f'{{"result": {number}}}', tool_call_id=f"call_{number}")


SHAPES = {
    "one": Conversation((user(0),)),
    "plain": Conversation((user(0), answer(1), user(2), answer(3), user(4))),
    "system": Conversation((SYSTEM, user(0), answer(1), user(2), answer(3), user(4))),
    "tools": Conversation((user(0), calls(1), result(1), answer(2), user(3), calls(4), result(4)), (TOOL,)),
    "system and tools": Conversation((SYSTEM, user(0), calls(1), result(1), answer(2), user(3)), (TOOL,)),
    "parallel": Conversation((user(0), calls(1, 2), result(1), result(2), answer(2), user(3)), (TOOL,)),
    "system inside": Conversation((SYSTEM, user(0), answer(1), NOTE, user(2))),
    "two users": Conversation((user(0), user(1), answer(2), user(3))),
    "inner system last": Conversation((SYSTEM, user(0), answer(1), user(2), NOTE)),
    "inner system behind a result": Conversation((user(0), calls(1), result(1), NOTE), (TOOL,)),
    "user behind a result": Conversation((user(0), calls(1), result(1), user(1)), (TOOL,)),
    "parallel results last": Conversation((SYSTEM, user(0), calls(1, 2), result(1), result(2)), (TOOL,)),
    "calls last": Conversation((SYSTEM, user(0), calls(1, 2)), (TOOL,)),
    "empty": Conversation((user(0), Message("assistant", ""), Message("user", ""), answer(1), user(2))),
    "calls without tools": Conversation((SYSTEM, user(0), calls(1), result(1), answer(2), user(3))),
    "said and called": Conversation(
        (user(0), replace(calls(1), content="I look."), result(1), replace(calls(4), content="Again."), result(4)),
        (TOOL,),
    ),
    "answers in a row": Conversation((user(0), answer(1), answer(2), user(3), answer(4), answer(5), user(6))),
    "calls in a row": Conversation(
        (user(0), calls(1), calls(2), result(1), result(2), answer(3), user(4)), (TOOL,)
    ),
    "thought, said and called": Conversation(
        (user(0), replace(calls(1), content="I look.", reasoning="because"), result(1), answer(2), user(3)),
        (TOOL,),
    ),
    "thinking": Conversation(
        (
            user(0),
            Message("assistant", "<think>\nhm\n</think>\n\nyes"),
            user(1),
            Message("assistant", "ok", reasoning="because"),
            user(2),
        )
    ),
}


def said(conversation: Conversation) -> tuple[Message, ...]:
    """Without the text beside calls, which some templates leave out."""
    return tuple(replace(m, content="") if m.tool_calls else m for m in conversation.messages)


def prefixes(conversation: Conversation) -> list[Conversation]:
    """The conversations of its first 1, 2, 3 and so on messages, itself left out."""
    counts = range(1, len(conversation.messages))
    return [replace(conversation, messages=conversation.messages[:count]) for count in counts]


def turns(conversation: Conversation) -> list[Conversation]:
    """Those of its prefixes that ask for an answer."""
    return [each for each in prefixes(conversation) if each.messages[-1].role in ("user", "tool")]
