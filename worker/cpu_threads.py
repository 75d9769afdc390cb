"""How work is split over the processor's cores: kernels of ours that release the interpreter lock, and torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch


def in_parts(parts: int, work: Callable[[int, int], None]) -> None:
    """Run `work(part, parts)` for every part at the same time, the first of them on this thread."""
    others = [_threads(parts).submit(work, part, parts) for part in range(1, parts)]
    work(0, parts)
    for other in others:
        other.result()


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Have torch's operations run on so many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def _threads(parts: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(parts - 1, thread_name_prefix="kernel")
