"""Measure OpenAI-compatible servers from the client's side, the same texts for each, and compare them.

    serving.py                                            a prefixd of its own
    serving.py --base-url http://127.0.0.1:8080           a running server
    serving.py --own "packed=--dtype int4"                two of them, the second with flags
    serving.py --peer llama-server=http://127.0.0.1:8301 --start "llama-server=llama-server -m m.gguf --port 8301"
    serving.py --long --model DIRECTORY --flags "--max-running 64"    the work of an accelerator, see long_bench.py

Servers are measured one after the other. One named by --start runs only while it is measured, so that idle
thread pools of one don't disturb another. All texts carry a salt of this run: nothing is cached beforehand.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import aiohttp
from chat_client import TIMEOUT, ServerFailed, chat, first_model
from client_bench import Client, Texts, say, system, user
from long_bench import LongBench, LongFigures
from server_process import own_prefixd, running, split_command

HEAD_TOKENS = 2000
TURN_TOKENS = 150
REPLY_TOKENS = 32
CHAT_TURNS = 20
WINDOWS = 3
WINDOW_TOKENS = 400  # of a window's own first message
WINDOW_ROUNDS = 8
COLD_TOKENS = 2046
COLD_RUNS = 3
DECODE_TOKENS = 128
DECODE_RUNS = 3
STREAMS = 8


@dataclass(frozen=True, slots=True)
class Figures:
    """What one server did. Times in seconds, rates in tokens a second, None where not measured."""

    start: float | None
    chat: float
    outside: float | None
    windows: float
    windows_first: float
    windows_last: float
    cold: float
    decode_1: float
    decode_8: float
    prompt_tokens: dict[str, int]
    outcomes: dict[str, float]

    @staticmethod
    def rows() -> tuple[tuple[str, str, str], ...]:
        """Title, field and unit of each row of the table."""
        return ROWS


ROWS = (
    ("start to ready", "start", "s"),
    (f"growing chat, median first token of turns 2-{CHAT_TURNS}", "chat", "s"),
    ("  of that outside the worker: gateway, sockets, client", "outside", "s"),
    (f"{WINDOWS} alternating windows, median first token from round 2", "windows", "s"),
    ("  the same, round 2 only", "windows_first", "s"),
    ("  the same, last round only", "windows_last", "s"),
    (f"cold prompt of about {COLD_TOKENS} tokens", "cold", "s"),
    ("decode, 1 stream", "decode_1", "tok/s"),
    (f"decode, {STREAMS} streams together", "decode_8", "tok/s"),
)


class Bench(Client):
    """All measurements of one server."""

    async def growing_chat(self) -> tuple[float, float | None, int]:
        """Median time to the first token from turn 2 on, the part of it outside the worker, and the last prompt."""
        messages = [system(self.texts.make("chat head", HEAD_TOKENS))]
        answers = []
        for turn in range(CHAT_TURNS):
            messages.append(user(self.texts.make(f"turn {turn}", TURN_TOKENS)))
            answer = await self.ask(messages, REPLY_TOKENS)
            messages.append({"role": "assistant", "content": answer.text})
            answers.append(answer)
        outside = [a.first_seconds - a.worker_seconds for a in answers[1:] if a.worker_seconds is not None]
        firsts = median(answer.first_seconds for answer in answers[1:])
        return firsts, median(outside) if outside else None, answers[-1].prompt_tokens

    async def windows(self) -> tuple[list[float], int]:
        """Median time to the first token in each round, and the tokens of the last prompt."""
        head = system(self.texts.make("windows head", HEAD_TOKENS))
        windows = [[head, user(self.texts.make(f"window {w}", WINDOW_TOKENS))] for w in range(WINDOWS)]
        rounds = []
        for number in range(WINDOW_ROUNDS):
            firsts = []
            for w, messages in enumerate(windows):
                if number:
                    messages.append(user(self.texts.make(f"window {w} round {number}", TURN_TOKENS)))
                answer = await self.ask(messages, REPLY_TOKENS)
                messages.append({"role": "assistant", "content": answer.text})
                firsts.append(answer.first_seconds)
            rounds.append(median(firsts))
        return rounds, answer.prompt_tokens

    async def cold(self) -> tuple[float, int]:
        answers = [
            await self.ask([user(self.texts.make(f"cold {run}", COLD_TOKENS))], 1) for run in range(COLD_RUNS)
        ]
        return median(answer.first_seconds for answer in answers), answers[-1].prompt_tokens

    async def decode(self, streams: int) -> float:
        """Tokens a second of all streams, from the first token of the first to the last of the last."""
        rates = []
        for run in range(DECODE_RUNS):
            questions = [
                f"Tell me a long story about the {self.texts.make(f'{run} {s}', 8)}" for s in range(streams)
            ]
            answers = await asyncio.gather(
                *(self.ask([user(question)], DECODE_TOKENS, ignore_eos=True) for question in questions)
            )
            tokens = sum(answer.completion_tokens - 1 for answer in answers)
            began = min(answer.first_seconds for answer in answers)
            rates.append(tokens / (max(answer.last_seconds for answer in answers) - began))
        return median(rates)

    async def run(self, start_seconds: float | None) -> Figures:
        say("  growing chat")
        growing, outside, chat_tokens = await self.growing_chat()
        say("  windows")
        rounds, window_tokens = await self.windows()
        say("  cold prompts")
        cold, cold_tokens = await self.cold()
        say("  decode")
        return Figures(
            start=start_seconds,
            chat=growing,
            outside=outside,
            windows=median(rounds[1:]),
            windows_first=rounds[1],
            windows_last=rounds[-1],
            cold=cold,
            decode_1=await self.decode(1),
            decode_8=await self.decode(STREAMS),
            prompt_tokens={
                "chat, last turn": chat_tokens,
                "window, last round": window_tokens,
                "cold": cold_tokens,
            },
            outcomes=await self.outcomes(),
        )


async def calibrate(session: aiohttp.ClientSession, base_url: str, model: str, salt: str) -> float:
    """Tokens a word of our texts, by the server's own count."""
    texts = Texts(salt, 1.0)
    short, long = [
        (await chat(session, base_url, model, [user(texts.make(f"calibration {size}", size))], max_tokens=1))
        for size in (20, 320)
    ]
    return (long.prompt_tokens - short.prompt_tokens) / 300


