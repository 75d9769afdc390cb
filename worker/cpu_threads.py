"""Splits a kernel that releases the interpreter lock over the processor's cores."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache


def in_parts(parts: int, work: Callable[[int, int], None]) -> None:
    """Run `work(part, parts)` for every part at the same time, the first of them on this thread."""
    others = [_threads(parts).submit(work, part, parts) for part in range(1, parts)]
    work(0, parts)
    for other in others:
        other.result()


@cache
def _threads(parts: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(parts - 1, thread_name_prefix="kernel")
