"""What an accelerator is measured by, from the client's side: histories of 7k and 32k tokens, and up to 64 streams.

Conversations are made of messages of one turn's length, so that their history is as finely divided as that of an agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from chat_client import Answer, ServerFailed
from client_bench import Client, say, system, user

HEAD_TOKENS = 1000
REPLY_TOKENS = 8
HISTORY_TOKENS = 30_500  # at the first turn that is measured: 32k at the middle one
TURN_TOKENS = 250  # a turn has more than before it: question, answer and what the template adds
TURNS = 12
CUT_TURN_TOKENS = 100  # the question behind a head and one exchange that were kept: 600 tokens behind the head
WINDOWS = 3
WINDOW_TOKENS = 7000
WINDOW_TURN_TOKENS = 200
WINDOW_ROUNDS = 8
COLD_TOKENS = {"cold_2k": 2048, "cold_8k": 8192, "cold_32k": 32_600}
COLD_RUNS = 3
# What a message has beside its text, about: the label of the text and the marks of the template.
LABEL_TOKENS = 22
DECODE_TOKENS = 256
STREAMS = {"decode_1": 1, "decode_8": 8, "decode_32": 32, "decode_64": 64}

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class LongFigures:
    """What one server did, in milliseconds but for `start`, in seconds. None where not measured."""

    start: float | None
    chat: float
    chat_outside: float | None
    windows: float
    windows_outside: float | None
    cut: float
    cut_to_head: float
    cold_2k: float
    cold_8k: float
    cold_32k: float
    decode_1: float
    decode_8: float
    decode_32: float
    decode_64: float
    prompt_tokens: dict[str, int]
    outcomes: dict[str, float]

    @staticmethod
    def rows() -> tuple[tuple[str, str, str], ...]:
        """Title, field and unit of each row of the table."""
        outside = "  of that outside the worker: gateway, sockets, client"
        return (
            ("start to ready", "start", "s"),
            (f"first token, 32k history + {TURN_TOKENS} a turn", "chat", "ms"),
            (outside, "chat_outside", "ms"),
            (
                f"first token, {WINDOWS} windows of {WINDOW_TOKENS // 1000}k + {WINDOW_TURN_TOKENS}",
                "windows",
                "ms",
            ),
            (outside, "windows_outside", "ms"),
            ("first token, history cut to its head and 600 tokens behind it", "cut", "ms"),
            (f"first token, history cut to its head + {TURN_TOKENS}", "cut_to_head", "ms"),
            *((f"first token, cold {size}", name, "ms") for name, size in COLD_TOKENS.items()),
            *((f"per token, {streams} at once", name, "ms") for name, streams in STREAMS.items()),
        )


class LongBench(Client):
    """All measurements of one server."""

    async def run(self, start_seconds: float | None) -> LongFigures:
        say("  growing conversation")
        messages, chat = await self.growing()
        say("  the same one, cut")
        cut, cut_to_head = await self.cut(messages)
        say("  windows")
        windows = await self.windows()
        colds = {}
        for name, size in COLD_TOKENS.items():
            say(f"  cold prompts of {size}")
            colds[name] = await self.cold(size)
        decoded = {}
        for name, streams in STREAMS.items():
            say(f"  decode, {streams} at once")
            decoded[name] = await self.decode(streams)
        return LongFigures(
            start=start_seconds,
            chat=first_ms(chat),
            chat_outside=outside_ms(chat),
            windows=first_ms(windows),
            windows_outside=outside_ms(windows),
            cut=first_ms(cut),
            cut_to_head=first_ms(cut_to_head),
            **{name: first_ms(answers) for name, answers in colds.items()},
            **decoded,
            prompt_tokens={
                "conversation, last turn": chat[-1].prompt_tokens,
                "its head alone": cut[-1].cached_tokens or 0,
                "cut": cut[-1].prompt_tokens,
                "window, last round": windows[-1].prompt_tokens,
                **{name: answers[-1].prompt_tokens for name, answers in colds.items()},
            },
            outcomes=await self.outcomes(),
        )

    async def growing(self) -> tuple[Messages, list[Answer]]:
        """A long conversation, and the answers to its later turns."""
        messages = [system(self.texts.make("chat head", HEAD_TOKENS))]
        messages += self._history("chat", HISTORY_TOKENS - HEAD_TOKENS, TURN_TOKENS)
        answers = [await self._turn(messages, f"chat {turn}", TURN_TOKENS) for turn in range(TURNS + 1)]
        return messages, answers[1:]

    async def cut(self, messages: Messages) -> tuple[list[Answer], list[Answer]]:
        """The answers after the conversation's middle was taken out, and those after all but its head was."""
        one_exchange, head_alone = [], []
        for run in range(COLD_RUNS):
            kept = 3 + 2 * run  # not what follows the head anyway
            shortened = [messages[0], *messages[kept : kept + 2]]
            one_exchange.append(await self._turn(shortened, f"cut {run}", CUT_TURN_TOKENS))
            head_alone.append(await self._turn([messages[0]], f"from the head {run}", TURN_TOKENS))
        return one_exchange, head_alone

    async def windows(self) -> list[Answer]:
        """The answers to all turns but the first of windows that are asked in turn."""
        windows = [
            [
                system(self.texts.make(f"window {w}", HEAD_TOKENS)),
                *self._history(f"window {w}", WINDOW_TOKENS - HEAD_TOKENS, WINDOW_TURN_TOKENS),
            ]
            for w in range(WINDOWS)
        ]
        answers = [
            await self._turn(messages, f"window {w} {number}", WINDOW_TURN_TOKENS)
            for number in range(WINDOW_ROUNDS + 1)
            for w, messages in enumerate(windows)
        ]
        return answers[WINDOWS:]

    async def cold(self, tokens: int) -> list[Answer]:
        return [await self.ask([user(self._text(f"cold {tokens} {run}", tokens))], 1) for run in range(COLD_RUNS)]

    async def decode(self, streams: int) -> float:
        """Milliseconds a token of each stream, while all of them run."""
        for run in range(2):  # the first one warms up
            questions = [self._text(f"decode {streams} {run} {s}", 64) for s in range(streams)]
            answers = await asyncio.gather(
                # While others still start, the first ones run: they must not end before all have begun.
                *(self.ask([user(text)], DECODE_TOKENS + 4 * streams, ignore_eos=True) for text in questions)
            )
        return token_ms(answers)

    async def _turn(self, messages: Messages, label: str, tokens: int) -> Answer:
        """Ask something more; the question and the answer become part of the conversation."""
        messages.append(user(self._text(label, tokens - REPLY_TOKENS - 4)))
        answer = await self.ask(messages, REPLY_TOKENS)
        messages.append({"role": "assistant", "content": answer.text})
        return answer

    def _text(self, label: str, tokens: int) -> str:
        """The text of a message of about so many tokens in all."""
        return self.texts.make(label, tokens - LABEL_TOKENS)

    def _history(self, label: str, tokens: int, each: int) -> Messages:
        """Messages of `each` tokens, by turns the user's and the assistant's."""
        count = tokens // each // 2 * 2
        texts = [self._text(f"{label} message {index}", each) for index in range(count)]
        roles = ("user", "assistant")
        return [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]


def first_ms(answers: Sequence[Answer]) -> float:
    return 1e3 * median(answer.first_seconds for answer in answers)


def outside_ms(answers: Sequence[Answer]) -> float | None:
    outside = [a.first_seconds - a.worker_seconds for a in answers if a.worker_seconds is not None]
    return 1e3 * median(outside) if outside else None


def token_ms(answers: Sequence[Answer]) -> float:
    """Milliseconds between the tokens of a stream while all streams run: between the last start and the first end.

    A piece of text may hold several tokens, or a part of one: pieces are counted by what they hold on average.
    Raises `ServerFailed` where they never run together.
    """
    begin = max(answer.sent + answer.first_seconds for answer in answers)
    end = min(answer.sent + answer.last_seconds for answer in answers)
    tokens = 0.0
    for answer in answers:
        inside = sum(begin < answer.sent + arrival <= end for arrival in answer.arrivals)
        tokens += inside * answer.completion_tokens / len(answer.arrivals)
    if not tokens:
        raise ServerFailed(f"{len(answers)} streams never ran at the same time")
    return 1e3 * (end - begin) * len(answers) / tokens
