"""The store in the sequences that broke other servers. Every turn checks the state it restored and all that is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshot_rig import Engine, Prompt, prompt, words

from worker.block_pool import BlockPool, OutOfBlocks
from worker.invariants import InvariantViolation
from worker.snapshots import SnapshotStore, UnknownSlot

HEAD = words(1, 30)
SYSTEM = words(2, 40)


def chat(turns: int, size: int = 20, head: list[int] | None = None, who: int = 10) -> Prompt:
    """A head and `turns` messages of one conversation."""
    return prompt(head or HEAD, *(words(who + turn, size) for turn in range(turns)))


def one_shot(who: int, size: int = 12) -> Prompt:
    return prompt(words(who, size), head=False)


def depths(engine: Engine, *requests: Prompt) -> list[int]:
    return [engine.play(request).lookup.depth for request in requests]


def found(run) -> tuple[int, str, str]:
    return run.lookup.depth, run.lookup.outcome, run.lookup.reason


# What a lookup says


def test_a_second_turn_hits_the_newest_boundary_of_the_first():
    engine = Engine(4)
    assert found(engine.play(chat(1))) == (0, "miss", "cold")
    assert found(engine.play(chat(3))) == (50, "hit", "none")


def test_a_request_without_boundaries_says_so():
    assert found(Engine(4).play(prompt(tail=words(1, 30)))) == (0, "miss", "no_boundary")


def test_a_prompt_that_shares_a_few_tokens_is_cold():
    engine = Engine(4)
    engine.play(prompt(words(1, 15) + words(2, 15)))
    assert found(engine.play(prompt(words(1, 15) + words(3, 15)))) == (0, "miss", "cold")


def test_a_prompt_that_differs_inside_its_first_message_tells_where():
    engine = Engine(4)
    engine.play(prompt(words(1, 20) + words(2, 20), words(3, 5)))
    lookup = engine.play(prompt(words(1, 20) + words(4, 20), words(3, 5))).lookup
    assert (lookup.outcome, lookup.reason) == ("miss", "diverged")
    assert (lookup.diverged_token, lookup.diverged_message) == (20, 0)


def test_an_edited_message_starts_from_the_nearest_boundary_and_tells_where_it_differs():
    """K-RC5, K-RC7: never more than the true common prefix, and exactly a stored boundary."""
    engine = Engine(8)
    engine.play(chat(4))
    edited = prompt(HEAD, words(10, 20), [*words(11, 17), 5], words(12, 20))
    lookup = engine.play(edited).lookup
    assert (lookup.depth, lookup.outcome, lookup.reason) == (30, "partial", "not_kept")
    assert (lookup.deepest_known, lookup.diverged_token, lookup.diverged_message) == (50, 67, 2)


def test_tools_before_the_first_message_belong_to_no_message():
    engine = Engine(4)
    tools = words(1, 40)
    first = prompt(tools, words(2, 5))
    boundaries = tuple(replace(b, messages=b.messages - 1) for b in first.boundaries)
    engine.play(replace(first, boundaries=boundaries))
    other = prompt([*tools[:30], 5, 5], words(2, 5))
    lookup = engine.store.lookup(
        "", other.ids, tuple(replace(b, messages=b.messages - 1) for b in other.boundaries)
    )
    assert (lookup.diverged_token, lookup.diverged_message) == (30, None)


@pytest.mark.parametrize(("verb", "reason"), [("evict", "evicted"), ("flush", "flushed"), ("oom", "evicted")])
def test_what_was_kept_once_says_how_it_went(verb, reason):
    engine = Engine(4)
    engine.play(chat(1))
    match verb:
        case "evict":
            engine.store.evict(engine.slots_at(50))
        case "flush":
            engine.store.flush()
        case "oom":
            engine.store.drop_all("oom")
    depth = 30 if verb == "evict" else 0
    assert found(engine.play(chat(3))) == (depth, "partial" if depth else "miss", reason)


def test_a_hit_tells_of_a_conversation_that_shares_more_without_a_boundary():
    engine = Engine(4)
    engine.play(prompt(HEAD, words(5, 30), words(6, 5)))
    engine.play(prompt(HEAD, words(7, 30)))
    lookup = engine.play(prompt(HEAD, words(5, 25) + words(8, 5))).lookup
    assert (lookup.depth, lookup.outcome, lookup.diverged_token, lookup.diverged_message) == (30, "hit", 55, 1)


def test_peeking_changes_nothing():
    engine = Engine(2)
    engine.play(chat(1))
    engine.store.slots[engine.slots_at(50)[0]].snapshot.tokens -= 1
    request = chat(2)
    before = [(n.last_used, n.hits, n.slot) for root in engine.store.index.roots for n in root.subtree()]
    assert engine.store.lookup("", request.ids, request.boundaries, peek=True).reason == "stale"
    after = [(n.last_used, n.hits, n.slot) for root in engine.store.index.roots for n in root.subtree()]
    assert before == after
    assert sum(engine.store.stale_drops.values()) == 0


def test_another_tenant_finds_nothing_and_learns_nothing():
    """K-SE1, also where a guess is right to the token."""
    engine = Engine(4)
    secret = words(3, 200)
    engine.play(prompt(secret, words(4, 20), tenant="a"))
    lookup = engine.play(prompt(secret, words(4, 20), tenant="b")).lookup
    assert (lookup.depth, lookup.reason, lookup.deepest_known, lookup.diverged_token) == (0, "cold", 0, None)
    assert found(engine.play(prompt(secret, words(4, 20), words(5, 5), tenant="a"))) == (220, "hit", "none")


# S1, K-RC1, K-RC3: prompts shorter than what is kept


def test_a_snapshot_that_outgrew_its_key_is_dropped_and_the_prompt_computed_afresh():
    """S1-2: the table says 3801, the slot holds more."""
    engine = Engine(1)
    engine.play(prompt(words(1, 80), head=False))
    engine.store.slots[0].snapshot.tokens = 200
    run = engine.start(prompt(words(1, 80), words(2, 20), head=False))
    assert found(run) == (0, "miss", "stale")
    assert engine.store.stale_drops["length"] == 1
    engine.compute(run, len(run.prompt))
    engine.finish(run)
    engine.check()
    assert engine.store.evictions["stale"] == 1


def test_restoring_a_slot_that_does_not_fit_its_key_takes_nothing():
    """S1-3: the router is bypassed."""
    engine = Engine(1)
    engine.play(one_shot(1))
    engine.store.slots[0].snapshot.blocks += tuple(engine.pool.allocate(1))
    assert engine.store.begin_restore(0, 1) is None
    assert engine.pool.used_count == 0
    assert engine.store.stale_drops["length"] == 1


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_the_same_request_again_always_leaves_a_token_to_compute(turns):
    """S1-4, S5-11, K-RC3: with and without a generation suffix."""
    engine = Engine(8)
    for tail in [(9,), ()]:
        request = prompt(HEAD, *(words(10 + t, 20) for t in range(turns)), tail=tail)
        runs = [engine.play(request) for _ in range(3)]
        assert all(run.lookup.depth < len(request) for run in runs)
        assert runs[1].lookup.depth == runs[2].lookup.depth == (request.last.end if tail else 10 + 20 * turns)


def test_a_compacted_conversation_starts_from_its_head_and_the_old_one_stays():
    """S1-5, K-RC1."""
    engine = Engine(8)
    engine.play(chat(6))
    compacted = prompt(HEAD, words(90, 25))
    assert engine.play(compacted).lookup.depth == 30
    cut = chat(3)
    assert found(engine.play(cut)) == (30, "partial", "not_kept")
    assert engine.play(chat(7)).lookup.depth == 150


def test_a_prompt_inside_a_stored_message_is_told_that_the_stored_one_is_longer():
    engine = Engine(4)
    engine.play(prompt(words(1, 100), head=False))
    assert found(engine.play(prompt(words(1, 50), tail=(), head=False))) == (0, "miss", "longer_than_prompt")


# S2, K-RT1: burned slots


@pytest.mark.parametrize("cause", ["length", "failed", "cancelled", "degenerate"])
def test_an_aborted_snapshot_burns_no_slot(cause):
    """S2 t1 to t5 with two slots: the abort at t2 moves nothing, so B finds the free slot and A stays."""
    engine = Engine(2)
    engine.play(prompt(words(1, 38), head=False))
    before = engine.store.slots.free_slots
    tiny = engine.start(one_shot(2, 3))
    reservation = engine.store.reserve()
    engine.compute(tiny, 2)
    match cause:
        case "length":
            assert engine.commit(reservation, tiny, tiny.prompt.last, stored_tokens=2) is None
        case "degenerate":
            with pytest.raises(ValueError, match="not one of"):
                engine.commit(reservation, tiny, replace(tiny.prompt.last, end=1))
            engine.store.abort(reservation, "failed")
        case _:
            engine.store.abort(reservation, cause)
    engine.finish(tiny)
    assert engine.store.slots.free_slots == before
    engine.play(prompt(words(3, 82), head=False))
    assert engine.kept() == [38, 82]
    assert depths(engine, prompt(words(1, 38), words(4, 10), head=False)) == [38]
    assert depths(engine, prompt(words(1, 38), words(5, 90), head=False)) == [38]
    assert sum(engine.store.stale_drops.values()) == 0


def test_a_cancelled_writer_leaves_no_entry_of_the_victim_behind():
    """S2-a, S2-c: the victim's entry goes before its slot is written, and stays gone after the abort."""
    engine = Engine(1)
    engine.play(one_shot(1))
    reservation = engine.store.reserve()
    assert engine.store.begin_write(reservation) == 0
    assert engine.kept() == []
    engine.store.abort(reservation, "cancelled")
    engine.check()
    assert found(engine.play(prompt(words(1, 12), words(2, 4), head=False))) == (0, "miss", "evicted")


