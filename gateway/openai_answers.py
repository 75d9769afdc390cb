"""What the two OpenAI dialects send back: chunks of a stream, and whole answers made of the same deltas."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway import sse
from gateway.answer import Answer, cache_comment, cache_report, cached_tokens
from gateway.custom_tools import custom_input
from gateway.detokenizer import TokenBytes
from gateway.errors import error_answer
from gateway.openai_params import ChatParams, CommonParams
from gateway.prefill import Prefilled
from gateway.reply import Call, CallArguments, CallEnd, CallStart, Part, ReasoningDelta, Reply, TextDelta, merged
from gateway.turn import Delta, ScoredToken, Turn
from protocol.errors import ServeError


class OpenAIAnswer(Answer):
    """What chat and plain completions share."""

    chunk_object: str
    whole_object: str
    id_prefix: str

    def __init__(self, request_id: str, model: str, tokens: TokenBytes, params: CommonParams) -> None:
        self._tokens = tokens
        self._usage_asked = params.include_usage
        self._progress_asked = params.return_progress is True
        self._n = params.choices
        self._head = {"id": self.id_prefix + request_id, "created": int(time.time()), "model": model}

    def opening(self, turn: Turn) -> bytes:
        return b""

    def progress(self, news: Sequence[Prefilled]) -> bytes:
        """In the form of llama-server, at the first choice of each prompt."""
        if not self._progress_asked:
            return b""
        return b"".join(
            sse.data(self._chunk([self._silent(told.prompt * self._n)]) | {"prompt_progress": _progress(told)})
            for told in news
        )

    def events(self, gained: Sequence[Delta]) -> bytes:
        choices = (choice for delta in gained for choice in self._delta_choices(delta))
        return b"".join(sse.data(self._chunk([choice])) for choice in choices)

    def closing(self, turn: Turn) -> bytes:
        """A chunk without choices says what was used and where it came from; a comment does if no usage is wanted."""
        if not self._usage_asked:
            return cache_comment(turn) + sse.DONE
        return sse.data(self._chunk([]) | {"usage": usage(turn), "prefixd": cache_report(turn)}) + sse.DONE

    def broken(self, error: ServeError) -> bytes:
        return sse.data(error_answer(error).body)

    def whole(self, deltas: Sequence[Delta], turn: Turn) -> dict[str, Any]:
        by_choice: dict[int, list[Delta]] = {number: [] for number in range(turn.choices)}
        for delta in deltas:
            by_choice[delta.choice].append(delta)
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [
                self._whole_choice(
                    Delta(
                        number,
                        "".join(delta.text for delta in parts),
                        tuple(part for delta in parts for part in delta.parts),
                        tuple(scored for delta in parts for scored in delta.scored),
                        next((d.finish_reason for d in reversed(parts) if d.finish_reason), None),
                    )
                )
                for number, parts in by_choice.items()
            ],
            "usage": usage(turn),
            "prefixd": cache_report(turn),
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_object, "choices": choices}
        return chunk | {"usage": None} if self._usage_asked else chunk

    @abstractmethod
    def _delta_choices(self, delta: Delta) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _whole_choice(self, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _silent(self, number: int) -> dict[str, Any]:
        """A choice of a chunk that has gained nothing."""

    def _text(self, token_id: int) -> str:
        return self._tokens.spelled(token_id).decode("utf-8", errors="replace")


class ChatAnswer(OpenAIAnswer):
    """`chat.completion` and its chunks."""

    chunk_object, whole_object, id_prefix = "chat.completion.chunk", "chat.completion", "chatcmpl-"

    def __init__(self, request_id: str, model: str, tokens: TokenBytes, params: CommonParams) -> None:
        super().__init__(request_id, model, tokens, params)
        self._custom = params.custom if isinstance(params, ChatParams) else frozenset()
        self._held: dict[tuple[int, int], Call] = {}  # calls of free-form tools that are not complete

    def opening(self, turn: Turn) -> bytes:
        start = {"role": "assistant", "content": ""}
        return b"".join(
            sse.data(self._chunk([self._choice(number, "delta", start)])) for number in range(turn.choices)
        )

    def _delta_choices(self, delta: Delta) -> list[dict[str, Any]]:
        """A chunk a part, then one for the end: clients look for one thing at a time."""
        gained = list(filter(None, (self._gained(delta.choice, part) for part in merged(delta.parts))))
        if delta.scored and not gained:
            gained.append({})
        choices = [self._choice(delta.choice, "delta", each) for each in gained]
        if delta.scored:
            choices[0]["logprobs"] = self._logprobs(delta.scored)
        if delta.finish_reason is not None:
            choices.append(self._choice(delta.choice, "delta", {}, finish_reason=delta.finish_reason))
        return choices

    def _whole_choice(self, delta: Delta) -> dict[str, Any]:
        reply = Reply.of(delta.parts)
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or ("" if not reply.calls else None)}
        if reply.reasoning:
            message |= _reasoning(reply.reasoning)
        if reply.calls:
            message["tool_calls"] = [self._call(call) for call in reply.calls]
        return self._choice(delta.choice, "message", message, delta.scored, delta.finish_reason)

    def _call(self, call: Call) -> dict[str, Any]:
        if call.name in self._custom:
            given = {"name": call.name, "input": custom_input(call.value(), call.arguments)}
            return {"id": call.call_id, "type": "custom", "custom": given}
        return _call(call.call_id, call.name, call.arguments)

    def _gained(self, choice: int, part: Part) -> dict[str, Any]:
        """The `delta` of a chunk; what a free-form tool is given is known once its call is complete."""
        match part:
            case CallStart() if part.name in self._custom:
                self._held[choice, part.index] = begun = Call(part.call_id, part.name, "")
                return {"tool_calls": [{"index": part.index, **self._call(begun)}]}
            case CallArguments() if held := self._held.get((choice, part.index)):
                self._held[choice, part.index] = replace(held, arguments=held.arguments + part.fragment)
                return {}
            case CallEnd() if held := self._held.pop((choice, part.index), None):
                given = self._call(held)["custom"]["input"]
                return {"tool_calls": [{"index": part.index, "custom": {"input": given}}]}
            case _:
                return _gained(part)

    def _choice(
        self,
        number: int,
        key: str,
        value: dict[str, Any],
        scored: tuple[ScoredToken, ...] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {
            "index": number,
            key: value,
            "logprobs": self._logprobs(scored) if scored else None,
            "finish_reason": finish_reason,
        }

    def _silent(self, number: int) -> dict[str, Any]:
        return self._choice(number, "delta", {"role": "assistant", "content": None})

    def _logprobs(self, scored: tuple[ScoredToken, ...]) -> dict[str, Any]:
        return {"content": [scored_token(self._tokens, token) for token in scored]}


class CompletionAnswer(OpenAIAnswer):
    """`text_completion`, for streams and whole answers alike."""

    chunk_object, whole_object, id_prefix = "text_completion", "text_completion", "cmpl-"

    def _delta_choices(self, delta: Delta) -> list[dict[str, Any]]:
        return [self._whole_choice(delta)]

    def _whole_choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": self._scored(delta.scored) if delta.scored else None,
            "finish_reason": delta.finish_reason,
        }

    def _silent(self, number: int) -> dict[str, Any]:
        return self._whole_choice(Delta(number, ""))

    def _scored(self, tokens: tuple[ScoredToken, ...]) -> dict[str, Any]:
        return {
            "tokens": [self._text(token.logprob.token_id) for token in tokens],
            "token_logprobs": [token.logprob.logprob for token in tokens],
            "top_logprobs": [
                {self._text(token_id): logprob for token_id, logprob in token.logprob.top} for token in tokens
            ],
            "text_offset": [token.start for token in tokens],
        }


def scored_token(tokens: TokenBytes, token: ScoredToken) -> dict[str, Any]:
    """A token of a chat's answer with its log-probability and its alternatives'."""

    def spelled(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokens.spelled(token_id)
        return {"token": raw.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(raw)}

    chosen = spelled(token.logprob.token_id, token.logprob.logprob)
    return {**chosen, "top_logprobs": [spelled(*other) for other in token.logprob.top]}


def _progress(told: Prefilled) -> dict[str, int]:
    """Milliseconds, and tokens of which the cached ones are part of the processed ones."""
    return {
        "total": told.total,
        "cache": told.cached,
        "processed": told.computed,
        "time_ms": round(told.seconds * 1000),
    }


def _gained(part: Part) -> dict[str, Any]:
    """The `delta` of a chunk."""
    match part:
        case TextDelta():
            return {"content": part.text}
        case ReasoningDelta():
            return _reasoning(part.text)
        case CallStart():
            return {"tool_calls": [{"index": part.index, **_call(part.call_id, part.name, "")}]}
        case CallArguments():
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.fragment}}]}
        case CallEnd():
            return {}


def _reasoning(text: str) -> dict[str, Any]:
    """Under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}


def _call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def usage(turn: Turn) -> dict[str, Any]:
    """What a completed turn used. Cached tokens are part of the prompt's."""
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        # Clients of this API take what was written off what was cached, as some hosts count it twice: none is told.
        "prompt_tokens_details": {"cached_tokens": cached_tokens(turn), "cache_write_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
    }
