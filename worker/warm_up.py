"""Steps that nobody asked for, run before a worker says that it is ready.

What is slow once is then behind it (compiled code, pages of memory), and the watch knows what each kind of step takes:
a first one that hangs is told to clients as soon as any other.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from protocol.messages import Generate, Sampling
from worker.block_pool import ZERO_BLOCK
from worker.runner import Runner
from worker.sampling import Sampler
from worker.sequences import Choice, Request
from worker.snapshots import SnapshotStore
from worker.step_watch import StepWatch
from worker.steps import Decode, Prefill, StateUse, Step, SwapIn, SwapOut

FEW_ROWS = 8
# Where the largest prefill pass would take longer, by what few rows took, the start does not wait for one. It takes
# about a quarter of that, as a row of many takes less.
_WHOLE_PASS_SECONDS = 8.0
_SWAPPED_BLOCKS = 8


def warm_up(
    run: Callable[[Step], object],
    watch: StepWatch,
    runner: Runner,
    store: SnapshotStore,
    context_tokens: int,
) -> None:
    """`run` carries a step out, and does nothing else. It leaves no block and no state behind."""
    most = min(runner.max_prefill_rows, context_tokens - 1)
    few = min(FEW_ROWS, most)
    with _choice(runner, store, most + 1) as choice:
        prefill, decode = _prefill(choice, few), Decode((choice,), ())
        run(prefill)  # what is slow once is not learned
        run(decode)
        seconds = _learn(run, watch, prefill)
        _learn(run, watch, decode)
        # A swap takes memory that is new to the process: its first time is like any other.
        swapped = tuple(choice.blocks[:_SWAPPED_BLOCKS])
        _learn(run, watch, SwapOut(choice, swapped, choice.entry))
        _learn(run, watch, SwapIn(choice, swapped))
        if few < most and seconds * most / few < _WHOLE_PASS_SECONDS:
            _learn(run, watch, _prefill(choice, most))


def _learn(run: Callable[[Step], object], watch: StepWatch, step: Step) -> float:
    """The seconds that it took, which the watch knows then."""
    began = time.monotonic()
    with watch.step(step):
        run(step)
    return time.monotonic() - began


def _prefill(choice: Choice, rows: int) -> Prefill:
    """A pass over a whole prompt, for which the choice's sequence begins anew."""
    request = choice.request
    request.message = Generate("", array("i", [0] * rows), (), request.message.sampling)
    choice.length = rows
    states = None if choice.entry is None else StateUse(choice.entry, ZERO_BLOCK, ())
    return Prefill(request, 0, rows, (), states)


@contextmanager
def _choice(runner: Runner, store: SnapshotStore, tokens: int) -> Iterator[Choice]:
    """One of a request that nobody sent, with memory for so many tokens."""
    sampling = Sampling(max_tokens=1)
    request = Request(b"", Generate("", array("i"), (), sampling), 0.0, caching=False)
    choice = Choice(request, 0, Sampler(sampling, 0, array("i"), None), next_token=0)
    request.blocks = choice.blocks = store.pool.allocate(store.pool.blocks_for(tokens))
    if store.states is not None:
        (choice.entry,) = store.states.allocate(1)
    try:
        yield choice
    finally:
        store.pool.release(choice.blocks)
        runner.cache.wipe(choice.blocks)
        if store.states is not None and choice.entry is not None:
            store.states.release([choice.entry])