def test_a_victim_stays_where_nothing_was_written():
    """S2-d: it can even be hit while it is reserved."""
    engine = Engine(1)
    engine.play(one_shot(1))
    reservation = engine.store.reserve()
    run = engine.start(prompt(words(1, 12), words(2, 4), head=False))
    assert run.lookup.depth == 12
    engine.store.abort(reservation, "failed")
    engine.finish(run)
    engine.check()
    assert engine.kept() == [12]
    assert engine.store.slots[0].generation == 1


def test_a_key_is_never_published_over_what_another_request_wrote():
    """S2-b: one slot, B kept, T reserves B's slot but writes nothing of its own length."""
    engine = Engine(1)
    engine.play(prompt(words(1, 80), head=False))
    tiny = engine.start(one_shot(2))
    reservation = engine.store.reserve()
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
    reservation = engine.store.reserve()
    run.prompt = replace(run.prompt, boundaries=(head, replace(head), last))
    with pytest.raises(ValueError, match="rise"):
        engine.commit(reservation, run, last)
    engine.check()
    with pytest.raises(ValueError, match="rise"):
        engine.store.note("", run.prompt.ids, run.prompt.boundaries, 51)
    engine.store.abort(reservation, "failed")
    engine.check()
    assert engine.store.index.node_count == 0


