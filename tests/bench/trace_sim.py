"""How many tokens the snapshot store saves on recorded workloads, beside what other caches would save.

The store, its index, placement and eviction are the worker's own, and so is what admits a request, restores, makes
room and commits; only the model is missing. One request runs at a time and its answer takes no memory. Each file is
played in order of arrival; `load` in workloads.py says how the formats become turns, and where boundaries are.

    trace_sim.py --slots 32 --users 8 FILE...       as many snapshots, memory for all of them, none divisible (windows)
    trace_sim.py --bytes 40GiB --users 8 FILE...    KV memory of the 8B dense shape, default slots, divisible snapshots
    trace_sim.py --slots 80% --users 8 FILE...      for each file where an LRU of snapshots saves 80% of what can be

SHARE columns are parts of the input tokens. REACHED is OURS in parts of INFINITE, AT MOST is BEST in parts of it: what
lies between the two is the policy's, what is beyond AT MOST cannot be had at this capacity.

- INFINITE  nothing is forgotten, and reuse ends at no boundary but that of a small block
- BEST      what nobody could save more than at this capacity, were all requests to come known: see bounds.py. With
            `--slots` of any snapshots, with `--bytes` of any blocks beside the prompt that runs
- OURS      the snapshot store
- SNAPSHOTS LRU of full copies of the state, one for each prompt's end, as many or as many bytes as ours
- BLOCKS    LRU of 16-token blocks in the same memory: with `--slots` what ours took at its peak
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from baselines import block_lru, capacity_for, infinite, snapshot_lru
from bounds import most_by_blocks, most_by_snapshots
from workloads import Turn, UnknownFormat, load

from protocol.messages import Generate, Sampling
from protocol.sizes import format_size, parse_size
from worker.admission import Admission
from worker.block_pool import BlockPool
from worker.commits import Commits
from worker.kv_cache import BLOCK_TOKENS
from worker.memory import slot_count
from worker.metrics import WorkerMetrics
from worker.sequence_memory import SequenceMemory
from worker.sequence_states import SequenceStates
from worker.sequences import Request, Running
from worker.snapshots import SnapshotStore

BYTES_PER_TOKEN = 147_456  # 36 layers, keys and values of 8 heads of 128 in bfloat16
CONTEXT_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """What one file came to. Tokens, but for the names."""

    file: str
    capacity: str
    requests: int
    input_tokens: int
    infinite_tokens: int
    best_tokens: int  # no more can be saved at this capacity
    ours_tokens: int
    snapshots_tokens: int
    blocks_tokens: int
    memory_bytes: int  # at the peak, of what ours held
    commits: int
    evictions: int


class Player:
    """The worker without a model: one request after another, its whole prompt in one pass."""

    def __init__(self, slots: int, blocks: int, *, divisible: bool = False) -> None:
        self.now = 0.0
        self.peak_blocks = 0
        self._pool = BlockPool(blocks + 1, BLOCK_TOKENS)
        size = BLOCK_TOKENS * BYTES_PER_TOKEN
        self.store = SnapshotStore(slots, self._pool, size, clock=lambda: self.now, divisible=divisible)
        self._running = Running()
        self._memory = SequenceMemory(self._pool, self.store)
        metrics = WorkerMetrics()
        self._commits = Commits(self.store, metrics)
        self._admission = Admission(
            self._running,
            self.store,
            self._memory,
            SequenceStates(self.store),
            metrics,
            None,
            max_model_len=CONTEXT_TOKENS,
            vocab_size=1 << 31,
            max_running=1,
            max_waiting=1,
        )

    def play(self, turn: Turn) -> int:
        """Compute one prompt; returns how many of its tokens were restored. None are where it does not fit at all."""
        self.now = turn.at
        if self._pool.blocks_for(turn.tokens) > self._pool.total_count:
            return 0
        message = Generate("", turn.token_ids, turn.boundaries, Sampling(max_tokens=1))
        self._admission.waiting.append(Request(b"", message, self.now, caching=True))
        request = self._admission.next()
        assert request is not None, "nothing else runs, and nothing is pinned"
        self._memory.tail_copy(request)
        copies = self._memory.own(request.blocks, request.computed, request.total)
        assert copies is not None
        self.peak_blocks = max(self.peak_blocks, self._pool.used_count)
        request.computed = request.total
        self._commits.materialised(request)
        self._commits.prompt_complete(request)
        self._running.prefilling.remove(request)
        self._pool.release(request.blocks)
        return request.depth


def simulate(name: str, turns: Sequence[Turn], slots: int | None, memory_bytes: int | None) -> Row:
    """Play one workload on all caches, with a number of slots or bytes of KV memory."""
    longest = max(turn.tokens for turn in turns)
    if memory_bytes is None:
        assert slots is not None
        once = sum(len(turn.keys) * turn.block_tokens for turn in turns)
        blocks = -(-min(once, (slots + 1) * longest) // BLOCK_TOKENS) + 2 * len(turns)
        player = Player(slots, blocks)
    else:
        blocks = memory_bytes // (BLOCK_TOKENS * BYTES_PER_TOKEN)
        player = Player(slot_count(None, recurs=False), blocks, divisible=True)
    ours = sum(player.play(turn) for turn in turns)
    peak = player.peak_blocks * BLOCK_TOKENS
    if memory_bytes is None:
        assert slots is not None
        snapshots = snapshot_lru(turns, slots, count_tokens=False)
        best = most_by_snapshots(turns, slots)
    else:
        snapshots = snapshot_lru(turns, memory_bytes // BYTES_PER_TOKEN, count_tokens=True)
        best = most_by_blocks(turns, memory_bytes // BYTES_PER_TOKEN)
    return Row(
        file=name,
        capacity=f"{slots} slots" if memory_bytes is None else format_size(memory_bytes),
        requests=len(turns),
        input_tokens=sum(turn.tokens for turn in turns),
        infinite_tokens=infinite(turns),
        best_tokens=best,
        ours_tokens=ours,
        snapshots_tokens=snapshots,
        blocks_tokens=block_lru(turns, peak if memory_bytes is None else memory_bytes // BYTES_PER_TOKEN),
        memory_bytes=peak * BYTES_PER_TOKEN,
        commits=player.store.commits,
        evictions=sum(player.store.evictions.values()),
    )


def at_share(turns: Sequence[Turn], share: float, *, in_bytes: bool) -> int | None:
    """The slots or bytes at which an LRU of snapshots saves this part of what can be; None: it never does."""
    reused: Callable[[int], int] = lambda n: snapshot_lru(turns, n, count_tokens=in_bytes)  # noqa: E731
    found = capacity_for(share, infinite(turns), reused, 1)
    return None if found is None else found * (BYTES_PER_TOKEN if in_bytes else 1)


def render(rows: Sequence[Row]) -> str:
    """A table with a line for each row."""
    shares_of = ["INFINITE", "BEST", "OURS", "SNAPSHOTS", "BLOCKS"]
    lines = [["FILE", "CAPACITY", "REQUESTS", *shares_of, "REACHED", "AT MOST", "PEAK"]]
    for row in rows:
        shares = [row.infinite_tokens, row.best_tokens, row.ours_tokens, row.snapshots_tokens, row.blocks_tokens]
        lines.append(
            [
                row.file,
                row.capacity,
                str(row.requests),
                *(f"{tokens / row.input_tokens:.1%}" for tokens in shares),
                *(f"{tokens / max(row.infinite_tokens, 1):.1%}" for tokens in (row.ours_tokens, row.best_tokens)),
                format_size(row.memory_bytes),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(cells))
        for cells in (zip(line, widths, strict=True) for line in lines)
    ]
    return "\n".join(line.rstrip() for line in aligned)


def _count(text: str) -> int | float:
    """A number, or a share where it ends in a percent sign."""
    return float(text[:-1]) / 100 if text.endswith("%") else int(text)


def _size(text: str) -> int | float:
    if text.endswith("%"):
        return float(text[:-1]) / 100
    size = parse_size(text) if not text.isdigit() else int(text)
    assert isinstance(size, int)
    return size


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    capacity = parser.add_mutually_exclusive_group(required=True)
    capacity.add_argument("--slots", type=_count, metavar="N|SHARE%", help="snapshots kept at most")
    capacity.add_argument("--bytes", type=_size, metavar="B|SHARE%", help="KV memory, such as 40GiB")
    parser.add_argument("--users", type=int, default=8, help="sessions that run at the same time (default 8)")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each file")
    options = parser.parse_args(argv)
    rows, failed = [], False
    for path in options.files:
        try:
            turns = load(path, options.users)
        except UnknownFormat as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        in_bytes = options.slots is None
        asked = options.bytes if in_bytes else options.slots
        size = at_share(turns, asked, in_bytes=in_bytes) if isinstance(asked, float) else asked
        if size is None:
            print(f"{path.name}: an LRU of snapshots never saves {asked:.0%} of what can be", file=sys.stderr)
            continue
        row = simulate(path.name.split(".")[0], turns, *((None, size) if in_bytes else (size, None)))
        if options.json:
            print(json.dumps(asdict(row)), flush=True)
        rows.append(row)
    if rows and not options.json:
        print(render(rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
