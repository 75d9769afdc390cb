"""What a lookup finds and says, and that a hit consumes nothing. Every turn checks the states restored and kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshot_rig import HEAD, SYSTEM, Engine, chat, depths, found, one_shot, prompt, words

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
    lookup = engine.finding.lookup(
        "", other.ids, tuple(replace(b, messages=b.messages - 1) for b in other.boundaries)
    )
    assert (lookup.diverged_token, lookup.diverged_message) == (30, None)


@pytest.mark.parametrize(("verb", "reason"), [("evict", "evicted"), ("flush", "flushed"), ("oom", "evicted")])
def test_what_was_kept_once_says_how_it_went(verb, reason):
    engine = Engine(4)
    engine.play(chat(1))
    match verb:
        case "evict":
            engine.clearing.evict(engine.slots_at(50))
        case "flush":
            engine.clearing.flush()
        case "oom":
            engine.clearing.drop_all("oom")
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
    assert engine.finding.lookup("", request.ids, request.boundaries, peek=True).reason == "stale"
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
    assert engine.finding.begin_restore(0, 1) is None
    assert engine.pool.used_count == 0
    assert engine.store.stale_drops["length"] == 1


def test_restoring_what_is_not_the_prompts_own_takes_nothing_and_costs_it_nothing():
    """S1-3: somebody else's snapshot, and one at another depth of this very conversation."""
    engine = Engine(3)
    engine.play(one_shot(1))
    request = prompt(words(1, 12), words(2, 5), head=False)
    engine.play(request)
    other = one_shot(3)
    for slot, ids, tokens in ((0, request.ids, 17), (1, request.ids, 12), (0, other.ids, 12), (0, other.ids, 1)):
        assert engine.finding.begin_restore(slot, 1, token_ids=ids, tokens=tokens) is None
    assert engine.finding.begin_restore(0, 1, token_ids=request.ids, tokens=12) is not None
    engine.finding.end_restore(0)
    assert sum(engine.store.stale_drops.values()) == 0
    assert engine.kept() == [12, 17]


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


# S3, K-RC2: keys and lengths


def test_twenty_turns_each_restore_the_turn_before():
    """S3-2, S3-10: the restored length grows with every turn and only the new messages are computed."""
    engine = Engine(64)
    assert depths(engine, *(chat(2 * turn + 1) for turn in range(20))) == [0, *(50 + 40 * t for t in range(19))]
    assert sum(engine.store.evictions.values()) == 0


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


@pytest.mark.parametrize("stored", [80, 300, 3000])
def test_no_share_of_a_stored_conversation_is_too_small_to_start_from(stored: int):
    """S4-a and S4-b: a fifth, a tenth and a hundredth of it are had in common, and it stays as it is."""
    engine = Engine(4)
    long, branch = prompt(HEAD, words(1, stored)), prompt(HEAD, words(2, 25))
    engine.play(long)
    assert found(engine.play(branch)) == (len(HEAD), "hit", "none")
    assert found(engine.play(prompt(HEAD, words(1, stored), words(3, 5)))) == (len(HEAD) + stored, "hit", "none")


def test_a_restore_that_fails_leaves_the_conversation_it_failed_on_intact():
    """S4-c, S4-h, K-RT5: no match takes nothing, and later requests are right."""
    engine = Engine(2)
    engine.play(one_shot(1))
    assert engine.finding.begin_restore(1, 1) is None
    assert engine.finding.begin_restore(7, 1) is None
    assert engine.finding.begin_restore(0, 5) is None
    assert engine.kept() == [12]
    assert depths(engine, prompt(words(1, 12), words(2, 5), head=False)) == [12]


# Slots: K-RT6, K-RT8, K-SM


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
    engine.clearing.evict(engine.slots_at(90))
    engine.check()
    assert depths(engine, prompt(HEAD, words(10, 20), words(60, 20))) == [50]


def test_looking_only_divides_nothing():
    engine = Engine(4, divisible=True)
    engine.play(chat(3))
    kept, other = engine.kept(), prompt(HEAD, words(10, 20), words(50, 20))
    assert engine.finding.lookup("", other.ids, other.boundaries, peek=True).depth == 30
    assert engine.kept() == kept


def test_only_as_much_of_a_divisible_snapshot_goes_as_room_is_needed():
    engine = Engine(4, blocks=40, divisible=True)
    engine.play(chat(5))
    assert engine.kept() == [30, 130]
    assert engine.clearing.make_room(engine.pool.free_count + 6)
    engine.check()
    assert (engine.kept(), engine.pool.free_count) == ([30, 108], 13)
    assert found(engine.play(chat(6))) == (108, "partial", "evicted")
    assert engine.kept() == [30, 130, 150], "what holds all of it has taken the place of the part"
    assert engine.store.evictions["blocks"] == 1
    undivided = Engine(4, blocks=40)
    undivided.play(chat(5))
    assert undivided.clearing.make_room(undivided.pool.free_count + 6)
    assert undivided.kept() == [30]


def test_what_is_cut_out_takes_the_place_of_what_was_passed_and_not_of_the_newest():
    engine = Engine(2, divisible=True)
    base, longer = [HEAD, words(10, 300)], [HEAD, words(10, 300), words(11, 40)]
    engine.play(prompt(*base, head=False))
    assert depths(engine, prompt(*longer, head=False)) == [330]
    assert engine.kept() == [330, 370]
    run = engine.start(prompt(HEAD, words(50, 12), head=False))
    assert (run.lookup.depth, engine.kept()) == (30, [30, 370])
    engine.finish(run)


def test_dividing_needs_a_slot_and_never_takes_that_of_the_snapshot_it_divides():
    engine = Engine(1, divisible=True)
    engine.play(prompt(words(1, 50), words(2, 20), head=False))
    assert depths(engine, prompt(words(1, 50), words(3, 20), head=False)) == [0]
    engine.check()
