"""Play an agent's conversation and show what each turn started from.

A coding agent works on a bug: its whole history goes with every request. Then come the things that real agents
do to a cache: the same request once more, a second window under the same head, a compaction of the history.

    demo.py                          a prefixd of its own
    BASE_URL=http://... demo.py      a running one
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import Sequence

import aiohttp
from chat_client import TIMEOUT, Answer, ServerFailed, chat, first_model
from server_process import own_prefixd

REPLY_TOKENS = 40

RULES = [
    "Work in small steps: one command at a time, and read its output before the next.",
    "Look at a file before you change it. Quote the line that you rely on.",
    "Never delete what you did not make. Never push. Leave unrelated code as it is.",
    "Run the tests that cover a change after the change, and all tests before you say that you are done.",
    "When a command fails, say what you expected, what happened instead, and what you will look at next.",
    "Keep lines under 100 characters, add types to signatures, and name things after what they hold.",
    "If the task is unclear, choose the reading that changes least, and say which one you chose.",
    "Answer with one short thought and then one command in a block of its own.",
]
TREE = "\n".join(
    f"shop/{name}.py" for name in ("cart", "coupon", "invoice", "mail", "money", "order", "stock", "user")
)
HEAD = (
    "You are a careful coding agent in a terminal. These are your rules.\n"
    + "\n".join(f"{number}. {rule}" for number, rule in enumerate(RULES * 3, 1))
    + f"\nThe project has these files:\n{TREE}"
)
TASK = "Customers report that a coupon of 10% on an order of 0.15 takes off a whole cent too much. Find out why."
OUTPUTS = [
    """\
$ ls shop tests
cart.py coupon.py invoice.py mail.py money.py order.py stock.py user.py
test_cart.py test_coupon.py test_money.py""",
    """\
$ cat shop/coupon.py
from shop.money import Money

class Coupon:
    def __init__(self, percent: int) -> None:
        self.percent = percent

    def apply(self, total: Money) -> Money:
        return total - total.share(self.percent)""",
    """\
$ cat shop/money.py
from dataclasses import dataclass

@dataclass(frozen=True)
class Money:
    cents: int

    def share(self, percent: int) -> "Money":
        return Money(-(-self.cents * percent // 100))

    def __sub__(self, other: "Money") -> "Money":
        return Money(self.cents - other.cents)""",
    """\
$ python -m pytest tests/test_money.py -q
....F
E  assert Money(cents=2) == Money(cents=1)
1 failed, 4 passed""",
    """\
$ git log --oneline -3 shop/money.py
4f1c2aa Round shares up, as the bank does
91be004 Keep money in whole cents""",
    """\
$ python -m pytest -q
.............................
29 passed in 0.41s""",
]
SUMMARY = "So far: Money.share rounds up, since commit 4f1c2aa. A coupon must round down. Say how to fix it."
OTHER_TASK = "Write the release note for the last week: three lines, one for each change a customer notices."


class Demo:
    """One conversation after another, with a line printed for each request."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, model: str) -> None:
        self._session = session
        self._base_url = base_url
        self._model = model
        self._line(["TURN", "PROMPT", "CACHED", "OUTCOME", "REASON", "FIRST TOKEN", "SAID"])

    async def ask(self, title: str, messages: list[dict[str, str]]) -> Answer:
        answer = await chat(self._session, self._base_url, self._model, messages, max_tokens=REPLY_TOKENS)
        self._line(
            [
                title,
                answer.prompt_tokens,
                "-" if answer.cached_tokens is None else answer.cached_tokens,
                answer.outcome,
                answer.reason,
                f"{answer.first_seconds * 1000:.0f} ms",
                " ".join(answer.text.split())[:24],
            ]
        )
        return answer

    def _line(self, cells: Sequence[object]) -> None:
        title, prompt, cached, outcome, reason, first, said = cells
        print(f"{title:<24} {prompt:>6} {cached:>6}  {outcome:<8} {reason:<14} {first:>11}  {said}", flush=True)

    async def play(self) -> None:
        head = message("system", f"Session {secrets.token_hex(4)}. {HEAD}")  # new each time: nothing is cached yet
        history = [head, message("user", TASK)]
        for turn, output in enumerate([*OUTPUTS, None], 1):
            answer = await self.ask(f"agent, turn {turn}", history)
            if output is not None:
                history += [message("assistant", answer.text), message("user", f"Observation:\n{output}")]
        await self.ask("the same once more", history)
        other = [head, message("user", OTHER_TASK)]
        answer = await self.ask("second window", other)
        other += [message("assistant", answer.text), message("user", "Shorter, please.")]
        await self.ask("second window, turn 2", other)
        history += [message("assistant", "The test fails."), message("user", "Then fix it.")]
        await self.ask("back to the agent", history)
        await self.ask("history compacted", [head, message("user", f"{TASK}\n{SUMMARY}")])


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def run(base_url: str | None) -> None:
    if base_url is None:
        print("starting a prefixd of our own", file=sys.stderr, flush=True)
        async with own_prefixd() as (own_url, _):
            await run(own_url)
        return
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        await Demo(session, base_url, await first_model(session, base_url)).play()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default=os.environ.get("BASE_URL"), metavar="URL", help="a running server")
    try:
        asyncio.run(run(parser.parse_args(argv).base_url))
    except ServerFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
