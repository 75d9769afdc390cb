"""What becomes a snapshot, and under which key: the sequences that burned slots of other servers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshot_rig import HEAD, Engine, Prompt, chat, depths, found, one_shot, prompt, words

# S2, K-RT1: burned slots


@pytest.mark.parametrize("cause", ["length", "failed", "cancelled", "degenerate"])
def test_an_aborted_snapshot_burns_no_slot(cause):
    """S2 t1 to t5 with two slots: the abort at t2 moves nothing, so B finds the free slot and A stays."""
    engine = Engine(2)
    engine.play(prompt(words(1, 38), head=False))
    before = engine.store.slots.free_slots
    tiny = engine.start(one_shot(2, 3))
    reservation = engine.keeping.reserve()
    engine.compute(tiny, 2)
    match cause:
        case "length":
            assert engine.commit(reservation, tiny, tiny.prompt.last, stored_tokens=2) is None
        case "degenerate":
            with pytest.raises(ValueError, match="not one of"):
                engine.commit(reservation, tiny, replace(tiny.prompt.last, end=1))
            engine.keeping.abort(reservation, "failed")
        case _:
            engine.keeping.abort(reservation, cause)
    engine.finish(tiny)
    assert engine.store.slots.free_slots == before
    engine.play(prompt(words(3, 82), head=False))
    assert engine.kept() == [38, 82]
    assert depths(engine, prompt(words(1, 38), words(4, 10), head=False)) == [38]
    assert depths(engine, prompt(words(1, 38), words(4, 10), words(5, 90), head=False)) == [48]
    assert sum(engine.store.stale_drops.values()) == 0


def test_a_cancelled_writer_leaves_no_entry_of_the_victim_behind():
    """S2-a, S2-c: the victim's entry goes before its slot is written, and stays gone after the abort."""
    engine = Engine(1)
    engine.play(one_shot(1))
    reservation = engine.keeping.reserve()
    assert engine.keeping.begin_write(reservation) == 0
    assert engine.kept() == []
    engine.keeping.abort(reservation, "cancelled")
    engine.check()
    assert found(engine.play(prompt(words(1, 12), words(2, 4), head=False))) == (0, "miss", "evicted")


def test_a_victim_stays_where_nothing_was_written():
    """S2-d: it can even be hit while it is reserved."""
    engine = Engine(1)
    engine.play(one_shot(1))
    reservation = engine.keeping.reserve()
    run = engine.start(prompt(words(1, 12), words(2, 4), head=False))
    assert run.lookup.depth == 12
    engine.keeping.abort(reservation, "failed")
    engine.finish(run)
    engine.check()
    assert engine.kept() == [12]
    assert engine.store.slots[0].generation == 1


def test_a_key_is_never_published_over_what_another_request_wrote():
    """S2-b: one slot, B kept, T reserves B's slot but writes nothing of its own length."""
    engine = Engine(1)
    engine.play(prompt(words(1, 80), head=False))
    tiny = engine.start(one_shot(2))
    reservation = engine.keeping.reserve()
    engine.compute(tiny, 4)
    assert engine.commit(reservation, tiny, tiny.prompt.last, stored_tokens=4) is None
    engine.finish(tiny)
    engine.check()
    assert engine.kept() == [80]
    assert engine.store.aborts["length"] == 1


def test_boundaries_that_do_not_rise_are_refused_and_nothing_changes():
    engine = Engine(1)
    run = engine.start(chat(1))
    run.wanted.clear()
    engine.compute(run, 51)
    head, last = run.prompt.boundaries
    reservation = engine.keeping.reserve()
    run.prompt = replace(run.prompt, boundaries=(head, replace(head), last))
    with pytest.raises(ValueError, match="rise"):
        engine.commit(reservation, run, last)
    engine.check()
    with pytest.raises(ValueError, match="rise"):
        engine.keeping.note("", run.prompt.ids, run.prompt.boundaries, 51)
    engine.keeping.abort(reservation, "failed")
    engine.check()
    assert engine.store.index.node_count == 0


def test_a_reservation_is_used_once():
    engine = Engine(1)
    reservation = engine.keeping.reserve()
    engine.keeping.abort(reservation, "failed")
    with pytest.raises(ValueError, match="before"):
        engine.keeping.abort(reservation, "failed")
    with pytest.raises(ValueError, match="before"):
        engine.keeping.begin_write(reservation)


def test_no_slot_is_promised_to_two():
    engine = Engine(1)
    engine.play(one_shot(1))
    first = engine.keeping.reserve()
    assert engine.keeping.reserve() is None
    assert engine.store.aborts["no_slot"] == 1
    engine.keeping.abort(first, "cancelled")
    assert engine.keeping.reserve() is not None


