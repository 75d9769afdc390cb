"""Replay recorded conversations against a running daemon, and check that each turn starts where the last one ended.

Every request carries its recorded history, also the recorded answers; the daemon's own short answers are thrown away.
A session ends at the first prompt that fills the model's context. Tools are not sent: the default model's template
does not print them. A file holds one conversation a line: a pool of messages, and spans of it for each request.

Checked, with exit code 1 and the offending turn at the first violation:

- append-only sessions, one after another: the restored length grows with each turn, and a turn computes no more than
  its new tokens and those behind the last boundary (`--gap`)
- windows, the same sessions from new heads, in turns: the same from the second visit on
- anywhere: no stale drop and no mismatch of a verified hit; with `--verified`, for a daemon with `--verify-hits 1`, no
  turn follows a hit before that has been computed again
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from chat_client import TIMEOUT, Answer, ServerFailed, chat, first_model

GAP_TOKENS = 32  # what may stand behind the last boundary: the header of the answer
WINDOWS = 3
POLL_SECONDS, MOST_POLLS = 0.1, 6000
_FIELDS = ("role", "content", "tool_calls", "tool_call_id", "name")
_STALE = re.compile(r"^prefixd_stale_drops_total{.*} (\S+)$", re.MULTILINE)
_VERIFICATIONS = re.compile(r'^prefixd_hit_verifications_total{result="(\w+)"} (\S+)$', re.MULTILINE)


class Violated(Exception):
    """A turn that broke a promise. The message names file, session, request and numbers."""


@dataclass(slots=True)
class Totals:
    """One line of the table."""

    title: str
    sessions: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0  # that the last prompt of the same session did not have
    full: int = 0  # sessions that ended with the context

    def line(self) -> str:
        share = self.cached_tokens / max(self.prompt_tokens, 1)
        computed = self.prompt_tokens - self.cached_tokens
        return (
            f"{self.title:<34} {self.sessions:>8} {self.requests:>8} {self.prompt_tokens:>9} {share:>7.1%} "
            f"{computed:>9} {self.new_tokens:>9} {self.full:>5}"
        )


TITLES = (
    f"{'FILE':<34} {'SESSIONS':>8} {'REQUESTS':>8} {'PROMPT':>9} {'CACHED':>7} {'COMPUTED':>9} {'NEW':>9} "
    f"{'FULL':>5}"
)


class Session:
    """One recorded session, one request at a time."""

    def __init__(self, row: dict[str, Any], salt: str) -> None:
        self.name: str = row["id"]
        pool = [{name: message[name] for name in _FIELDS if name in message} for message in row["messages"]]
        self._prompts = [
            [message for first, end in request["prompt"] for message in pool[first:end]]
            for request in row["requests"]
        ]
        self._salt = salt
        self.append_only = all(
            len(before) < len(after) and after[: len(before)] == before
            for before, after in zip(self._prompts, self._prompts[1:], strict=False)
        )
        self.played = 0
        self.last: Answer | None = None

    def next_prompt(self) -> list[dict[str, Any]] | None:
        """The messages of the next request, behind a system message that no other replay has; None after the last."""
        if self.played == len(self._prompts):
            return None
        self.played += 1
        messages = self._prompts[self.played - 1]
        mark = f"Replay {self._salt}."
        if messages and messages[0]["role"] == "system":
            head, rest = f"{mark} {messages[0]['content']}", messages[1:]
        else:
            head, rest = mark, messages
        return [{"role": "system", "content": head}, *rest]


class Replay:
    """Plays files and adds up. Raises `Violated` at the first broken promise."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        model: str,
        *,
        max_tokens: int = 4,
        gap: int = GAP_TOKENS,
        verified: bool = False,
    ) -> None:
        self._http = session
        self._base_url = base_url
        self._model = model
        self._max_tokens = max_tokens
        self._gap = gap
        self._verified = verified

    async def file(self, path: Path, sessions: int, requests: int) -> None:
        """Its first sessions one after another, then the append-only ones among them as windows."""
        rows = _rows(path)[:sessions]
        for row in rows:
            row["requests"] = [request for request in row["requests"] if request["prompt"]][:requests]
        faults = await self._faults()
        name = path.name.split(".")[0]
        totals, salt = Totals(name), secrets.token_hex(4)
        for row in rows:
            played = Session(row, salt)
            while await self._turn(played, totals):
                pass
        print(totals.line(), flush=True)
        salt = secrets.token_hex(4)
        windows = [played for row in rows if (played := Session(row, salt)).append_only][:WINDOWS]
        if len(windows) > 1:
            totals = Totals(f"{name}, windows")
            open_windows = windows
            while open_windows:
                open_windows = [window for window in open_windows if await self._turn(window, totals)]
            print(totals.line(), flush=True)
        new = await self._faults() - faults
        if new:
            raise Violated(f"{name}: {new:g} stale drops or mismatches")

    async def _turn(self, played: Session, totals: Totals) -> bool:
        """Play and check the next request; false when the session is over."""
        messages = played.next_prompt()
        if messages is None:
            return False
        before = await self.verifications() if self._verified else {}
        try:
            answer = await chat(
                self._http, self._base_url, self._model, messages, max_tokens=self._max_tokens, ignore_eos=True
            )
        except ServerFailed as error:
            if "context_length_exceeded" not in str(error):
                raise
            totals.full += 1
            return False
        cached = answer.cached_tokens or 0
        last, played.last = played.last, answer
        totals.sessions += last is None
        totals.requests += 1
        totals.prompt_tokens += answer.prompt_tokens
        totals.cached_tokens += cached
        grown = answer.prompt_tokens - (last.prompt_tokens if last and played.append_only else 0)
        totals.new_tokens += grown
        what = f"{totals.title}, session {played.name}, request {played.played}"
        if self._verified and cached and await self._verification_after(before) != "verified":
            raise Violated(f"{what}: the hit at {cached} tokens was not verified")
        if last and played.append_only:
            told = f"{answer.outcome}, {answer.reason}"
            if last.cached_tokens and cached <= last.cached_tokens:
                raise Violated(f"{what}: restored {cached} tokens after {last.cached_tokens} ({told})")
            if answer.prompt_tokens - cached > grown + self._gap:
                raise Violated(
                    f"{what}: computed {answer.prompt_tokens - cached} tokens, of which {grown} are new ({told})"
                )
        return True

    async def verifications(self) -> dict[str, int]:
        """Hits that were computed again since the daemon started, by result."""
        return {result: int(float(count)) for result, count in _VERIFICATIONS.findall(await self._metrics())}

    async def _verification_after(self, before: dict[str, int]) -> str:
        """The result of the one that follows; empty where none does."""
        for _ in range(MOST_POLLS):
            now = await self.verifications()
            for result, count in now.items():
                if count > before.get(result, 0):
                    return result
            await asyncio.sleep(POLL_SECONDS)
        return ""

    async def _faults(self) -> float:
        """Stale drops and mismatches of verified hits so far."""
        stale = sum(map(float, _STALE.findall(await self._metrics())))
        return stale + (await self.verifications()).get("mismatched", 0)

    async def _metrics(self) -> str:
        """With those of the worker, which are left out while it is too busy to tell them in time."""
        for _ in range(MOST_POLLS):
            async with self._http.get(f"{self._base_url}/metrics") as response:
                response.raise_for_status()
                text = await response.text()
            if _STALE.search(text):
                return text
            await asyncio.sleep(POLL_SECONDS)
        raise ServerFailed(f"{self._base_url} never tells its worker's metrics")


def _rows(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


async def run(options: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        model = options.model or await first_model(session, options.base_url)
        replay = Replay(
            session,
            options.base_url,
            model,
            max_tokens=options.max_tokens,
            gap=options.gap,
            verified=options.verified,
        )
        print(TITLES)
        for path in options.files:
            await replay.file(path, options.sessions, options.requests)
        print(", ".join(f"{count} hits {result}" for result, count in (await replay.verifications()).items()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--base-url", required=True, metavar="URL")
    parser.add_argument("--model", help="a name to ask for (default: the first one listed)")
    parser.add_argument("--sessions", type=int, default=3, help="of each file (default 3)")
    parser.add_argument("--requests", type=int, default=1000, help="of each session at most")
    parser.add_argument("--max-tokens", type=int, default=4, help="of each answer (default 4)")
    parser.add_argument("--gap", type=int, default=GAP_TOKENS, help="tokens behind the last boundary (default 32)")
    parser.add_argument(
        "--verified", action="store_true", help="wait for each hit's verification (--verify-hits 1)"
    )
    try:
        asyncio.run(run(parser.parse_args(argv)))
    except (Violated, ServerFailed) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
