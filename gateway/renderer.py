"""A conversation to text with the positions of its boundaries, through a template whose habits were learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gateway.boundaries import Cut, merge, message_ends
from gateway.conversation import Conversation, Message
from gateway.template import NOBODY, ChatTemplate, Rendered, Span
from gateway.template_env import to_json
from gateway.template_form import Habits, TemplateForm, Written, ending
from gateway.text_memory import common_prefix

# Why a message has no boundary of its own.
JOINED = "the template takes no message of this kind here, so it is joined with the next one"
CONTINUED = "it is the answer that is to be continued"
MOVED = "the template does not write it where its turn is"
UNWRITTEN = "the template writes nothing for it here"
GROUPED = "the template writes it together with messages behind it"
PASSING = "what the template writes behind it may go away once another message follows"
VAGUE = "the template writes an empty message of this role differently once another follows"
UNSEEN = "the template puts its text together in a way that does not show where messages end"
SUFFIX = "it ends in what starts the answer"


@dataclass(frozen=True, slots=True)
class PromptText:
    """Rendered text and its cuts, in characters: rising, merged, all before the generation suffix.

    `ends` has for each message the position of its boundary, or why it has none.
    """

    text: str
    cuts: tuple[Cut, ...]
    ends: tuple[int | str, ...]


class Renderer:
    """Immutable; safe to use from several threads at once."""

    def __init__(self, template: ChatTemplate, habits: Habits) -> None:
        self.template = template
        self.habits = habits
        self.form = TemplateForm(template, habits)

    def render(self, conversation: Conversation) -> PromptText:
        """Raises what the template raises."""
        messages = conversation.messages
        reply = not conversation.continues
        written = self.form.write(conversation)
        rendered = self._run(conversation, written, reply)
        text, limit = rendered.text, len(rendered.text)
        if self.habits.unseen:
            text = text if reply else text.removesuffix(self.habits.end_of_turn)
            return PromptText(text, (), (UNSEEN,) * len(messages))
        ends = self._ends(rendered, messages)
        if not reply:
            text = text.removesuffix(self.habits.end_of_turn)
            limit = len(text)
        elif self.habits.answer_in_loop or ends[-1] is None or ending(messages[-1]) in self.habits.trailers:
            limit = common_prefix(text, self.run(conversation, False).text)
            ends[-1] = limit if ends[-1] is None else min(ends[-1], limit)
        leading = _leading_systems(messages)
        first = next(((each.fields, each.owner) for each in written if each.owner >= leading), None)
        owned = {span.owner for span in rendered.spans}
        before_loop = min(owned - {NOBODY}, default=len(messages))
        parts = {each.owner for each in written}
        said = text[:limit]
        found = [
            self._end(messages, index, end, said, index in parts, index in owned or index < before_loop)
            for index, end in enumerate(ends)
        ]
        for index in range(min(leading, len(messages) - 1)):
            together = messages[index + 1].content or (index + 1 < leading and index not in owned)
            if isinstance(found[index], int) and found[index] == found[index + 1] and together:
                found[index] = GROUPED
        cuts = [Cut(end, "message", index + 1) for index, end in enumerate(found) if isinstance(end, int)]
        for index, end in enumerate(ends):
            if found[index] is PASSING and end is not None:
                cuts.append(Cut(end, "interior", index))
        own = found[leading - 1] if leading else None
        inside = self._text_start(text, ends, first, leading < len(messages))
        if isinstance(own, int):
            cuts.append(Cut(own, "head", leading))
            if inside > own:
                cuts.append(Cut(inside, "interior", leading))
        else:
            start = next((span.start for span in rendered.spans if span.owner >= 0), 0)
            if start == found[0] or start in found:
                start = 0  # it is some message's end
            cuts.append(Cut(max(start, inside), "head", 0))
        return PromptText(
            text,
            tuple(cut for cut in merge(cuts) if 0 < cut.end <= limit),
            tuple(SUFFIX if isinstance(end, int) and end > limit else end for end in found),
        )

    def _ends(self, rendered: Rendered, messages: Sequence[Message]) -> list[int | None]:
        """Where each message ends, without what is there only because another follows."""
        trailers, text = self.habits.trailers, rendered.text
        if not trailers:
            return message_ends(rendered.spans, len(messages))
        spans: list[Span] = []
        latest = NOBODY
        for span in rendered.spans:
            late = latest > span.owner != NOBODY
            if late and text[span.start : span.end] in trailers.get(ending(messages[latest]), ()):
                span = Span(latest, span.start, span.end)  # it ends the last message of a group, not its first
            spans.append(span)
            latest = max(latest, span.owner)
        ends = message_ends(spans, len(messages))
        owners = {span.owner for span in spans}
        for index, end in enumerate(ends[:-1]):
            own = trailers.get(ending(messages[index]), ()) if end and index in owners else ()
            found = next((each for each in own if text.endswith(each, 0, end)), "")
            ends[index] = end and end - len(found)
        return ends

    def run(self, conversation: Conversation, reply: bool) -> Rendered:
        """Render as it is, with or without the generation prompt. Raises what the template raises."""
        return self._run(conversation, self.form.write(conversation), reply)

    def _run(self, conversation: Conversation, written: Sequence[Written], reply: bool) -> Rendered:
        tools = [] if self.habits.tools_as_text else list(conversation.tools)  # some print the list as it is
        return self.template.render(
            [self.form.given(each) for each in written],
            tools or self.habits.no_tools,
            reply=reply,
            extra=conversation.variables | self.variables(conversation),
            owners=[each.owner for each in written],
        )

    def variables(self, conversation: Conversation) -> dict[str, Any]:
        """What Firefunction's template wants besides messages and tools; nothing for others."""
        if not self.template.mentions("functions"):
            return {}
        functions = to_json(list(conversation.tools), indent=4)
        return {"functions": functions, "datetime": datetime.now().strftime("%B %d %Y")}

    def _end(
        self, messages: Sequence[Message], index: int, end: int | None, text: str, whole: bool, wrote: bool
    ) -> int | str:
        """A message's boundary, or why it has none.

        `whole`: no later message is joined to it; `wrote`: the template wrote something for it, or did so for
        several before its loop over messages.
        """
        message, habits = messages[index], self.habits
        last = index == len(messages) - 1
        if last and message.role == "assistant" and not message.tool_calls:
            return CONTINUED
        if not whole:
            return JOINED
        if end is None:
            return GROUPED
        empty = not (message.content or message.tool_calls)
        if not end or (not wrote and not empty):
            return UNWRITTEN
        if empty and message.role in habits.vague:
            return VAGUE
        if message.role in habits.misplaced and (message.role != "system" or index < _leading_systems(messages)):
            return MOVED
        only_systems = last and message.role == "system" and _leading_systems(messages) == len(messages)
        closer = habits.closers.get(ending(message, only_systems), "")
        if closer and text.startswith(closer, end) and not (last and habits.answer_in_loop):
            if ending(message) in habits.passing:
                return PASSING
            return end + len(closer)
        return end

    def _text_start(
        self, text: str, ends: Sequence[int | None], first: tuple[dict[str, Any], int] | None, other: bool
    ) -> int:
        """Where the first message behind tools and system text begins; 0 if it cannot be seen.

        Templates write tools or system text into that message's turn, or a text of their own before it: then it
        begins where its content does, or where the header does that every such message has.
        """
        if first is None or not other or first[0]["role"] != "user":
            return 0
        content, end = first[0]["content"], ends[first[1]]
        footer = self.habits.user_footer
        if end is None or not self.habits.user_headers:
            return 0
        for written in (content, content.strip()):
            start = end - len(footer) - len(written)
            if start > 0 and text.startswith(footer, end - len(footer)) and text.startswith(written, start):
                headers = [h for h in self.habits.user_headers if text.endswith(h, 0, start)]
                return start - max(map(len, headers), default=0)
        return 0


def _leading_systems(messages: Sequence[Message]) -> int:
    leading = 0
    while leading < len(messages) and messages[leading].role == "system":
        leading += 1
    return leading
