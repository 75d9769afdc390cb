"""Learns what a template writes around messages, and behind the last one: how far its text can be cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gateway.boundaries import message_ends
from gateway.conversation import Conversation, Message
from gateway.renderer import Renderer
from gateway.template import ChatTemplate
from gateway.template_chats import (
    ANSWER,
    BOTH,
    CALL,
    ENDINGS,
    FOLLOWING,
    NEXT,
    PLAIN,
    SYSTEM,
    USER,
    as_conversation,
    rendered_probe,
    text_of_probe,
)
from gateway.template_form import Habits, ending
from gateway.text_memory import common_prefix


def closing_habits(template: ChatTemplate, habits: Habits) -> Habits:
    """What the template writes behind the last message, by its kind, and whether it stays once another follows; and
    what it writes behind one only because another follows.
    """
    closers: dict[str, str] = {}
    trailers: dict[str, set[str]] = {}
    passing: set[str] = set()
    renderer = Renderer(template, habits)
    for chat in ENDINGS:
        alone = rendered_probe(renderer, as_conversation(chat))
        if alone is None:
            continue
        kind = ending(chat[-1], only_systems=chat == (SYSTEM,))
        end = message_ends(alone.spans, len(chat))[-1]
        if end is not None and _is_frame(alone.text[end:], chat):
            closers[kind] = alone.text[end:]
        for following in FOLLOWING[kind]:
            both = as_conversation((*chat, following))
            longer, alone = rendered_probe(renderer, both), rendered_probe(renderer, replace(both, messages=chat))
            if longer is None or alone is None:
                continue
            if not longer.text.startswith(alone.text):
                if kind in closers and following.role == "assistant":
                    passing.add(kind)
                continue
            own = message_ends(longer.spans, len(chat) + 1)[len(chat) - 1]
            if own is None:
                continue
            late, early = longer.text[len(alone.text) : own], longer.text[own : len(alone.text)]
            if _is_frame(early, chat):
                closers.setdefault(kind, early)
            if _is_frame(late, (following,)):
                trailers.setdefault(kind, set()).add(late)
    longest_first = {kind: tuple(sorted(found, key=len, reverse=True)) for kind, found in trailers.items()}
    return replace(habits, closers=closers, trailers=longest_first, passing=frozenset(passing))


def _is_frame(text: str, chat: Sequence[Message]) -> bool:
    """Whether some text is of the template alone: one that keeps a message back writes it where a closer would be."""
    said = [m.content for m in (*chat, SYSTEM) if m.content] + [c.name for m in chat for c in m.tool_calls]
    return bool(text) and not any(each in text for each in said)


def end_of_turn(template: ChatTemplate, habits: Habits) -> str:
    text = text_of_probe(template, habits, Conversation((USER, ANSWER)), reply=False) or ""
    _, found, after = text.partition(ANSWER.content)
    return after if found else ""


def end_before_calls(template: ChatTemplate, habits: Habits) -> str:
    text = text_of_probe(template, habits, as_conversation(BOTH)) or ""
    end = habits.end_of_turn.strip()
    between = text.rpartition(ANSWER.content)[2].partition(CALL.name)[0]
    native = not (habits.calls_apart or habits.calls_as_text)
    return end if native and ANSWER.content in text and end in between else ""


def user_frame(template: ChatTemplate, habits: Habits) -> Habits:
    """What stands around the text of user messages: before that of a first one, and of a later one."""
    headers: list[str] = []
    footer = ""
    renderer = Renderer(template, habits)
    for chat in ((SYSTEM, *PLAIN), PLAIN):
        if text_of_probe(template, habits, as_conversation(chat)) is None:
            continue
        rendered = renderer.run(as_conversation(chat), reply=True)
        ends = renderer.render(as_conversation(chat)).ends
        first, last = len(chat) - 3, len(chat) - 1
        start, end = ends[last - 1], ends[last]
        if not isinstance(start, int) or not isinstance(end, int):
            continue
        own = next((s for s in rendered.spans if s.owner == first), None)
        header, found, footer = rendered.text[start:end].partition(NEXT.content)
        headers += [header] if found and SYSTEM.content not in header else []
        opening = rendered.text[own.start : own.end].partition(USER.content)[0] if own else ""
        if opening and SYSTEM.content not in opening:
            headers.append(opening)
            break
    footer = footer.removesuffix(habits.closers.get("user", ""))
    return replace(habits, user_headers=tuple(sorted({h for h in headers if h})), user_footer=footer)


def answers_in_loop(template: ChatTemplate, habits: Habits, conversation: Conversation) -> bool:
    renderer = Renderer(template, habits)
    asking, plain = renderer.run(conversation, True), renderer.run(conversation, False)
    end = message_ends(asking.spans, len(conversation.messages))[-1]
    return end is not None and end > common_prefix(asking.text, plain.text)
