"""From a conversation, or a plain prompt, to what the worker is sent: token ids and boundaries.

Pure work without input or output, done on several threads: nothing here may touch the event loop's objects.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, TypeVar

from jinja2.exceptions import TemplateError

from gateway.body_memory import BodyMemory
from gateway.boundaries import Cut, completion_cuts, merge, with_interior
from gateway.chains import Chains
from gateway.client_text import texts, without_control
from gateway.control_tokens import strings_in
from gateway.conversation import Conversation, Message
from gateway.detokenizer import TokenBytes
from gateway.model_files import ModelFiles
from gateway.renderer import PromptText, Renderer
from gateway.said_before import SaidBefore
from gateway.template import ChatTemplate
from gateway.template_probe import learn, probe_texts
from gateway.tenants import ANYONE, Tenant
from gateway.tokenizer import PromptTokenizer, TooLongError
from protocol.errors import RequestError, SettingsError
from protocol.messages import Boundary, ModelInfo, Vocabulary

_SAMPLE = "  It's 12345\n\n größe e\u0301 日本😀\t x "  # what tokenizers split in different ways
_NO_TOKENS = {"bos_token": "", "eos_token": ""}  # templates print them without looking whether they are there
INSIDE = "it ends inside a token, or in blanks that are other tokens when nothing follows"
NOTHING = "there is nothing before it but what starts every prompt"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_COUNTED_CONTEXTS = 8  # a client wants to know how much to leave out; beyond this nobody cuts


class Prompt(NamedTuple):
    """One prompt as the worker gets it. `opening` is a chat's text behind its last cut: the answer goes on from it."""

    token_ids: array[int]
    boundaries: tuple[Boundary, ...]
    opening: str = ""


class Trace(NamedTuple):
    """A chat's ids and cuts, in tokens, and for each message the position of its boundary or why it has none.

    `text` is the rendered history, without what starts the answer; `suffix` is that. `text_cuts` are in characters.
    """

    token_ids: array[int]
    cuts: tuple[Cut, ...]
    ends: tuple[int | str, ...]
    text: str
    suffix: str
    text_cuts: tuple[Cut, ...]


class _Encoded(NamedTuple):
    """A rendered chat, its ids, and the tokens before each of the render's cuts (None: inside a token)."""

    rendered: PromptText
    sentinel: str
    token_ids: array[int]
    positions: list[int | None]