def test_a_reservation_is_used_once():
    engine = Engine(1)
    reservation = engine.store.reserve()
    engine.store.abort(reservation, "failed")
    with pytest.raises(ValueError, match="before"):
        engine.store.abort(reservation, "failed")
    with pytest.raises(ValueError, match="before"):
        engine.store.begin_write(reservation)


def test_no_slot_is_promised_to_two():
    engine = Engine(1)
    engine.play(one_shot(1))
    first = engine.store.reserve()
    assert engine.store.reserve() is None
    assert engine.store.aborts["no_slot"] == 1
    engine.store.abort(first, "cancelled")
    assert engine.store.reserve() is not None


def test_a_promised_victim_that_is_in_use_by_then_is_not_taken():
    engine = Engine(1)
    engine.play(one_shot(1))
    other = engine.start(one_shot(2))
    engine.compute(other, 3)
    reservation = engine.store.reserve()
    reader = engine.start(prompt(words(1, 12), words(3, 4), head=False), hold=True)
    assert engine.store.begin_write(reservation) is None
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
    assert engine.commit(engine.store.reserve(), run, run.prompt.at(50), stored_tokens=stored) is None
    assert engine.store.aborts["length"] == 1
    assert engine.store.slots.free_slots == (0, 1)
    assert engine.commit(engine.store.reserve(), run, run.prompt.at(50)) is not None
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
    reservation = engine.store.reserve()
    commit = engine.store.commit(
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
    old = engine.store.lookup("", request.ids, request.boundaries)
    engine.play(one_shot(2))
    assert engine.store.begin_restore(old.slot, old.generation) is None
    assert engine.pool.used_count == 3
    assert sum(engine.store.stale_drops.values()) == 0


def test_an_entry_of_an_older_generation_is_dropped_and_the_slot_left_to_its_owner():
    engine = Engine(2)
    engine.play(one_shot(1))
    engine.play(one_shot(2))
    first, second = engine.store.slots.snapshots()
    engine.store.index.detach(first.node, "evicted")
    engine.store.index.attach(first.node, second.slot, 1)
    request = prompt(words(1, 12), words(3, 4), head=False)
    lookup = engine.store.lookup("", request.ids, request.boundaries)
    assert (lookup.depth, lookup.reason) == (0, "stale")
    assert engine.store.stale_drops["generation"] == 1
    other = prompt(words(2, 12), words(3, 4), head=False)
    assert engine.store.lookup("", other.ids, other.boundaries).slot == second.slot


def test_a_shared_ancestor_stays_when_a_leaf_can_go():
    """S3-7, K-RT9: base, then one branch after another, two slots."""
    engine = Engine(2)
    base = words(1, 4)
    assert depths(engine, *(prompt(base, words(branch, 3)) for branch in range(2, 9))) == [0, 4, 4, 4, 4, 4, 4]
    engine.play(prompt(base, words(3, 3)))
    assert engine.kept() == [4, 7]
    assert depths(engine, prompt(base, words(3, 3), words(4, 2))) == [7]


def test_twenty_turns_each_restore_the_turn_before():
    """S3-2, S3-10: the restored length grows with every turn and only the new messages are computed."""
    engine = Engine(64)
    assert depths(engine, *(chat(2 * turn + 1) for turn in range(20))) == [0, *(50 + 40 * t for t in range(19))]
    assert sum(engine.store.evictions.values()) == 0


def test_a_long_conversation_advances_on_few_slots():
    """S3-11, S5-10: four slots, 16 turns; the source of a turn is never the victim of its commit."""
    engine = Engine(4)
    assert depths(engine, *(chat(2 * turn + 1) for turn in range(16))) == [0, *(50 + 40 * t for t in range(15))]
    assert 30 in engine.kept(), "the head went although older turns could"


def test_the_restore_source_is_not_the_victim_of_its_own_commit():
    engine = Engine(1)
    engine.play(one_shot(1))
    run = engine.start(prompt(words(1, 12), words(2, 30), head=False))
    engine.compute(run, 43)
    assert run.committed == []
    engine.finish(run)
    assert engine.kept() == [12]


def test_as_many_snapshots_go_as_one_prompt_needs():
    """S3-12, K-SM2: room is made before anything is allocated, and no more than needed goes."""
    engine = Engine(12, blocks=31)
    for who in range(6):
        engine.play(one_shot(10 + who, 20))
    assert engine.pool.free_count == 1
    assert engine.store.make_room(12)
    assert engine.pool.free_count == 16
    assert engine.store.evictions["blocks"] == 3
    engine.check()


def test_room_that_cannot_be_had_costs_nothing():
    engine = Engine(4, blocks=10)
    engine.play(one_shot(1))
    engine.store.pin(0)
    engine.play(one_shot(2))
    kept = engine.kept()
    assert not engine.store.make_room(8)
    assert not engine.store.make_room(11)
    assert engine.kept() == kept
    assert engine.store.make_room(7)
    assert engine.kept() == [12]


# S4, K-RT2, K-RT3, K-RT4: a hit consumes nothing


def test_a_conversation_that_shares_a_head_does_not_consume_another():
    """S4: A, unrelated B, C on A's head, then A goes on."""
    engine = Engine(8)
    a, c = prompt(SYSTEM, words(3, 60)), prompt(SYSTEM, words(4, 50))
    a_more = prompt(SYSTEM, words(3, 60), words(5, 10))
    assert depths(engine, a, one_shot(6, 60), c, a_more) == [0, 0, 40, 100]


def test_windows_that_alternate_each_keep_their_own_depth():
    """S4-d, K-RT4: three windows on one head."""
    engine = Engine(8)
    for turn in range(4):
        for window in range(3):
            depth = engine.play(chat(2 * turn + 1, who=100 * (window + 1))).lookup.depth
            assert depth == (30 + 20 * (2 * turn - 1) if turn else 30 if window else 0)


def test_a_conversation_that_begins_like_a_longer_one_hides_nothing():
    """K-RT3, S4-f: A is the start of B; the deepest match wins for either."""
    engine = Engine(8)
    engine.play(chat(1))
    engine.play(chat(9))
    a, b = prompt(HEAD, words(10, 20), words(50, 5)), chat(10)
    for _ in range(3):
        assert engine.play(b).lookup.depth >= 210
        assert engine.play(a).lookup.depth >= 50


def test_two_continuations_of_one_snapshot_leave_it_as_it_is():
    """K-RC8, S5-6: X, Y, X again, and both at once."""
    engine = Engine(8)
    engine.play(chat(1, size=21))
    x, y = (prompt(HEAD, words(10, 21), words(who, 30)) for who in (50, 51))
    one, two = engine.start(x), engine.start(y)
    assert one.blocks == two.blocks
    for position in range(52, 82):
        for run in (one, two):
            engine.compute(run, position)
            engine.verify_run(run)
    engine.check()
    engine.finish(one)
    engine.finish(two)
    assert depths(engine, x, y, x) == [81, 81, 81]


def test_a_restore_that_fails_leaves_the_conversation_it_failed_on_intact():
    """S4-c, S4-h, K-RT5: no match takes nothing, and later requests are right."""
    engine = Engine(2)
    engine.play(one_shot(1))
    assert engine.store.begin_restore(1, 1) is None
    assert engine.store.begin_restore(7, 1) is None
    assert engine.store.begin_restore(0, 5) is None
    assert engine.kept() == [12]
    assert depths(engine, prompt(words(1, 12), words(2, 5), head=False)) == [12]


# S5: what is kept


def wanted(engine: Engine, request: Prompt, depth: int = 0) -> list[int]:
    return [b.end for b in engine.store.wanted(request.tenant, request.ids, request.boundaries, depth)]


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
    engine.store.flush()
    again = prompt(HEAD, *(words(10 + t, 5) for t in range(14)))
    assert len(wanted(engine, again)) == 2 + 4


def test_a_prompt_repeated_to_its_last_token_keeps_the_boundary_before():
    engine = Engine(4)
    request = prompt(words(1, 20), words(2, 20), tail=(), head=False)
    assert depths(engine, request, request, request) == [0, 0, 20]


# Slots: K-RT6, K-RT8, K-SM


def test_one_shots_do_not_push_out_a_long_session():
    """K-RT6: two slots, one session, then twenty small prompts."""
    engine = Engine(2)
    session = prompt(words(1, 200), words(2, 2800))
    engine.play(session)
    for who in range(20):
        engine.play(one_shot(100 + who, 30))
    assert engine.play(prompt(words(1, 200), words(2, 2800), words(3, 20))).lookup.depth == 3000
    assert engine.store.aborts["not_worth"] > 0


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


def test_no_slots_disable_the_store():
    """K-SM3."""
    engine = Engine(0)
    assert found(engine.play(chat(2))) == (0, "miss", "disabled")
    assert found(engine.play(chat(2))) == (0, "miss", "disabled")
    assert engine.pool.used_count == engine.store.snapshot_bytes == engine.store.index.node_count == 0
    assert engine.store.flush().removed == []
    with pytest.raises(ValueError, match="-1"):
        SnapshotStore(-1, BlockPool(4, 4), 100)


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
    assert not engine.store.make_room(engine.pool.free_count + 1)
    engine.compute(reader, 20)
    engine.finish(reader)
    engine.check()
    assert engine.play(one_shot(2)).committed == [12]


def test_out_of_memory_drops_everything_at_once():
    """S6-5: also what is pinned; a reader keeps what it has, and nobody finds it any more."""
    engine = Engine(4)
    engine.play(chat(1))
    engine.store.pin(engine.slots_at(30)[0])
    reader = engine.start(chat(3), hold=True)
    engine.store.drop_all("oom")
    engine.check()
    assert engine.kept() == []
    assert engine.store.slot_states()["restoring"] == 1
    engine.compute(reader, 60)
    engine.finish(reader)
    assert engine.store.slot_states()["free"] == 4
    assert engine.store.evictions["oom"] == 2
    assert engine.pool.used_count == 0


def test_only_what_follows_the_restored_position_is_computed():
    """S6-1: same head, other question; the blocks of the head are the same memory."""
    engine = Engine(4)
    engine.play(prompt(words(1, 32), words(2, 10)))
    run = engine.start(prompt(words(1, 32), words(3, 10)))
    assert run.computed == 32
    head = list(run.blocks)
    engine.compute(run, 43)
    assert run.blocks[:8] == head
    engine.finish(run)


def test_snapshots_along_a_conversation_cost_it_once():
    engine = Engine(16)
    for turns in range(1, 8):
        engine.play(chat(turns))
    tokens = 30 + 7 * 20
    assert len(engine.kept()) == 8
    # One block more for each snapshot that ends inside one and was continued.
    assert tokens / 4 <= engine.store.held_count <= tokens / 4 + 8


# The operator


def test_evicting_leaves_what_is_busy_or_pinned():
    engine = Engine(4)
    for who in (1, 2, 3):
        engine.play(one_shot(who))
    engine.store.pin(1)
    reader = engine.start(prompt(words(1, 12), words(5, 5), head=False), hold=True)
    planned = engine.store.evict([0, 1, 2, 2], dry_run=True)
    assert (planned.removed, planned.busy, planned.freed_bytes, planned.dry_run) == ([2], [0, 1], 300, True)
    assert engine.kept() == [12, 12, 12]
    done = engine.store.evict([0, 1, 2])
    assert (done.removed, done.busy, done.freed_bytes, done.dry_run) == ([2], [0, 1], 300, False)
    engine.finish(reader)
    assert engine.kept() == [12, 12]
    assert engine.store.evictions["operator"] == 1


def test_evicting_an_unknown_slot_removes_nothing():
    engine = Engine(4)
    engine.play(one_shot(1))
    for slot in (1, 4, -1):
        with pytest.raises(UnknownSlot, match=f"slot {slot} holds no snapshot"):
            engine.store.evict([0, slot])
        for act in (engine.store.pin, engine.store.unpin, engine.store.slot_info):
            with pytest.raises(UnknownSlot):
                act(slot)
    assert engine.kept() == [12]


def test_flush_says_what_went_and_what_goes_when_released():
    """K-LO9: later requests find nothing at once; a pinned snapshot stays."""
    engine = Engine(4)
    for who in (1, 2, 3):
        engine.play(one_shot(who))
    engine.store.pin(1)
    again = prompt(words(1, 12), words(5, 5), head=False)
    reader = engine.start(again, hold=True)
    assert engine.store.flush(dry_run=True).removed == [2]
    removed = engine.store.flush()
    assert (removed.removed, removed.busy, removed.freed_bytes) == ([2], [0, 1], 300)
    assert engine.store.flush().busy == [1]
    assert engine.store.lookup("", again.ids, again.boundaries).reason == "flushed"
    engine.check()
    assert engine.store.slot_states()["ready"] == engine.store.slot_states()["restoring"] == 1
    engine.finish(reader)
    assert engine.store.slot_states()["ready"] == 1
    assert engine.play(prompt(words(2, 12), words(5, 5), head=False)).lookup.depth == 12


def test_a_pinned_snapshot_outlives_any_pressure():
    engine = Engine(1)
    engine.play(one_shot(1))
    engine.store.pin(0)
    engine.clock.now += 1_000_000
    assert engine.play(chat(3)).committed == []
    assert not engine.store.make_room(engine.pool.total_count)
    engine.store.unpin(0)
    assert engine.play(chat(3)).committed != []


def test_a_slot_tells_what_it_holds():
    engine = Engine(4)
    engine.play(prompt(words(1, 32), words(2, 10), tenant="t"))
    engine.play(prompt(words(1, 32), words(2, 10), words(3, 3), tenant="t"))
    head, middle = engine.slots_at(32, 42)
    engine.clock.now += 5
    info = engine.store.slot_info(middle)
    assert (info.state, info.generation, info.tenant, info.kind) == ("ready", 1, "t", "message")
    assert (info.tokens, info.messages, info.blocks, info.parent_slot, info.children) == (42, 2, 11, head, 1)
    assert (info.total_bytes, info.own_bytes) == (1100, 100)
    assert (info.hits, info.busy, info.pinned) == (1, 0, False)
    assert (info.created_age_seconds, info.used_age_seconds) == (6.0, 5.0)
    assert len(info.digest) == 8
    assert engine.store.slot_info(head).children == 1


def test_a_reserved_slot_is_listed_without_a_snapshot():
    engine = Engine(4)
    reservation = engine.store.reserve()
    assert engine.store.slot_info(reservation.slot).state == "reserved"
    assert engine.store.slot_info(reservation.slot).tokens == 0


def test_listing_pages_through_the_slots_in_use():
    engine = Engine(8)
    for who in range(5):
        engine.play(one_shot(10 + who))
    engine.store.evict([1])
    page, cursor, total = engine.store.list_slots(0, 2)
    assert ([info.slot for info in page], cursor, total) == ([0, 2], 3, 4)
    page, cursor, _ = engine.store.list_slots(cursor, 2)
    assert ([info.slot for info in page], cursor) == ([3, 4], None)
    assert engine.store.list_slots(99, 0)[0] == []


def test_the_tree_shows_what_extends_what():
    engine = Engine(8)
    engine.play(chat(1))
    engine.play(chat(3))
    engine.play(prompt(HEAD, words(99, 9)))
    engine.play(one_shot(70))
    head, forked, end = engine.slots_at(30, 39, 90)
    (between,) = engine.slots_at(50)
    assert [(node.tokens, node.parent_slot, node.level) for node in engine.store.tree()] == [
        (12, None, 0),
        (30, None, 0),
        (39, head, 1),
        (50, head, 1),
        (90, between, 1),
    ]
    engine.store.pin(forked)
    engine.store.begin_restore(end, engine.store.slots[end].generation)
    by_slot = {node.slot: node for node in engine.store.tree()}
    assert [(by_slot[slot].pinned, by_slot[slot].busy) for slot in (forked, end)] == [(True, 0), (False, 1)]


def test_a_tree_deeper_than_nested_json_can_be():
    engine = Engine(400, 4096)
    for turns in range(1, 301):
        engine.play(prompt(*([[1, 2]] * turns)))
    nodes = engine.store.tree()
    assert [node.tokens for node in nodes] == list(range(2, 602, 2))
    assert {node.level for node in nodes} == {0}


def test_every_cause_is_counted_from_the_start():
    store = Engine(1).store
    assert set(store.stale_drops) == {"tokens", "generation", "length", "fingerprint", "checksum", "verify"}
    assert set(store.evictions) == {"slots", "blocks", "operator", "flush", "stale", "oom"}
    assert not any([*store.stale_drops.values(), *store.evictions.values(), *store.aborts.values()])
    assert set(store.slot_states()) == {"free", "reserved", "writing", "ready", "restoring", "evicting"}


def test_what_is_remembered_without_state_is_bounded():
    engine = Engine(2, ghost_bytes=20_000)
    for who in range(100):
        engine.play(one_shot(10 + who, 50))
    assert engine.store.index.ghost_bytes <= 20_000
    assert engine.store.index.node_count < 40


# The checker


def broken(engine: Engine, fault: str) -> None:
    store = engine.store
    first, second = store.slots.snapshots()[:2]
    match fault:
        case "two entries for one slot":
            second.node.slot, second.node.generation = first.slot, 1
        case "older generation":
            store.slots[first.slot].generation += 1
        case "entry of a free slot":
            store.slots.begin_evict(first.slot)
            store.slots.finish_evict(first.slot)
        case "longer key":
            first.tokens -= 1
        case "too few blocks":
            first.blocks = first.blocks[:-1]
        case "ids of another length":
            first.node.ids += bytes(4)
        case "a free block":
            engine.pool.release(first.blocks)
        case "a lost slot":
            store.slots._free.pop()
        case "a reader too many":
            store.slots[first.slot].readers += 1
        case "bytes not counted":
            store.held_count += 1
        case "a reference too many":
            engine.pool.share(first.blocks)
        case "ghosts not counted":
            store.index.ghost_bytes += 1


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        ("two entries for one slot", 1),
        ("older generation", 1),
        ("entry of a free slot", 3),
        ("longer key", 2),
        ("too few blocks", 2),
        ("ids of another length", 2),
        ("a free block", 3),
        ("a lost slot", 4),
        ("a reader too many", 6),
        ("bytes not counted", 10),
        ("a reference too many", 10),
        ("ghosts not counted", 10),
    ],
)
def test_the_checker_names_the_invariant_that_does_not_hold(fault, number):
    engine = Engine(3)
    engine.play(one_shot(1))
    engine.play(one_shot(2))
    broken(engine, fault)
    with pytest.raises(InvariantViolation, match=f"invariant {number}: ") as caught:
        engine.store.check_invariants([])
    assert caught.value.number == number


