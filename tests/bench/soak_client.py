"""One client of a soak: two conversations around a secret word, asked, asked again, edited and hung up on.

Every answer is searched for the words of others, and every greedy one is compared with the answer to the same
request without the cache: text, log-probabilities and finish reason.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import aiohttp
from chat_client import parse_cache_header

End = Literal["answered", "hung up", "failed", "cut off", "hung"]

ANSWER_TOKENS = 16
LONG_TOKENS = 400  # of an answer that is hung up on
FORGET_TOKENS = 600  # a conversation that has grown so long begins anew
RETRY_SECONDS = 1.0
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
_SAMPLED = {"temperature": 1.0}
_QUESTIONS = (
    "What is the secret word?",
    "Repeat the secret word three times.",
    "Spell the secret word, then say it once more.",
    "Write a short sentence about {topic} with the secret word in it.",
    "Which word did I ask you to remember? Say it and nothing else.",
    "Say the secret word and then name a kind of {topic}.",
)
_TOPICS = ("rivers", "bread", "boats", "weather", "stone", "birds", "gardens", "winter", "markets", "lamps")
_TEXT = "along the quiet road small carts went by while people spoke of rain and of the price of corn and wool"
_RULES = (
    "You are a helpful assistant who remembers what was said. Answer briefly and plainly, in one sentence, and "
    "never leave out the word that you were asked to remember when somebody asks for it."
)


def secret_words(count: int, dice: random.Random) -> list[str]:
    """Words that no text has by itself, none of them within another one."""
    starts, middles, ends = (
        ("br", "kl", "sv", "tr", "gw", "zm", "dr", "pl"),
        "aeiou",
        ("mbex", "rtug", "lpoz", "nquf"),
    )
    every = [f"{start}{middle}{end}" for start in starts for middle in middles for end in ends]
    return dice.sample(every, count)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one request came to. `choice` is what must be equal to be the same answer."""

    end: End
    text: str
    choice: tuple[Any, ...] = ()
    error: str = ""
    outcome: str = "-"
    prompt_tokens: int = 0
    began: float = 0.0  # of the monotonic clock, as the next one
    ended: float = 0.0


@dataclass(slots=True)
class Tally:
    """What all clients have seen together. Each text of `wrong` is a violation."""

    ends: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    compared_cut: int = 0  # beginnings of answers that were hung up on
    echoed: int = 0  # answers with the client's own word
    failures: list[Seen] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)


