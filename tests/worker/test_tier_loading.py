"""Loading from a slower tier, and copying to one, beside everything else that a worker does."""

from __future__ import annotations

import pytest
from scheduler_rig import one, text
from snapshot_rig import prompt
from tier_rig import ENTRIES, Start, chat


def test_others_decode_while_one_is_loaded(start: Start):
    rig = start()
    rig.serve(chat(3))
    rig.settle()
    rig = start()
    running = rig.generate(one(9, 6), max_tokens=40)
    rig.turns(4)
    rig.disk._readers.is_held = True
    waiting, behind = rig.generate(chat(4)), rig.generate(one(8, 6))
    said = len(rig.tokens(running))
    rig.turns(10)
    assert not rig.of(waiting, object)
    assert len(rig.tokens(running)) > said
    rig.turn_until(lambda: rig.tokens(behind))
    rig.disk._readers.let_go()
    rig.run()
    for request in (running, waiting, behind):
        rig.assert_answered(request)
    assert rig.depth(waiting) == (chat(3).last.end, "hit", "none")


def test_two_that_want_the_same_load_it_once(start: Start):
    rig = start()
    rig.serve(chat(3))
    rig.settle()
    rig = start()
    both = [
        rig.generate(chat(4)),
        rig.generate(prompt(text(1, 17), *(text(t + 2, 9) for t in range(3)), text(9, 4))),
    ]
    rig.run()
    assert [rig.depth(request) for request in both] == [(chat(3).last.end, "hit", "none")] * 2
    assert rig.store.commits == 1 + 2


def test_a_request_that_leaves_while_it_is_loaded(start: Start):
    rig = start()
    rig.serve(chat(3))
    rig.settle()
    rig = start()
    rig.disk._readers.is_held = True
    request = rig.generate(chat(4))
    rig.turns(2)
    rig.cancel(request)
    rig.turns(2)
    rig.disk._readers.let_go()
    rig.settle()
    assert rig.depth(rig.serve(chat(4))) == (chat(3).last.end, "hit", "none")


@pytest.mark.parametrize("entries", ENTRIES)
def test_without_room_for_it_a_prompt_is_computed(start: Start, entries: int):
    """A pinned snapshot leaves no room for both."""
    rig = start(blocks=24, entries=entries)
    rig.serve(chat(4, who=1))
    rig.settle()
    rig = start(blocks=24, entries=entries)
    rig.serve(one(3, 40))
    rig.ask("pin", slot=0)
    request = rig.serve(chat(4, who=1))
    assert rig.accepted(request).depth >= 0
    rig.run()


@pytest.mark.parametrize("entries", ENTRIES)
def test_copying_gives_way_to_a_request(start: Start, entries: int, slowly: None):
    """What is being copied holds blocks that a long prompt needs."""
    rig = start(blocks=16, slots=2, entries=entries and 3)
    rig.serve(one(1, 40))
    assert rig.tiers.references[0]
    request = rig.serve(one(2, 56))
    rig.assert_answered(request)
    rig.settle()
