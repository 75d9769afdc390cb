"""One HTTP request's work in the worker: its prompts, the events that come back, and the text they make."""

from __future__ import annotations

import asyncio
from asyncio import Queue
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from gateway.detokenizer import Detokenizer, StopStrings, TokenBytes
from gateway.errors import failure
from gateway.prefill import PrefillWatch
from gateway.reply import CallStart, Part, ReasoningDelta, Reply, ReplyParser, ReplyReader, merged
from gateway.worker_client import Cause, Event, WorkerClient
from protocol.errors import ProtocolError, ServeError, WorkerFailure, WorkerUnavailable
from protocol.messages import (
    Accepted,
    Completed,
    Failed,
    Finished,
    Generate,
    Progress,
    TokenLogprob,
    Tokens,
)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer with its log-probability; `start` is its text position in the answer."""

    start: int
    logprob: TokenLogprob


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained: raw text, the scored tokens that begin in it, and the reason if it ended.

    `parts` are what the text is made of, as far as that is certain: they may lag behind it, up to the end. Answers
    to chats are written from the parts, plain completions from `text`. `finish_reason` is "stop", "length" or
    "tool_calls" (see `gateway.reply`).
    """

    choice: int
    text: str
    parts: tuple[Part, ...] = ()
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: str | None = None


@dataclass(slots=True)
class _Choice:
    """One choice while it runs.

    `read` counts characters detokenized, `sent` those given out, `unshown` the tokens since any part was certain.
    """

    detokenizer: Detokenizer
    stops: StopStrings
    parser: ReplyParser
    read: int = 0
    sent: int = 0
    unshown: int = 0
    scored: list[ScoredToken] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    ended: bool = False
    reason: str | None = None


