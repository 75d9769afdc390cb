"""Learns a template's habits by rendering small conversations once, at load.

Templates disagree about things no standard settles: whether tool arguments are an object or text, whether an
assistant message that only calls tools has empty or no content, where the system text goes, whether two user
messages may follow one another. Each probe has words in it that can be found again, so what became of it is seen
rather than guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from gateway.boundaries import message_ends
from gateway.conversation import Conversation, Message, ToolCall
from gateway.renderer import Renderer
from gateway.template import ChatTemplate, Rendered
from gateway.template_form import Habits, ending
from gateway.text_memory import common_prefix
from protocol.errors import SettingsError

_TOOL = {
    "type": "function",
    "function": {
        "name": "probefunction",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"probekey": {"type": "string", "description": "p"}}},
    },
}
_CALL = ToolCall("call_0123456789abcdef", "probefunction", {"probekey": "probevalue"})
_OTHER_CALL = ToolCall("call_fedcba9876543210", "probefunction", {"probekey": "othervalue"})
_SYSTEM, _USER = Message("system", "systemprobe"), Message("user", "firstprobe")
_ANSWER, _NEXT = Message("assistant", "answerprobe"), Message("user", "secondprobe")
_INNER = Message("system", "innerprobe")
_CALLING = Message("assistant", "", (_CALL,))
_OTHER_CALLING = Message("assistant", "", (_OTHER_CALL,))
_RESULT = Message("tool", "resultprobe", tool_call_id=_CALL.id)
_OTHER_RESULT = Message("tool", "otherprobe", tool_call_id=_OTHER_CALL.id)

_PLAIN = (_USER, _ANSWER, _NEXT)
_CHATS = (_PLAIN, (_SYSTEM, *_PLAIN), (_USER,))
_ASKED = (_USER, _CALLING, _RESULT)
_TOOL_CHATS = ((*_ASKED, _ANSWER, _NEXT), (_SYSTEM, *_ASKED, _ANSWER, _NEXT), _ASKED)
_BOTH = (_USER, Message("assistant", _ANSWER.content, (_CALL,)), _RESULT)
_PARALLEL = (_USER, Message("assistant", "", (_CALL, _OTHER_CALL)), _RESULT, _OTHER_RESULT)
_USER_FOLLOWS = ((_USER, _NEXT), (*_ASKED, _NEXT))
_INNER_SYSTEM = ((_USER, _ANSWER, _INNER, _NEXT), (*_PLAIN, _INNER), (*_ASKED, _INNER))
_ENDINGS = ((_USER,), (_USER, _ANSWER), (_USER, _CALLING), _ASKED, (*_PLAIN, _INNER))
_FOLLOWING = {
    "user": (_ANSWER, _OTHER_CALLING, _NEXT, _INNER),
    "assistant": (_NEXT, _INNER),
    "calls": (_RESULT,),
    "tool": (_ANSWER, _OTHER_CALLING, _NEXT, _INNER),
    "system": (_ANSWER, _OTHER_CALLING, _NEXT),
}
_EMPTY = (
    (_USER, Message("assistant", ""), _NEXT),
    (Message("user", ""), _ANSWER, _NEXT),
    (*_ASKED[:2], replace(_RESULT, content=""), _ANSWER, _NEXT),
)


def learn(template: ChatTemplate) -> Renderer:
    """The renderer for a template. Raises `SettingsError` where even a plain chat cannot be rendered."""
    habits = _plain_habits(template)
    habits = _tool_habits(template, habits)
    habits = _order_habits(template, habits)
    habits = _empty_habits(template, habits)
    conversations = [Conversation(chat) for chat in _CHATS]
    conversations += [Conversation(chat, (_TOOL,)) for chat in (*_TOOL_CHATS, _PLAIN)]
    rendered = [c for c in conversations if _text(template, habits, c) is not None]
    habits = replace(habits, answer_in_loop=any(_answers_in_loop(template, habits, c) for c in rendered))
    habits = _closing_habits(template, habits)
    habits = replace(
        habits,
        misplaced=frozenset(role for c in rendered for role in _misplaced(template, habits, c)),
        end_of_turn=_end_of_turn(template, habits),
    )
    habits = replace(habits, end_before_calls=_end_before_calls(template, habits))
    habits = _user_frame(template, habits)
    habits = replace(habits, vague=frozenset(_vague(template, habits)))
    return Renderer(template, replace(habits, unseen=_is_unseen(Renderer(template, habits))))


def _is_unseen(renderer: Renderer) -> bool:
    """Whether a plain chat has no boundary, or any that is not where the render of so many messages ends."""
    for chat in (_PLAIN, (_SYSTEM, *_PLAIN)):
        if _text(renderer.template, renderer.habits, _chat(chat)) is None:
            continue
        whole = renderer.render(_chat(chat))
        ends = {count: end for count, end in enumerate(whole.ends, 1) if isinstance(end, int)}
        alone = {count: _rendered(renderer, chat[:count]) for count in ends}
        begins = {n: len(a.text) for n, a in alone.items() if a is not None and whole.text.startswith(a.text)}
        if not whole.cuts or any(ends[count] != length for count, length in begins.items()):
            return True
    return False


def probe_texts(renderer: Renderer) -> Iterator[str]:
    """Renders of all probes that the template takes, with and without the generation prompt."""
    for chat, tools in product((*_CHATS, *_TOOL_CHATS), ((), (_TOOL,))):
        for reply in (True, False):
            text = _text(renderer.template, renderer.habits, Conversation(chat, tools), reply)
            if text is not None:
                yield text


def _text(template: ChatTemplate, habits: Habits, conversation: Conversation, reply: bool = True) -> str | None:
    try:
        return Renderer(template, habits).run(conversation, reply).text
    except Exception:  # whatever a foreign template's code raises means: not like this
        return None


def _chat(messages: Sequence[Message]) -> Conversation:
    """A probe, with tools where it calls any."""
    return Conversation(tuple(messages), (_TOOL,) if any(m.tool_calls for m in messages) else ())


def _plain_habits(template: ChatTemplate) -> Habits:
    # The template may demand tools; then it serves requests that bring some.
    for tools, parts, no_tools in product(((), (_TOOL,)), (False, True), (None, ())):
        habits = Habits(no_tools=no_tools, content_in_parts=parts)
        if _NEXT.content in (_text(template, habits, Conversation(_PLAIN, tools)) or ""):
            return habits
    try:
        Renderer(template, Habits()).run(Conversation(_PLAIN), reply=True)
    except Exception as error:
        raise SettingsError(f"chat_template: cannot render a plain conversation: {error}") from error
    raise SettingsError("chat_template: a user message does not appear in its text")


def _tool_habits(template: ChatTemplate, habits: Habits) -> Habits:
    """The first way of writing tool calls, results and tools that comes out right; as given where none does."""
    text = _text(template, habits, Conversation(_PLAIN, (_TOOL,)))
    if text is None or _CALL.name not in text:
        shown = replace(habits, tools_as_text=True)
        # The tools go into system text, which the template may have no place for either.
        for tried in (shown, replace(shown, system_as_user=True)):
            if _CALL.name in (_text(template, tried, Conversation(_PLAIN, (_TOOL,))) or ""):
                habits = replace(shown, system_as_user=tried.system_as_user)
                break
    forms = ((False, False), (True, False), (True, True))
    for form, ordinal, raw, empty in product(forms, (False, True), (False, True), ("", None)):
        tried = replace(
            habits,
            calls_as_text=form[0],
            results_as_user=form[1],
            ordinal_ids=ordinal,
            arguments_as_text=raw,
            empty_content=empty,
        )
        text = _text(template, tried, Conversation(_TOOL_CHATS[0], (_TOOL,)))
        if text is not None and _call_came_out(text):
            return tried
    return habits


def _call_came_out(text: str) -> bool:
    tail = text[text.find(_USER.content) :]
    spoilt = any(sign in tail for sign in ('\\"probekey', "'probekey'", "None", "\\\\"))
    return not spoilt and "probevalue" in tail and "probefunction" in tail and _RESULT.content in tail


def _order_habits(template: ChatTemplate, habits: Habits) -> Habits:
    """What to do where the template refuses an order of roles, or moves or drops a system message.

    Each try stands only if it brings every probe out that the template takes in some form.
    """
    with_tools = _in_order(template, habits, _ASKED)
    follows, inner = (
        [chat for chat in chats if with_tools or not any(m.tool_calls for m in chat)]
        for chats in (_USER_FOLLOWS, _INNER_SYSTEM)
    )
    nothing: frozenset[str] = frozenset()
    for joined in (nothing, frozenset({"user"}), frozenset({"user", "tool"})):
        tried = replace(habits, joined=joined)
        if all(_in_order(template, tried, chat) for chat in follows):
            habits = tried
            break
    if not _shown(template, habits, (_SYSTEM, *_PLAIN)):
        tried = replace(habits, system_as_user=True, joined=habits.joined)
        habits = tried if _shown(template, tried, (_SYSTEM, *_PLAIN)) else habits
    if not all(_in_order(template, habits, chat) for chat in inner):
        tried = replace(habits, inner_as_user=True)
        habits = tried if all(_in_order(template, tried, chat) for chat in inner) else habits
    if with_tools and not _in_order(template, habits, _PARALLEL):
        tried = replace(habits, single_calls=True)
        habits = tried if _in_order(template, tried, _PARALLEL) else habits
    if with_tools and not _calls_beside_text(template, habits):
        tried = replace(habits, calls_apart=True)
        habits = tried if _calls_beside_text(template, tried) and _in_order(template, tried, _BOTH) else habits
    return habits


def _empty_habits(template: ChatTemplate, habits: Habits) -> Habits:
    """Text in parts where only that lets a message be empty, and makes no difference otherwise."""
    chats = [
        chat for chat in _EMPTY if _in_order(template, habits, [m for m in chat if m.content or m.tool_calls])
    ]
    in_parts = replace(habits, content_in_parts=True)
    if all(_text(template, habits, _chat(chat)) is not None for chat in chats):
        return habits
    same = all(_text(template, in_parts, _chat(c)) == _text(template, habits, _chat(c)) for c in (_PLAIN, _ASKED))
    taken = all(_text(template, in_parts, _chat(chat)) is not None for chat in chats)
    return in_parts if same and taken else habits


def _calls_beside_text(template: ChatTemplate, habits: Habits) -> bool:
    """Whether a call comes out that has text beside it. Where only the text is lost, that is the model's habit."""
    text = _text(template, habits, _chat(_BOTH)) or ""
    return "probevalue" in text[text.find(_USER.content) :]


