from hypothesis import given
from hypothesis import strategies as st

from worker.eviction import SURPLUS, Candidate, choose_for_blocks, choose_for_slot, recompute_cost, value_of
from worker.returns import PAUSE_SECONDS


def candidate(slot, end=100, **fields):
    values = {
        "parent": None,
        "start": 0,
        "interior": False,
        "passed": False,
        "share": 0.5,
        "unproven": False,
        "idle_seconds": 0.0,
        "last_used": slot,
        "blocks": (),
        "pause": PAUSE_SECONDS,
        "fixed": False,
    }
    return Candidate(slot=slot, end=end, **(values | fields))


def blocks_of(*candidates, others=()):
    """Reference counts as these snapshots and other holders would make them."""
    counts = [0] * 100
    for blocks in [*(c.blocks for c in candidates), others]:
        for block in blocks:
            counts[block] += 1
    return counts


# Slots


def test_what_was_passed_goes_before_a_leaf_that_may_come_back():
    leaf = candidate(0, end=1000, idle_seconds=60)
    passed = candidate(1, end=9000, interior=True, passed=True, share=0.001)
    assert choose_for_slot([leaf, passed]) == 1
    assert choose_for_slot([leaf._replace(end=10, idle_seconds=9999), passed]) == 0


def test_what_an_end_without_snapshot_is_computed_from_is_worth_its_asks_too():
    begun, other = candidate(0, share=0.01), candidate(1, share=0.4)
    assert choose_for_slot([begun, other]) == 0
    assert choose_for_slot([begun._replace(end_share=0.9), other]) == 1
    assert choose_for_slot([begun._replace(end_share=0.9, end_idle_seconds=9999), other]) == 0


def test_what_was_passed_stays_before_less_where_conversations_go_back():
    leaf = candidate(0, end=9000, share=0.9, idle_seconds=9999)
    passed = candidate(1, end=9000, interior=True, passed=True, share=0.05)
    assert choose_for_slot([leaf, passed]) == 0
    assert choose_for_slot([leaf._replace(idle_seconds=600), passed]) == 1
    assert choose_for_slot([leaf, passed], newcomer=5000, extends=True, unproven=True) == 1, (
        "an answer is less yet"
    )


def test_what_is_asked_for_for_certain_never_loses_all_its_worth():
    certain, likely = candidate(0, share=1.0, idle_seconds=1e6), candidate(1, share=0.9, idle_seconds=1e6)
    assert choose_for_slot([certain, likely]) == 1
    assert choose_for_slot([certain, candidate(1, share=0.0)]) == 1


def test_what_was_never_used_since_the_start_is_worth_nothing_however_certain():
    ever = candidate(0, share=1.0, idle_seconds=float("inf"))
    assert value_of(ever) == 0.0
    assert value_of(ever._replace(idle_seconds=1e30)) > 0.0


def test_what_comes_back_more_often_stays():
    rarely, often = candidate(0, share=0.1), candidate(1, end=90, share=0.9)
    assert choose_for_slot([rarely, often]) == 0
    assert choose_for_slot([rarely._replace(end=2000), often]) == 1, "much is worth keeping for a small chance"


def test_a_head_or_branch_point_is_weighed_like_leaves():
    leaf, branch = candidate(0, end=3000, idle_seconds=60), candidate(1, end=3000, interior=True, share=0.9)
    assert choose_for_slot([leaf, branch]) == 0
    assert choose_for_slot([leaf, branch._replace(idle_seconds=6000)]) == 1


def test_idle_times_count_in_pauses_of_each_conversation():
    old, new = candidate(0, end=4000, idle_seconds=100), candidate(1, end=2000, idle_seconds=1)
    assert choose_for_slot([old, new]) == 1
    assert choose_for_slot([old._replace(pause=10), new._replace(pause=10)]) == 0
    assert choose_for_slot([old, new._replace(pause=10)]) == 1
    assert choose_for_slot([old, new._replace(end=4000, idle_seconds=50, pause=5)]) == 1, "its agent would be back"


def test_an_absorbed_answer_that_was_never_hit_goes_before_any_leaf_or_anchor():
    absorbed = candidate(0, end=9000, unproven=True)
    stale, anchor = candidate(1, end=10, idle_seconds=9999), candidate(2, end=10, interior=True)
    assert choose_for_slot([absorbed, stale, anchor]) == 0
    assert choose_for_slot([absorbed._replace(unproven=False), stale, anchor]) == 1


def test_an_absorbed_answer_goes_before_what_was_passed_but_for_another_one():
    absorbed, passed = (
        candidate(0, start=900, end=930, unproven=True),
        candidate(1, end=900, interior=True, passed=True),
    )
    forgotten = passed._replace(idle_seconds=1e6)
    assert choose_for_slot([absorbed, passed]) == choose_for_slot([absorbed, forgotten]) == 0
    assert choose_for_slot([absorbed, passed], unproven=True) == 0
    assert choose_for_slot([absorbed, forgotten], unproven=True) == 1


