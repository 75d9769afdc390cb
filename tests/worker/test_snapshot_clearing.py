"""What goes when slots or blocks are short, and at the operator's word."""

from __future__ import annotations

import pytest
from snapshot_rig import Engine, chat, depths, one_shot, prompt, words

from worker.block_pool import OutOfBlocks
from worker.snapshot_view import slot_info
from worker.snapshots import UnknownSlot


def test_a_shared_ancestor_stays_when_a_leaf_can_go():
    """S3-7, K-RT9: base, then one branch after another, two slots."""
    engine = Engine(2)
    base = words(1, 4)
    assert depths(engine, *(prompt(base, words(branch, 3)) for branch in range(2, 9))) == [0, 4, 4, 4, 4, 4, 4]
    engine.play(prompt(base, words(3, 3)))
    assert engine.kept() == [4, 7]
    assert depths(engine, prompt(base, words(3, 3), words(4, 2))) == [7]


def test_a_long_conversation_advances_on_few_slots():
    """S3-11, S5-10: four slots, 16 turns; the source of a turn is never the victim of its commit."""
    engine = Engine(4)
    for turn in range(16):
        run = engine.play(chat(2 * turn + 1))
        assert run.lookup.depth == (10 + 40 * turn if turn else 0)
        assert run.lookup.depth in [0, *engine.kept()], "older turns could have gone"
    assert 30 in engine.kept(), "the head went although older turns could"


def test_the_restore_source_goes_for_what_extends_it_where_nothing_else_was_passed():
    engine = Engine(2)
    engine.play(one_shot(1))
    engine.play(one_shot(2, 30))
    run = engine.start(prompt(words(1, 12), words(2, 60), head=False))
    engine.compute(run, 72)
    assert engine.kept() == [30, 72], "another conversation stays, and not what this one leaves behind"
    engine.finish(run)


def test_a_session_goes_forward_beside_what_is_worth_more():
    engine = Engine(2)
    engine.play(one_shot(1, 3000))
    messages = [words(2, 50), words(3, 40), words(4, 40), words(5, 40)]
    turns = [prompt(*messages[:count], head=False) for count in (1, 2, 3, 4)]
    assert depths(engine, *turns) == [0, 50, 90, 130]
    assert engine.kept() == [170, 3000]


def test_where_conversations_go_back_the_restore_source_stays_before_what_adds_little():
    engine = Engine(2)
    for branch in ([], [words(3, 4)], [words(4, 4)]):
        engine.play(prompt(words(1, 12), *branch, head=False))
    engine.play(one_shot(6, 120))
    engine.play(one_shot(7, 3000))
    engine.play(prompt(words(6, 120), words(8, 4), head=False))
    assert engine.kept() == [120, 3000]


def test_one_slot_goes_forward_with_its_conversation():
    engine = Engine(1)
    assert depths(engine, *(chat(2 * turn + 1) for turn in range(6))) == [0, *(50 + 40 * t for t in range(5))]
    assert engine.kept() == [250]


def test_a_new_conversation_pushes_out_one_other_and_not_one_for_each_of_its_parts():
    engine = Engine(2)
    for who in (1, 2, 1, 2):
        engine.play(prompt(words(who, 40), head=False))
    engine.play(prompt(words(3, 30), words(4, 10)))
    assert engine.kept() == [40, 40]
    assert depths(engine, prompt(words(3, 30), words(4, 10), words(5, 10))) == [40]


def test_what_is_begun_anew_again_and_again_is_weighed_with_what_it_leads_to():
    engine = Engine(4)
    base, longer = prompt(words(1, 12), head=False), prompt(words(1, 12), words(2, 4), head=False)
    engine.play(base)
    for _ in range(12):
        engine.play(longer)
    returns = engine.store.returns
    assert returns.share("repeated") > returns.share("going_on")
    (slot,) = engine.slots_at(16)
    engine.store.remove([slot], "slots")
    (left,) = engine.clearing._candidates(())
    assert (left.end, left.end_share) == (12, returns.share("repeated", 4))


def test_what_others_restore_from_makes_no_room_for_what_was_built_on_it():
    engine = Engine(1)
    engine.play(one_shot(1))
    reader = engine.start(prompt(words(1, 12), words(3, 4), head=False), hold=True)
    assert engine.play(prompt(words(1, 12), words(2, 30), head=False)).committed == []
    engine.finish(reader)
    assert engine.kept() == [12]


