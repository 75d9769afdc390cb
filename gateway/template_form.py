"""Messages in the form one chat template takes: its habits, and what is done where it has no place for something."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gateway.conversation import Conversation, JsonObject, Message, ToolCall, text_of
from gateway.template import NOBODY, ChatTemplate
from gateway.template_env import to_json

_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
_ORDINAL_ID_LENGTH = 9  # what Mistral's templates insist on


@dataclass(frozen=True, slots=True)
class Habits:
    """How one template wants a conversation, and how far its text can be cut. Found by `template_probe.learn`."""

    arguments_as_text: bool = False  # tool arguments as JSON text, not as an object
    empty_content: str | None = ""  # content of a message that only calls tools
    ordinal_ids: bool = False  # refuses tool call ids as clients write them
    calls_as_text: bool = False  # drops tool calls: they are written into the content
    calls_in_turn: bool = False  # refuses or drops further calls in one message: each has a message of its own
    single_calls: bool = False  # refuses several calls in one message: these are written into the content
    calls_apart: bool = False  # drops calls beside text: the text is a message of its own before theirs
    results_as_user: bool = False  # drops or refuses tool results: they are a user's messages
    system_as_user: bool = False  # drops or refuses leading system messages: they are a user's
    one_system: bool = False  # drops or refuses a second leading system message: it joins the first
    inner_as_user: bool = False  # drops, moves or refuses system messages behind others: they are a user's
    joined: frozenset[str] = frozenset()  # roles that no user message may follow: it is appended to theirs
    one_answer: bool = False  # refuses answers in a row: each is appended to the one before
    text_in_reasoning: bool = False  # refuses text and reasoning beside calls: the text goes behind the reasoning
    tools_as_text: bool = False  # drops tools: they are written into the system text
    no_tools: tuple[()] | None = None  # what to pass where there are none
    content_in_parts: bool = False  # takes text as a list of parts only, as models that see do
    empty_in_parts: frozenset[str] = frozenset()  # roles whose text is given so where it is empty
    answer_in_loop: bool = False  # the generation prompt is written inside the loop over messages
    misplaced: frozenset[str] = frozenset()  # roles whose text is not where their turn is
    closers: Mapping[str, str] = field(default_factory=dict)  # by `ending`: written when nothing follows
    trailers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # written only because another follows
    passing: frozenset[str] = frozenset()  # endings whose closer goes away once another message follows
    unseen: bool = False  # where messages end does not show, as their text is put together elsewhere
    vague: frozenset[str] = frozenset()  # roles whose empty messages are written differently at the end
    user_headers: tuple[str, ...] = ()  # what may stand before the text of a user message
    user_footer: str = ""  # what stands behind it
    end_of_turn: str = ""  # what follows the text of a final assistant message
    end_before_calls: str = ""  # of this, what also stands between a text and calls in one message


class Written(NamedTuple):
    """A message for the template. `owner` is the index of the last client message in it, or NOBODY if it is ours."""

    fields: dict[str, Any]
    owner: int


class TemplateForm:
    """Writes conversations for one template. Immutable; so are the fields it gives out."""

    def __init__(self, template: ChatTemplate, habits: Habits) -> None:
        self._habits = habits
        self._reasoning_names = [name for name in _REASONING_NAMES if template.mentions(name)]
        self._uses_ids = template.mentions("id") or template.mentions("tool_call_id")

    def write(self, conversation: Conversation) -> list[Written]:
        """Messages as the template wants them; one more in front where only that can show the tools."""
        names = _tool_names(conversation.messages)
        ordinals: dict[str, str] = {}
        written: list[Written] = []
        used: set[int] = set()
        leading = True
        for index, message in enumerate(conversation.messages):
            leading = leading and message.role == "system"
            for part in self._parts(message):
                fields = self._fields(part, names.get(index), ordinals, leading)
                if id(fields) in used:
                    fields = dict(fields)  # one message twice: a template's loop tells its messages apart by them
                used.add(id(fields))
                before = written[-1] if written else None
                if before is not None and before.owner != index and self._is_one(before.fields, fields, leading):
                    written[-1] = Written(self._joined(message, before.fields, fields), index)
                else:
                    written.append(Written(fields, index))
        if self._habits.tools_as_text and conversation.tools:
            self._show_tools(written, _tools_text(conversation.tools), conversation.messages[0])
        return written

    def given(self, written: Written) -> dict[str, Any]:
        """A message as the template is given it."""
        content, habits = written.fields["content"], self._habits
        in_parts = habits.content_in_parts or (not content and written.fields["role"] in habits.empty_in_parts)
        if not in_parts or content is None:
            return written.fields
        return {**written.fields, "content": [{"type": "text", "text": content}]}

    def _is_one(self, before: dict[str, Any], fields: dict[str, Any], leading: bool) -> bool:
        """Whether the template takes the two only as one message."""
        match fields["role"]:
            case "user":
                return before["role"] in self._habits.joined
            case "system":
                return leading and self._habits.one_system
            case "assistant":
                return before["role"] == "assistant" and self._habits.one_answer
        return False

    def _parts(self, message: Message) -> tuple[Message, ...]:
        calls, habits = message.tool_calls, self._habits
        apart = bool(calls and habits.calls_apart and message.content)
        if not apart and not (habits.calls_in_turn and len(calls) > 1):
            return (message,)
        parts = message.made.get(self)
        if parts is None:
            calling = replace(message, content="", reasoning=None) if apart else message
            own = [replace(message, tool_calls=()), calling] if apart else [message]
            if habits.calls_in_turn:
                further = (replace(calling, content="", reasoning=None, tool_calls=(call,)) for call in calls[1:])
                own[-1:] = [replace(calling, tool_calls=calls[:1]), *further]
            parts = message.made[self] = tuple(own)
        assert isinstance(parts, tuple)
        return parts

    def _joined(self, message: Message, before: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """What is written before a message, with the message appended; the same one each time."""
        known = message.made.get((self, "joined"))
        if isinstance(known, tuple) and known[0] is before:
            fields = known[1]
            return fields
        if fields["role"] == "assistant":
            joined = self._one_answer(before, fields)
        else:
            joined = {**before, "content": f"{before['content']}\n\n{fields['content']}"}
        message.made[self, "joined"] = before, joined
        return joined

    def _one_answer(self, before: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
        """Two answers as one: what is said and thought in both, and then all calls."""
        joined = before | fields
        for name in ("content", *self._reasoning_names):
            if said := [each[name] for each in (before, fields) if each.get(name)]:
                joined[name] = "\n\n".join(said)
        if calls := [*before.get("tool_calls", ()), *fields.get("tool_calls", ())]:
            joined["tool_calls"] = calls
        return joined

    def _show_tools(self, written: list[Written], text: str, message: Message) -> None:
        """Append the tools to leading system text, or put them where that would be. `message` is the first one."""
        first, owner = written[0]
        inserts = first["role"] != "system" and (not self._habits.system_as_user or first["role"] != "user")
        known = message.made.get((self, "tools"))
        if isinstance(known, tuple) and known[0] is first and known[1] == text:
            shown = known[2]
        else:
            shown = self._with_tools(first, text, inserts)
            message.made[self, "tools"] = first, text, shown
        if inserts:
            written.insert(0, Written(shown, NOBODY))
        else:
            written[0] = Written(shown, owner)

    def _with_tools(self, first: dict[str, Any], text: str, inserts: bool) -> dict[str, Any]:
        if inserts:
            return {"role": "user" if self._habits.system_as_user else "system", "content": text}
        said = (first["content"], text) if first["role"] == "system" else (text, first["content"])
        return {**first, "content": "\n\n".join(said)}

    def _fields(
        self, message: Message, tool_name: str | None, ordinals: dict[str, str], leading: bool
    ) -> dict[str, Any]:
        """The fields of a message, the very same ones each time. `ordinals` learns the ids that are new in it."""
        if self._habits.ordinal_ids and (message.tool_calls or message.tool_call_id):
            return self._numbered(message, tool_name, ordinals, leading)
        key = (self, tool_name, leading)
        fields: dict[str, Any] | None = message.made.get(key)
        if fields is None:
            fields = message.made[key] = self._message(message, tool_name, ordinals, leading)
        return fields

    def _numbered(
        self, message: Message, tool_name: str | None, ordinals: dict[str, str], leading: bool
    ) -> dict[str, Any]:
        """The same where the ids in it are counted through the conversation."""
        ids = [*(call.id for call in message.tool_calls), message.tool_call_id or ""]
        key = (self, tool_name, leading, len(ordinals), *map(ordinals.get, ids))
        known = message.made.get(key)
        if known is None:
            written = self._message(message, tool_name, ordinals, leading)
            known = message.made[key] = written, {each: ordinals[each] for each in ids if each in ordinals}
        fields: dict[str, Any]
        fields, learned = known
        ordinals |= learned
        return fields

    def _message(
        self, message: Message, tool_name: str | None, ordinals: dict[str, str], leading: bool
    ) -> dict[str, Any]:
        habits = self._habits
        calls, content, reasoning = message.tool_calls, message.content, message.reasoning
        if calls and content and reasoning and habits.text_in_reasoning:
            content, reasoning = "", f"{reasoning}\n\n{content}"
        fields: dict[str, Any] = {"role": message.role, "content": content}
        if message.role == "system" and (habits.system_as_user if leading else habits.inner_as_user):
            fields["role"] = "user"
        if calls and (habits.calls_as_text or (habits.single_calls and len(calls) > 1)):
            written = [_call_text(call) for call in calls]
            fields["content"] = "\n".join([content, *written] if content else written)
        elif calls:
            fields["tool_calls"] = [self._call(call.id, call.name, call.arguments, ordinals) for call in calls]
            if not content:
                fields["content"] = habits.empty_content
        if reasoning:
            fields |= dict.fromkeys(self._reasoning_names, reasoning)
        if message.role == "tool" and habits.results_as_user:
            return {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
        if message.role == "tool":
            if message.tool_call_id and self._uses_ids:
                fields["tool_call_id"] = self._id(message.tool_call_id, ordinals)
            if tool_name:
                fields["name"] = tool_name
        return fields

    def _call(self, call_id: str, name: str, arguments: Any, ordinals: dict[str, str]) -> dict[str, Any]:
        if self._habits.arguments_as_text and not isinstance(arguments, str):
            arguments = to_json(arguments)
        call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if self._uses_ids:
            call["id"] = self._id(call_id, ordinals)
        return call

    def _id(self, call_id: str, ordinals: dict[str, str]) -> str:
        if not self._habits.ordinal_ids:
            return call_id
        return ordinals.setdefault(call_id, str(len(ordinals)).zfill(_ORDINAL_ID_LENGTH))


def ending(message: Message, only_systems: bool = False) -> str:
    """What kind of message a conversation ends with, as far as templates close it differently."""
    return "calls" if message.tool_calls else "head" if only_systems else message.role


def _call_text(call: ToolCall) -> str:
    # Put together, as what was made of the arguments before need not be made again.
    body = f'{{"name": {to_json(call.name)}, "arguments": {to_json(call.arguments)}}}'
    return f"<tool_call>\n{body}\n</tool_call>"


def _tools_text(tools: tuple[dict[str, Any], ...]) -> str:
    """Tools for a model whose template has no place for them, in the form of the calls above."""
    listed = "\n".join(map(_function_text, tools))
    return (
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\n"
        'To call one, answer with <tool_call>{"name": its name, "arguments": an object}</tool_call>.'
    )


def _function_text(tool: dict[str, Any]) -> str:
    def write() -> str:
        return to_json(tool["function"])

    return text_of(tool, _function_text, write) if isinstance(tool, JsonObject) else write()


def _tool_names(messages: tuple[Message, ...]) -> dict[int, str]:
    """For each tool result the function's name: by the call it answers, else as the client named it.

    Clients drop `name` from results when they resume a session, so it must not decide the prompt.
    """
    called: dict[str, str] = {}
    names: dict[int, str] = {}
    for index, message in enumerate(messages):
        for call in message.tool_calls:
            called[call.id] = call.name
        if message.role == "tool":
            name = called.get(message.tool_call_id or "") or message.name
            if name:
                names[index] = name
    return names
