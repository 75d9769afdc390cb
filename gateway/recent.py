"""What was kept last, up to so many bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from threading import Lock
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Recent(Generic[Key, Value]):
    """Values that are found by any of their keys, each key leading to the last one kept under it.

    The oldest go first. Safe to use from several threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._found: dict[Key, Value] = {}
        self._kept: deque[tuple[Value, Sequence[Key], int]] = deque()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Key) -> Value | None:
        with self._lock:
            return self._found.get(key)

    def keep(self, value: Value, keys: Sequence[Key], size: int) -> None:
        """Keep a value that takes `size` bytes; one that is larger than all room there is is not kept."""
        if size > self._max_bytes:
            return
        with self._lock:
            self._found.update(dict.fromkeys(keys, value))
            self._kept.append((value, keys, size))
            self.held_bytes += size
            while self.held_bytes > self._max_bytes:
                dropped, its_keys, its_size = self._kept.popleft()
                self.held_bytes -= its_size
                for key in its_keys:
                    if self._found.get(key) is dropped:
                        del self._found[key]