def test_a_commit_that_is_refused_costs_the_snapshot_it_was_built_on_nothing():
    engine = Engine(1)
    engine.play(one_shot(1))
    run = engine.start(prompt(words(1, 12), words(2, 30), head=False))
    run.wanted.clear()
    engine.compute(run, 43)
    for stored in (41, 43):
        assert engine.commit(engine.keeping.reserve(), run, run.prompt.last, stored_tokens=stored) is None
    assert engine.kept() == [12]
    assert engine.keep(run, run.prompt.last) == 0
    engine.finish(run)
    engine.check()
    assert engine.kept() == [42]


def test_an_absorbed_answer_goes_first_and_what_it_extends_stays():
    engine = Engine(3)
    engine.play(chat(1))
    engine.absorb(chat(2))
    assert engine.kept() == [30, 50, 70]
    engine.play(one_shot(70))
    assert engine.kept() == [12, 30, 50]


def test_an_absorbed_answer_that_was_hit_is_kept_like_any_other():
    engine = Engine(3)
    engine.play(chat(1))
    engine.absorb(chat(2))
    assert depths(engine, chat(3)) == [70]
    assert engine.kept() == [30, 70, 90], "what was passed went"
    engine.play(one_shot(70, 200))
    assert engine.kept() == [30, 90, 200]


def test_an_absorbed_answer_pushes_out_nothing_that_was_asked_for():
    engine = Engine(3)
    engine.play(chat(1))
    engine.play(one_shot(70))
    engine.absorb(chat(2))
    assert engine.kept() == [12, 30, 50]
    assert engine.store.aborts["not_worth"] == 1


def test_as_many_snapshots_go_as_one_prompt_needs():
    """S3-12, K-SM2: room is made before anything is allocated, and no more than needed goes."""
    engine = Engine(12, blocks=31)
    for who in range(6):
        engine.play(one_shot(10 + who, 20))
    assert engine.pool.free_count == 1
    assert engine.clearing.make_room(12)
    assert engine.pool.free_count == 16
    assert engine.store.evictions["blocks"] == 3
    engine.check()


def test_room_that_cannot_be_had_costs_nothing():
    engine = Engine(4, blocks=10)
    engine.play(one_shot(1))
    engine.clearing.pin(0)
    engine.play(one_shot(2))
    kept = engine.kept()
    assert not engine.clearing.make_room(8)
    assert not engine.clearing.make_room(11)
    assert engine.kept() == kept
    assert engine.clearing.make_room(7)
    assert engine.kept() == [12]


def test_one_shots_do_not_push_out_a_long_session():
    """K-RT6: two slots, one session, then twenty small prompts."""
    engine = Engine(2)
    session = prompt(words(1, 200), words(2, 2800))
    engine.play(session)
    for who in range(20):
        engine.play(one_shot(100 + who, 30))
    assert engine.play(prompt(words(1, 200), words(2, 2800), words(3, 20))).lookup.depth == 3000
    alone = Engine(1)
    alone.play(one_shot(1, 3000))
    for who in range(20):
        alone.play(one_shot(100 + who, 30))
    assert alone.kept() == [3000]
    assert alone.store.aborts["not_worth"] == 20


def test_one_shots_make_room_for_one_another_before_a_session_goes():
    """The same with memory short instead of slots."""
    engine = Engine(64, blocks=850)
    session = prompt(words(1, 200), words(2, 2800))
    engine.play(session)
    for who in range(40):
        engine.play(one_shot(100 + who, 30))
    assert engine.store.evictions["blocks"] > 0
    assert engine.play(prompt(words(1, 200), words(2, 2800), words(3, 20))).lookup.depth == 3000


def test_an_agent_that_grows_is_not_keyed_by_its_whole_prompt():
    """K-RT8."""
    engine = Engine(2)
    assert depths(engine, *(chat(turns) for turns in (1, 3, 5, 7)))[1:] == [50, 90, 130]


def test_a_snapshot_larger_than_the_pool_is_never_kept_and_nothing_leaks():
    """K-SM1: the request fails for want of memory, what others keep may go, the rest works on."""
    engine = Engine(4, blocks=20)
    run = engine.start(one_shot(1, 100))
    with pytest.raises(OutOfBlocks):
        engine.compute(run, 101)
    engine.finish(run)
    engine.check()
    assert engine.pool.used_count == 0
    assert engine.play(one_shot(2)).committed == [12]


