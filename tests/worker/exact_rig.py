"""Small random models served by the real engine, scheduler and store, and hits compared with cold runs bit for bit."""

from __future__ import annotations

import queue
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from snapshot_rig import Prompt, prompt

from protocol.messages import Accepted, Completed, Generate, Sampling, TokenLogprob, Tokens
from worker.build import build
from worker.config import WorkerSettings
from worker.io import FromGateway
from worker.own_time import OwnTime
from worker.snapshot_clearing import Clearing
from worker.snapshot_finding import INSIDE_TOKENS

VOCAB = 96
STEPS = 16
# A block has 32 tokens, a pass at most 256; torch's attention is run at key lengths rounded up to 512.
EDGES = [edge + off for edge in (160, 192, 256, 288, 512, 544) for off in (-1, 0, 1)]
LENGTHS = [*range(1, 131), *EDGES]

Answer = tuple[TokenLogprob, ...]


class Sockets:
    """Takes what the engine sends."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.bad_frames = 0
        self.time = OwnTime()
        self.events: dict[str, list[Any]] = defaultdict(list)

    def send(self, _sender: bytes, message: Any) -> None:
        self.events[message.request_id].append(message)


class Worker:
    """A worker on a small random model, driven by hand."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.sockets = Sockets()
        chosen = WorkerSettings(**{"model": str(path), "device": "cpu", "kv_memory": "64MiB", **settings})
        self.engine, self.model = build(chosen, path, self.sockets, "e", lambda _: None)  # type: ignore[arg-type]
        self._ids = 0

    @property
    def runner(self) -> Any:
        return self.engine._runner

    def ask(self, request: Prompt, *, cache: bool = True, max_tokens: int = 1, n: int = 1) -> str:
        self._ids += 1
        sampling = Sampling(max_tokens, temperature=0.0, logprobs=VOCAB)
        message = Generate(f"r{self._ids}", request.ids, request.boundaries, sampling, n, cache)
        self.sockets.inbox.put(FromGateway(b"gateway", message))
        return message.request_id

    def run(self) -> None:
        self.engine.turn(wait=False)
        while self.engine.running_count or self.engine.waiting_count:
            self.engine.turn(wait=False)

    def serve(self, request: Prompt, **options: Any) -> Answer:
        request_id = self.ask(request, **options)
        self.run()
        return self.answer(request_id)

    def answer(self, request_id: str, choice: int = 0) -> Answer:
        events = self.sockets.events[request_id]
        assert isinstance(events[-1], Completed), events[-1]
        mine = [event for event in events if isinstance(event, Tokens) and event.choice == choice]
        return tuple(score for event in mine for score in event.logprobs)

    def count(self, metric: str, **labels: str) -> float:
        return self.engine._metrics.registry.get_sample_value(metric, labels) or 0.0

    def depth(self, request_id: str) -> int:
        (accepted,) = [event for event in self.sockets.events[request_id] if isinstance(event, Accepted)]
        return accepted.depth

    def settle(self) -> None:
        """Have all that was kept copied to slower tiers."""
        tiers = self.engine._tiers
        assert tiers is not None
        assert tiers.finish(60.0) == 0


@contextmanager
def one_at_a_time() -> Iterator[Callable[..., Worker]]:
    """Start a worker in place of the one before, which is closed."""
    workers: list[Worker] = []

    def start(path: Path, **settings: Any) -> Worker:
        if workers:
            workers.pop().engine.close()
        workers.append(Worker(path, **settings))
        return workers[-1]

    yield start
    for worker in workers:
        worker.engine.close()


def ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def question(length: int, tail: int = 5) -> Prompt:
    """A prompt with a boundary at `length` and a few tokens after it."""
    return prompt(ids(length, length), tail=ids(10_000 + length, tail), head=False)


def primer(length: int) -> Prompt:
    """Another prompt with the same boundary: serving it keeps a snapshot there."""
    return prompt(ids(length, length), tail=ids(20_000 + length, 3), head=False)


def cold_answers(worker: Worker, lengths: Sequence[int], max_tokens: int) -> dict[int, Answer]:
    """The answers with the cache off, each computed alone, no two of which are equal."""
    cold = {length: worker.serve(question(length), cache=False, max_tokens=max_tokens) for length in lengths}
    assert len(set(cold.values())) == len(lengths), "the answers say nothing of their prompts"
    return cold


