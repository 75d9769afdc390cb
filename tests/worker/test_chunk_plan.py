"""Chunks of a recurrence lie in the same places however a prompt is cut into passes."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.messages import Boundary, Generate, Sampling
from worker.cuda.chunk_plan import CHUNK, ChunkPlan, chunk_starts, plan_size, saves_start, targets_start
from worker.sequences import Request, pass_end
from worker.steps import StateUse


def request(total: int, ends: list[int]) -> Request:
    boundaries = tuple(Boundary(end, bytes(16), "message", index) for index, end in enumerate(ends))
    message = Generate("r", array("i", [0] * total), boundaries, Sampling(1))
    return Request(b"", message, 0.0, caching=True)


@given(data=st.data())
def test_passes_of_any_size_from_any_boundary_have_the_same_chunks(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 900))
    ends = sorted(data.draw(st.sets(st.integers(1, total), max_size=12)))
    whole = chunk_starts(total, [end for end in ends if end < total])
    asked = request(total, ends)
    asked.computed = data.draw(st.sampled_from([0, *(end for end in ends if end < total)]))
    found: list[int] = [start for start in whole if start < asked.computed]
    while asked.computed < total:
        start = asked.computed
        end = pass_end(asked, data.draw(st.sampled_from([1, 32, 64, 100, 256, 512])), CHUNK)
        assert start < end <= total
        cuts = [boundary - start for boundary in ends if start < boundary < end]
        found += [start + chunk for chunk in chunk_starts(end - start, cuts)]
        asked.computed = end
    assert found == whole


def test_where_nothing_recurs_in_chunks_a_pass_ends_anywhere() -> None:
    asked = request(100, [30])
    assert pass_end(asked, 37, 1) == 37
    assert pass_end(asked, 400, 1) == 100


def test_a_plan_as_kernels_read_it() -> None:
    """A boundary after 70 rows whose state two entries take, one at the end of the pass, one that nobody keeps."""
    use = StateUse(entry=9, source=4, captures=((70, 5), (70, 6), (150, 7)), cuts=(70, 75))
    plan = ChunkPlan.of(150, use)
    assert plan.starts == (0, 64, 70, 75, 139, 150)
    assert (plan.source, plan.entry) == (4, 9)
    assert plan.targets == (-1, 5, -1, -1, 7)
    assert plan.copies == ((5, 6),)
    packed = np.full(plan_size(8), -9, np.int32)
    plan.pack(8, packed)
    assert packed[:10].tolist() == [5, 4, 9, 3, 0, 64, 70, 75, 139, 150]
    assert packed[targets_start(8) :][:5].tolist() == [-1, 5, -1, -1, 7]
    assert packed[saves_start(8) :][:6].tolist() == [70, 5, 150, 7, 150, 9]


def test_a_sequence_goes_on_in_its_own_entry() -> None:
    plan = ChunkPlan.of(64, StateUse(entry=3, source=None, captures=()))
    assert (plan.source, plan.entry, plan.targets) == (3, 3, (-1,))


def test_a_state_within_a_chunk_cannot_be_had() -> None:
    with pytest.raises(ValueError, match="70"):
        ChunkPlan.of(150, StateUse(entry=1, source=None, captures=((70, 5),)))
