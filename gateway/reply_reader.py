"""Chooses how a request's answers are read, and forced: by its model's template, its tools and the settings."""

from __future__ import annotations

import logging
from dataclasses import astuple

from gateway.config import GatewaySettings
from gateway.conversation import Conversation
from gateway.grammar import Demand, Reasoning, answer_grammar
from gateway.grammar_cache import KnownGrammars
from gateway.layout_probe import find_layout
from gateway.prompts import Prompt, PromptMaker
from gateway.reply import ReplyParser, ReplyReader
from gateway.reply_call_json import JsonNotation
from gateway.reply_calls import Calls
from gateway.reply_formats import NOTATIONS, THINKINGS, markers
from gateway.reply_parser import StreamParser, Thinking
from gateway.reply_probe import Formats, find_formats
from protocol.errors import RequestError

_log = logging.getLogger("prefixd.gateway")


class ReplyReaders:
    """Makes the readers of one model. Safe to use from several threads."""

    def __init__(self, maker: PromptMaker, settings: GatewaySettings) -> None:
        self._maker = maker
        self._formats = {
            id(renderer): _chosen(find_formats(renderer), settings) for renderer in maker.renderers.values()
        }
        self._layouts = {
            id(renderer): find_layout(renderer, NOTATIONS.get(found.calls), THINKINGS.get(found.reasoning))
            for renderer in maker.renderers.values()
            for found in (self._formats[id(renderer)],)
        }
        self._known = KnownGrammars()
        for formats in sorted(set(self._formats.values())):
            _log.info("answers are read with calls as %s and reasoning as %s", formats.calls, formats.reasoning)

    def formats(self, conversation: Conversation) -> Formats:
        """The names of the notations that answers to a conversation are read in."""
        return self._formats[id(self._maker.renderer(conversation))]

    def reader(
        self,
        conversation: Conversation,
        prompt: Prompt,
        *,
        calls: bool = True,
        one_call: bool = False,
        held: bool = False,
    ) -> ReplyReader:
        """`calls`: tools may be called, if the conversation has any; `one_call`: the answer ends with its first.

        `held`: the answer has a grammar, so nothing that only resembles a call need be taken for one.
        """
        formats = self.formats(conversation)
        notation = NOTATIONS.get(formats.calls) if calls and conversation.callable_tools else None
        if held and isinstance(notation, JsonNotation):
            notation = notation.held()
        thinking = THINKINGS.get(formats.reasoning)
        inside = thinking is not None and thinking.opened_by(_opening(conversation, prompt))
        end = self._maker.renderer(conversation).habits.end_before_calls

        def parser() -> ReplyParser:
            return StreamParser(
                thinking, notation, Calls(conversation.callable_tools), inside=inside, one_call=one_call, end=end
            )

        return ReplyReader(parser, self._maker.token_bytes.special_in(markers(notation, thinking, end)))

    def grammar(
        self,
        conversation: Conversation,
        prompt: Prompt,
        demand: Demand | None,
        *,
        calls: bool,
        many: bool = False,
    ) -> str | None:
        """The grammar of answers to `demand`; `calls`: where it is for JSON, a tool may be called instead.

        Where it is for a call, `many` may come. Raises `RequestError` naming its field, where such answers cannot be
        forced; nobody asked for a form where a demand is free, so such tools are called as the model likes.
        """
        if demand is None or (demand.free and self.formats(conversation).calls not in NOTATIONS):
            return None
        try:
            return self._forced(conversation, prompt, demand, calls=calls, many=many)
        except RequestError:
            if demand.free and not demand.only:
                return None
            raise

    def _forced(
        self, conversation: Conversation, prompt: Prompt, demand: Demand, *, calls: bool, many: bool
    ) -> str:
        """Raises `RequestError` for a demand that cannot be held to."""
        formats = self.formats(conversation)
        thinking = THINKINGS.get(formats.reasoning)
        if conversation.continues:
            raise demand.refused("an answer that goes on from the last message cannot be forced into a form")
        layout = self._layouts[id(self._maker.renderer(conversation))]
        tools = conversation.callable_tools if calls or demand.schema is None else ()
        if demand.schema is None:
            tools = tuple(t for t in tools if demand.tool in (None, t["function"]["name"]))
            if not tools:
                raise demand.refused("there is no such tool" if demand.tool else "there are no tools to call")
            known = layout.openers if demand.free else layout.calls
            if not known or (self._ends_early(conversation) and not demand.free):
                raise demand.refused(f"calls in the notation of this model ({formats.calls}) cannot be forced")
        elif layout.said is None:
            raise demand.refused(f"answers in the notation of this model ({formats.reasoning}) cannot be forced")
        reasoning = None if thinking is None else _reasoning(thinking, _opening(conversation, prompt))
        if thinking is not None and thinking.anywhere and layout.resumed is None:
            reasoning = None  # what parts it from an answer is not known
        self._maker.vocabulary  # noqa: B018 (made here, on a thread, and not where it is sent)
        split = self._maker.token_bytes.split
        # Layouts belong to renderers, and those live as long as this.
        made_of = (id(layout), demand.made_of, tools, reasoning and astuple(reasoning), many)
        return self._known.grammar(
            made_of, lambda: answer_grammar(demand, tools, layout, reasoning, split, many=many)
        )

    def _ends_early(self, conversation: Conversation) -> bool:
        """Whether calls stand behind what ends an answer already, by the model's own settings."""
        end = self._maker.renderer(conversation).habits.end_before_calls
        return any(piece in self._maker.end_token_ids for piece in self._maker.token_bytes.split(end))


def _opening(conversation: Conversation, prompt: Prompt) -> str:
    """What the prompt has begun of the answer."""
    opening, asked = prompt.opening, conversation.messages[-1].content.strip()
    if asked and not conversation.continues:
        opening = opening.rpartition(asked)[2]  # where no cut parts them, what was asked must not open it
    return opening


def _reasoning(thinking: Thinking, opening: str) -> Reasoning | None:
    """None where the prompt has already closed it."""
    opened = thinking.opened_by(opening)
    return None if not opened and thinking.close in opening else Reasoning(thinking.open, thinking.close, opened)


def _chosen(found: Formats, settings: GatewaySettings) -> Formats:
    calls, reasoning = settings.tool_call_format, settings.reasoning_format
    return Formats(
        found.calls if calls == "auto" else calls, found.reasoning if reasoning == "auto" else reasoning
    )