class PromptMaker:
    """Holds tokenizer and templates of one model. Safe to use from several threads."""

    def __init__(self, files: ModelFiles) -> None:
        """Raises `SettingsError` for a tokenizer or template that cannot be served."""
        self.renderers = dict(_learned(files))
        added = [token.content for token in files.tokenizer.get_added_tokens_decoder().values()]
        probes = [text for renderer in self.renderers.values() for text in probe_texts(renderer)]
        written = {token for token in added if token.strip() and any(token in text for text in probes)}
        sources = [renderer.template.source for renderer in self.renderers.values()]
        written |= {token for token in added if token.strip() and any(token in t for t in sources)}
        self.tokenizer = PromptTokenizer(files.tokenizer, written)
        self.tokenizer.check([*probes, *(f"{token}{_SAMPLE}{token}b{token}{token} c" for token in added[:16])])
        self.token_bytes = TokenBytes(files.tokenizer)
        self.bodies = BodyMemory()
        self.said: SaidBefore[Message] = SaidBefore()
        self.said_in_blocks: SaidBefore[tuple[Message, ...]] = SaidBefore()
        self._chains = Chains()
        self._prefix = self.tokenizer.default_prefix()
        self._kept_from = max(len(self._prefix), 1)  # BOS alone is nothing to keep
        self.end_token_ids = files.end_token_ids | self._template_ends()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens' bytes, as the worker needs them for grammars."""
        tokens = self.token_bytes
        spelled = " ".join(tokens.spelled(token_id).hex() for token_id in range(self.tokenizer.vocab_size))
        return Vocabulary(spelled, tuple(sorted(tokens.special)), tuple(sorted(self.end_token_ids)))

    def chat(self, conversation: Conversation, model: ModelInfo, tenant: Tenant = ANYONE) -> Prompt:
        """Raises `RequestError` where the template refuses or the prompt fills the context."""
        try:
            encoded = self._encode(conversation, model.max_model_len, tenant)
        except TooLongError as error:
            raise _too_long(f"at least {error.at_least}", model, "messages") from error
        ids = encoded.token_ids
        if len(ids) >= model.max_model_len:
            raise _too_long(str(len(ids)), model, "messages")
        rendered = encoded.rendered
        opening = rendered.text[rendered.cuts[-1].end if rendered.cuts else 0 :]
        return Prompt(ids, self._boundaries(model, ids, self._cuts(encoded), tenant), opening)

    def count(self, conversation: Conversation, model: ModelInfo, tenant: Tenant = ANYONE) -> int:
        """The number of tokens that `chat` would make, also where they do not fit. Raises `RequestError`."""
        try:
            return len(self._encode(conversation, _COUNTED_CONTEXTS * model.max_model_len, tenant).token_ids)
        except TooLongError as error:
            raise _too_long(f"at least {error.at_least}", model, "messages") from error

    def trace(self, conversation: Conversation) -> Trace:
        """The same without a model, and what became of each message. Raises `RequestError`."""
        encoded = self._encode(conversation, None)
        at = {cut.end: end for cut, end in zip(encoded.rendered.cuts, encoded.positions, strict=True)}
        ends: list[int | str] = []
        for end in encoded.rendered.ends:
            position = at.get(end) if isinstance(end, int) else end
            if position is None:
                position = INSIDE
            elif isinstance(position, int) and position <= self._kept_from:
                position = NOTHING
            ends.append(position)
        text, cuts = _without(encoded.sentinel, encoded.rendered)
        history = cuts[-1].end if cuts else 0
        return Trace(
            encoded.token_ids,
            tuple(self._cuts(encoded)),
            tuple(ends),
            text[:history],
            text[history:],
            tuple(cuts),
        )

    def history(self, conversation: Conversation) -> tuple[str, array[int]]:
        """Text and ids of a conversation with nothing that asks for an answer. Raises `RequestError`."""
        renderer = self.renderer(conversation)
        conversation, sentinel = self._without_control(conversation, renderer)
        rendered = _guarded(lambda: renderer.run(conversation, reply=False).text)
        text = _spelled(PromptText(rendered, (), ()), sentinel, conversation).text
        ids, _ = self._one_bos(self.tokenizer.encode_chat(text, sentinel=sentinel).token_ids)
        return text.replace(sentinel, ""), ids

    def _encode(self, conversation: Conversation, limit: int | None, tenant: Tenant = ANYONE) -> _Encoded:
        renderer = self.renderer(conversation)
        conversation = replace(
            conversation,
            messages=self.said.same_head(tenant.name, conversation.messages),
            tools=self.said.same_tools(tenant.name, conversation.tools),
        )
        conversation, sentinel = self._without_control(conversation, renderer)
        rendered = _spelled(_guarded(lambda: renderer.render(conversation)), sentinel, conversation)
        wanted = [cut.end for cut in rendered.cuts]
        ids, found = self.tokenizer.encode_chat(
            rendered.text, wanted, sentinel=sentinel, limit=limit, owner=tenant.name
        )
        ids, shift = self._one_bos(ids)
        return _Encoded(rendered, sentinel, ids, [None if end is None else end + shift for end in found])

    def _without_control(self, conversation: Conversation, renderer: Renderer) -> tuple[Conversation, str]:
        """The conversation with every control string of its text broken by a character, and that ("": none is)."""
        return without_control(conversation, self.tokenizer.control, lambda: self._kept(renderer))

    def _cuts(self, encoded: _Encoded) -> list[Cut]:
        cuts = [
            Cut(end, cut.kind, cut.messages)
            for cut, end in zip(encoded.rendered.cuts, encoded.positions, strict=True)
            if end is not None and end > self._kept_from
        ]
        if not cuts:  # then it is a text as any other: but for what starts the answer it goes on the next turn
            return [cut for cut in completion_cuts(len(encoded.token_ids)) if cut.kind == "interior"]
        return with_interior(merge(cuts))

    def _boundaries(
        self, model: ModelInfo, ids: array[int], cuts: Sequence[Cut], tenant: Tenant
    ) -> tuple[Boundary, ...]:
        count = tenant.shared(cuts)
        if not count:
            return self._chains.boundaries(tenant.root(model.fingerprint), ids, cuts)
        shared = self._chains.boundaries(tenant.head_root(model.fingerprint), ids, cuts[:count])
        head = shared[-1]
        rest = [cut._replace(end=cut.end - head.end) for cut in cuts[count:]]
        own = self._chains.boundaries(tenant.parted(head.digest), ids[head.end :], rest)
        return (*shared, *(replace(boundary, end=boundary.end + head.end) for boundary in own))

    def completion(self, prompt: str | array[int], model: ModelInfo, tenant: Tenant = ANYONE) -> Prompt:
        """A plain prompt: text encoded as the tokenizer does by default, or token ids as they are."""
        try:
            ids = (
                self.tokenizer.encode_plain(prompt, model.max_model_len, tenant.name)
                if isinstance(prompt, str)
                else prompt
            )
        except TooLongError as error:
            raise _too_long(f"at least {error.at_least}", model, "prompt") from error
        if not ids:
            raise RequestError("prompt: must not be empty", param="prompt")
        if len(ids) >= model.max_model_len:
            raise _too_long(str(len(ids)), model, "prompt")
        cuts: list[Cut] = completion_cuts(len(ids))
        return Prompt(ids, self._chains.boundaries(tenant.root(model.fingerprint), ids, cuts))

    def renderer(self, conversation: Conversation) -> Renderer:
        """What renders a conversation. Raises `RequestError` where the model has no template."""
        tools = bool(conversation.tools)
        if tools and _WITH_TOOLS in self.renderers:
            return self.renderers[_WITH_TOOLS]
        renderer = next(iter(self.renderers.values()), None)
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
        """The control token with which each template ends an answer, unless calls may follow it in the answer."""
        ends: set[int] = set()
        for renderer in self.renderers.values():
            if renderer.habits.end_before_calls:
                continue
            end = next(self.tokenizer.control.matches(renderer.habits.end_of_turn), None)
            if end is not None:
                ends.update(self.tokenizer.encode_chat(end.group()).token_ids)
        return frozenset(ends)


