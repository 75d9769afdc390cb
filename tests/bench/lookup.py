"""Time one lookup of a prompt of 32k tokens with 80 boundaries among 100,000 index entries.

The prompt extends a conversation that is kept up to its last boundary but one, so that all ids are compared, and
snapshots are divisible, so that a place inside the next message is looked for too. Goal: at most 50 us at the median
beyond what comparing 128 KB of ids takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from protocol.digest import chain_digests, root_digest
from protocol.messages import Boundary
from worker.block_pool import BlockPool
from worker.snapshot_finding import Finding
from worker.snapshot_keeping import Keeping
from worker.snapshots import SnapshotStore

PROMPT_TOKENS, BOUNDARIES, ENTRIES = 32_000, 80, 100_000
OTHER_TOKENS = 20  # a message of the other conversations, which are never compared beyond their first
RUNS = 300


class Times(NamedTuple):
    """Medians in microseconds."""

    lookup: float
    compare: float
    entries: int

    def __str__(self) -> str:
        return (
            f"lookup of {PROMPT_TOKENS} tokens, {BOUNDARIES} boundaries, {self.entries} entries: {self.lookup:.0f} us, "
            f"of which comparing the ids {self.compare:.0f} us, the rest {self.lookup - self.compare:.0f} us"
        )


def conversation(source: random.Random, message_tokens: int) -> tuple[array[int], tuple[Boundary, ...]]:
    """A prompt of random ids with a boundary after each message."""
    ids = array("i", source.choices(range(100_000), k=message_tokens * BOUNDARIES))
    ends = range(message_tokens, len(ids) + 1, message_tokens)
    digests = chain_digests(root_digest("bench"), ids, ends)
    named = enumerate(zip(ends, digests, strict=True), 1)
    return ids, tuple(Boundary(end, digest, "message", number) for number, (end, digest) in named)


def measure(entries: int = ENTRIES, runs: int = RUNS) -> Times:
    """Fill a store and time lookups that hit."""
    source = random.Random(1)
    message_tokens = PROMPT_TOKENS // BOUNDARIES
    pool = BlockPool(PROMPT_TOKENS // 32 + 2, 32)
    store = SnapshotStore(8, pool, 1, ghost_bytes=1 << 40, divisible=True)
    finding, keeping = Finding(store), Keeping(store)
    for _ in range(entries // BOUNDARIES - 1):
        keeping.note("", *conversation(source, OTHER_TOKENS), PROMPT_TOKENS)
    ids, boundaries = conversation(source, message_tokens)
    kept = boundaries[-2]
    blocks = pool.allocate(pool.blocks_for(kept.end))
    reservation = keeping.reserve()
    assert reservation is not None
    assert keeping.commit(reservation, "", ids, kept, boundaries, blocks, stored_tokens=kept.end) is not None
    keeping.note("", ids, boundaries, len(ids))
    copy = array("i", ids)

    def lookup() -> None:
        assert finding.lookup("", copy, boundaries).depth == kept.end

    data, other = ids.tobytes(), copy.tobytes()
    return Times(_median(lookup, runs), _median(lambda: data == other, runs), store.index.node_count)


def _median(call: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=ENTRIES, help=f"in the index (default {ENTRIES})")
    print(measure(parser.parse_args(argv).entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
