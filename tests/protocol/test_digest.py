"""Boundary digests: pinned values, and what they tell apart."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.digest import DIGEST_BYTES, chain_digests, link_digest, root_digest

ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=64).map(lambda values: array("i", values))


def test_digests_are_the_same_on_every_machine():
    root = root_digest("model", "tenant")
    assert root.hex() == "7e7646ff8ae47ccb13dc3551716b2a11"
    assert [digest.hex() for digest in chain_digests(root, array("i", [1, 2, 3]), [2, 3])] == [
        "e9288660c59c750069b7bc679ade8702",
        "fa78d1ea119c32c5e1854ac23530bfc8",
    ]


def test_the_root_binds_model_and_tenant_apart():
    roots = {root_digest("ab", ""), root_digest("a", "b"), root_digest("", "ab"), root_digest("ab", "c")}
    assert len(roots) == 4


@given(ids, st.data())
def test_a_chain_is_its_links_and_does_not_see_what_follows(tokens, data):
    ends = sorted(data.draw(st.sets(st.integers(1, len(tokens)), min_size=1)))
    root = root_digest("m")
    chain = chain_digests(root, tokens, ends)
    assert all(len(digest) == DIGEST_BYTES for digest in chain)
    assert chain == chain_digests(root, tokens + array("i", [7]), ends)
    parent, start = root, 0
    for end, digest in zip(ends, chain, strict=True):
        parent, start = link_digest(parent, tokens[start:end]), end
        assert digest == parent


@given(ids, st.data())
def test_one_changed_token_changes_the_digest_and_all_after_it(tokens, data):
    ends = sorted(data.draw(st.sets(st.integers(1, len(tokens)), min_size=1)))
    place = data.draw(st.integers(0, len(tokens) - 1))
    other = array("i", tokens)
    other[place] ^= 1
    root = root_digest("m")
    for end, one, two in zip(
        ends, chain_digests(root, tokens, ends), chain_digests(root, other, ends), strict=True
    ):
        assert (one == two) == (end <= place)


def test_other_boundary_positions_give_another_name_to_the_same_tokens():
    tokens = array("i", [1, 2, 3, 4])
    root = root_digest("m")
    assert chain_digests(root, tokens, [2, 4])[-1] != chain_digests(root, tokens, [3, 4])[-1]


@pytest.mark.parametrize("ends", [[0], [2, 2], [3, 2], [5]])
def test_positions_that_do_not_rise_within_the_tokens_are_refused(ends):
    with pytest.raises(ValueError, match="does not rise"):
        chain_digests(root_digest("m"), array("i", [1, 2, 3, 4]), ends)


def test_ids_of_another_width_are_refused():
    with pytest.raises(ValueError, match="int32"):
        link_digest(root_digest("m"), array("q", [1]))
