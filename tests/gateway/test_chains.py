"""A chain that goes on from one that is remembered has the digests of one computed from the start."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import chains
from gateway.boundaries import Cut
from gateway.chains import Chains
from gateway.recent import Recent
from protocol.digest import chain_digests, root_digest

messages = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8)


@given(st.lists(st.tuples(messages, st.integers(0, 8), st.sampled_from("ab")), min_size=1, max_size=8))
def test_digests_are_those_of_the_whole_chain(turns):
    remembering, said = Chains(), []
    for added, kept, model in turns:
        said = said[:kept] + added
        ids = array("i", [token for message in said for token in message])
        ends = [sum(map(len, said[: count + 1])) for count in range(len(said))]
        root = root_digest(model)
        found = remembering.boundaries(root, ids, [Cut(end, "message", at) for at, end in enumerate(ends)])
        assert [(each.end, each.digest) for each in found] == list(
            zip(ends, chain_digests(root, ids, ends), strict=True)
        )


def test_the_same_ids_cut_elsewhere_are_another_chain():
    remembering, ids, root = Chains(), array("i", range(1000)), b"r" * 16
    for ends in ([100, 500, 900], [200, 500, 900], [500, 900, 1000]):
        found = remembering.boundaries(root, ids, [Cut(end, "message", 0) for end in ends])
        assert [each.digest for each in found] == chain_digests(root, ids, ends)


def test_the_same_digests_may_be_those_of_other_messages():
    remembering, ids, root = Chains(), array("i", range(100)), b"r" * 16
    for first in (Cut(50, "message", 1), Cut(50, "head", 0), Cut(50, "message", 1)):
        found = remembering.boundaries(root, ids, [first, Cut(100, "message", 2)])
        assert (found[0].kind, found[0].messages) == (first.kind, first.messages)


def test_only_what_is_new_is_hashed(monkeypatch: pytest.MonkeyPatch):
    hashed: list[int] = []

    def counted(parent, ids, ends):
        hashed.append(ends[-1])
        return chain_digests(parent, ids, ends)

    monkeypatch.setattr(chains, "chain_digests", counted)
    remembering, ids = Chains(), array("i", range(1000))
    for ends in ([100, 500, 900], [100, 500, 900, 1000], [100, 500, 800], [100, 800]):
        remembering.boundaries(b"r" * 16, ids, [Cut(end, "message", 0) for end in ends])
    assert hashed == [900, 100, 300, 700]


def test_the_oldest_go_first_and_a_key_leads_to_the_last_one():
    recent: Recent[str, list[int]] = Recent(100)
    first, second, third = [1], [2], [3]
    recent.keep(first, ["a", "b"], 50)
    recent.keep(second, ["b", "c"], 50)
    assert [recent.get(key) for key in "abc"] == [first, second, second]
    recent.keep(third, ["d"], 50)
    assert [recent.get(key) for key in "abcd"] == [None, second, second, third]
    assert (len(recent), recent.held_bytes) == (2, 100)


def test_what_is_larger_than_all_the_room_pushes_nothing_out():
    recent: Recent[str, list[int]] = Recent(100)
    first = [1]
    recent.keep(first, ["a"], 60)
    recent.keep([2], ["a", "b"], 101)
    assert (len(recent), recent.held_bytes, recent.get("a"), recent.get("b")) == (1, 60, first, None)
    recent.keep([3], ["b"], 100)
    assert (len(recent), recent.held_bytes, recent.get("a")) == (1, 100, None)
