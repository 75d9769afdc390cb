"""What is asked of a tier, whichever it is. On the engine's thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Protocol

from worker.snapshot_index import AbsentReason, Node
from worker.tiers.ledger import Ledger, Part, PartOf
from worker.tiers.part_file import PartKind, Tensors


class Reading:
    """A part on its way back: `tensors` are its own once `future` is done, or at once where there is none."""

    __slots__ = ("future", "tensors")

    def __init__(self, tensors: Tensors, future: Future[None] | None = None) -> None:
        self.tensors = tensors
        self.future = future

    @property
    def is_done(self) -> bool:
        return self.future is None or self.future.done()

    def check(self) -> None:
        """Raises `BadFile` where it could not be read."""
        if self.future is not None:
            self.future.result()


class Tier(Protocol):
    """A place where parts are kept, with a budget."""

    ledger: Ledger
    failures: Counter[str]
    written_bytes: int

    @property
    def is_full(self) -> bool:
        """So much waits to be written that nothing should be added."""

    @property
    def is_writing(self) -> bool:
        """Whether anything that was put is not there yet."""

    def find(self, node: Node, kind: PartKind) -> Part | None:
        """A part that may be used."""

    def has_or_writes(self, node: Node, kind: PartKind) -> bool:
        """Whether nothing need be put."""

    def put(self, node: Node, kind: PartKind, tensors: Tensors, protect: Collection[Node]) -> bool:
        """Keep a part; nobody may write to `tensors` any more. False, and counted, where there is no room for it.

        Nothing of `protect` goes for it.
        """

    def read(self, part: Part, to: Callable[[], Tensors]) -> Reading:
        """Get a part back; `to` makes room for it, if that is needed."""

    def drop(self, node: Node, reason: AbsentReason) -> None:
        """Nothing of a boundary is found any more."""

    def flush(self, keep: Collection[PartOf]) -> int:
        """Drop everything but these parts; returns the bytes that came free."""

    def collect(self) -> None:
        """Enter what has been written."""

    def close(self) -> None:
        """Give back what it holds of the system."""
