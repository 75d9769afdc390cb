"""Which step comes next: prefill and decode take turns, and short room is met by waiting or swapping."""

from __future__ import annotations

from worker.commits import Commits
from worker.sequence_memory import SequenceMemory
from worker.sequence_states import SequenceStates
from worker.sequences import Choice, Request, Running, age, pass_end
from worker.steps import Decode, Prefill, Step
from worker.swapping import Swapping

_OLDEST_EVERY = 4  # one prefill pass in four goes to the oldest request, the others to the nearly finished


class Passes:
    """Makes steps of what runs. A step that is returned has every block it writes to."""

    def __init__(
        self,
        running: Running,
        memory: SequenceMemory,
        states: SequenceStates,
        swapping: Swapping,
        commits: Commits,
        max_prefill_rows: int,
        shared_prefill_rows: int,
        max_decode_rows: int,
        state_chunk: int = 1,
    ) -> None:
        """`shared_prefill_rows`: rows of a prefill pass while others decode, so that their streams do not stutter.

        `state_chunk`: that of `pass_end`.
        """
        self._running = running
        self._memory = memory
        self._states = states
        self._commits = commits
        self._swapping = swapping
        self._max_prefill_rows = max_prefill_rows
        self._shared_prefill_rows = shared_prefill_rows
        self._max_decode_rows = max_decode_rows
        self._state_chunk = state_chunk
        self._prefill_turns = 0
        self._decoded_last = False

    def next(self) -> Step | None:
        """Whoever was swapped out comes back first. None if something runs, but there is no room for any step."""
        step: Step | None = self._swapping.back()
        if step is None and self._decoded_last:
            step = self._prefill() or self._decode()
        elif step is None:
            step = self._decode() or self._prefill()
        if isinstance(step, Prefill | Decode):
            self._decoded_last = isinstance(step, Decode)
        return step

    def after(self, step: Decode) -> Decode | None:
        """The same choices one token further, the blocks for it taken; None unless nothing else is to be done."""
        running = self._running
        if running.prefilling or running.swapped or len(step.choices) != len(running.decoding):
            return None
        for choice in step.choices:
            if choice.finished is not None:
                return None
            copies = self._memory.own(choice.blocks, choice.length + 1, choice.length + 2)
            if copies is None:
                return None
            assert not copies, "what comes next is in the choice's own block, or in a new one"
        return Decode(step.choices, ())

    def in_the_way(self) -> Request:
        """No step has room, as pinned snapshots hold too much: who has to go for the others to go on."""
        running = self._running
        admitted = [*running.prefilling, *(choice.request for choice in running.decoding)]
        if admitted:
            return max(admitted, key=lambda request: request.arrived)
        return min(running.swapped, key=age).request

    def _prefill(self) -> Prefill | None:
        """The next pass of the first request, in order of urgency, that can have the blocks it writes to."""
        if not self._running.prefilling:
            return None
        self._prefill_turns += 1
        order = sorted(self._running.prefilling, key=lambda r: r.total - r.computed)
        if self._prefill_turns % _OLDEST_EVERY == 0:
            order.insert(0, min(order, key=lambda r: r.arrived))
        rows = self._max_prefill_rows
        if self._running.decoding:
            rows = min(rows, self._shared_prefill_rows)
        for request in order:
            start, end = request.computed, pass_end(request, rows, self._state_chunk)
            copies = self._memory.own(request.blocks, start, end)
            if copies is not None:
                copies = self._memory.tail_copy(request) + copies
                self._commits.capture(request, end)
                return Prefill(request, start, end, copies, self._states.use(request, end))
        return None

    def _decode(self) -> Step | None:
        """One token for as many choices as a pass holds; those left out take turns. Swaps where room is short."""
        decoding = self._running.decoding
        copies: list[tuple[int, int]] = []
        chosen: list[Choice] = []
        for choice in decoding[: self._max_decode_rows]:
            own = self._memory.own(choice.blocks, choice.length, choice.length + 1)
            if own is None:
                break
            copies.extend(own)
            chosen.append(choice)
        if not chosen:
            return self._swapping.out() if decoding else None
        if len(chosen) < len(decoding):
            self._running.decoding = decoding[len(chosen) :] + chosen
        return Decode(tuple(chosen), tuple(copies))