async def measure(
    options: argparse.Namespace, base_url: str, model: str | None, salt: str, start_seconds: float | None
) -> Figures | LongFigures:
    # Some servers close a connection that they said they would keep: a new one a request costs nothing here.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=TIMEOUT, connector=connector) as session:
        model = model or await first_model(session, base_url)
        texts = Texts(salt, await calibrate(session, base_url, model, salt))
        bench = LongBench if options.long else Bench
        return await bench(session, base_url, model, texts).run(start_seconds)


async def measure_all(options: argparse.Namespace) -> dict[str, Figures | LongFigures]:
    salt = secrets.token_hex(4)
    figures: dict[str, Figures | LongFigures] = {}
    common = [*(["--model", options.model] if options.model else []), *split_command(options.flags)]
    say(options.name)
    if options.base_url:
        figures[options.name] = await measure(options, options.base_url, options.model, salt, None)
    else:
        async with own_prefixd(common) as (base_url, seconds):
            figures[options.name] = await measure(options, base_url, None, salt, seconds)
    for name, flags in (pair.split("=", 1) for pair in options.own):
        say(name)
        async with own_prefixd([*common, *split_command(flags)]) as (base_url, seconds):
            figures[name] = await measure(options, base_url, None, salt, seconds)
    commands = dict(pair.split("=", 1) for pair in options.start)
    for name, base_url in (pair.split("=", 1) for pair in options.peer):
        say(name)
        if name in commands:
            async with running(split_command(commands[name]), f"{base_url}/health") as seconds:
                figures[name] = await measure(options, base_url, None, salt, seconds)
        else:
            figures[name] = await measure(options, base_url, None, salt, None)
        say(render(figures))  # what has been measured so far, should the next one fail
    return figures


def render(figures: Mapping[str, Figures | LongFigures]) -> str:
    """A Markdown table: one column a server, and one of ratios of the first server to each other."""
    ours, *peers = figures
    head = ["work", *figures, *(f"{ours} / {peer}" for peer in peers)]
    rows = []
    for title, name, unit in figures[ours].rows():
        values = [getattr(figures[server], name) for server in figures]
        cells = ["-" if value is None else f"{value:.3g} {unit}" for value in values]
        ratios = [f"{values[0] / value:.2f}" if value and values[0] else "-" for value in values[1:]]
        rows.append([title, *cells, *ratios])
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    ]
    lines.insert(1, " | ".join("-" * width for width in widths))
    table = "\n".join(f"| {line} |" for line in lines)
    notes = [f"prompt tokens at {ours}: " + ", ".join(f"{k} {v}" for k, v in figures[ours].prompt_tokens.items())]
    notes += [f"{name} {value:g}" for name, value in figures[ours].outcomes.items()]
    return "\n".join([table, "", *notes])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", metavar="URL", help="a running server; without it a prefixd is started")
    parser.add_argument(
        "--model", metavar="NAME", help="model to ask for, or to serve (default: the server's first)"
    )
    parser.add_argument("--name", default="prefixd", help="what to call that server (default: %(default)s)")
    parser.add_argument(
        "--own", action="append", default=[], metavar="NAME=FLAGS", help="another prefixd of ours; repeatable"
    )
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL", help="another server; repeatable"
    )
    parser.add_argument(
        "--start", action="append", default=[], metavar="NAME=CMD", help="command that runs a peer; repeatable"
    )
    parser.add_argument(
        "--flags",
        default="",
        metavar="FLAGS",
        help="flags of every prefixd that is started, such as --max-running 64",
    )
    parser.add_argument(
        "--long", action="store_true", help="measure with the prompts and streams of an accelerator"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    options = parser.parse_args(argv)
    try:
        figures = asyncio.run(measure_all(options))
    except ServerFailed as error:
        say(str(error))
        return 1
    print(render(figures))
    if options.json:
        options.json.write_text(
            json.dumps({name: asdict(each) for name, each in figures.items()}, indent=2) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