def test_an_absorbed_answer_takes_the_place_of_nothing_that_was_asked_for():
    leaf, anchor = candidate(0, end=10, idle_seconds=9999), candidate(1, end=10, interior=True)
    assert choose_for_slot([leaf, anchor], newcomer=5000, extends=True, unproven=True) is None
    other = candidate(2, end=9000, unproven=True)
    assert choose_for_slot([leaf, anchor, other], newcomer=5, extends=True, unproven=True) == 2


def test_the_passed_snapshot_that_saves_least_goes_first():
    wide = candidate(0, start=0, end=4000, interior=True, passed=True)
    narrow = candidate(1, start=4000, end=4100, interior=True, passed=True)
    assert choose_for_slot([wide, narrow]) == 1


def test_of_equal_leaves_the_one_not_used_longest_goes():
    assert choose_for_slot([candidate(0, last_used=5), candidate(1, last_used=4)]) == 1
    assert choose_for_slot([candidate(0, idle_seconds=10), candidate(1, idle_seconds=9)]) == 0


def test_a_one_shot_goes_before_a_session_that_came_back():
    session = candidate(0, share=0.9, idle_seconds=100)
    assert choose_for_slot([session, candidate(1)]) == 1


def test_what_nobody_asks_for_goes_at_last_however_long_it_is():
    session = candidate(0, end=30_000, share=0.9, idle_seconds=7 * 24 * 3600)
    assert choose_for_slot([session, candidate(1, end=300)]) == 0


def test_fixed_slots_are_never_chosen():
    assert choose_for_slot([candidate(0, fixed=True)]) is None
    assert choose_for_slot([]) is None


def test_a_small_newcomer_does_not_push_out_a_long_session():
    session = candidate(0, end=30_000)
    assert choose_for_slot([session], recompute_cost(0, 300)) is None
    assert choose_for_slot([session], recompute_cost(0, 8_000)) == 0


def test_nor_where_others_go_on_after_seconds_and_it_for_minutes():
    session = candidate(0, end=30_000, idle_seconds=300.0, pause=1.0)
    assert choose_for_slot([session], recompute_cost(0, 300)) is None


def test_a_newcomer_that_extends_another_must_be_worth_what_it_pushes_out():
    session = candidate(0, end=30_000)
    assert choose_for_slot([session], recompute_cost(60_000, 61_000), extends=True) is None
    assert choose_for_slot([session], recompute_cost(30_000, 61_000), extends=True) == 0


def test_a_newcomer_takes_the_place_of_an_equal_one_that_came_back():
    """Or a new conversation would never begin to be kept beside old ones."""
    assert choose_for_slot([candidate(0, end=3000, share=0.9)], recompute_cost(0, 3000)) == 0


def test_a_small_newcomer_takes_a_slot_that_was_passed():
    passed = candidate(0, end=30_000, interior=True, passed=True)
    assert choose_for_slot([passed], recompute_cost(0, 300)) == 0
    assert choose_for_slot([passed, candidate(1, end=30_000)], recompute_cost(0, 300)) == 0


# Blocks


def test_as_many_leaves_go_as_are_needed():
    one, two, three = (candidate(i, blocks=(10 * i + 1, 10 * i + 2)) for i in range(3))
    assert choose_for_blocks([one, two, three], 3, blocks_of(one, two, three)) == [0, 1]


def test_nothing_goes_where_all_together_would_not_do():
    one, two = candidate(0, blocks=(1, 2)), candidate(1, blocks=(3, 4), fixed=True)
    assert choose_for_blocks([one, two], 3, blocks_of(one, two)) is None


def test_only_blocks_that_nobody_else_holds_count():
    shared, own = candidate(0, blocks=(1, 2)), candidate(1, blocks=(3,), share=0.9)
    assert choose_for_blocks([shared, own], 1, blocks_of(shared, own, others=(1, 2))) == [1]
    assert choose_for_blocks([shared], 1, blocks_of(shared, others=(1, 2))) is None


def test_a_leaf_goes_before_what_it_extends():
    head = candidate(0, end=8, blocks=(1, 2), interior=True)
    leaf = candidate(1, start=8, end=16, parent=0, blocks=(1, 2, 3, 4), share=0.9)
    assert choose_for_blocks([head, leaf], 2, blocks_of(head, leaf)) == [1]
    assert choose_for_blocks([head, leaf], 4, blocks_of(head, leaf)) == [1, 0]


