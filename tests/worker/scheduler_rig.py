"""The real engine, scheduler and store on the model and memory of `toy_model`, and without sockets."""

from __future__ import annotations

import math
import queue
from collections.abc import Callable
from typing import Any

import torch
from snapshot_rig import Clock, Prompt, prompt, spelled, states
from toy_model import VOCAB, Runner, answer

from protocol.codec import decode, encode
from protocol.control import Stats
from protocol.messages import (
    Accepted,
    Cancel,
    Command,
    Completed,
    Failed,
    Finished,
    Generate,
    Message,
    ModelInfo,
    Reply,
    Sampling,
    Tokens,
)
from worker.block_pool import BlockPool
from worker.control import Control
from worker.engine import Engine
from worker.io import FromGateway, FromOperator
from worker.journal import Journal
from worker.metrics import WorkerMetrics
from worker.outbox import Outbox
from worker.scheduler import Scheduler
from worker.snapshots import SnapshotStore
from worker.tiers.tiers import Tiers

BLOCK_TOKENS = 4
MODEL = ModelInfo("f", "tiny", "float32", "cpu", VOCAB, 4096, 1, 1, 1, 1, True)


class Sockets:
    """Stands in for `WorkerSockets`: what is sent goes through the real codec and is kept."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.sent: list[tuple[bytes, Message]] = []
        self.replies: list[Reply] = []
        self.on_send: Callable[[Message], object] = lambda message: None

    def send(self, sender: bytes, message: Message) -> None:
        self.sent.append((sender, decode(encode(message))))
        self.on_send(message)

    def answer(self, sender: bytes, reply: Reply) -> None:
        answered = decode(encode(reply))
        assert isinstance(answered, Reply)
        self.replies.append(answered)


class Rig:
    """A worker without a model and without sockets. Time passes with every turn."""

    def __init__(
        self,
        *,
        blocks: int = 64,
        slots: int = 16,
        max_running: int = 4,
        max_waiting: int = 100,
        max_queue_seconds: float = math.inf,
        max_model_len: int = 4096,
        prefill_rows: int = 8,
        block_tokens: int = BLOCK_TOKENS,
        verify_hits: float = 0.0,
        entries: int = 0,
        divisible: bool = False,
        tiers: Callable[[Rig], Tiers] | None = None,
        holds: bool = False,
        check_each: bool = False,
    ) -> None:
        """`entries` of recurrent state; 0 for a model that has none. `tiers` are made when there is a store.

        `holds`: as where passes run on a device of their own.
        """
        self.clock = Clock()
        self.max_running = max_running
        self.max_model_len = max_model_len
        self.pool = BlockPool(blocks + 1, block_tokens)
        recurring = {"states": BlockPool(entries + 1, 1), "state_bytes": 7} if entries else {}
        self.store = SnapshotStore(
            slots, self.pool, block_bytes=100, clock=self.clock, divisible=divisible, **recurring
        )
        self.sockets = Sockets()
        self.metrics = WorkerMetrics()
        self.journal = Journal(clock=self.clock)
        self.runner = Runner(self)
        self.tiers = tiers(self) if tiers else None
        outbox = Outbox(self.sockets.send, holds)
        self.scheduler = Scheduler(
            epoch="e",
            store=self.store,
            pool=self.pool,
            metrics=self.metrics,
            journal=self.journal,
            emit=outbox.send,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            max_prefill_rows=prefill_rows,
            shared_prefill_rows=64,
            max_running=max_running,
            max_waiting=max_waiting,
            max_queue_seconds=max_queue_seconds,
            caching=slots > 0,
            verify_hits=verify_hits,
            differ=lambda kept, computed: not torch.equal(kept, computed),
            clock=self.clock,
            tiers=self.tiers,
        )
        control = Control(
            model=MODEL,
            model_name="tiny",
            block_bytes=100,
            scheduler=self.scheduler,
            store=self.store,
            pool=self.pool,
            metrics=self.metrics,
            journal=self.journal,
            tiers=self.tiers,
        )
        sockets, runner = self.sockets, self.runner
        self.engine = Engine(
            sockets,  # type: ignore[arg-type]
            self.scheduler,
            self.store,
            runner,  # type: ignore[arg-type]
            control,
            self.metrics,
            self.clock,
            self.tiers,
            outbox=outbox,
            check_each=check_each,
        )
        self._ids = 0
        self.asked: dict[str, Generate] = {}

    # Asking

    def generate(
        self,
        request: Prompt,
        *,
        n: int = 1,
        max_tokens: int = 4,
        cache: bool = True,
        sender: bytes = b"gateway",
        **sampling: Any,
    ) -> str:
        """Put a request in the inbox; returns its id."""
        self._ids += 1
        request_id = f"r{self._ids}"
        message = Generate(
            request_id,
            request.ids,
            request.boundaries,
            Sampling(max_tokens, **{"temperature": 0.0, **sampling}),
            n,
            cache,
            request.tenant,
        )
        self.asked[request_id] = message
        self.sockets.inbox.put(FromGateway(sender, message))
        return request_id

    def cancel(
        self, request_id: str, cause: Any = "disconnect", choice: int | None = None, sender: bytes = b"gateway"
    ) -> None:
        self.sockets.inbox.put(FromGateway(sender, Cancel(request_id, cause, choice)))

    def ask(self, verb: str, **args: Any) -> Reply:
        """Have a control command answered, with one turn of the engine."""
        self.sockets.inbox.put(FromOperator(b"operator", Command("c", verb, args)))
        self.turn()
        return self.sockets.replies.pop()

    def stats(self) -> Stats:
        reply = self.ask("stats")
        assert isinstance(reply.data, dict)
        return Stats(**reply.data)

    # Going on

    def turn(self) -> None:
        self.clock.now += 1
        self.engine.turn(wait=False)
        if self.runner.cache.wrong:
            raise self.runner.cache.wrong[0]
        self.check()

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def turn_until(self, reached: Callable[[], object]) -> None:
        """Turn until something is so, for a long time at most."""
        for _ in range(2000):
            if reached():
                return
            self.turn()
        raise AssertionError("it is never reached")

    def run(self) -> None:
        """Turn until nothing is open; what holds at rest is checked."""
        self.turn()
        self.turn_until(lambda: self.scheduler.is_idle)
        self.check_rest()

    def rest(self) -> None:
        """Turn until there is nothing left to do, in the background either."""
        self.run()
        self.turn_until(lambda: self.scheduler.background.is_empty)
        self.check_rest()

    def serve(self, request: Prompt, **options: Any) -> str:
        request_id = self.generate(request, **options)
        self.run()
        return request_id

    # Looking

    def events(self, request_id: str) -> list[Message]:
        return [message for _, message in self.sockets.sent if getattr(message, "request_id", None) == request_id]

    def of(self, request_id: str, kind: type[Any]) -> list[Any]:
        return [event for event in self.events(request_id) if isinstance(event, kind)]

    def tokens(self, request_id: str, choice: int = 0) -> list[int]:
        return [t for event in self.of(request_id, Tokens) if event.choice == choice for t in event.token_ids]

    def accepted(self, request_id: str) -> Accepted:
        (accepted,) = self.of(request_id, Accepted)
        return accepted

    def end(self, request_id: str) -> Completed | Failed:
        """The last message of a request, of which there is exactly one."""
        ends = [event for event in self.events(request_id) if isinstance(event, Completed | Failed)]
        assert len(ends) == 1, f"{request_id} has {len(ends)} last messages"
        assert self.events(request_id)[-1] is ends[0]
        return ends[0]

    def reasons(self, request_id: str) -> list[str]:
        """How the choices ended, in order of choices."""
        finished = sorted(self.of(request_id, Finished), key=lambda event: event.choice)
        return [event.reason for event in finished]

    def assert_answered(self, request_id: str) -> None:
        """Every choice has the answer of the model, as far as it was asked for."""
        message, end = self.asked[request_id], self.end(request_id)
        assert isinstance(end, Completed), end
        sampling = message.sampling
        limit = min(sampling.max_tokens, self.context - len(message.token_ids))
        expected = answer(message.token_ids, limit, sampling.stop_token_ids)
        for choice in range(message.n):
            assert self.tokens(request_id, choice) == expected

    @property
    def context(self) -> int:
        """Longest prompt and answer together."""
        return min(self.max_model_len, self.pool.total_count * self.pool.block_tokens)

    def kept(self) -> list[int]:
        """The positions kept, rising."""
        return sorted(s.node.end for s in self.store.slots.snapshots() if not s.leaving)

    def count(self, metric: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(metric, labels)
        assert value is not None, metric
        return value

    # Checks

    def check(self) -> None:
        """Every block has the holders it should have, and every snapshot the state of its tokens."""
        running = self.scheduler.running
        prefills = list(running.prefilling)
        if self.scheduler.background.running is not None:
            prefills.append(self.scheduler.background.running)
        choices = [*running.decoding, *running.swapped]
        tables = [request.blocks for request in prefills]
        tables += [[r.tail_source] for r in prefills if r.tail_source is not None]
        tables += [choice.blocks for choice in choices]
        entries = [entry for request in prefills for entry in [*request.entries, request.entry_source] if entry]
        entries += [choice.entry for choice in choices if choice.entry is not None]
        entries += [request.checkpoint[1] for request in prefills if request.checkpoint is not None]
        held, states_held = self.tiers.references if self.tiers else ([], [])
        self.store.check_invariants([*tables, *held], [*entries, *states_held])
        for snapshot in self.store.slots.snapshots():
            if not snapshot.leaving:
                ids = spelled(snapshot.node)[: snapshot.tokens]
                assert self.runner.cache.read(snapshot.blocks, len(ids)) == states(ids), f"slot {snapshot.slot}"
                if snapshot.state is not None:
                    assert self.runner.entries[snapshot.state] == states(ids)[-1], f"slot {snapshot.slot}"

    def check_rest(self) -> None:
        """Nothing is open: nothing is held but by snapshots, and everybody has had a last word."""
        background = self.scheduler.background.running
        entries = background.entries if background else []
        entry_source = background.entry_source if background else None
        entries = [*entries, entry_source] if entry_source else entries
        held, states_held = self.tiers.references if self.tiers else ([], [])
        tables = [] if background is None else [background.blocks]
        self.store.check_invariants([*tables, *held], [*entries, *states_held])
        assert self.scheduler.running.is_empty
        assert not self.scheduler.waiting
        assert self.scheduler.running_count == 0
        for request_id in self.asked:
            self.end(request_id)


def text(start: int, count: int) -> list[int]:
    """`count` ids within the vocabulary that depend on `start`."""
    return [hash((start, i)) % VOCAB for i in range(count)]


def one(start: int, count: int, tail: int = 1) -> Prompt:
    """A prompt of one message of `count` tokens and a generation suffix."""
    return prompt(text(start, count), tail=text(start + 1000, tail), head=False)
