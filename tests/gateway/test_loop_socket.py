"""Messages reach the loop as they come, whatever is sent meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq

from gateway.loop_socket import _AT_ONCE, LoopSocket

SECONDS = 10.0  # far longer than anything takes


@dataclass
class Taken:
    """What has come; `faults` are raised, one a message."""

    frames: list[list[bytes]] = field(default_factory=list)
    faults: list[Exception] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def __call__(self, frames: list[bytes]) -> None:
        self.frames.append(frames)
        self.changed.set()
        if self.faults:
            raise self.faults.pop(0)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(SECONDS):
            while len(self.frames) < count:
                self.changed.clear()
                await self.changed.wait()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    context: zmq.Context[Any] = zmq.Context()
    ends = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    ends[1].bind(f"ipc://{tmp_path}/s")
    for end in ends:
        end.set_hwm(0)
    ends[0].set(zmq.IMMEDIATE, 1)
    ends[1].rcvtimeo = int(1000 * SECONDS)
    ends[0].connect(f"ipc://{tmp_path}/s")
    yield ends
    context.destroy(linger=0)


async def test_what_comes_while_much_is_sent_is_taken(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]):
    taken = Taken()
    mine, other = LoopSocket(pair[0], taken), pair[1]
    for number in range(300):
        other.send(b"%d" % number)
        for _ in range(5):
            mine.send([b"sent", b"twice"])
        await taken.until(number + 1)
    assert taken.frames == [[b"%d" % number] for number in range(300)]
    assert all(other.recv_multipart() == [b"sent", b"twice"] for _ in range(1500))
    mine.close(0)


async def test_many_messages_leave_others_their_turn(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]):
    taken, counts = Taken(), []
    mine = LoopSocket(pair[0], taken)
    for number in range(10 * _AT_ONCE):
        pair[1].send(b"%d" % number)

    async def look() -> None:
        while len(taken.frames) < 10 * _AT_ONCE:
            counts.append(len(taken.frames))
            await asyncio.sleep(0)

    await asyncio.wait_for(look(), SECONDS)
    assert max(later - before for before, later in pairwise(counts)) <= _AT_ONCE
    mine.close(0)


async def test_a_fault_in_taking_one_loses_no_other(pair: tuple[zmq.Socket[bytes], zmq.Socket[bytes]]):
    taken, told = Taken(faults=[ValueError("x")]), []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    mine = LoopSocket(pair[0], taken)
    for number in range(3):
        pair[1].send(b"%d" % number)
    await taken.until(3)
    assert [str(each) for each in told] == ["x"]
    mine.close(0)


async def test_nobody_takes_what_is_sent_to_nobody(tmp_path: Path):
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IMMEDIATE, 1)
    socket.connect(f"ipc://{tmp_path}/nobody")
    mine = LoopSocket(socket, Taken())
    assert not mine.send([b"x"])
    mine.close(0)
    context.term()
