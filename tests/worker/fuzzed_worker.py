"""A live worker, its sockets and its engine loop on threads of their own, that is sent damaged frames among good ones.

The model is a fake: what counts is that no message ends a loop, that bad ones are counted and dropped, and that the
good ones around them are answered.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import zmq

from protocol.codec import decode, encode
from protocol.errors import ProtocolError
from protocol.messages import (
    Absorb,
    Cancel,
    Command,
    Completed,
    Failed,
    Generate,
    Heartbeat,
    Hello,
    Message,
    ModelInfo,
    Reply,
    Sampling,
    Vocabulary,
)
from protocol.rundir import CONTROL_SOCKET, WORK_SOCKET, prepare_run_dir, socket_address
from worker.block_pool import BlockPool
from worker.control import Control
from worker.engine import Engine
from worker.io import WorkerSockets
from worker.journal import Journal
from worker.metrics import WorkerMetrics
from worker.scheduler import Scheduler
from worker.snapshots import SnapshotStore

sys.path.append(str(Path(__file__).parents[1] / "protocol"))  # frame_mutations.py

from frame_mutations import VOCAB, Frames

WAIT_SECONDS = 60.0  # far longer than anything takes
LOGGED_CHARACTERS = 1000  # what a bad message may make of a line in the log
_BLOCK_TOKENS = 4
_MODEL = ModelInfo("f", "tiny", "float32", "cpu", VOCAB, 256, 1, 1, 1, 1, True)
_TAKEN = {"work": (Hello, Generate, Cancel, Absorb, Vocabulary), "control": (Command,)}


class _Cache:
    def copy_block(self, source: int, target: int) -> None:
        pass


class _Runner:
    """Stands in for a model whose every next token is as likely as any other."""

    cache = _Cache()

    def prefill(
        self,
        token_ids: Sequence[int],
        blocks: list[int],
        start: int,
        use: object = None,
        copies: Sequence[tuple[int, int]] = (),
    ) -> list[int]:
        for source, target in copies:
            self.cache.copy_block(source, target)
        return list(token_ids)

    def head_row(self, hidden: int) -> torch.Tensor:
        return torch.linspace(0, 1, VOCAB)

    def decode(
        self, token_ids: list[int], tables: list[list[int]], lengths: list[int], entries: Sequence[int] = ()
    ) -> torch.Tensor:
        return torch.linspace(0, 1, VOCAB).repeat(len(tables), 1)

    def largest(self, logits: torch.Tensor) -> tuple[list[int], list[float]]:
        most, best = logits.max(dim=-1)
        return best.tolist(), most.tolist()

    def save(self, blocks: Sequence[int], entry: int | None) -> None:
        return None

    def load(self, blocks: Sequence[int], entry: int | None, saved: None) -> None:
        pass


class _Faults(logging.Handler):
    """Keeps what the worker logs as an error, and lines that a sender could make as long as it likes."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if len(text) > LOGGED_CHARACTERS:
            self.found.append(f"a line of {len(text)} characters: {text[:100]}")
        elif "\n" in text:
            self.found.append(f"more than one line: {text!r}")
        elif record.levelno >= logging.ERROR and not text.startswith("cannot talk to a "):
            cause = "" if record.exc_info is None else f": {record.exc_info[1]!r}"
            self.found.append(f"{text}{cause}")


@dataclass(slots=True)
class Counts:
    """What was sent: how many were refused as they should be, and how many were messages all the same."""

    inputs: int = 0
    refused: int = 0
    taken: int = 0


