"""A worker that keeps one snapshot alone."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig, text
from snapshot_rig import prompt


@pytest.mark.parametrize("entries", [0, 3, 8])
@pytest.mark.parametrize("rows", [5, 64])
def test_an_only_slot_goes_forward_with_its_conversation(entries, rows):
    """The fewest states that a worker starts with: a sequence's, its source's and one to keep beside that."""
    rig = Rig(slots=1, entries=entries, prefill_rows=rows)
    for turns in range(1, 7):
        request = prompt(*(text(i, 9) for i in range(turns)))
        known = request.boundaries[-2].end if turns > 1 else 0
        assert rig.accepted(rig.serve(request)).depth == known
        assert rig.kept() == [request.last.end]
    other = prompt(text(50, 80), head=False)
    rig.serve(other)
    assert rig.kept() == [80], "and with another one, where that is worth more"
    rig.assert_answered(rig.serve(prompt(text(50, 80), text(51, 9), head=False)))
    assert rig.kept() == [89]


@pytest.mark.parametrize("entries", [0, 8])
def test_an_only_slot_that_is_pinned_stays(entries):
    rig = Rig(slots=1, entries=entries)
    rig.serve(prompt(text(0, 9)))
    rig.ask("pin", slot=0)
    for turns in (2, 3):
        rig.assert_answered(rig.serve(prompt(*(text(i, 9) for i in range(turns)))))
        assert rig.kept() == [9]
    rig.ask("unpin", slot=0)
    rig.serve(prompt(*(text(i, 9) for i in range(4))))
    assert rig.kept() == [36]


def test_two_that_go_on_from_an_only_slot_at_once():
    """One has taken the slot that the other one's state is yet to be copied from."""
    rig = Rig(slots=1, entries=8, prefill_rows=4)
    rig.serve(prompt(text(0, 12)))
    both = [rig.generate(prompt(text(0, 12), text(who, size)), max_tokens=6) for who, size in ((1, 4), (2, 30))]
    rig.run()
    for request in both:
        rig.assert_answered(request)
        assert rig.accepted(request).depth == 12
    assert len(rig.kept()) == 1


def test_a_pass_that_fails_gives_back_the_state_that_it_was_to_fill():
    rig = Rig(slots=1, entries=8)
    rig.serve(prompt(text(0, 9)))
    rig.runner.faults.append(("prefill", MemoryError()))
    longer = prompt(text(0, 9), text(1, 9))
    rig.serve(longer)
    assert rig.store.states is not None
    assert rig.store.states.free_count == 8
    rig.assert_answered(rig.serve(longer))
    assert rig.kept() == [18]