def _shown(template: ChatTemplate, habits: Habits, messages: Sequence[Message]) -> bool:
    text = _text(template, habits, _chat(messages))
    return text is not None and all(message.content in text for message in messages)


def _in_order(template: ChatTemplate, habits: Habits, messages: Sequence[Message]) -> bool:
    text = _text(template, habits, _chat(messages))
    if text is None:
        return False
    places = [text.find(message.content) for message in messages if message.content]
    return -1 not in places and places == sorted(places)


def _answers_in_loop(template: ChatTemplate, habits: Habits, conversation: Conversation) -> bool:
    renderer = Renderer(template, habits)
    asking, plain = renderer.run(conversation, True), renderer.run(conversation, False)
    end = message_ends(asking.spans, len(conversation.messages))[-1]
    return end is not None and end > common_prefix(asking.text, plain.text)


def _closing_habits(template: ChatTemplate, habits: Habits) -> Habits:
    """What the template writes behind the last message, by its kind, and whether it stays once another follows; and
    what it writes behind one only because another follows.
    """
    closers: dict[str, str] = {}
    trailers: dict[str, set[str]] = {}
    passing: set[str] = set()
    renderer = Renderer(template, habits)
    for chat in _ENDINGS:
        alone = _rendered(renderer, chat)
        if alone is None:
            continue
        kind, end = ending(chat[-1]), message_ends(alone.spans, len(chat))[-1]
        if end is not None and _is_frame(alone.text[end:], chat):
            closers[kind] = alone.text[end:]
        for following in _FOLLOWING[kind]:
            longer = _rendered(renderer, (*chat, following))
            if longer is None:
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


