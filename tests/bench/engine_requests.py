"""The engine around a runner, without sockets: takes whole requests, and tells when their tokens came."""

from __future__ import annotations

import queue
import time
from array import array
from collections import defaultdict
from collections.abc import Sequence
from typing import cast

from engine_passes import CONTEXT, ENTRIES, Bench

from protocol.digest import link_digest, root_digest
from protocol.messages import Accepted, Boundary, Failed, Generate, Sampling, Tokens
from worker.block_pool import BlockPool
from worker.control import Control
from worker.engine import Engine
from worker.io import FromGateway, WorkerSockets
from worker.journal import Journal
from worker.kv_cache import BLOCK_TOKENS
from worker.metrics import WorkerMetrics
from worker.scheduler import Scheduler
from worker.snapshots import SnapshotStore


class Sockets:
    """Takes what the engine sends, and when."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[FromGateway] = queue.SimpleQueue()
        self.tokens: dict[str, list[float]] = defaultdict(list)
        self.depths: dict[str, int] = {}

    def send(self, _sender: bytes, message: object) -> None:
        if isinstance(message, Tokens):
            self.tokens[message.request_id].append(time.perf_counter())
        elif isinstance(message, Accepted):
            self.depths[message.request_id] = message.depth
        elif isinstance(message, Failed):
            raise RuntimeError(message.message)


class Served:
    """The engine with its scheduler and store around a runner, driven by hand."""

    def __init__(self, bench: Bench) -> None:
        runner = bench.runner
        self.pool = BlockPool(runner.cache.num_blocks, BLOCK_TOKENS)
        self.store = SnapshotStore(
            512,
            self.pool,
            BLOCK_TOKENS * bench.token_bytes,
            states=BlockPool(ENTRIES, 1) if bench.states else None,
            state_bytes=bench.state_bytes,
        )
        self.sockets, self.metrics = Sockets(), WorkerMetrics()
        scheduler = Scheduler(
            epoch="e",
            store=self.store,
            pool=self.pool,
            metrics=self.metrics,
            journal=Journal(),
            emit=self.sockets.send,
            max_model_len=CONTEXT,
            vocab_size=bench.config.vocab_size,
            max_prefill_rows=runner.max_prefill_rows,
            shared_prefill_rows=runner.shared_prefill_rows,
            max_running=64,
            max_waiting=256,
            caching=True,
            state_chunk=runner.state_chunk,
        )
        sockets, control = cast(WorkerSockets, self.sockets), cast(Control, None)
        self.engine = Engine(sockets, scheduler, self.store, runner, control, self.metrics)
        self._asked = 0

    def ask(self, messages: Sequence[Sequence[int]], max_tokens: int = 1, cache: bool = True) -> tuple[str, float]:
        """Put a prompt of these messages and a short suffix in the inbox: its id, and when."""
        self._asked += 1
        token_ids, boundaries, digest = array("i"), [], root_digest("model", "")
        for index, message in enumerate(messages):
            part = array("i", message)
            token_ids.extend(part)
            digest = link_digest(digest, part)
            boundaries.append(Boundary(len(token_ids), digest, "message" if index else "head", index + 1))
        token_ids.extend((1, 2, 3))
        sampling = Sampling(max_tokens, temperature=0.0)
        request = Generate(f"r{self._asked}", token_ids, tuple(boundaries), sampling, cache_prompt=cache)
        asked = time.perf_counter()
        self.sockets.inbox.put(FromGateway(b"gateway", request))
        return request.request_id, asked

    def run(self) -> None:
        """Until all is answered."""
        self.engine.turn(wait=False)
        while self.engine.running_count or self.engine.waiting_count:
            self.engine.turn(wait=False)

    def first_token(
        self, messages: Sequence[Sequence[int]], depth: int | None = None, cache: bool = True
    ) -> float:
        """Milliseconds from asking to the first token. Says so unless it starts from a snapshot of `depth` tokens."""
        request_id, asked = self.ask(messages, cache=cache)
        self.run()
        if depth is not None and self.sockets.depths[request_id] != depth:
            print(f"  started from {self.sockets.depths[request_id]} of {depth} tokens")
        return 1e3 * (self.sockets.tokens[request_id][0] - asked)

    def token_ms(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Mean milliseconds between the tokens of each of these requests, while all of them decode."""
        # While others still start, the first ones decode: a step after each prefill pass.
        asked = [self.ask([part], 128 + 4 * len(prompts), cache=False)[0] for part in prompts]
        self.run()
        begin = max(self.sockets.tokens[request_id][0] for request_id in asked)
        means = []
        for request_id in asked:
            times = [at for at in self.sockets.tokens[request_id] if at > begin][:100]
            means.append(1e3 * (times[-1] - times[0]) / (len(times) - 1))
        return means

    def mean_ms(self, name: str) -> float:
        """Mean of a histogram of seconds."""
        total = self.metrics.registry.get_sample_value(f"prefixd_{name}_seconds_sum") or 0.0
        return 1e3 * total / (self.metrics.registry.get_sample_value(f"prefixd_{name}_seconds_count") or 1.0)