# Divisible states


def test_a_boundary_that_a_deeper_snapshot_passes_is_found_where_states_are_divisible():
    engine = Engine(4, divisible=True)
    other = prompt(HEAD, words(10, 20), words(50, 20))
    assert depths(engine, chat(3), other) == [0, 50]
    assert found(engine.play(chat(4))) == (90, "hit", "none")
    assert depths(Engine(4), chat(3), other) == [0, 30], "a recurrent state is not divisible"


def test_a_part_of_a_snapshot_survives_the_snapshot():
    engine = Engine(4, divisible=True)
    engine.play(chat(3))
    engine.play(prompt(HEAD, words(10, 20), words(50, 20)))
    engine.store.evict(engine.slots_at(90))
    engine.check()
    assert depths(engine, prompt(HEAD, words(10, 20), words(60, 20))) == [50]


def test_looking_only_divides_nothing():
    engine = Engine(4, divisible=True)
    engine.play(chat(3))
    kept, other = engine.kept(), prompt(HEAD, words(10, 20), words(50, 20))
    assert engine.store.lookup("", other.ids, other.boundaries, peek=True).depth == 30
    assert engine.kept() == kept


def test_dividing_needs_a_slot_and_never_takes_that_of_the_snapshot_it_divides():
    engine = Engine(1, divisible=True)
    engine.play(prompt(words(1, 50), words(2, 20), head=False))
    assert depths(engine, prompt(words(1, 50), words(3, 20), head=False)) == [0]
    engine.check()