def test_a_promised_victim_that_is_in_use_by_then_is_not_taken():
    engine = Engine(1)
    engine.play(one_shot(1))
    other = engine.start(one_shot(2))
    engine.compute(other, 3)
    reservation = engine.keeping.reserve()
    reader = engine.start(prompt(words(1, 12), words(3, 4), head=False), hold=True)
    assert engine.keeping.begin_write(reservation) is None
    engine.check()
    engine.finish(reader)
    engine.finish(other)
    assert engine.kept() == [12]


def test_a_snapshot_stays_whatever_becomes_of_its_request():
    """S2-f: materialised is committed."""
    engine = Engine(2)
    run = engine.start(chat(1))
    engine.compute(run, 50)
    engine.finish(run)
    assert engine.play(chat(2)).lookup.depth == 50


def test_equal_digests_of_different_prefixes_are_told_apart_by_ids():
    """S2-g, K-SE2."""
    engine = Engine(2)
    same = {"shape": lambda digest: bytes(16), "head": False}
    engine.play(prompt(words(1, 20), **same))
    assert found(engine.play(prompt(words(2, 20), words(3, 5), **same))) == (0, "miss", "stale")
    assert engine.store.stale_drops["tokens"] == 1


def test_a_clash_with_a_snapshot_in_use_leaves_it_and_keeps_nothing_new():
    engine = Engine(2)
    same = {"shape": lambda digest: bytes(16), "head": False}
    engine.play(prompt(words(1, 20), **same))
    reader = engine.start(prompt(words(1, 20), words(4, 5), shape=lambda d: bytes(16), head=False), hold=True)
    assert engine.play(prompt(words(2, 20), **same)).committed == []
    assert engine.store.aborts["collision"] == 1
    engine.finish(reader)
    assert engine.kept() == [20]


# S3, K-RC2: keys and lengths


@pytest.mark.parametrize("stored", [49, 51, 0])
def test_a_snapshot_of_another_length_than_its_key_is_refused(stored):
    """S3-4, S3-5, S3-6, S6-2: and the slot goes back."""
    engine = Engine(2)
    run = engine.start(chat(1))
    engine.compute(run, 29)
    run.wanted.clear()
    engine.compute(run, 51)
    assert engine.commit(engine.keeping.reserve(), run, run.prompt.at(50), stored_tokens=stored) is None
    assert engine.store.aborts["length"] == 1
    assert engine.store.slots.free_slots == (0, 1)
    assert engine.commit(engine.keeping.reserve(), run, run.prompt.at(50)) is not None
    engine.finish(run)
    engine.check()


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_snapshot_with_too_few_or_too_many_blocks_is_refused(wrong):
    engine = Engine(2)
    run = engine.start(one_shot(1, 12))
    run.wanted.clear()
    engine.compute(run, 13)
    blocks = run.blocks[: 3 + wrong]
    request = run.prompt
    reservation = engine.keeping.reserve()
    commit = engine.keeping.commit(
        reservation, "", request.ids, request.last, request.boundaries, blocks, stored_tokens=12
    )
    assert commit is None
    engine.finish(run)
    engine.check()
    assert engine.pool.used_count == 0


def test_a_boundary_inside_a_block_and_inside_a_chunk_is_kept_exactly():
    """S3-8, K-RC2: computed to 13 in one go, kept at 6 and 11, block size 4."""
    engine = Engine(4)
    run = engine.start(prompt(words(1, 6), words(2, 5)))
    engine.compute(run, 12)
    engine.finish(run)
    engine.check()
    assert engine.kept() == [6, 11]
    assert depths(engine, prompt(words(1, 6), words(3, 9))) == [6]
    assert depths(engine, prompt(words(1, 6), words(2, 5), words(4, 9))) == [11]


def test_the_same_boundary_is_kept_once():
    engine = Engine(4)
    first, second = engine.start(one_shot(1)), engine.start(one_shot(1))
    for run in (first, second):
        engine.compute(run, 13)
    assert engine.store.aborts["duplicate"] == 1
    assert engine.store.commits == 1
    for run in (first, second):
        engine.finish(run)
    engine.check()


def test_a_slot_written_again_has_a_new_generation():
    """S3-9: equal lengths do not hide a change."""
    engine = Engine(1)
    engine.play(one_shot(1))
    request = prompt(words(1, 12), words(3, 4), head=False)
    old = engine.finding.lookup("", request.ids, request.boundaries)
    engine.play(one_shot(2))
    assert engine.finding.begin_restore(old.slot, old.generation) is None
    assert engine.pool.used_count == 3
    assert sum(engine.store.stale_drops.values()) == 0