def assert_hits_equal(worker: Worker, cold: Mapping[int, Answer], asked: Mapping[int, str]) -> None:
    assert [worker.depth(request_id) for request_id in asked.values()] == list(asked)
    unequal = [length for length, request_id in asked.items() if worker.answer(request_id) != cold[length]]
    assert not unequal


def assert_long_answers_equal(
    worker: Worker, lengths: Sequence[int] = (1, 31, 64, 129, 287), count: int = 64
) -> None:
    """All of a long answer, decoded alone after a hit and alone after a cold run."""
    cold = {length: worker.serve(question(length), cache=False, max_tokens=count) for length in lengths}
    assert {len(answer) for answer in cold.values()} == {count}
    prime(worker, lengths)
    asked = {}
    for length in lengths:
        asked[length] = worker.ask(question(length), max_tokens=count)
        worker.run()
    assert_hits_equal(worker, cold, asked)


def assert_equal_in_company(worker: Worker, cold: Mapping[int, Answer]) -> None:
    """Hits alone, then all at once with long cold prompts between them, so that every pass is of another make-up."""
    prime(worker, cold)
    alone = {}
    for length in cold:
        alone[length] = worker.ask(question(length), max_tokens=len(cold[length]))
        worker.run()
    assert_hits_equal(worker, cold, alone)
    together = {}
    for index, length in enumerate(cold):
        together[length] = worker.ask(question(length), max_tokens=len(cold[length]))
        if index % 8 == 0:
            worker.ask(prompt(ids(30_000 + index, 300 + index)), cache=False, max_tokens=40)
    worker.run()
    assert_hits_equal(worker, cold, together)


def assert_equal_after_flush(worker: Worker, cold: Mapping[int, Answer]) -> None:
    """Hits on snapshots that are committed anew."""
    Clearing(worker.engine._store).flush()
    prime(worker, cold)
    asked = {length: worker.ask(question(length), max_tokens=len(cold[length])) for length in cold}
    worker.run()
    assert_hits_equal(worker, cold, asked)


def assert_equal_inside_messages(worker: Worker) -> None:
    """Prompts that leave a long stored message at places of every kind, all at once: only where a layer recurs, none
    starts inside it.
    """
    shared = [*range(INSIDE_TOKENS, INSIDE_TOKENS + 40, 3), *EDGES]
    asked = {
        length: prompt([*ids(7, 600)[:length], *ids(40_000 + length, 9)], tail=ids(3, 4), head=False)
        for length in shared
    }
    cold = {length: worker.serve(request, cache=False, max_tokens=4) for length, request in asked.items()}
    assert len(set(cold.values())) == len(shared), "the answers say nothing of their prompts"
    worker.serve(prompt(ids(7, 600), tail=ids(3, 4), head=False))
    together = {length: worker.ask(request, max_tokens=4) for length, request in asked.items()}
    worker.run()
    inside = shared if worker.engine._store.divisible else [0] * len(shared)
    assert [worker.depth(request_id) for request_id in together.values()] == inside
    assert [length for length, request_id in together.items() if worker.answer(request_id) != cold[length]] == []


def assert_equal_after_swapping(roomy: Worker, worker: Worker) -> None:
    """Ten answers that do not fit the pool of `worker` together, of prompts that start from a snapshot."""
    lengths = [20 + 7 * index for index in range(10)]
    alone = [roomy.serve(question(length), cache=False, max_tokens=100) for length in lengths]
    asked = [worker.ask(question(length), max_tokens=100) for length in lengths]
    worker.run()
    assert worker.count("prefixd_swaps_total", direction="in") > 0
    assert [worker.answer(request_id) for request_id in asked] == alone


def prime(worker: Worker, lengths: Iterable[int]) -> None:
    for length in lengths:
        worker.ask(primer(length))
    worker.run()


def unequal_hits(worker: Worker, lengths: Sequence[int], tail: int) -> list[int]:
    """The lengths at which the first token's logits after a hit are not those of a cold run."""
    cold = [worker.serve(question(length, tail), cache=False) for length in lengths]
    for length in lengths:
        worker.serve(primer(length))
    asked = []
    for length in lengths:
        asked.append(worker.ask(question(length, tail)))
        worker.run()
    assert [worker.depth(request_id) for request_id in asked] == list(lengths)
    hits = [worker.answer(request_id) for request_id in asked]
    return [length for length, hit, other in zip(lengths, hits, cold, strict=True) if hit != other]
