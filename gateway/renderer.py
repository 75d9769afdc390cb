"""A conversation to text with the positions of its boundaries, through a template whose habits were learned."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gateway.boundaries import Cut, merge, message_ends
from gateway.conversation import Conversation, Message, ToolCall
from gateway.template import ChatTemplate, Rendered
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
    results_as_user: bool = False  # drops or refuses tool results: they are a user's messages
    tools_as_text: bool = False  # drops tools: they are written into the system text
    no_tools: tuple[()] | None = None  # what to pass where there are none
    answer_in_loop: bool = False  # the generation prompt is written inside the loop over messages
    misplaced: frozenset[str] = frozenset()  # roles whose text is not where their turn is
    end_of_turn: str = ""  # what follows the text of a final assistant message


@dataclass(frozen=True, slots=True)
class PromptText:
    """Rendered text and its cuts, in characters: rising, merged, all before the generation suffix."""

    text: str
    cuts: tuple[Cut, ...]


class Renderer:
    """Immutable; safe to use from several threads at once."""

    def __init__(self, template: ChatTemplate, habits: Habits) -> None:
        self.template = template
        self.habits = habits
        self._reasoning_names = [name for name in _REASONING_NAMES if template.mentions(name)]
        self._uses_ids = template.mentions("id") or template.mentions("tool_call_id")

    def render(self, conversation: Conversation) -> PromptText:
        """Raises what the template raises."""
        reply = not conversation.continues
        rendered = self.run(conversation, reply)
        text, limit = rendered.text, len(rendered.text)
        ends = message_ends(rendered.spans, len(conversation.messages))
        if not reply:
            text = text.removesuffix(self.habits.end_of_turn)
            limit = len(text)
        elif self.habits.answer_in_loop or ends[-1] is None:
            limit = common_prefix(text, self.run(conversation, False).text)
            ends[-1] = limit if ends[-1] is None else min(ends[-1], limit)
        return PromptText(text, tuple(self._cuts(conversation, rendered, ends, limit)))

    def run(self, conversation: Conversation, reply: bool) -> Rendered:
        """Render as it is, with or without the generation prompt. Raises what the template raises."""
        messages = self.messages(conversation)
        tools = () if self.habits.tools_as_text else conversation.tools
        return self.template.render(
            messages,
            tools or self.habits.no_tools,
            reply=reply,
            extra=conversation.variables | self.variables(conversation),
            ours=len(messages) - len(conversation.messages),
        )

    def variables(self, conversation: Conversation) -> dict[str, Any]:
        """What Firefunction's template wants besides messages and tools; nothing for others."""
        if not self.template.mentions("functions"):
            return {}
        functions = to_json(list(conversation.tools), indent=4)
        return {"functions": functions, "datetime": datetime.now().strftime("%B %d %Y")}

    def messages(self, conversation: Conversation) -> list[dict[str, Any]]:
        """Messages as the template wants them; one more in front where only that can show the tools."""
        names = _tool_names(conversation.messages)
        ordinals: dict[str, str] = {}
        messages = [
            self._message(message, names.get(index), ordinals)
            for index, message in enumerate(conversation.messages)
        ]
        if not (self.habits.tools_as_text and conversation.tools):
            return messages
        text = _tools_text(conversation.tools)
        if conversation.messages[0].role != "system":
            return [{"role": "system", "content": text}, *messages]
        messages[0]["content"] += "\n\n" + text
        return messages

    def _message(self, message: Message, tool_name: str | None, ordinals: dict[str, str]) -> dict[str, Any]:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls and self.habits.calls_as_text:
            written = [_call_text(call) for call in message.tool_calls]
            fields["content"] = "\n".join([message.content, *written] if message.content else written)
        elif message.tool_calls:
            fields["tool_calls"] = [
                self._call(call.id, call.name, call.arguments, ordinals) for call in message.tool_calls
            ]
            if not message.content:
                fields["content"] = self.habits.empty_content
        if message.reasoning:
            fields |= dict.fromkeys(self._reasoning_names, message.reasoning)
        if message.role == "tool" and self.habits.results_as_user:
            return {"role": "user", "content": f"<tool_response>\n{message.content}\n</tool_response>"}
        if message.role == "tool":
            if message.tool_call_id and self._uses_ids:
                fields["tool_call_id"] = self._id(message.tool_call_id, ordinals)
            if tool_name:
                fields["name"] = tool_name
        return fields

    def _call(self, call_id: str, name: str, arguments: Any, ordinals: dict[str, str]) -> dict[str, Any]:
        if self.habits.arguments_as_text and not isinstance(arguments, str):
            arguments = to_json(arguments)
        call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if self._uses_ids:
            call["id"] = self._id(call_id, ordinals)
        return call

    def _id(self, call_id: str, ordinals: dict[str, str]) -> str:
        if not self.habits.ordinal_ids:
            return call_id
        return ordinals.setdefault(call_id, str(len(ordinals)).zfill(_ORDINAL_ID_LENGTH))

    def _cuts(
        self, conversation: Conversation, rendered: Rendered, ends: list[int | None], limit: int
    ) -> list[Cut]:
        messages = conversation.messages
        last = len(messages) - (1 if conversation.continues else 0)
        cuts = [
            Cut(end, "message", index + 1)
            for index, end in enumerate(ends[:last])
            if end is not None and messages[index].role not in self.habits.misplaced
        ]
        cuts.append(self._head(messages, rendered, ends))
        return [cut for cut in merge(cuts) if 0 < cut.end <= limit]

    def _head(self, messages: tuple[Message, ...], rendered: Rendered, ends: list[int | None]) -> Cut:
        """The end of tools and leading system text: where the first other message begins.

        No head (a cut at 0) where that message is written with it and has its end at the same position.
        """
        leading = 0
        while leading < len(messages) and messages[leading].role == "system":
            leading += 1
        if leading and "system" not in self.habits.misplaced:
            end = ends[leading - 1] or 0
        else:
            leading = 0
            end = next((span.start for span in rendered.spans if span.owner >= 0), 0)
        alone = leading == len(messages) or ends[leading] != end
        return Cut(end if alone else 0, "head", leading)


def common_prefix(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    if one.startswith(other):
        return len(other)
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


def _call_text(call: ToolCall) -> str:
    body = to_json({"name": call.name, "arguments": call.arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def _tools_text(tools: tuple[dict[str, Any], ...]) -> str:
    """Tools for a model whose template has no place for them, in the form of the calls above."""
    listed = "\n".join(to_json(tool["function"]) for tool in tools)
    return (
        f"You can call these functions:\n<tools>\n{listed}\n</tools>\n"
        'To call one, answer with <tool_call>{"name": its name, "arguments": an object}</tool_call>.'
    )


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
