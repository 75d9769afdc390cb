"""A worker without a model: real sockets and frames, scripted answers, and a record of what it was sent."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import zmq
import zmq.asyncio
from tiny_model import END_ID, tiny_tokenizer

from protocol.codec import decode, encode
from protocol.messages import (
    PROTOCOL_VERSION,
    Absorb,
    Accepted,
    Cancel,
    Command,
    Completed,
    Failed,
    Finished,
    Generate,
    Heartbeat,
    Hello,
    Message,
    ModelInfo,
    Phase,
    Reply,
    TokenLogprob,
    Tokens,
    Vocabulary,
)
from protocol.rundir import CONTROL_SOCKET, WORK_SOCKET, socket_address

MODEL = ModelInfo("tiny", "llama", "float32", "cpu", 607, 512, 1, 1, 1, 4, True)
WORKER_METRICS = "# HELP prefixd_slots Slots\n# TYPE prefixd_slots gauge\nprefixd_slots 4.0\n"


class FakeWorker:
    """Answers every `Generate` by its `script`, which may be replaced before a request is made."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.epoch = "epoch-1"
        self.phase: Phase = "ready"
        self.version = PROTOCOL_VERSION
        self.model = MODEL
        self.requests: list[Generate] = []
        self.cancels: list[Cancel] = []
        self.absorbed: list[Absorb] = []
        self.vocabularies: list[Vocabulary] = []
        self.cancelled = asyncio.Event()
        self.script: Callable[[Call], Awaitable[None]] = say("Hello there!")
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._work = self._bind(WORK_SOCKET)
        self._control = self._bind(CONTROL_SOCKET)
        self._tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._serve_control())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._context.destroy(linger=0)

    async def send(self, peer: bytes, message: Message) -> None:
        header, *buffers = encode(message)
        header = orjson.dumps({**orjson.loads(header), "v": self.version})
        await self._work.send_multipart([peer, header, *buffers])

    def _bind(self, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.ROUTER)
        socket.bind(socket_address(self._run_dir, name))
        return socket

    async def _serve(self) -> None:
        while True:
            peer, *frames = await self._work.recv_multipart()
            match decode(frames):
                case Hello():
                    beat = Heartbeat(self.epoch, self.phase, "", 0.0, 0, 0, self.model)
                    await self.send(peer, beat)
                case Generate() as request:
                    self.requests.append(request)
                    self._tasks.append(asyncio.create_task(self._run(Call(self, peer, request))))
                case Absorb() as absorb:
                    self.absorbed.append(absorb)
                case Vocabulary() as vocabulary:
                    self.vocabularies.append(vocabulary)
                case Cancel() as cancel:
                    self.cancels.append(cancel)
                    self.cancelled.set()

    async def _run(self, call: Call) -> None:
        await self.script(call)

    async def _serve_control(self) -> None:
        while True:
            peer, *frames = await self._control.recv_multipart()
            command = decode(frames)
            assert isinstance(command, Command)
            reply = Reply(self.epoch, command.command_id, {"text": WORKER_METRICS})
            await self._control.send_multipart([peer, *encode(reply)])


class Call:
    """One request as a script sees it."""

    def __init__(self, worker: FakeWorker, peer: bytes, request: Generate) -> None:
        self.worker, self.peer, self.request = worker, peer, request
        self.counts = [0] * request.n

    async def send(self, message: Message) -> None:
        await self.worker.send(self.peer, message)

    async def accept(self, outcome: str = "miss", depth: int = 0, reason: str = "cold") -> None:
        await self.send(Accepted(self.worker.epoch, self.request.request_id, outcome, depth, reason, 1, 7))

    async def tokens(self, ids: Sequence[int], choice: int = 0, logprobs: Sequence[TokenLogprob] = ()) -> None:
        self.counts[choice] += len(ids)
        name = self.request.request_id
        await self.send(Tokens(self.worker.epoch, name, choice, array("i", ids), tuple(logprobs)))

    async def finish(self, choice: int = 0, reason: str = "stop") -> None:
        self.counts[choice] += reason == "stop"
        name = self.request.request_id
        await self.send(Finished(self.worker.epoch, name, choice, reason, self.counts[choice]))

    async def complete(self, outcome: str = "miss", depth: int = 0, reason: str = "cold", kept: int = 0) -> None:
        prompt, new = len(self.request.token_ids), sum(self.counts)
        done = Completed(
            self.worker.epoch, self.request.request_id, outcome, depth, reason, prompt, new, 0.1, 0.2, 0.3, kept
        )
        await self.send(done)

    async def fail(self, code: str, message: str = "told to fail") -> None:
        await self.send(Failed(self.worker.epoch, self.request.request_id, code, message))


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer().encode(text, add_special_tokens=False).ids


def say(
    text: str,
    *,
    outcome: str = "miss",
    depth: int = 0,
    reason: str = "cold",
    kept: int = 0,
    at_once: int = 1,
) -> Callable[[Call], Awaitable[None]]:
    """A script: every choice says `text`, in messages of `at_once` tokens, within the request's limits."""

    async def script(call: Call) -> None:
        await call.accept(outcome, depth, reason)
        sampling = call.request.sampling
        ids = [*ids_of(text), END_ID] if END_ID in sampling.stop_token_ids else ids_of(text)
        for choice in range(call.request.n):
            said = ids[: sampling.max_tokens]
            ended = said[-1] == END_ID
            said = said[:-1] if ended else said
            for at in range(0, len(said), at_once):
                part = said[at : at + at_once]
                scores = []
                if sampling.logprobs is not None:
                    scores = [
                        TokenLogprob(i, -0.5, tuple((i + k, -1.0 - k) for k in range(sampling.logprobs)))
                        for i in part
                    ]
                await call.tokens(part, choice, scores)
            await call.finish(choice, "stop" if ended else "length")
        await call.complete(outcome, depth, reason, kept)

    return script


async def never_ending(call: Call) -> None:
    """A script that makes tokens until the worker is told to cancel."""
    await call.accept()
    while not call.worker.cancelled.is_set():
        await call.tokens(ids_of("on and on "))
        await asyncio.sleep(0.01)


async def silent(call: Call) -> None:
    """A script that says nothing until the worker is told to cancel."""
    await call.worker.cancelled.wait()


async def half_an_answer(call: Call) -> None:
    """A script that begins, and goes no further."""
    await call.accept()
    await call.tokens(ids_of("half an ans"))


def restarted(worker: FakeWorker, epoch: str) -> None:
    """The worker from now on is another process, as far as its messages tell."""
    worker.epoch = epoch
    worker.model = replace(worker.model)