class SoakClient:
    """Talks until `until` (monotonic); no request takes longer than its deadline."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        number: int,
        secrets: Sequence[str],
        tally: Tally,
        deadline_seconds: float,
    ) -> None:
        self._session = session
        self._url = url
        self._dice = random.Random(number)
        self._own = secrets[number]
        self._others = [word for word in secrets if word != self._own]
        self._in_system = number % 2 == 0  # else all share the system text, and part at the first question
        self._tally = tally
        self._deadline_seconds = deadline_seconds

    async def live(self, until: float) -> None:
        conversations = [self._beginning() for _ in range(2)]
        while time.monotonic() < until:
            messages = self._dice.choice(conversations)
            if len(messages) > 3 and self._dice.random() < 0.2:
                self._edit(messages)
            messages.append(_user(self._question()))
            if self._dice.random() < 0.2:
                await self._hang_up(messages)
            answer = await self._compared(messages)
            if self._dice.random() < 0.2:
                await self._ask({"messages": messages, "max_tokens": ANSWER_TOKENS, **_SAMPLED})
            if answer.end != "answered" or answer.prompt_tokens > FORGET_TOKENS:
                messages[:] = self._beginning()
            elif self._dice.random() < 0.2:
                del messages[-1]  # asked anew
            else:
                messages.append({"role": "assistant", "content": answer.text.strip()})

    def _beginning(self) -> list[dict[str, str]]:
        told = f"The secret word is {self._own}. Remember that the secret word is {self._own}."
        if self._in_system:
            return [{"role": "system", "content": f"{_RULES} {told}"}]
        history = [{"role": "system", "content": _RULES}, _user(told)]
        return [*history, {"role": "assistant", "content": f"I will remember the secret word {self._own}."}]

    def _question(self) -> str:
        filler = " ".join(self._dice.choices(_TEXT.split(), k=self._dice.randint(0, 60)))
        return f"{filler} {self._dice.choice(_QUESTIONS)}".strip().format(topic=self._dice.choice(_TOPICS))

    def _edit(self, messages: list[dict[str, str]]) -> None:
        """Another wording of an earlier question, what follows it stays; or the last turn is taken back."""
        if self._dice.random() < 0.5:
            del messages[-2:]
            return
        asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
        # The very first one may be what names the secret word.
        if later := asked[1:]:
            messages[self._dice.choice(later)] = _user(self._question())

    async def _compared(self, messages: list[dict[str, str]]) -> Seen:
        """A greedy answer, after it has been compared."""
        stream = self._dice.random() < 0.5
        fields = _STREAMED if stream else {"logprobs": True, "top_logprobs": 2}
        body = {"messages": list(messages), "temperature": 0, "max_tokens": ANSWER_TOKENS, **fields}
        answer = await self._ask(body)
        if answer.end == "answered":
            cold = await self._cold(body)
            self._tally.compared += 1
            if cold.choice != answer.choice:
                self._tally.unequal.append(f"{self._own}: {answer.text!r} but without the cache {cold.text!r}")
        return answer

    async def _hang_up(self, messages: list[dict[str, str]]) -> None:
        """Leave in the middle of a stream; what came of it must be how the cold answer begins."""
        body = {"messages": list(messages), "temperature": 0, "max_tokens": LONG_TOKENS, "ignore_eos": True}
        cut = await self._ask({**body, "stream": True}, pieces=self._dice.randint(0, 6))
        if cut.end == "hung up" and cut.text:
            cold = await self._cold({**body, "max_tokens": ANSWER_TOKENS})
            shorter = min(len(cut.text), len(cold.text))
            self._tally.compared_cut += 1
            if cut.text[:shorter] != cold.text[:shorter]:
                self._tally.unequal.append(f"{self._own}: cut off at {cut.text!r} of {cold.text!r}")

    async def _cold(self, body: dict[str, Any]) -> Seen:
        """The answer without the cache, however often the worker is lost meanwhile."""
        while (seen := await self._ask({**body, "cache_prompt": False})).end == "failed":
            pass
        return seen

    async def _ask(self, body: dict[str, Any], pieces: int | None = None) -> Seen:
        """One request, counted. With `pieces`, the connection is closed after so many that carry text."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_seconds):
                seen = await _send(self._session, self._url, body, pieces)
        except TimeoutError:
            seen = Seen("hung", "", error=f"no end within {self._deadline_seconds:g} s")
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            seen = Seen("cut off", "", error=f"{type(error).__name__}: {error}")
        seen = replace(seen, began=began, ended=time.monotonic())
        self._count(seen, body.get("cache_prompt", True))
        if seen.end == "failed":
            await asyncio.sleep(RETRY_SECONDS)
        return seen

    def _count(self, seen: Seen, cached: bool) -> None:
        tally = self._tally
        tally.ends[seen.end] += 1
        if cached:
            tally.outcomes[seen.outcome] += 1
        if seen.end not in ("answered", "hung up"):
            tally.failures.append(seen)
        tally.echoed += self._own in seen.text
        tally.foreign += [f"{word} in {seen.text!r} to {self._own}" for word in self._others if word in seen.text]


async def _send(session: aiohttp.ClientSession, url: str, body: dict[str, Any], pieces: int | None) -> Seen:
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        outcome = parse_cache_header(response.headers.get("x-prefixd-cache", "")).get("outcome", "-")
        if response.status != 200:
            return Seen("failed", "", error=f"{response.status}: {await response.text()}"[:300])
        if not body.get("stream"):
            whole = await response.json()
            [choice] = whole["choices"]
            text = choice["message"]["content"]
            parts = (text, choice["finish_reason"], json.dumps(choice["logprobs"]) if "logprobs" in choice else "")
            return Seen("answered", text, parts, outcome=outcome, prompt_tokens=whole["usage"]["prompt_tokens"])
        text, finish, error, prompt_tokens = "", "", "", 0
        async for line in response.content:
            if pieces is not None and pieces <= 0:
                response.close()
                return Seen("hung up", text, outcome=outcome)
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            error = str(event.get("error") or error)
            prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
            for choice in event.get("choices", ()):
                if piece := choice["delta"].get("content"):
                    text += piece
                    pieces = None if pieces is None else pieces - 1
                finish = choice.get("finish_reason") or finish
        if finish:
            return Seen("answered", text, (text, finish, ""), outcome=outcome, prompt_tokens=prompt_tokens)
        return Seen(
            "failed" if error else "cut off", text, error=error or "a stream without an end", outcome=outcome
        )


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