def _rendered(renderer: Renderer, chat: Sequence[Message]) -> Rendered | None:
    try:
        return renderer.run(_chat(chat), reply=False)
    except Exception:  # whatever a foreign template's code raises means: not like this
        return None


def _is_frame(text: str, chat: Sequence[Message]) -> bool:
    """Whether some text is of the template alone: one that keeps a message back writes it where a closer would be."""
    said = [m.content for m in (*chat, _SYSTEM) if m.content] + [c.name for m in chat for c in m.tool_calls]
    return bool(text) and not any(each in text for each in said)


def _misplaced(template: ChatTemplate, habits: Habits, conversation: Conversation) -> Iterator[str]:
    """Roles of messages whose text is behind a cut that counts them, or before one that does not."""
    renderer = Renderer(template, replace(habits, misplaced=frozenset()))
    prompt = renderer.render(conversation)
    for index, message in enumerate(conversation.messages):
        at = prompt.text.find(message.content) if message.content else -1
        end = prompt.ends[index]
        if at < 0 or isinstance(end, str):
            continue
        moved = at >= end
        if moved or any((at < c.end) != (index < c.messages) for c in prompt.cuts if c.kind == "message"):
            yield message.role


def _end_of_turn(template: ChatTemplate, habits: Habits) -> str:
    text = _text(template, habits, Conversation((_USER, _ANSWER)), reply=False) or ""
    _, found, after = text.partition(_ANSWER.content)
    return after if found else ""