class FuzzedWorker:
    """Use as a context. Raises `AssertionError`, from `send` or at the end, for whatever should not be."""

    def __init__(self, run_dir: Path) -> None:
        prepare_run_dir(run_dir)
        self.counts = Counts()
        self._run_dir = run_dir
        self._batches = 0
        self._faults = _Faults()
        self._ended: list[BaseException] = []
        self._sockets = WorkerSockets(run_dir, "e", self._heartbeat)
        self._sockets.accepting = True
        self._pool = BlockPool(200, _BLOCK_TOKENS)
        self._store = SnapshotStore(8, self._pool, block_bytes=100)
        self._engine = self._make_engine()
        self._context: zmq.Context[Any] = zmq.Context()
        self._noise, self._good = ({name: self._peer(name) for name in _TAKEN} for _ in range(2))
        self._thread = threading.Thread(target=self._run, name="engine")

    def __enter__(self) -> FuzzedWorker:
        logging.getLogger("worker").addHandler(self._faults)
        self._level = logging.getLogger("worker").level
        logging.getLogger("worker").setLevel(logging.INFO)
        self._sockets.start()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._engine.stop()
        self._thread.join(WAIT_SECONDS)
        self._sockets.stop()
        self._context.destroy(linger=0)
        logging.getLogger("worker").removeHandler(self._faults)
        logging.getLogger("worker").setLevel(self._level)
        if kind is None:
            self._check()
            held = self._pool.used_count
            assert held == self._store.held_count, f"{held} blocks are held, {self._store.held_count} by snapshots"
            self._store.check_invariants(sequences=())

    def send(self, inputs: Iterable[Frames], dice: random.Random) -> None:
        """Send them all, most of them to where they belong, and see what became of them."""
        expected = self._sockets.bad_frames
        for frames in inputs:
            is_command = bool(frames) and b'"Command"' in frames[0]
            name = "control" if is_command != (dice.random() < 0.1) else "work"
            expected += not self._is_message(frames, name)
            if frames:  # ZeroMQ sends no message without any
                self._noise[name].send_multipart(frames)
            else:
                expected -= 1
            self.counts.inputs += 1
        self._batches += 1
        # Under another id the requests of the one before are orphans: they make no work for the next batch.
        self._noise["work"].send_multipart(encode(Hello(f"g{self._batches}")))
        for peers in (self._noise, self._good):
            self._expect_answers(peers)
        found = self._sockets.bad_frames
        assert found == expected, f"{found} frames were counted as bad, {expected} are"
        self._check()

    def _is_message(self, frames: Frames, name: str) -> bool:
        """Whether the worker takes it there. Whatever the codec lets in is the same after another trip."""
        try:
            message = decode(frames)
        except ProtocolError:
            self.counts.refused += 1
            return False
        # What nests deeper than orjson writes, or is a larger number, can be read but not sent again.
        with suppress(TypeError):
            again = decode(encode(message))
            assert again == message, f"{again} is not {message}"
        taken = isinstance(message, _TAKEN[name])
        self.counts.taken += taken
        self.counts.refused += not taken
        return taken

    def _expect_answers(self, peers: dict[str, zmq.Socket[Any]]) -> None:
        name = f"sync-{self._batches}"
        ids = array("i", range(9))
        peers["work"].send_multipart(encode(Generate(name, ids, (), Sampling(2, 0.0))))
        peers["control"].send_multipart(encode(Command(name, "stats")))
        end = self._await(peers["work"], lambda m: isinstance(m, Completed | Failed) and m.request_id == name)
        assert isinstance(end, Completed), f"a good request got {end}"
        reply = self._await(peers["control"], lambda m: isinstance(m, Reply) and m.command_id == name)
        assert isinstance(reply, Reply)
        assert reply.error is None

    def _await(self, socket: zmq.Socket[Any], wanted: Any) -> Message:
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            while not socket.poll(100):
                self._check()
                assert time.monotonic() < deadline, "no answer to a good message"
            message = decode(socket.recv_multipart())
            if wanted(message):
                return message

    def _check(self) -> None:
        trouble = self._trouble()
        assert not trouble, trouble

    def _trouble(self) -> list[object]:
        alive = [] if self._sockets.is_alive() or not self._thread.is_alive() else ["the socket thread has ended"]
        return [*self._ended, *self._faults.found, *alive]

    def _run(self) -> None:
        try:
            self._engine.run()
        except BaseException as error:
            self._ended.append(error)

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat("e", "ready", "", 0.0, 0, 0, _MODEL)

    def _peer(self, name: str) -> zmq.Socket[Any]:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        socket.set_hwm(0)
        socket.connect(socket_address(self._run_dir, WORK_SOCKET if name == "work" else CONTROL_SOCKET))
        return socket

    def _make_engine(self) -> Engine:
        metrics, journal = WorkerMetrics(), Journal()
        scheduler = Scheduler(
            epoch="e",
            store=self._store,
            pool=self._pool,
            metrics=metrics,
            journal=journal,
            emit=self._sockets.send,
            max_model_len=_MODEL.max_model_len,
            vocab_size=VOCAB,
            max_prefill_rows=16,
            shared_prefill_rows=16,
            max_running=8,
            max_waiting=2000,
            caching=True,
        )
        control = Control(
            model=_MODEL,
            model_name="tiny",
            block_bytes=100,
            scheduler=scheduler,
            store=self._store,
            pool=self._pool,
            metrics=metrics,
            journal=journal,
        )
        runner: Any = _Runner()
        return Engine(self._sockets, scheduler, self._store, runner, control, metrics)
