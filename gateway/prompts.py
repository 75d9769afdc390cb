"""From a conversation, or a plain prompt, to what the worker is sent: token ids and boundaries.

Pure work without input or output, done on a thread: nothing here may touch the event loop's objects.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError

from gateway.boundaries import Cut, completion_cuts, digest_cuts, merge, with_interior
from gateway.control_tokens import strings_in, unused_character
from gateway.conversation import Conversation, Message, ToolCall
from gateway.detokenizer import TokenBytes
from gateway.model_files import ModelFiles
from gateway.renderer import PromptText, Renderer
from gateway.template import ChatTemplate
from gateway.template_probe import learn, probe_texts
from gateway.tokenizer import PromptTokenizer, TooLongError
from protocol.digest import root_digest
from protocol.errors import RequestError
from protocol.messages import Boundary, ModelInfo

_SAMPLE = "  It's 12345\n\n größe e\u0301 日本😀\t x "  # what tokenizers split in different ways
_DEFAULT, _WITH_TOOLS = "default", "tool_use"


class Prompt(NamedTuple):
    """One prompt as the worker gets it."""

    token_ids: array[int]
    boundaries: tuple[Boundary, ...]


class PromptMaker:
    """Holds tokenizer and templates of one model. Safe to use from several threads."""

    def __init__(self, files: ModelFiles) -> None:
        """Raises `SettingsError` for a tokenizer or template that cannot be served."""
        self.renderers = {
            name: learn(ChatTemplate(source, files.special_tokens)) for name, source in files.templates.items()
        }
        added = [token.content for token in files.tokenizer.get_added_tokens_decoder().values()]
        probes = [text for renderer in self.renderers.values() for text in probe_texts(renderer)]
        written = {token for token in added if token.strip() and any(token in text for text in probes)}
        written |= {
            token for token in added if token.strip() and any(token in t for t in files.templates.values())
        }
        self.tokenizer = PromptTokenizer(files.tokenizer, written)
        self.tokenizer.check([*probes, *(f"{token}{_SAMPLE}{token}b{token}{token} c" for token in added[:16])])
        self.token_bytes = TokenBytes(files.tokenizer)
        self._prefix = self.tokenizer.default_prefix()
        self.end_token_ids = files.end_token_ids | self._template_ends()

    def chat(self, conversation: Conversation, model: ModelInfo) -> Prompt:
        """Raises `RequestError` where the template refuses or the prompt fills the context."""
        renderer = self._renderer(bool(conversation.tools))
        kept = self._kept(renderer)
        sentinel = ""
        if any(self.tokenizer.control.occur_in(text) for text in _texts(conversation)):
            sentinel = unused_character(_texts(conversation))
            conversation = _rewritten(
                conversation,
                lambda text, own: self.tokenizer.control.broken(text, sentinel, kept if own else _NONE),
            )
        rendered = _render(renderer, conversation)
        positions = [cut.end for cut in rendered.cuts]
        try:
            ids, found = self.tokenizer.encode_chat(
                rendered.text, positions, sentinel=sentinel, limit=model.max_model_len
            )
        except TooLongError as error:
            raise _too_long(f"at least {error.at_least}", model, "messages") from error
        ids, shift = self._one_bos(ids)
        if len(ids) >= model.max_model_len:
            raise _too_long(str(len(ids)), model, "messages")
        cuts = [
            replace(cut, end=end + shift)
            for cut, end in zip(rendered.cuts, found, strict=True)
            if end is not None and end + shift > max(len(self._prefix), 1)  # BOS alone is nothing to keep
        ]
        return Prompt(ids, digest_cuts(root_digest(model.fingerprint), ids, with_interior(merge(cuts))))

    def completion(self, prompt: str | array[int], model: ModelInfo) -> Prompt:
        """A plain prompt: text encoded as the tokenizer does by default, or token ids as they are."""
        try:
            ids = self.tokenizer.encode_plain(prompt, model.max_model_len) if isinstance(prompt, str) else prompt
        except TooLongError as error:
            raise _too_long(f"at least {error.at_least}", model, "prompt") from error
        if not ids:
            raise RequestError("prompt: must not be empty", param="prompt")
        if len(ids) >= model.max_model_len:
            raise _too_long(str(len(ids)), model, "prompt")
        cuts: list[Cut] = completion_cuts(len(ids))
        return Prompt(ids, digest_cuts(root_digest(model.fingerprint), ids, cuts))

    def _renderer(self, tools: bool) -> Renderer:
        if tools and _WITH_TOOLS in self.renderers:
            return self.renderers[_WITH_TOOLS]
        renderer = self.renderers.get(_DEFAULT) or next(iter(self.renderers.values()), None)
        if renderer is None:
            raise RequestError("this model has no chat template: use /v1/completions", code="no_chat_template")
        return renderer

    def _kept(self, renderer: Renderer) -> frozenset[str]:
        """Control strings that the template itself looks for in an answer, such as `</think>`."""
        looked_for = renderer.template.looked_for
        return frozenset(t for t in self.tokenizer.control.tokens if any(t in text for text in looked_for))

    def _one_bos(self, ids: array[int]) -> tuple[array[int], int]:
        """A chat begins with the tokens that plain encoding adds, once, whether its template writes them or not."""
        if not self._prefix or list(ids[: len(self._prefix)]) == self._prefix:
            return ids, 0
        return array("i", self._prefix) + ids, len(self._prefix)

    def _template_ends(self) -> frozenset[int]:
        """The control token with which each template ends an answer."""
        ends: set[int] = set()
        for renderer in self.renderers.values():
            end = next(self.tokenizer.control.matches(renderer.habits.end_of_turn), None)
            if end is not None:
                ends.update(self.tokenizer.encode_chat(end.group()).token_ids)
        return frozenset(ends)


_NONE: frozenset[str] = frozenset()


def _render(renderer: Renderer, conversation: Conversation) -> PromptText:
    try:
        return renderer.render(conversation)
    except TemplateError as error:
        raise RequestError(
            f"messages: the model's chat template refuses them: {error.message}", param="messages"
        ) from error
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RuntimeError) as error:
        # The template's code met something it was not written for; what it says is about its own variables.
        raise RequestError(
            f"messages: the model's chat template cannot render them: {error}", param="messages"
        ) from error


def _too_long(tokens: str, model: ModelInfo, param: str) -> RequestError:
    return RequestError(
        f"the prompt has {tokens} tokens; this model's maximum context length is {model.max_model_len} tokens, "
        "of which the answer needs at least one",
        param=param,
        code="context_length_exceeded",
    )


def _texts(conversation: Conversation) -> Iterator[str]:
    """Every string a client wrote that a template may print."""
    for message in conversation.messages:
        yield message.content
        yield from (message.reasoning or "", message.name or "", message.tool_call_id or "")
        for call in message.tool_calls:
            yield from (call.id, call.name)
            yield from strings_in(call.arguments)
    yield from strings_in(conversation.tools)
    yield from strings_in(conversation.variables)


def _rewritten(conversation: Conversation, change: Callable[[str, bool], str]) -> Conversation:
    """Every string changed; `change` is told whether it is the text of an answer."""

    def value(item: Any) -> Any:
        if isinstance(item, str):
            return change(item, False)
        if isinstance(item, dict):
            return {change(key, False): value(below) for key, below in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(value(below) for below in item)
        return item

    def optional(text: str | None) -> str | None:
        return None if text is None else change(text, False)

    messages = [
        Message(
            message.role,
            change(message.content, message.role == "assistant"),
            tuple(
                ToolCall(change(call.id, False), change(call.name, False), value(call.arguments))
                for call in message.tool_calls
            ),
            optional(message.tool_call_id),
            optional(message.name),
            None if message.reasoning is None else change(message.reasoning, True),
        )
        for message in conversation.messages
    ]
    return Conversation(tuple(messages), value(conversation.tools), value(conversation.variables))


def token_id_array(value: Sequence[object], vocab_size: int, where: str) -> array[int]:
    """Checked token ids. Raises `RequestError` naming the first wrong one."""
    for at, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            raise RequestError(f"{where}.{at} is no token id of this model", param=f"{where}.{at}")
    return array("i", value)  # type: ignore[arg-type]  # checked above
