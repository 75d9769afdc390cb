from hypothesis import given
from hypothesis import strategies as st
from snapshot_rig import prompt, weak, words

from worker.snapshot_index import NODE_BYTES, Common, SnapshotIndex

PLENTY = 1 << 20


def add(index, request, now=0.0):
    data = request.ids.tobytes()
    chain, clash = index.walk(request.tenant, data, request.boundaries)
    assert clash is None
    return index.extend(request.tenant, data, request.boundaries, chain, now)


def depth(index, request):
    chain, _ = index.walk(request.tenant, request.ids.tobytes(), request.boundaries)
    return chain[-1].end if chain else 0


def common(index, request):
    data = request.ids.tobytes()
    chain, _ = index.walk(request.tenant, data, request.boundaries)
    return index.common_prefix(request.tenant, data, chain)


def test_a_walk_ends_where_the_conversation_is_new():
    index = SnapshotIndex(PLENTY)
    add(index, prompt([1, 2], [3, 4, 5]))
    assert depth(index, prompt([1, 2], [3, 4, 5], [6])) == 5
    assert depth(index, prompt([1, 2], [3, 4, 4])) == 2
    assert depth(index, prompt([7])) == 0


def test_stray_end_markers_do_not_keep_a_conversation_from_growing():
    """S3-1 and S3-3: markers are only tokens here, whatever they stand for."""
    index = SnapshotIndex(PLENTY)
    add(index, prompt([1, 100, 2, 3], [200, 2, 3], [300]))
    assert depth(index, prompt([1, 100, 2, 3], [200, 2, 3], [300, 2, 3], [400])) == 7
    assert depth(index, prompt([1, 100, 2, 3], [201, 2, 3], [300, 2, 3], [400])) == 4


def test_equal_tokens_cut_at_other_places_are_another_conversation():
    index = SnapshotIndex(PLENTY)
    add(index, prompt([1, 2], [3, 4], [5]))
    assert depth(index, prompt([1, 2, 3], [4, 5], [6])) == 0


def test_tenants_share_nothing():
    index = SnapshotIndex(PLENTY)
    add(index, prompt([1, 2], tenant="a"))
    assert depth(index, prompt([1, 2], tenant="b")) == 0
    assert common(index, prompt([1, 2], tenant="b")) == Common(0, False, False)


def test_an_equal_digest_with_other_ids_is_a_clash():
    index = SnapshotIndex(PLENTY)
    first = prompt([1, 2], shape=lambda digest: bytes(16))
    add(index, first)
    other = prompt([3, 4], shape=lambda digest: bytes(16))
    assert index.walk("", other.ids.tobytes(), other.boundaries).clash is not None


def test_an_equal_digest_at_another_position_is_a_clash():
    index = SnapshotIndex(PLENTY)
    add(index, prompt([1, 1], shape=lambda digest: bytes(16)))
    other = prompt([1, 1, 1], shape=lambda digest: bytes(16))
    assert index.walk("", other.ids.tobytes(), other.boundaries).clash is not None


def test_a_boundary_beyond_the_tokens_ends_the_walk_without_a_clash():
    index = SnapshotIndex(PLENTY)
    long = prompt([1, 2], [3, 4])
    add(index, long)
    assert index.walk("", long.ids[:3].tobytes(), long.boundaries).clash is None


def test_using_a_conversation_uses_all_it_extends():
    index = SnapshotIndex(PLENTY)
    head = add(index, prompt([1, 2]), now=1.0)
    add(index, prompt([1, 2], [3]), now=7.0)
    assert head.used_at == 7.0


def test_ghosts_that_nothing_extends_go_first_and_the_least_used_before_others():
    index = SnapshotIndex(4 * (NODE_BYTES + 8))
    add(index, prompt([1, 2], [3, 4]))
    add(index, prompt([5, 6], [7, 8]))
    add(index, prompt([1, 2], [3, 4]))
    add(index, prompt([9, 9]))
    index.trim()
    assert depth(index, prompt([5, 6], [7, 8])) == 2
    assert depth(index, prompt([1, 2], [3, 4])) == 4
    add(index, prompt([8, 8]))
    index.trim()
    assert depth(index, prompt([5, 6], [7, 8])) == 0
    assert depth(index, prompt([1, 2], [3, 4])) == 4
    assert index.ghost_bytes <= 4 * (NODE_BYTES + 8)


