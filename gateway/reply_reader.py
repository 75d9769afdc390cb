"""Chooses how a request's answers are read, by its model's template, its tools and the settings."""

from __future__ import annotations

from gateway.config import GatewaySettings
from gateway.conversation import Conversation
from gateway.prompts import Prompt, PromptMaker
from gateway.reply import ReplyReader


class ReplyReaders:
    """Makes the readers of one model. Immutable."""

    def __init__(self, maker: PromptMaker, settings: GatewaySettings) -> None:
        self._maker = maker

    def reader(
        self, conversation: Conversation, prompt: Prompt, *, calls: bool = True, one_call: bool = False
    ) -> ReplyReader:
        """`calls`: tools may be called, if the conversation has any; `one_call`: the answer ends with its first."""
        return ReplyReader()
