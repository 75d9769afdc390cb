"""A worker whose answers are written beforehand: `python scripted_worker.py ANSWERS FLAGS...`.

Everything runs as in `prefixd worker`, the sampling of each token included; only then is the token replaced by the
next one of an answer from the file ANSWERS. Random weights could not use a client's tools otherwise.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import worker.main
from protocol.messages import ModelInfo, Sampling, TokenLogprob

if TYPE_CHECKING:
    from torch import Tensor

    from worker.engine import Engine

TURN, END = "<|im_start|>", "<|im_end|>"


class Script:
    """The answers, and the tokenizer that reads prompts and writes answers."""

    def __init__(self, answers: Path, model: Path) -> None:
        from tokenizers import Tokenizer

        self._answers = answers
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._turn, self._end = (self._tokenizer.token_to_id(text) for text in (TURN, END))
        self._assistant = self._tokenizer.token_to_id("assistant")

    def answer(self, prompt_ids: Sequence[int]) -> list[int]:
        """The answer of the first pattern found in what came since the last answer; the file may change meanwhile."""
        news = self._tokenizer.decode(self._since_last_answer(list(prompt_ids)), skip_special_tokens=False)
        for pattern, text in json.loads(self._answers.read_text()):
            if re.search(pattern, news, re.DOTALL):
                return [*self._tokenizer.encode(text, add_special_tokens=False).ids, self._end]
        raise ValueError(f"no answer was written for: {news[-2000:]}")

    def _since_last_answer(self, ids: list[int]) -> list[int]:
        """The last turn of the assistant is the one that is asked for."""
        asked = len(ids) - 1 - ids[::-1].index(self._turn)
        for at in range(asked - 1, -1, -1):
            if ids[at] == self._turn and ids[at + 1] == self._assistant:
                return ids[ids.index(self._end, at) : asked]
        return ids[:asked]


class ScriptedWorker(worker.main.Worker):
    """Has every sampler of this process choose the script's tokens."""

    answers: Path

    def ready(self, engine: Engine, model: ModelInfo) -> None:
        import worker.scheduler  # not before: it loads torch, whose threads are set up by `main`
        from worker.sampling import Sampler

        script = Script(self.answers, Path(self.settings.model))

        class Scripted(Sampler):
            is_plain_greedy = False

            def __init__(self, sampling: Sampling, choice: int, prompt_ids: Sequence[int], *rest: Any) -> None:
                super().__init__(sampling, choice, prompt_ids, *rest)
                self._next = iter(script.answer(prompt_ids))

            def choose(self, logits: Tensor) -> tuple[int, TokenLogprob | None]:
                _, logprob = super().choose(logits)
                return next(self._next), logprob

        worker.scheduler.Sampler = Scripted
        super().ready(engine, model)


if __name__ == "__main__":
    file, *flags = sys.argv[1:]
    ScriptedWorker.answers = Path(file)
    worker.main.Worker = ScriptedWorker
    sys.exit(worker.main.main(flags))
