"""What a lookup finds and says, and that a hit consumes nothing. Every turn checks the states restored and kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshot_rig import HEAD, SYSTEM, Engine, Prompt, chat, depths, found, one_shot, prompt, words

# What a lookup says
from worker.snapshot_finding import INSIDE_TOKENS


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


# Inside a message


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
