"""What the two OpenAI dialects send back: chunks of a stream, and whole answers made of the same deltas."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from gateway.detokenizer import TokenBytes
from gateway.turn import Delta, ScoredToken, Turn
from protocol.messages import Accepted, Completed

_WORST_FIRST = ("miss", "partial", "hit")


class Answer(ABC):
    """One request's answer. `chunk` and `whole` must not be mixed for one answer."""

    chunk_object: str
    whole_object: str
    id_prefix: str

    def __init__(self, request_id: str, model: str, tokens: TokenBytes, *, usage_asked: bool) -> None:
        self._tokens = tokens
        self.usage_asked = usage_asked
        self._head = {"id": self.id_prefix + request_id, "created": int(time.time()), "model": model}

    def opening(self, choices: int) -> list[dict[str, Any]]:
        """Chunks that come before any text."""
        return []

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """One chunk of a stream."""
        return self._chunk([self._delta_choice(delta)])

    def usage_chunk(self, turn: Turn) -> dict[str, Any]:
        """The last chunk: no choices, but what was used and where it came from."""
        return self._chunk([]) | {"usage": usage(turn), "prefixd": cache_report(turn)}

    def whole(self, deltas: Iterable[Delta], turn: Turn) -> dict[str, Any]:
        """The answer to a request that asked for no stream."""
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
        return chunk | {"usage": None} if self.usage_asked else chunk

    @abstractmethod
    def _delta_choice(self, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_choice(self, delta: Delta) -> dict[str, Any]: ...

    def _text(self, token_id: int) -> str:
        return self._tokens.spelled(token_id).decode("utf-8", errors="replace")


class ChatAnswer(Answer):
    """`chat.completion` and its chunks."""

    chunk_object, whole_object, id_prefix = "chat.completion.chunk", "chat.completion", "chatcmpl-"

    def opening(self, choices: int) -> list[dict[str, Any]]:
        start = {"role": "assistant", "content": ""}
        return [self._chunk([self._choice(number, "delta", start)]) for number in range(choices)]

    def _delta_choice(self, delta: Delta) -> dict[str, Any]:
        gained = {"content": delta.text} if delta.text else {}
        return self._choice(delta.choice, "delta", gained, delta)

    def _whole_choice(self, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text}
        return self._choice(delta.choice, "message", message, delta)

    def _choice(self, number: int, key: str, value: dict[str, Any], delta: Delta | None = None) -> dict[str, Any]:
        scored = delta.scored if delta else ()
        return {
            "index": number,
            key: value,
            "logprobs": {"content": [self._scored(token) for token in scored]} if scored else None,
            "finish_reason": delta.finish_reason if delta else None,
        }

    def _scored(self, token: ScoredToken) -> dict[str, Any]:
        chosen = self._spelled(token.logprob.token_id, token.logprob.logprob)
        return {**chosen, "top_logprobs": [self._spelled(*other) for other in token.logprob.top]}

    def _spelled(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokens.spelled(token_id)
        return {"token": self._text(token_id), "logprob": logprob, "bytes": list(raw)}


class CompletionAnswer(Answer):
    """`text_completion`, for streams and whole answers alike."""

    chunk_object, whole_object, id_prefix = "text_completion", "text_completion", "cmpl-"

    def _delta_choice(self, delta: Delta) -> dict[str, Any]:
        return {
            "index": delta.choice,
            "text": delta.text,
            "logprobs": self._scored(delta.scored) if delta.scored else None,
            "finish_reason": delta.finish_reason,
        }

    _whole_choice = _delta_choice

    def _scored(self, tokens: tuple[ScoredToken, ...]) -> dict[str, Any]:
        return {
            "tokens": [self._text(token.logprob.token_id) for token in tokens],
            "token_logprobs": [token.logprob.logprob for token in tokens],
            "top_logprobs": [
                {self._text(token_id): logprob for token_id, logprob in token.logprob.top} for token in tokens
            ],
            "text_offset": [token.start for token in tokens],
        }


def usage(turn: Turn) -> dict[str, Any]:
    """What a completed turn used. Cached tokens are part of the prompt's."""
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(found.depth for found in turn.completed.values())},
    }


def cache_report(turn: Turn) -> dict[str, Any]:
    """Where a completed turn started from, and how long it waited; of several prompts the one served worst."""
    prompt, final = min(turn.completed.items(), key=lambda item: _rank(item[1]))
    accepted = turn.accepted.get(prompt)
    return {
        "outcome": final.outcome,
        "depth": final.depth,
        "reason": final.reason,
        "diverged_message": accepted.diverged_message if accepted else None,
        "diverged_token": accepted.diverged_token if accepted else None,
        "queue_seconds": final.queue_seconds,
        "prefill_seconds": final.prefill_seconds,
    }


def cache_line(turn: Turn) -> str | None:
    """The value of `x-prefixd-cache`; None while any prompt has not been looked up."""
    found: list[Accepted | Completed] = []
    for prompt in range(turn.prompts):
        known = turn.completed.get(prompt) or turn.accepted.get(prompt)
        if known is None:
            return None
        found.append(known)
    worst = min(found, key=_rank)
    return f"{worst.outcome}; depth={worst.depth}; reason={worst.reason}"


def _rank(found: Accepted | Completed) -> tuple[int, int]:
    return _WORST_FIRST.index(found.outcome), found.depth