def test_many_conversations_on_few_slots_come_and_go():
    """K-SM5: nothing stays pinned."""
    engine = Engine(2)
    for who in range(50):
        engine.play(one_shot(10 + who))
    assert engine.store.evictions["slots"] == 48
    assert engine.store.slot_states()["restoring"] == 0


def test_a_snapshot_in_use_is_not_overwritten():
    """K-SM6: one slot, A restores, B commits meanwhile."""
    engine = Engine(1)
    engine.play(one_shot(1))
    reader = engine.start(prompt(words(1, 12), words(3, 10), head=False), hold=True)
    assert engine.play(one_shot(2)).committed == []
    assert not engine.clearing.make_room(engine.pool.free_count + 1)
    engine.compute(reader, 20)
    engine.finish(reader)
    engine.check()
    assert engine.play(one_shot(2)).committed == [12]


def test_out_of_memory_drops_everything_at_once():
    """S6-5: also what is pinned; a reader keeps what it has, and nobody finds it any more."""
    engine = Engine(4)
    engine.play(chat(1))
    engine.clearing.pin(engine.slots_at(30)[0])
    reader = engine.start(chat(3), hold=True)
    engine.clearing.drop_all("oom")
    engine.check()
    assert engine.kept() == []
    assert engine.store.slot_states()["restoring"] == 1
    engine.compute(reader, 60)
    engine.finish(reader)
    assert engine.store.slot_states()["free"] == 4
    assert engine.store.evictions["oom"] == 2
    assert engine.pool.used_count == 0


def test_evicting_leaves_what_is_busy_or_pinned():
    engine = Engine(4)
    for who in (1, 2, 3):
        engine.play(one_shot(who))
    engine.clearing.pin(1)
    reader = engine.start(prompt(words(1, 12), words(5, 5), head=False), hold=True)
    planned = engine.clearing.evict([0, 1, 2, 2], dry_run=True)
    assert (planned.removed, planned.busy, planned.freed_bytes, planned.dry_run) == ([2], [0, 1], 300, True)
    assert engine.kept() == [12, 12, 12]
    done = engine.clearing.evict([0, 1, 2])
    assert (done.removed, done.busy, done.freed_bytes, done.dry_run) == ([2], [0, 1], 300, False)
    engine.finish(reader)
    assert engine.kept() == [12, 12]
    assert engine.store.evictions["operator"] == 1


def test_evicting_an_unknown_slot_removes_nothing():
    engine = Engine(4)
    engine.play(one_shot(1))
    for slot in (1, 4, -1):
        with pytest.raises(UnknownSlot, match=f"slot {slot} holds no snapshot"):
            engine.clearing.evict([0, slot])
        for act in (engine.clearing.pin, engine.clearing.unpin):
            with pytest.raises(UnknownSlot):
                act(slot)
        with pytest.raises(UnknownSlot):
            slot_info(engine.store, slot)
    assert engine.kept() == [12]


def test_flush_says_what_went_and_what_goes_when_released():
    """K-LO9: later requests find nothing at once; a pinned snapshot stays."""
    engine = Engine(4)
    for who in (1, 2, 3):
        engine.play(one_shot(who))
    engine.clearing.pin(1)
    again = prompt(words(1, 12), words(5, 5), head=False)
    reader = engine.start(again, hold=True)
    assert engine.clearing.flush(dry_run=True).removed == [2]
    removed = engine.clearing.flush()
    assert (removed.removed, removed.busy, removed.freed_bytes) == ([2], [0, 1], 300)
    assert engine.clearing.flush().busy == [1]
    assert engine.finding.lookup("", again.ids, again.boundaries).reason == "flushed"
    engine.check()
    assert engine.store.slot_states()["ready"] == engine.store.slot_states()["restoring"] == 1
    engine.finish(reader)
    assert engine.store.slot_states()["ready"] == 1
    assert engine.play(prompt(words(2, 12), words(5, 5), head=False)).lookup.depth == 12


def test_a_pinned_snapshot_outlives_any_pressure():
    engine = Engine(1)
    engine.play(one_shot(1))
    engine.clearing.pin(0)
    engine.clock.now += 1_000_000
    assert engine.play(chat(3)).committed == []
    assert not engine.clearing.make_room(engine.pool.total_count)
    engine.clearing.unpin(0)
    assert engine.play(chat(3)).committed != []