def _end_before_calls(template: ChatTemplate, habits: Habits) -> str:
    text = _text(template, habits, _chat(_BOTH)) or ""
    end = habits.end_of_turn.strip()
    between = text.rpartition(_ANSWER.content)[2].partition(_CALL.name)[0]
    native = not (habits.calls_apart or habits.calls_as_text)
    return end if native and _ANSWER.content in text and end in between else ""


def _user_frame(template: ChatTemplate, habits: Habits) -> Habits:
    """What stands around the text of user messages: before that of a first one, and of a later one."""
    headers: list[str] = []
    footer = ""
    renderer = Renderer(template, habits)
    for chat in ((_SYSTEM, *_PLAIN), _PLAIN):
        if _text(template, habits, _chat(chat)) is None:
            continue
        rendered = renderer.run(_chat(chat), reply=True)
        ends = renderer.render(_chat(chat)).ends
        first, last = len(chat) - 3, len(chat) - 1
        start, end = ends[last - 1], ends[last]
        if not isinstance(start, int) or not isinstance(end, int):
            continue
        own = next((s for s in rendered.spans if s.owner == first), None)
        header, found, footer = rendered.text[start:end].partition(_NEXT.content)
        headers += [header] if found and _SYSTEM.content not in header else []
        opening = rendered.text[own.start : own.end].partition(_USER.content)[0] if own else ""
        if opening and _SYSTEM.content not in opening:
            headers.append(opening)
            break
    footer = footer.removesuffix(habits.closers.get("user", ""))
    return replace(habits, user_headers=tuple(sorted({h for h in headers if h})), user_footer=footer)


def _vague(template: ChatTemplate, habits: Habits) -> Iterator[str]:
    """Roles whose empty messages end elsewhere when they are the last."""
    renderer = Renderer(template, habits)
    for chat in _EMPTY:
        if _text(template, habits, _chat(chat)) is None:
            continue
        prompt = renderer.render(_chat(chat))
        index = next(i for i, message in enumerate(chat) if not message.content and not message.tool_calls)
        tools = _chat(chat).tools
        alone = _text(template, habits, Conversation(chat[: index + 1], tools), reply=False)
        end = prompt.ends[index]
        if isinstance(end, int) and alone is not None and prompt.text.startswith(alone) and len(alone) != end:
            yield chat[index].role
