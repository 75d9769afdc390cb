"""Steps that nobody asked for, run before a worker says that it is ready.

What is slow once is then behind it (compiled code, pages of memory), and the watch knows what each kind of step takes:
a first one that hangs is told to clients as soon as any other.
"""

from __future__ import annotations

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

ROWS = 64  # of a prefill pass: enough that a larger one takes its share of the time, or less
_SWAPPED_BLOCKS = 8


def warm_up(
    run: Callable[[Step], object],
    watch: StepWatch,
    runner: Runner,
    store: SnapshotStore,
    context_tokens: int,
) -> None:
    """`run` carries a step out, and does nothing else. It leaves no block and no state behind."""
    with _choice(runner, store, min(ROWS, runner.max_prefill_rows, context_tokens - 1)) as choice:
        states = None if choice.entry is None else StateUse(choice.entry, ZERO_BLOCK, ())
        steps: tuple[Step, ...] = Prefill(choice.request, 0, choice.length, (), states), Decode((choice,), ())
        for step in steps:
            run(step)  # what is slow once is not learned
        # But of a swap it is: each takes memory that is new to the process.
        blocks = tuple(choice.blocks[:_SWAPPED_BLOCKS])
        for step in (*steps, SwapOut(choice, blocks, choice.entry), SwapIn(choice, blocks)):
            with watch.step(step):
                run(step)


@contextmanager
def _choice(runner: Runner, store: SnapshotStore, tokens: int) -> Iterator[Choice]:
    """One of a request that nobody sent, whose prompt has so many tokens, with memory for one more."""
    sampling = Sampling(max_tokens=1)
    request = Request(b"", Generate("", array("i", [0] * tokens), (), sampling), 0.0, caching=False)
    choice = Choice(request, 0, Sampler(sampling, 0, array("i"), None), length=tokens, next_token=0)
    request.blocks = choice.blocks = store.pool.allocate(store.pool.blocks_for(tokens + 1))
    if store.states is not None:
        (choice.entry,) = store.states.allocate(1)
    try:
        yield choice
    finally:
        store.pool.release(choice.blocks)
        runner.cache.wipe(choice.blocks)
        if store.states is not None and choice.entry is not None:
            store.states.release([choice.entry])