def _learned(files: ModelFiles) -> Iterator[tuple[str, Renderer]]:
    """The templates that a chat may ask for, the one without tools first. Raises `SettingsError`.

    A model may have others, such as one that takes documents.
    """
    plain = [name for name in files.templates if name != _WITH_TOOLS]
    for name in ([_DEFAULT] if _DEFAULT in plain else plain[:1]) + [_WITH_TOOLS]:
        if name not in files.templates:
            continue
        try:
            yield name, learn(ChatTemplate(files.templates[name], _NO_TOKENS | files.special_tokens))
        except SettingsError as error:
            which = f" (the template named {name!r})" if len(files.templates) > 1 else ""
            raise SettingsError(f"{error}{which}") from error


_Result = TypeVar("_Result")


def _spelled(rendered: PromptText, sentinel: str, conversation: Conversation) -> PromptText:
    """With the sentinel itself where the template wrote it as an escape: as JSON in ASCII, or as Python shows text."""
    for form in (json.dumps(sentinel)[1:-1], repr(sentinel)[1:-1]) if sentinel else ():
        text, longer = rendered.text, len(form) - 1
        if form in text and not any(form in said for said in _strings(conversation)):
            ends = tuple(
                end - longer * text.count(form, 0, end) if isinstance(end, int) else end for end in rendered.ends
            )
            cuts = (cut._replace(end=cut.end - longer * text.count(form, 0, cut.end)) for cut in rendered.cuts)
            rendered = PromptText(text.replace(form, sentinel), tuple(cuts), ends)
    return rendered


def _strings(conversation: Conversation) -> Iterator[str]:
    for message in conversation.messages:
        yield from texts(message)
    yield from strings_in(conversation.tools)
    yield from strings_in(conversation.variables)


def _without(sentinel: str, rendered: PromptText) -> tuple[str, list[Cut]]:
    """The text as it was meant, with its cuts."""
    if not sentinel:
        return rendered.text, list(rendered.cuts)
    cuts = [cut._replace(end=cut.end - rendered.text.count(sentinel, 0, cut.end)) for cut in rendered.cuts]
    return rendered.text.replace(sentinel, ""), cuts


def _guarded(render: Callable[[], _Result]) -> _Result:
    """Run a template. Raises `RequestError` for whatever it raises."""
    try:
        return render()
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
        # The wording by which clients of either API know that they must compact, and by how much.
        f"prompt is too long: {tokens} tokens > {model.max_model_len - 1} maximum; "
        f"this model's maximum context length is {model.max_model_len} tokens, and the answer needs at least one",
        param=param,
        code="context_length_exceeded",
    )


def token_id_array(value: Sequence[object], vocab_size: int, where: str) -> array[int]:
    """Checked token ids. Raises `RequestError` naming the first wrong one."""
    for at, item in enumerate(value):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            raise RequestError(f"{where}.{at} is no token id of this model", param=f"{where}.{at}")
    return array("i", value)  # type: ignore[arg-type]  # checked above
