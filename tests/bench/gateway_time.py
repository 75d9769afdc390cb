"""The gateway's share of a turn: 32k tokens of history in 80 messages, and one new message; and of cold prompts.

    gateway_time.py [--model PATH_OR_NAME] [--tokens N] [--messages N] [--turns N] [--cold N]

Parsing, rendering, tokenizing and digests of each turn are timed, and in the same run what encoding its whole text
costs. Prints medians and their ratio. A cold prompt is one whose text was never seen before.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import orjson

from gateway.canonical import parse_messages, parse_tools
from gateway.conversation import Conversation
from gateway.model_files import load_model_files
from gateway.openai_params import parse_params
from gateway.prompts import PromptMaker
from protocol.codec import encode
from protocol.messages import Generate, ModelInfo, Sampling
from protocol.model_path import EMBEDDED_MODEL, resolve_model

MODEL = ModelInfo("bench", "llama", "float32", "cpu", 1 << 20, 1 << 20, 1, 1, 1, 4, True)
ROOT = Path(__file__).parents[2]


class Text:
    """Pieces of this project's own code and prose, such as an agent's files and answers."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        files = sorted(
            [*ROOT.glob("*.md"), *(f for room in ("gateway", "worker") for f in ROOT.glob(f"{room}/*.py"))]
        )
        self.all = "\n".join(file.read_text(encoding="utf-8") for file in files)

    def some(self, characters: int) -> str:
        start = self._rng.randrange(len(self.all))
        return (self.all[start:] + self.all * (1 + characters // len(self.all)))[:characters]

    def lengths(self, count: int, total: int) -> list[int]:
        """Of messages: most of them short, some long."""
        shares = [self._rng.expovariate(1.0) + 0.05 for _ in range(count)]
        return [max(8, int(total * share / sum(shares))) for share in shares]


class NewText(Text):
    """Text that no other piece of it repeats: Python's own library, file after file."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        self._rng.shuffle(files)
        self.all = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
        self._at = 0

    def some(self, characters: int) -> str:
        if self._at + characters > len(self.all):
            raise SystemExit("there is not enough new text for so many cold prompts")
        self._at += characters
        return self.all[self._at - characters : self._at]


def conversation(text: Text, messages: int, characters: int) -> list[dict[str, Any]]:
    """An agent's history: a system message, then questions, calls, results and answers."""
    first, *lengths = text.lengths(messages, characters)
    made: list[dict[str, Any]] = [{"role": "system", "content": text.some(first)}]
    for number, length in enumerate(lengths):
        match number % 4:
            case 0:
                made.append({"role": "user", "content": text.some(length)})
            case 1:
                arguments = orjson.dumps({"path": text.some(20), "text": text.some(length)}).decode()
                function = {"name": "edit", "arguments": arguments}
                call = {"id": f"call_{number}", "type": "function", "function": function}
                made.append({"role": "assistant", "content": "", "tool_calls": [call]})
            case 2:
                made.append({"role": "tool", "tool_call_id": f"call_{number - 1}", "content": text.some(length)})
            case _:
                made.append({"role": "assistant", "content": text.some(length)})
    return made


def turn(maker: PromptMaker, body: bytes) -> None:
    """What happens between a body and the frames for the worker."""
    fields = maker.bodies.parse("", body)
    parse_params("chat", fields)
    messages = parse_messages(fields["messages"], through=partial(maker.said.parsed, "", len(body)))
    made = maker.chat(Conversation(messages, parse_tools(fields.get("tools"))), MODEL)
    encode(Generate("bench", made.token_ids, made.boundaries, Sampling(100)))


def cold(maker: PromptMaker, encode_whole: Callable[[str], object], per_token: float, turns: int) -> None:
    """Prompts of new text: in one message and in many, after ones of the same kind."""
    source = NewText(11)
    print(f"\ncold prompts, {turns} of each kind, medians in ms")
    for tokens in (8_000, 32_000):
        for messages in (1, 40):
            mine: list[float] = []
            theirs: list[float] = []
            for _ in range(turns):
                said = conversation(source, messages, int(tokens * per_token))
                body = orjson.dumps({"messages": said, "stream": True, "temperature": 0})
                mine.append(seconds(lambda body=body: turn(maker, body)))
                made = maker.trace(Conversation(parse_messages(said)))
                theirs.append(seconds(lambda text=made.text + made.suffix: encode_whole(text)))
            ours, whole = statistics.median(mine), statistics.median(theirs)
            print(
                f"{tokens:6} tokens in {messages:2} messages  the gateway {ours * 1e3:6.2f}"
                f"  least {min(mine) * 1e3:6.2f}  encoding it whole {whole * 1e3:6.2f}  ratio {whole / ours:.1f}"
            )


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--messages", type=int, default=80)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--cold", type=int, default=12, help="cold prompts of each kind")
    asked = parser.parse_args()
    files = load_model_files(resolve_model(asked.model))
    maker, source = PromptMaker(files), Text(7)
    per_token = len(source.all) / len(files.tokenizer.encode(source.all).ids)

    def encode_whole(text: str) -> object:
        return files.tokenizer.encode_batch_fast([text], add_special_tokens=False)

    history = conversation(source, asked.messages, int(asked.tokens * per_token))
    gc.collect()
    gc.freeze()  # as the process does at start
    turn(maker, orjson.dumps({"messages": history}))
    warm: list[float] = []
    whole: list[float] = []
    tokens = 0
    for number in range(asked.turns):
        # Each turn says something new at the end of the same history, so that its length stays as asked.
        said = [*history, {"role": "user", "content": f"turn {number}: {source.some(300)}"}]
        body = orjson.dumps({"messages": said, "stream": True, "temperature": 0})
        warm.append(seconds(lambda body=body: turn(maker, body)))
        made = maker.trace(Conversation(parse_messages(said)))
        text, tokens = made.text + made.suffix, len(made.token_ids)
        whole.append(seconds(lambda text=text: encode_whole(text)))
    mine, theirs = statistics.median(warm), statistics.median(whole)
    print(f"{tokens} tokens in {asked.messages + 1} messages, {asked.turns} turns, times in ms")
    print(
        f"a turn in the gateway  median {mine * 1e3:6.2f}  least {min(warm) * 1e3:6.2f}  most {max(warm) * 1e3:6.2f}"
    )
    print(f"encoding it whole      median {theirs * 1e3:6.2f}  least {min(whole) * 1e3:6.2f}")
    print(f"ratio {theirs / mine:.1f}; goals: a turn 3.00 or less, ratio 20 or more")
    cold(maker, encode_whole, per_token, asked.cold)


if __name__ == "__main__":
    main()
