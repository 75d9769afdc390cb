"""What every measurement of a server from the client's side needs: a client, and texts of about a wanted length."""

from __future__ import annotations

import random
import sys

import aiohttp
from chat_client import Answer, chat

# Common words, most of which are one token to most tokenizers.
COMMON_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work number night point home water room mother money story
fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city name team minute idea body back parent face level office door health person art
war history party result change morning reason research moment air teacher area
"""
WORDS = COMMON_WORDS.split()


class Texts:
    """Texts of about a wanted number of tokens, equal for every server of a run, and new in every run."""

    def __init__(self, salt: str, tokens_per_word: float) -> None:
        self._salt = salt
        self._tokens_per_word = tokens_per_word

    def make(self, label: str, tokens: int) -> str:
        source = random.Random(f"{self._salt} {label}")
        words = [source.choice(WORDS) for _ in range(max(1, round(tokens / self._tokens_per_word)))]
        return f"{self._salt} {label}: {' '.join(words)}."


class Client:
    """Asks one server."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, model: str, texts: Texts) -> None:
        self._session = session
        self._base_url = base_url
        self._model = model
        self.texts = texts

    async def ask(self, messages: list[dict[str, str]], max_tokens: int, **options: object) -> Answer:
        return await chat(self._session, self._base_url, self._model, messages, max_tokens=max_tokens, **options)

    async def outcomes(self) -> dict[str, float]:
        """Cache counters of a prefixd that are not zero; none of another server."""
        async with self._session.get(f"{self._base_url}/metrics") as response:
            text = await response.text() if response.status == 200 else ""
        counters = ("prefixd_cache_lookups_total{", "prefixd_stale_drops_total{")
        pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(counters))
        return {name: float(value) for name, value in pairs if float(value)}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