class Turn:
    """All prompts of one HTTP request. Leaving the context cancels whatever has not ended.

    Choices are numbered through: choice `c` of prompt `p` is `p * n + c`.
    """

    def __init__(
        self,
        client: WorkerClient,
        requests: Sequence[Generate],
        tokens: TokenBytes,
        stops: Sequence[str],
        reader: ReplyReader,
    ) -> None:
        self._client = client
        self._requests = {request.request_id: at for at, request in enumerate(requests)}
        self._to_send = list(requests)  # at first, and again those that found the queue full
        self._by_id = {request.request_id: request for request in requests}
        self.prefill = PrefillWatch(requests)
        self._n = requests[0].n
        self._queue: Queue[Event | ServeError] = Queue()
        self.prompts = self._running = len(requests)
        self._choices = [
            _Choice(Detokenizer(tokens, reader.visible), StopStrings(stops), reader.parser())
            for _ in range(len(requests) * self._n)
        ]
        self.prompt_tokens = sum(len(request.token_ids) for request in requests)
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # of these, by the parts that they made
        self.accepted: dict[int, Accepted] = {}  # by prompt
        self.completed: dict[int, Completed] = {}
        self.cancel_cause: Cause = "disconnect"

    def __enter__(self) -> Turn:
        """Send everything. Raises `WorkerUnavailable`."""
        try:
            self._send()
        except BaseException:
            self._abandon()
            raise
        return self

    def _send(self) -> None:
        while self._to_send:
            self._client.submit(self._to_send.pop(0), self._queue)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._abandon()

    @property
    def choices(self) -> int:
        """Choices of all prompts together."""
        return len(self._choices)

    @property
    def done(self) -> bool:
        """Every prompt has been completed."""
        return not self._running

    def reply(self, choice: int) -> tuple[Reply, str | None]:
        """What a choice has said so far, and why it ended if it has."""
        return Reply.of(self._choices[choice].parts), self._choices[choice].reason

    def stop_string(self, choice: int) -> str | None:
        """The stop string that ended a choice, if one did."""
        return self._choices[choice].stops.matched

    async def wait(self, seconds: float | None = None) -> list[Delta] | None:
        """Wait for events, take all that are there, and return what they add; None if none came in time.

        Events such as an acceptance add nothing. Raises the `ServeError` that ended the turn.
        """
        try:
            async with asyncio.timeout(seconds):
                event = await self._queue.get()
        except TimeoutError:
            return None
        deltas = self._take(event)
        while not self._queue.empty():
            deltas += self._take(self._queue.get_nowait())
        return deltas

    def _take(self, event: Event | ServeError) -> list[Delta]:
        match event:
            case ServeError():
                raise event
            case Failed():
                self._failed(event)
            case Accepted():
                prompt = self._requests[event.request_id]
                self.accepted[prompt] = event
                self.prefill.accepted(prompt, event.depth)
            case Progress():
                self.prefill.reached(self._requests[event.request_id], event.computed)
            case Tokens():
                self.prefill.answered(self._requests[event.request_id])
                return self._tokens(event)
            case Finished():
                self.completion_tokens += event.completion_tokens
                return self._finished(event)
            case Completed():
                self.completed[self._requests[event.request_id]] = event
                self._running -= 1
                self._check_all_ended(event)
                self._send()
        return []

    def _failed(self, event: Failed) -> None:
        """A prompt that finds the queue full waits for another one of its own turn to end, if one is there."""
        self._to_send.append(self._by_id[event.request_id])
        if event.code != "queue_full" or len(self._to_send) == self._running:
            raise failure(event)

    def _tokens(self, event: Tokens) -> list[Delta]:
        number, choice = self._choice(event)
        if choice.ended:
            return []
        text: list[str] = []
        parts: list[Part] = []
        for at, token_id in enumerate(event.token_ids):
            if at < len(event.logprobs):
                choice.scored.append(ScoredToken(choice.read, event.logprobs[at]))
            new = choice.detokenizer.feed(token_id)
            choice.read += len(new)
            text.append(choice.stops.feed(new))
            read = choice.parser.feed(text[-1])
            self._count_reasoning(choice, read)
            parts += read
            if choice.stops.found or choice.parser.done:
                choice.ended = True
                self._client.cancel(event.request_id, "stop", event.choice)
                return [self._delta(number, choice, text, parts, "stop")]
        delta = self._delta(number, choice, text, parts, None)
        return [delta] if delta.text or delta.scored else []

    def _finished(self, event: Finished) -> list[Delta]:
        number, choice = self._choice(event)
        if choice.ended:
            return []
        if event.reason == "cancelled":
            raise WorkerFailure("the worker cancelled this request")
        choice.ended = True
        held = choice.stops.finish()
        return [self._delta(number, choice, [held], choice.parser.feed(held), event.reason)]

    def _delta(
        self, number: int, choice: _Choice, said: Sequence[str], parts: list[Part], reason: str | None
    ) -> Delta:
        """Scored tokens go out with the text they begin; at the end those without text go too."""
        text = "".join(said)
        if reason is not None:
            parts += choice.parser.finish()
        choice.sent += len(text)
        choice.parts += parts
        if reason == "stop" and _calls(choice):
            reason = "tool_calls"
        choice.reason = reason
        ready = [token for token in choice.scored if token.start < choice.sent]
        if reason is not None and not choice.stops.found:
            ready = choice.scored
        choice.scored = choice.scored[len(ready) :]
        return Delta(number, text, merged(parts), tuple(ready), reason)

    def _count_reasoning(self, choice: _Choice, read: Sequence[Part]) -> None:
        """A token that shows nothing yet, such as a marker's, belongs to what shows next."""
        choice.unshown += 1
        if any(isinstance(part, ReasoningDelta) for part in read):
            self.reasoning_tokens += choice.unshown
        if read:
            choice.unshown = 0

    def _choice(self, event: Tokens | Finished) -> tuple[int, _Choice]:
        if not 0 <= event.choice < self._n:
            raise ProtocolError(f"the worker sent choice {event.choice} of {self._n}")
        number = self._requests[event.request_id] * self._n + event.choice
        return number, self._choices[number]

    def _check_all_ended(self, event: Completed) -> None:
        prompt = self._requests[event.request_id]
        if not all(choice.ended for choice in self._choices[prompt * self._n : (prompt + 1) * self._n]):
            raise WorkerUnavailable(
                "the worker had not heard of this gateway for a while, and gave the request up"
            )

    def _abandon(self) -> None:
        for request_id in self._requests:
            self._client.cancel(request_id, self.cancel_cause)
            self._client.forget(request_id)


def _calls(choice: _Choice) -> bool:
    """Whether an answer that has ended is one with calls. One that a stop string cut off in a call calls nothing."""
    called = any(isinstance(part, CallStart) for part in choice.parts)
    if not (called and choice.stops.found):
        return called
    return all(call.arguments and isinstance(call.value(), dict) for call in Reply.of(choice.parts).calls)