def test_an_absorbed_answer_that_was_never_hit_gives_its_blocks_first():
    absorbed = candidate(0, start=8, end=16, blocks=(1, 2, 3, 4), unproven=True)
    stale = candidate(1, end=4, blocks=(5,), idle_seconds=9999)
    assert choose_for_blocks([absorbed, stale], 1, blocks_of(absorbed, stale)) == [0]
    assert choose_for_blocks([absorbed, stale], 5, blocks_of(absorbed, stale)) == [0, 1]


def test_an_ancestor_goes_only_with_its_last_descendant():
    head = candidate(0, end=4, blocks=(1,), interior=True)
    left = candidate(1, end=8, parent=0, blocks=(1, 2))
    right = candidate(2, end=8, parent=0, blocks=(1, 3), fixed=True)
    assert choose_for_blocks([head, left, right], 1, blocks_of(head, left, right)) == [1]
    assert choose_for_blocks([head, left, right], 2, blocks_of(head, left, right)) is None


def test_who_asks_for_a_leaf_that_goes_asks_for_what_it_extends():
    base = candidate(0, end=800, blocks=(1, 2), interior=True, share=0.01)
    leaf = candidate(1, start=800, end=810, parent=0, blocks=(1, 2, 3), share=0.9)
    other = candidate(2, end=800, blocks=(4, 5), share=0.2)
    assert choose_for_blocks([base, leaf, other], 3, blocks_of(base, leaf, other)) == [1, 2]
    gone = leaf._replace(share=0.01)
    assert choose_for_blocks([base, gone, other], 3, blocks_of(base, gone, other)) == [1, 0]


def test_a_small_need_is_met_by_small_snapshots():
    session = candidate(0, end=30_000, idle_seconds=300, blocks=tuple(range(1, 60)))
    one_shots = [candidate(i, end=300, blocks=(60 + i,)) for i in range(1, 5)]
    everything = [session, *one_shots]
    assert choose_for_blocks(everything, 2, blocks_of(*everything)) == [1, 2]


def test_what_comes_free_beyond_a_need_counts_where_others_will_soon_need_it():
    """Each block of the long one is worth less, and only a small part of a large memory is more than is needed now."""
    long = candidate(0, idle_seconds=400, blocks=range(1, 7))
    short = candidate(1, idle_seconds=500, blocks=(7, 8))
    large = blocks_of(long, short)
    assert choose_for_blocks([long, short], 2, large) == [0]
    assert choose_for_blocks([long, short], 2, large[:9]) == [1]


def test_an_interior_snapshot_computed_apart_gives_its_own_blocks():
    """Two clients sent the same prompt at once: what is in use shares no memory with what it extends."""
    head = candidate(0, end=8, blocks=(1, 2), interior=True)
    leaf = candidate(1, start=8, end=16, parent=0, blocks=(3, 4, 5, 6), fixed=True)
    assert choose_for_blocks([head, leaf], 2, blocks_of(head, leaf)) == [0]


def test_a_snapshot_whose_going_frees_nothing_is_spared():
    busy = candidate(0, end=8, blocks=(1, 2))
    useful = candidate(1, end=9000, share=0.9, blocks=(3, 4))
    assert choose_for_blocks([busy, useful], 2, blocks_of(busy, useful, others=(1, 2))) == [1]


def test_a_block_held_by_two_snapshots_comes_free_with_the_second():
    one, two = candidate(0, blocks=(1, 2)), candidate(1, blocks=(1, 2))
    assert choose_for_blocks([one, two], 1, blocks_of(one, two)) == [0, 1]


def test_a_longer_prefix_costs_more_per_token():
    assert recompute_cost(0, 1000) < recompute_cost(30_000, 31_000)
    assert recompute_cost(0, 3000) == recompute_cost(0, 1000) + recompute_cost(1000, 3000)


@given(st.data())
def test_what_goes_for_blocks_is_what_loses_least_each_time(data):
    """However the search saves work: of conversations that share nothing the next to go is that with the least loss."""
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=7))
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    candidates = [
        candidate(
            slot,
            end=data.draw(st.integers(1, 5)) * 100,
            idle_seconds=data.draw(st.integers(0, 5)) * 100.0,
            blocks=range(start, start + size),
        )
        for slot, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    needed = data.draw(st.integers(1, sum(sizes)))
    refcounts = blocks_of(*candidates)
    expected, left, short = [], list(candidates), needed
    of_use = max(needed, len(refcounts) // SURPLUS)
    while short > 0:
        losses = {c: value_of(c) / min(len(c.blocks), of_use) for c in left}
        going = min(left, key=lambda c: (losses[c], c.last_used))
        left.remove(going)
        expected.append(going.slot)
        short -= len(going.blocks)
    assert choose_for_blocks(candidates, needed, refcounts) == expected