def test_an_entry_of_an_older_generation_is_dropped_and_the_slot_left_to_its_owner():
    engine = Engine(2)
    engine.play(one_shot(1))
    engine.play(one_shot(2))
    first, second = engine.store.slots.snapshots()
    engine.store.index.detach(first.node, "evicted")
    engine.store.index.attach(first.node, second.slot, 1, first.tokens)
    request = prompt(words(1, 12), words(3, 4), head=False)
    lookup = engine.finding.lookup("", request.ids, request.boundaries)
    assert (lookup.depth, lookup.reason) == (0, "stale")
    assert engine.store.stale_drops["generation"] == 1
    other = prompt(words(2, 12), words(3, 4), head=False)
    assert engine.finding.lookup("", other.ids, other.boundaries).slot == second.slot


# S5: what is kept


def wanted(engine: Engine, request: Prompt, depth: int = 0) -> list[int]:
    return [b.end for b in engine.keeping.wanted(request.tenant, request.ids, request.boundaries, depth)]


def cut(total: int, *ends: int) -> Prompt:
    """A prompt of `total` tokens with boundaries at `ends`, none of them a head."""
    sizes = [end - start for start, end in zip((0, *ends), ends, strict=False)]
    return prompt(*(words(i + 1, size) for i, size in enumerate(sizes)), tail=[7] * (total - ends[-1]), head=False)


def test_a_short_conversation_keeps_its_newest_boundary():
    """S5-1, S5-3, S3-2, K-BD1."""
    assert wanted(Engine(4), cut(3000, 1200, 2950)) == [2950]
    assert wanted(Engine(4), cut(300, 290)) == [290]
    assert wanted(Engine(4), chat(4)) == [30, 110]


def test_long_stretches_keep_one_in_8192():
    """S5-2."""
    engine = Engine(4)
    request = cut(30_000, *range(1000, 29_951, 1000), 29_950)
    assert wanted(engine, request) == [12_000, 20_000, 28_000, 29_950]
    assert wanted(engine, request, depth=12_000) == [20_000, 28_000, 29_950]
    assert wanted(engine, cut(30_000, 1200, 29_950)) == [1200, 29_950]


def test_a_growing_text_starts_from_the_last_cut_of_its_grid():
    """A plain completion: cuts every 512 tokens and one at the end, which a longer text does not share."""
    engine = Engine(4)

    def text(total: int) -> Prompt:
        ends = [*range(512, total, 512), total]
        request = prompt(*(range(a, b) for a, b in zip([0, *ends], ends, strict=False)), tail=(), head=False)
        interior = (replace(boundary, kind="interior") for boundary in request.boundaries[:-1])
        return replace(request, boundaries=(*interior, request.last))

    assert depths(engine, text(1100), text(1300), text(1700)) == [0, 1024, 1024]


def test_what_is_kept_is_not_kept_again():
    engine = Engine(4)
    engine.play(chat(1))
    assert wanted(engine, chat(1)) == []
    assert wanted(engine, chat(3)) == [90]


def test_where_conversations_branch_is_kept_on_second_sight():
    """An agent that rebuilds its last message at every step hits the boundary before it from the third step on."""
    engine = Engine(8)
    steps = [prompt(HEAD, words(10, 20), words(11, 20), words(50 + step, 15)) for step in range(4)]
    assert depths(engine, *steps) == [0, 30, 70, 70]
    assert engine.play(steps[0]).lookup.depth == 85


def test_one_request_takes_few_branch_points():
    engine = Engine(64)
    for turns in range(1, 12):
        engine.play(prompt(HEAD, *(words(10 + t, 5) for t in range(turns)), words(100 + turns, 5)))
    engine.clearing.flush()
    again = prompt(HEAD, *(words(10 + t, 5) for t in range(14)))
    assert len(wanted(engine, again)) == 2 + 4 + 1, "they wrote their last messages anew: one more before the end"


def test_a_prompt_repeated_to_its_last_token_keeps_the_boundary_before():
    engine = Engine(4)
    request = prompt(words(1, 20), words(2, 20), tail=(), head=False)
    assert depths(engine, request, request, request) == [0, 0, 20]


# Slots: K-RT6, K-RT8, K-SM


def test_cancelled_requests_leave_nothing_behind():
    """K-SM4, K-RC12: cancelled at any point, what is kept is exactly what was finished."""
    engine = Engine(4)
    for attempt in range(60):
        run = engine.start(chat(3))
        engine.compute(run, max(run.computed, attempt * 90 // 60))
        engine.finish(run)
        engine.check()
    assert engine.pool.used_count == engine.store.held_count
    assert engine.play(chat(3)).lookup.depth == 70
