"""Starting inside messages, and snapshots of which only a part is left: where states are divisible."""

from __future__ import annotations

import pytest
from snapshot_rig import HEAD, Engine, Prompt, depths, found, one_shot, prompt, words

from worker.snapshot_finding import INSIDE_TOKENS


def edited(same: int, who: int = 60) -> Prompt:
    """The head and a message of 200 tokens, rewritten behind its first `same`."""
    return prompt(HEAD, words(10, 200)[:same] + words(who, 200 - same), words(who + 1, 20))


def test_an_edited_message_is_computed_from_the_edit_on():
    engine = Engine(8, divisible=True)
    engine.play(prompt(HEAD, words(10, 200), words(11, 20)))
    run = engine.play(edited(150))
    assert found(run) == (180, "hit", "none")
    assert (run.lookup.diverged_message, run.lookup.diverged_token) == (1, 180)
    assert depths(engine, prompt(HEAD, words(10, 150) + words(60, 50), words(62, 5))) == [230], "and kept"


def test_a_few_tokens_that_happen_to_be_the_same_are_not_worth_it():
    engine = Engine(8, divisible=True)
    engine.play(prompt(HEAD, words(10, 200), words(11, 20)))
    assert depths(engine, edited(INSIDE_TOKENS - 1, who=70), edited(INSIDE_TOKENS, who=80)) == [
        30,
        30 + INSIDE_TOKENS,
    ]


def test_a_recurrent_state_is_restored_at_boundaries_alone():
    engine = Engine(8)
    engine.play(prompt(HEAD, words(10, 200), words(11, 20)))
    assert depths(engine, edited(150)) == [30]


def test_the_first_message_too_is_gone_on_from_where_it_was_edited():
    engine = Engine(8, divisible=True)
    engine.play(one_shot(1, 300))
    run = engine.play(prompt(words(1, 200) + words(5, 100), head=False))
    assert found(run) == (200, "partial", "diverged")
    assert (run.lookup.diverged_message, run.lookup.diverged_token) == (0, 200)


def test_what_is_stored_of_others_is_not_looked_at_beyond_the_chain():
    engine = Engine(8, divisible=True)
    engine.play(prompt(HEAD, words(10, 200), words(11, 20)))
    request = edited(150)
    assert engine.finding.lookup("", request.ids, request.boundaries, apart=True).depth == 30
    assert engine.finding.lookup("other", request.ids, request.boundaries).depth == 0


def test_one_token_at_least_is_computed_inside_a_message():
    engine = Engine(8, divisible=True)
    engine.play(one_shot(1, 300))
    assert depths(engine, prompt(words(1, 200), tail=(), head=False)) == [199]


def test_a_prompt_that_equals_a_snapshot_goes_on_from_its_last_token_but_one():
    engine = Engine(8, divisible=True)
    request = prompt(words(1, 100), words(2, 100), tail=(), head=False)
    engine.play(request)
    assert found(engine.play(request)) == (199, "partial", "longer_than_prompt")
    engine.play(prompt(words(1, 100), words(2, 100), words(3, 90), head=False))
    engine.clearing.evict([s.slot for s in engine.store.slots.snapshots() if s.tokens == 200])
    assert depths(engine, request) == [199], "of what extends it"


def test_the_message_that_shares_most_is_found_among_those_that_are_kept():
    engine = Engine(8, divisible=True)
    engine.play(prompt(HEAD, words(10, 200)))
    engine.play(prompt(HEAD, words(10, 190) + words(20, 10)))
    engine.clearing.evict([s.slot for s in engine.store.slots.snapshots() if s.tokens == 230])
    assert engine.kept() == [30]
    engine.play(prompt(HEAD, words(10, 100) + words(21, 100)))
    assert depths(engine, prompt(HEAD, words(10, 195) + words(22, 5))) == [130]


def test_a_stale_part_is_dropped_and_the_boundary_before_it_found():
    engine = Engine(8, divisible=True)
    engine.play(prompt(HEAD, words(10, 200)))
    (slot,) = engine.slots_at(230)
    engine.store.slots[slot].snapshot.tokens = 231
    assert depths(engine, prompt(HEAD, words(10, 150) + words(22, 50))) == [30]
    assert engine.store.stale_drops["length"] == 1


def test_a_part_of_what_was_evicted_is_gone_on_from_and_replaced():
    engine = Engine(8, blocks=60, divisible=True)
    request = prompt(words(1, 200), head=False)
    engine.play(request)
    assert engine.clearing.make_room(engine.pool.free_count + 20)
    assert engine.kept() == [120]
    assert found(engine.play(request)) == (120, "partial", "evicted")
    assert engine.kept() == [200]
    assert engine.store.evictions["blocks"] == 1


def test_a_part_becomes_smaller_and_goes_at_last():
    engine = Engine(8, blocks=60, divisible=True)
    engine.play(prompt(words(1, 100), words(2, 100), head=False))
    for kept in ([160], [120], [80], [40], []):
        assert engine.clearing.make_room(engine.pool.free_count + 10)
        engine.check()
        assert engine.kept() == kept


def test_a_part_that_was_kept_back_by_an_operator_is_gone_on_from():
    engine = Engine(8, blocks=60, divisible=True)
    engine.play(prompt(words(1, 200), head=False))
    assert engine.clearing.make_room(engine.pool.free_count + 20)
    (part,) = engine.store.slots.snapshots()
    engine.clearing.pin(part.slot)
    assert not engine.clearing.make_room(engine.pool.free_count + 1)
    assert depths(engine, prompt(words(1, 150), head=False)) == [120]


