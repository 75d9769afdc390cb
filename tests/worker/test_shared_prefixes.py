"""Requests that share a beginning: one computes it, the others follow."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig, one, text
from snapshot_rig import Prompt, prompt

from protocol.messages import Finished
from worker.io import GatewayLost

HEAD = text(1, 20)


def forks(*tails: int, head: int = 20, tail: int = 12) -> list[Prompt]:
    """Prompts that share a head and go on each in its own way."""
    return [prompt(text(1, head), text(start, tail), head=False) for start in tails]


def test_a_shared_prefix_is_computed_once():
    rig = Rig()
    requests = [rig.generate(request) for request in forks(2, 3, 4)]
    rig.run()
    for request in requests:
        rig.assert_answered(request)
    assert [rig.accepted(request).depth for request in requests] == [0, 20, 20]
    computed = sum(end - start for _, start, end in rig.runner.prefilled)
    assert computed == 20 + 3 * 13


def test_followers_let_those_behind_them_pass():
    rig = Rig()
    leader, follower = (rig.generate(request) for request in forks(2, 3))
    stranger = rig.generate(one(9, 8))
    rig.turn()
    assert rig.accepted(leader)
    assert not rig.events(follower)
    assert rig.accepted(stranger)
    rig.run()


@pytest.mark.parametrize("options", [{"cache": False}, {}])
def test_nothing_is_shared_with_other_tenants_or_uncached_requests(options):
    rig = Rig()
    tenant = "" if options else "other"
    leader = rig.generate(prompt(HEAD, text(2, 12)), **options)
    other = rig.generate(prompt(HEAD, text(3, 12), tenant=tenant))
    rig.turn()
    assert rig.accepted(leader)
    assert rig.accepted(other)
    rig.run()
    assert rig.accepted(other).depth == 0


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("how", ["cancelled", "failed", "lost"])
def test_a_follower_goes_on_from_what_its_leader_had_finished(how, turns):
    rig = Rig()
    shared = [text(1, 10), text(2, 10), text(3, 10)]
    leader = rig.generate(prompt(*shared, text(4, 20), head=False), sender=b"leader")
    follower = rig.generate(prompt(*shared, text(5, 6), head=False))
    rig.turns(turns)
    if how == "cancelled":
        rig.cancel(leader, sender=b"leader")
    elif how == "lost":
        rig.sockets.inbox.put(GatewayLost(b"leader"))
    else:
        rig.runner.faults.append(("prefill", RuntimeError("a fault")))
    rig.run()
    rig.assert_answered(follower)
    done = 8 * turns
    assert rig.accepted(follower).depth == max(end for end in (0, 10, 20, 30) if end <= done)
    assert not rig.of(leader, Finished)


def test_a_follower_follows_the_next_leader_when_its_own_ends():
    rig = Rig()
    shared = [text(1, 10), text(2, 30)]
    requests = [rig.generate(prompt(*shared, text(start, 10), head=False)) for start in (3, 4, 5)]
    rig.turns(2)
    rig.cancel(requests[0])
    rig.run()
    assert [rig.accepted(request).depth for request in requests[1:]] == [10, 40]
    for request in requests[1:]:
        rig.assert_answered(request)


def test_followers_of_followers():
    rig = Rig(max_running=8)
    a, b, c = text(1, 12), text(2, 12), text(3, 12)
    chain = [
        rig.generate(prompt(a, text(7, 5), head=False)),
        rig.generate(prompt(a, b, text(8, 5), head=False)),
        rig.generate(prompt(a, b, c, text(9, 5), head=False)),
        rig.generate(prompt(a, b, c, head=False)),
    ]
    rig.run()
    assert [rig.accepted(request).depth for request in chain] == [0, 12, 24, 36]
    for request in chain:
        rig.assert_answered(request)


def test_a_leader_that_cannot_commit_holds_nobody_up():
    rig = Rig(slots=1)
    rig.serve(one(9, 30), max_tokens=1)
    rig.ask("pin", slot=0)
    requests = [rig.generate(request) for request in forks(2, 3)]
    rig.run()
    for request in requests:
        rig.assert_answered(request)
    assert rig.accepted(requests[1]).depth == 0


def test_a_leader_that_fails_at_its_last_pass():
    rig = Rig()
    leader, follower = (rig.generate(request) for request in forks(2, 3, head=16, tail=4))
    rig.runner.faults.append(("head", RuntimeError("a fault")))
    rig.run()
    assert rig.end(leader).code == "internal"
    rig.assert_answered(follower)
    assert rig.accepted(follower).depth == 16
