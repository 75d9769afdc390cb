"""Damaged frames, by the thousand: a live worker counts and drops them, and answers what stands between them.

`PREFIXD_FUZZ_INPUTS` sets how many there are; without it, as many as fit into a few seconds.
"""

import os
import random
import sys
import tempfile
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "worker"))  # fuzzed_worker.py

from frame_mutations import SAMPLES, mutated
from fuzzed_worker import FuzzedWorker

from protocol.codec import decode, encode
from worker import io

SECONDS = 3.0
BATCH = 250


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="pfx-fuzz-") as folder:  # the path of a Unix socket is short
        yield Path(folder)


def test_no_damaged_frame_ends_a_loop_or_keeps_a_good_one_from_its_answer(run_dir):
    count = os.environ.get("PREFIXD_FUZZ_INPUTS")
    seed = 0 if os.environ.get("CI") else random.randrange(1 << 32)
    deadline = time.monotonic() + SECONDS
    with FuzzedWorker(run_dir) as worker:
        while worker.counts.inputs < int(count) if count else time.monotonic() < deadline:
            dice = random.Random(seed)
            try:
                worker.send([mutated(dice) for _ in range(BATCH)], dice)
            except AssertionError as error:
                raise AssertionError(
                    f"tests/bench/fuzz.py --seed {seed} --inputs {BATCH} finds: {error}"
                ) from error
            seed += 1
    assert worker.counts.refused > worker.counts.taken > 0


def test_what_ends_a_loop_is_found(run_dir, monkeypatch):
    def broken(frames):
        if b'"Accepted"' in frames[0]:
            raise IndexError("a fault of the codec")
        return decode(frames)

    monkeypatch.setattr(io, "decode", broken)
    dice = random.Random(0)
    with pytest.raises(AssertionError, match="a fault of the codec"), FuzzedWorker(run_dir) as worker:
        worker.send([encode(message) for message in SAMPLES], dice)


def test_what_is_let_in_without_being_a_message_is_found(run_dir, monkeypatch):
    def lenient(frames):
        return decode(frames[:1] if len(frames) > 2 else frames)

    monkeypatch.setattr(io, "decode", lenient)
    dice = random.Random(0)
    with FuzzedWorker(run_dir) as worker, pytest.raises(AssertionError, match="were counted as bad"):
        worker.send([[*encode(SAMPLES[0]), b"", b""]], dice)