def test_what_two_computed_apart_is_not_cut_to_where_the_other_goes_on():
    engine = Engine(8, blocks=200, divisible=True)
    pair = [prompt(words(1, 200), words(who, 20), head=False) for who in (2, 3)]
    runs = [engine.start(request) for request in pair]
    for run, request in zip(runs, pair, strict=True):
        run.wanted = [request.last]
    for run, request in zip(runs, pair, strict=True):
        engine.compute(run, len(request))
        engine.finish(run)
    while held := engine.store.held_count:
        assert engine.clearing.make_room(engine.pool.free_count + min(held, 10))
        engine.check()
        assert engine.store.held_count < held


def test_a_pin_and_a_hint_outlast_what_takes_the_place_of_a_part():
    engine = Engine(8, blocks=80, divisible=True)
    engine.play(prompt(words(1, 200), head=False))
    assert engine.clearing.make_room(engine.pool.free_count + 20)
    (part,) = engine.store.slots.snapshots()
    part.session, part.hold_seconds = "session", 60.0
    engine.clearing.pin(part.slot)
    engine.play(prompt(words(1, 200), words(2, 50), head=False))
    whole = engine.store.known(engine.slots_at(200)[0])
    assert (whole.pinned, whole.session, whole.hold_seconds) == (True, "session", 60.0)
    assert not engine.clearing.make_room(80)


def test_an_answer_that_nobody_asked_for_is_so_in_part_too():
    engine = Engine(8, blocks=80, divisible=True)
    engine.absorb(prompt(words(1, 200), head=False))
    assert engine.clearing.make_room(engine.pool.free_count + 20)
    (part,) = engine.store.slots.snapshots()
    assert (part.tokens, part.absorbed) == (120, True)


def test_a_boundary_that_nothing_is_kept_of_hides_no_message_that_is_alike():
    engine = Engine(8, divisible=True)
    engine.play(prompt(HEAD, words(10, 200)))
    engine.clearing.evict(engine.slots_at(230))
    engine.play(prompt(HEAD, words(10, 150) + words(20, 50)))
    run = engine.play(prompt(HEAD, words(10, 200), words(21, 9)))
    assert found(run) == (180, "partial", "evicted")


@pytest.mark.parametrize("asked", [words(10, 200), words(10, 190) + words(23, 10)], ids=["its own", "another"])
def test_a_message_that_was_cut_hides_none_that_is_alike_and_kept_whole(asked: list[int]):
    engine = Engine(8, blocks=200, divisible=True)
    engine.play(prompt(HEAD, words(10, 200)))
    engine.play(prompt(HEAD, words(10, 180) + words(20, 20)))
    engine.play(prompt(HEAD, words(10, 170) + words(9, 30)))
    cut = engine.store.index.find("", prompt(HEAD, words(10, 200)).boundaries[1].digest)
    assert cut is not None
    engine.store.shorten(engine.store.known(cut.slot), cut, 120)
    engine.check()
    run = engine.play(prompt(HEAD, asked))
    assert run.lookup.depth == 30 + 180


def test_a_boundary_is_not_cut_out_in_the_place_of_what_holds_more_of_the_prompt():
    engine = Engine(3, divisible=True)
    for who in (2, 3, 4):
        engine.play(prompt(words(1, 200), words(who, 200), head=False))
        engine.clock.now += 1000
    engine.clearing.evict(engine.slots_at(200))
    engine.play(one_shot(9, 300))
    assert sorted(engine.kept()) == [300, 400, 400]
    assert depths(engine, prompt(words(1, 200), words(3, 150) + words(5, 50), head=False)) == [350]


def test_where_no_slot_can_be_had_one_boundary_is_tried_and_not_all_of_a_long_conversation():
    engine = Engine(1, divisible=True)
    messages = [words(10 + turn, 20) for turn in range(30)]
    engine.play(prompt(*messages, head=False))
    engine.clearing.pin(*engine.slots_at(600))
    refused = engine.store.aborts["no_slot"]
    request = prompt(*messages[:-1], words(9, 5), head=False)
    assert engine.finding.lookup("", request.ids, request.boundaries).depth == 580
    assert engine.store.aborts["no_slot"] == refused + 1


def test_what_was_evicted_is_compared_once_and_not_for_each_boundary(monkeypatch: pytest.MonkeyPatch):
    engine, compared = Engine(8, divisible=True), []
    request = prompt(*(words(10 + turn, 20) for turn in range(30)), head=False)
    engine.play(request)
    engine.clearing.flush()
    plain = engine.store.index.most_stored
    monkeypatch.setattr(engine.store.index, "most_stored", lambda *asked: compared.append(1) or plain(*asked))
    assert found(engine.play(request))[:2] == (0, "miss")
    assert len(compared) == 1


def test_what_extends_a_boundary_serves_for_it_where_no_slot_is_free():
    engine = Engine(1, divisible=True)
    engine.play(prompt(words(1, 200), words(2, 200), head=False))
    engine.clearing.pin(*engine.slots_at(400))
    request = prompt(words(1, 200), words(3, 20), head=False)
    assert engine.finding.lookup("", request.ids, request.boundaries, peek=True).depth == 200
    assert found(engine.play(request)) == (200, "hit", "none")