def test_what_leads_to_a_snapshot_is_never_forgotten():
    index = SnapshotIndex(0)
    node = add(index, prompt([1, 2], [3, 4]))
    index.attach(node, 0, 1, node.end)
    index.trim()
    assert depth(index, prompt([1, 2], [3, 4])) == 4
    index.detach(node, "evicted")
    index.trim()
    assert index.node_count == index.ghost_bytes == 0
    assert index.roots == ()


def test_a_conversation_that_left_the_index_can_come_back():
    index = SnapshotIndex(0)
    add(index, prompt([1, 2]))
    index.trim()
    assert index.node_count == 0
    add(index, prompt([1, 2]))
    assert depth(index, prompt([1, 2])) == 2


def test_the_common_prefix_is_followed_through_boundaries_that_the_request_has_not():
    index = SnapshotIndex(PLENTY)
    add(index, prompt(words(1, 20), words(2, 20), words(3, 20)))
    whole = words(1, 20) + words(2, 20) + words(3, 20)
    assert common(index, prompt(whole[:50], tail=(7, 7))) == Common(50, True, False)
    assert common(index, prompt(whole[:50], tail=())) == Common(50, False, True)
    assert common(index, prompt(whole, tail=(7,))) == Common(60, False, False)


def test_a_prompt_that_only_goes_on_does_not_differ():
    index = SnapshotIndex(PLENTY)
    add(index, prompt(words(1, 20)))
    assert common(index, prompt(words(1, 20), words(2, 5))) == Common(20, False, False)


ids = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@given(st.lists(ids, min_size=1, max_size=12), ids, st.integers(0, 12))
def test_the_closest_of_many_siblings_is_found(siblings, wanted, forgotten):
    """Each sibling under one head ends with an id of its own length, so that none is the start of another."""
    index = SnapshotIndex(PLENTY)
    stored = [[*sibling, 100 + len(sibling)] for sibling in siblings]
    for position, sibling in enumerate(stored):
        add(index, prompt([50], sibling))
        if position == forgotten:
            common(index, prompt([50], [9, 9]))  # from here on the order of siblings is kept up
    for sibling in stored[:forgotten]:
        request = prompt([50], sibling)
        chain, _ = index.walk("", request.ids.tobytes(), request.boundaries)
        if len(chain) == 2:
            index.remove(chain[-1])
    left = [sibling for sibling in stored if sibling not in stored[:forgotten]]
    expected = max((_shared(sibling, wanted) for sibling in left), default=0)
    assert common(index, prompt([50], wanted, tail=(70,))).tokens == 1 + expected


def _shared(one, other) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(st.lists(st.lists(ids, min_size=1, max_size=3), min_size=1, max_size=10), st.integers(0, 6))
def test_accounts_agree_whatever_is_added_and_forgotten(histories, limit):
    index = SnapshotIndex(limit * (NODE_BYTES + 12))
    for history in histories:
        add(index, prompt(*history))
        index.trim()
        nodes = [node for root in index.roots for node in root.subtree() if node is not root]
        assert index.node_count == len(nodes)
        assert index.ghost_bytes == sum(index.weight(node) for node in nodes) <= limit * (NODE_BYTES + 12)


def test_weak_digests_still_tell_ids_apart():
    index = SnapshotIndex(PLENTY)
    clashes = 0
    for start in range(1, 30):
        request = prompt(words(start, 3), shape=weak)
        chain, clash = index.walk("", request.ids.tobytes(), request.boundaries)
        assert chain == []
        clashes += clash is not None
        if clash is None:
            add(index, request)
    assert clashes >= 25
