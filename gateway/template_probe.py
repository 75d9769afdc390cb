"""Learns a template's habits by rendering small conversations once, at load.

Templates disagree about things no standard settles: whether tool arguments are an object or text, whether an
assistant message that only calls tools has empty or no content, where the system text goes, whether two user
messages may follow one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from gateway.conversation import Conversation, Message
from gateway.renderer import Renderer
from gateway.template import ChatTemplate
from gateway.template_chats import (
    ASKED,
    BOTH,
    CALL,
    CHATS,
    EMPTY,
    INNER_SYSTEM,
    NEXT,
    PARALLEL,
    PLAIN,
    RESULT,
    SHORT_IDS,
    SYSTEM,
    THOUGHT,
    TOOL,
    TOOL_CHATS,
    TWO_ANSWERS,
    TWO_SYSTEMS,
    USER,
    USER_FOLLOWS,
    as_conversation,
    rendered_probe,
    text_of_probe,
)
from gateway.template_endings import answers_in_loop, closing_habits, end_before_calls, end_of_turn, user_frame
from gateway.template_form import Habits
from protocol.errors import SettingsError


def learn(template: ChatTemplate) -> Renderer:
    """The renderer for a template. Raises `SettingsError` where even a plain chat cannot be rendered."""
    renderer = _learn(template)
    if renderer.habits.unseen:
        gathering = _learn(template.gathering())
        renderer = renderer if gathering.habits.unseen else gathering
    return renderer


def _learn(template: ChatTemplate) -> Renderer:
    habits = _plain_habits(template)
    habits = _tool_habits(template, habits)
    habits = _order_habits(template, habits)
    habits = _empty_habits(template, habits)
    conversations = [Conversation(chat) for chat in CHATS]
    conversations += [Conversation(chat, (TOOL,)) for chat in (*TOOL_CHATS, PLAIN)]
    rendered = [c for c in conversations if text_of_probe(template, habits, c) is not None]
    habits = replace(habits, answer_in_loop=any(answers_in_loop(template, habits, c) for c in rendered))
    habits = closing_habits(template, habits)
    habits = replace(
        habits,
        misplaced=frozenset(role for c in rendered for role in _misplaced(template, habits, c)),
        end_of_turn=end_of_turn(template, habits),
    )
    habits = replace(habits, end_before_calls=end_before_calls(template, habits))
    habits = user_frame(template, habits)
    habits = replace(habits, vague=frozenset(_vague(template, habits)))
    return Renderer(template, replace(habits, unseen=_is_unseen(Renderer(template, habits))))


def _is_unseen(renderer: Renderer) -> bool:
    """Whether a plain chat has no boundary but its end, or any that is not where the render of so many messages is."""
    for chat in (PLAIN, (SYSTEM, *PLAIN)):
        if text_of_probe(renderer.template, renderer.habits, as_conversation(chat)) is None:
            continue
        whole = renderer.render(as_conversation(chat))
        ends = {count: end for count, end in enumerate(whole.ends, 1) if isinstance(end, int)}
        alone = {count: rendered_probe(renderer, as_conversation(chat[:count])) for count in ends}
        begins = {n: len(a.text) for n, a in alone.items() if a is not None and whole.text.startswith(a.text)}
        if len(whole.cuts) < 2 or any(ends[count] != length for count, length in begins.items()):
            return True
    return False


def probe_texts(renderer: Renderer) -> Iterator[str]:
    """Renders of all probes that the template takes, with and without the generation prompt."""
    for chat, tools in product((*CHATS, *TOOL_CHATS), ((), (TOOL,))):
        for reply in (True, False):
            text = text_of_probe(renderer.template, renderer.habits, Conversation(chat, tools), reply)
            if text is not None:
                yield text


def _plain_habits(template: ChatTemplate) -> Habits:
    # The template may demand tools; then it serves requests that bring some.
    for tools, parts, no_tools in product(((), (TOOL,)), (False, True), (None, ())):
        habits = Habits(no_tools=no_tools, content_in_parts=parts)
        if NEXT.content in (text_of_probe(template, habits, Conversation(PLAIN, tools)) or ""):
            return habits
    try:
        Renderer(template, Habits()).run(Conversation(PLAIN), reply=True)
    except Exception as error:
        raise SettingsError(f"chat_template: cannot render a plain conversation: {error}") from error
    raise SettingsError("chat_template: a user message does not appear in its text")


def _tool_habits(template: ChatTemplate, habits: Habits) -> Habits:
    """The first way of writing tool calls, results and tools that comes out right; as given where none does."""
    text = text_of_probe(template, habits, Conversation(PLAIN, (TOOL,)))
    if text is None or CALL.name not in text:
        shown = replace(habits, tools_as_text=True)
        # The tools go into system text, which the template may have no place for either.
        for tried in (shown, replace(shown, system_as_user=True)):
            if CALL.name in (text_of_probe(template, tried, Conversation(PLAIN, (TOOL,))) or ""):
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
        text = text_of_probe(template, tried, Conversation(TOOL_CHATS[0], (TOOL,)))
        short = text_of_probe(template, tried, as_conversation(SHORT_IDS))
        if text is not None and short is not None and _call_came_out(text):
            return tried
    return habits


def _call_came_out(text: str) -> bool:
    tail = text[text.find(USER.content) :]
    spoilt = any(sign in tail for sign in ('\\"probekey', "'probekey'", "None", "\\\\"))
    return not spoilt and "probevalue" in tail and "probefunction" in tail and RESULT.content in tail


def _order_habits(template: ChatTemplate, habits: Habits) -> Habits:
    """What to do where the template refuses an order of roles, or moves or drops a system message.

    Each try stands only if it brings every probe out that the template takes in some form.
    """
    with_tools = _in_order(template, habits, ASKED)
    follows, inner = (
        [chat for chat in chats if with_tools or not any(m.tool_calls for m in chat)]
        for chats in (USER_FOLLOWS, INNER_SYSTEM)
    )
    nothing: frozenset[str] = frozenset()
    for joined in (nothing, frozenset({"user"}), frozenset({"user", "tool"})):
        tried = replace(habits, joined=joined)
        if all(_in_order(template, tried, chat) for chat in follows):
            habits = tried
            break
    if not _shown(template, habits, (SYSTEM, *PLAIN)):
        tried = replace(habits, system_as_user=True, joined=habits.joined)
        habits = tried if _shown(template, tried, (SYSTEM, *PLAIN)) else habits
    if not all(_in_order(template, habits, chat) for chat in inner):
        tried = replace(habits, inner_as_user=True)
        habits = tried if all(_in_order(template, tried, chat) for chat in inner) else habits
    if not _shown(template, habits, TWO_SYSTEMS):
        tried = replace(habits, one_system=True)
        habits = tried if _shown(template, tried, TWO_SYSTEMS) else habits
    if not _in_order(template, habits, TWO_ANSWERS):
        tried = replace(habits, one_answer=True)
        habits = tried if _in_order(template, tried, TWO_ANSWERS) else habits
    if with_tools and not _both_calls(template, habits):
        ways = (replace(habits, calls_in_turn=True), replace(habits, single_calls=True))
        habits = next((tried for tried in ways if _both_calls(template, tried)), habits)
    if with_tools and not _calls_beside_text(template, habits):
        tried = replace(habits, calls_apart=True)
        habits = tried if _calls_beside_text(template, tried) and _in_order(template, tried, BOTH) else habits
    if with_tools and text_of_probe(template, habits, as_conversation(THOUGHT)) is None:
        tried = replace(habits, text_in_reasoning=True)
        habits = tried if _calls_beside_text(template, tried, THOUGHT) else habits
    return habits


def _empty_habits(template: ChatTemplate, habits: Habits) -> Habits:
    """Roles whose text, where it is empty, is taken as a part of a list only."""
    for chat in EMPTY:
        empty = next(message for message in chat if not message.content and not message.tool_calls)
        tried = replace(habits, empty_in_parts=habits.empty_in_parts | {empty.role})
        if (
            _in_order(template, habits, [message for message in chat if message is not empty])
            and text_of_probe(template, habits, as_conversation(chat)) is None
            and text_of_probe(template, tried, as_conversation(chat)) is not None
        ):
            habits = tried
    return habits


def _both_calls(template: ChatTemplate, habits: Habits) -> bool:
    """Whether calls that are made at once all come out, with their results behind them."""
    text = text_of_probe(template, habits, as_conversation(PARALLEL)) or ""
    return _in_order(template, habits, PARALLEL) and "probevalue" in text and "othervalue" in text


def _calls_beside_text(template: ChatTemplate, habits: Habits, chat: Sequence[Message] = BOTH) -> bool:
    """Whether a call comes out that has text beside it. Where only the text is lost, that is the model's habit."""
    text = text_of_probe(template, habits, as_conversation(chat)) or ""
    return "probevalue" in text[text.find(USER.content) :]


def _shown(template: ChatTemplate, habits: Habits, messages: Sequence[Message]) -> bool:
    text = text_of_probe(template, habits, as_conversation(messages))
    return text is not None and all(message.content in text for message in messages)


def _in_order(template: ChatTemplate, habits: Habits, messages: Sequence[Message]) -> bool:
    text = text_of_probe(template, habits, as_conversation(messages))
    if text is None:
        return False
    places = [text.find(message.content) for message in messages if message.content]
    return -1 not in places and places == sorted(places)


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


def _vague(template: ChatTemplate, habits: Habits) -> Iterator[str]:
    """Roles whose empty messages end elsewhere when they are the last."""
    renderer = Renderer(template, habits)
    for chat in EMPTY:
        if text_of_probe(template, habits, as_conversation(chat)) is None:
            continue
        prompt = renderer.render(as_conversation(chat))
        index = next(i for i, message in enumerate(chat) if not message.content and not message.tool_calls)
        tools = as_conversation(chat).tools
        alone = text_of_probe(template, habits, Conversation(chat[: index + 1], tools), reply=False)
        end = prompt.ends[index]
        if isinstance(end, int) and alone is not None and prompt.text.startswith(alone) and len(alone) != end:
            yield chat[index].role
