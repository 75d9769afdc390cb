"""Chooses how a request's answers are read, by its model's template, its tools and the settings."""

from __future__ import annotations

import logging

from gateway.config import GatewaySettings
from gateway.conversation import Conversation
from gateway.prompts import Prompt, PromptMaker
from gateway.reply import ReplyParser, ReplyReader
from gateway.reply_calls import Calls
from gateway.reply_formats import NOTATIONS, THINKINGS, markers
from gateway.reply_parser import StreamParser
from gateway.reply_probe import Formats, find_formats

_log = logging.getLogger("prefixd.gateway")


class ReplyReaders:
    """Makes the readers of one model. Immutable."""

    def __init__(self, maker: PromptMaker, settings: GatewaySettings) -> None:
        self._maker = maker
        self._formats = {
            id(renderer): _chosen(find_formats(renderer), settings) for renderer in maker.renderers.values()
        }
        for formats in sorted(set(self._formats.values())):
            _log.info("answers are read with calls as %s and reasoning as %s", formats.calls, formats.reasoning)

    def formats(self, conversation: Conversation) -> Formats:
        """The names of the notations that answers to a conversation are read in."""
        return self._formats[id(self._maker.renderer(conversation))]

    def reader(
        self, conversation: Conversation, prompt: Prompt, *, calls: bool = True, one_call: bool = False
    ) -> ReplyReader:
        """`calls`: tools may be called, if the conversation has any; `one_call`: the answer ends with its first."""
        formats = self.formats(conversation)
        notation = NOTATIONS.get(formats.calls) if calls and conversation.tools else None
        thinking = THINKINGS.get(formats.reasoning)
        opening, asked = prompt.opening, conversation.messages[-1].content.strip()
        if asked and not conversation.continues:
            opening = opening.rpartition(asked)[2]  # where no cut parts them, what was asked must not open it
        inside = thinking is not None and thinking.opened_by(opening)

        def parser() -> ReplyParser:
            return StreamParser(thinking, notation, Calls(conversation.tools), inside=inside, one_call=one_call)

        return ReplyReader(parser, self._maker.token_bytes.special_in(markers(notation, thinking)))


def _chosen(found: Formats, settings: GatewaySettings) -> Formats:
    calls, reasoning = settings.tool_call_format, settings.reasoning_format
    return Formats(
        found.calls if calls == "auto" else calls, found.reasoning if reasoning == "auto" else reasoning
    )
