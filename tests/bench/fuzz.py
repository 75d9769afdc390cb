"""Send a live worker damaged frames, and say how long it took.

    fuzz.py --inputs 1000000
    fuzz.py --seed 7 --inputs 1000        the same inputs each time

The first thing that should not be ends it with what was found, and the seed and batch that bring it back.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "protocol"))  # frame_mutations.py
sys.path.append(str(Path(__file__).parents[1] / "worker"))  # fuzzed_worker.py

from frame_mutations import mutated
from fuzzed_worker import FuzzedWorker

BATCH = 250  # inputs between two looks at the worker, as in the test


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="default: %(default)d")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="S", help="of the first batch; default: %(default)d"
    )
    asked = parser.parse_args(argv)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pfx-fuzz-") as folder, FuzzedWorker(Path(folder)) as worker:
        for batch in range(-(-asked.inputs // BATCH)):
            dice = random.Random(asked.seed + batch)
            inputs = [mutated(dice) for _ in range(min(BATCH, asked.inputs - batch * BATCH))]
            try:
                worker.send(inputs, dice)
            except Exception as error:
                print(f"found with --seed {asked.seed + batch} --inputs {len(inputs)}:", file=sys.stderr)
                for line in inputs:
                    print(line if len(str(line)) < 2000 else f"{str(line)[:2000]}...", file=sys.stderr)
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                return 1
    seconds = time.monotonic() - started
    counts = worker.counts
    print(
        f"{counts.inputs} inputs in {seconds:.0f} s: {counts.refused} refused and counted, "
        f"{counts.taken} taken as messages; every good message among them was answered"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
