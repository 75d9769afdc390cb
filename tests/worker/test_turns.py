"""Tenants take turns, and leave one another places to wait in."""

from array import array

from hypothesis import given
from hypothesis import strategies as st
from scheduler_rig import Rig, text
from snapshot_rig import prompt

from protocol.messages import Accepted, Generate, Sampling
from worker.sequences import Request
from worker.turns import Turns

NAMES = ["a", "b", "c", "d"]


def request(name: str) -> Request:
    return Request(b"gateway", Generate("r", array("i", [1]), (), Sampling(1), tenant=name), 0.0, True)


def one(seed: int, tenant: str = ""):
    return prompt(text(seed, 20), tenant=tenant)


@given(st.lists(st.sampled_from([*NAMES, None]), max_size=60), st.integers(0, 70))
def test_whoever_waits_lets_each_other_tenant_pass_once_at_most(events, strangers):
    """None starts the next request; strangers that came and went before make the memory of turns drop some."""
    turns, waiting = Turns(), []
    for number in range(strangers):
        turns.took(request(f"s{number}"), waiting)
    passed: dict[str, list[str]] = {}  # for each that waits, who has started since
    for event in [*events, *[None] * len(events)]:
        if event is not None:
            waiting.append(request(event))
            passed.setdefault(event, [])
            continue
        if not waiting:
            continue
        order = turns.order(waiting)
        assert sorted(map(id, order)) == sorted(map(id, waiting))
        for name in NAMES:
            mine = [each for each in waiting if each.message.tenant == name]
            assert [each for each in order if each.message.tenant == name] == mine
        first = order[0]
        waiting.remove(first)
        turns.took(first, waiting)
        name = first.message.tenant
        del passed[name]
        for others in passed.values():
            assert name not in others
            others.append(name)
        if any(each.message.tenant == name for each in waiting):
            passed[name] = []


def test_one_request_waits_for_no_backlog():
    rig = Rig(max_running=1)
    many = [rig.generate(one(seed, "busy")) for seed in range(6)]
    rig.turn()
    alone = rig.generate(one(9, "quiet"))
    rig.run()
    starts = [message.request_id for _, message in rig.sockets.sent if isinstance(message, Accepted)]
    assert starts == [many[0], alone, *many[1:]]


def test_members_of_one_tenant_have_turns_of_their_own():
    rig = Rig(max_running=1)
    for number, member in enumerate(["x", "x", "x", "y"]):
        prompted = one(number, "house")
        message = Generate(
            f"r{number}", prompted.ids, prompted.boundaries, Sampling(2), tenant="house", member=member
        )
        rig.scheduler.add(b"gateway", message)
    rig.run()
    starts = [message.request_id for _, message in rig.sockets.sent if isinstance(message, Accepted)]
    assert starts == ["r0", "r3", "r1", "r2"]


def test_a_tenant_fills_no_more_places_than_it_leaves_free():
    rig = Rig(max_running=1, max_waiting=4)
    first = [rig.generate(one(seed, "busy")) for seed in range(5)]
    others = [rig.generate(one(10 + seed, "quiet")) for seed in range(2)]
    rig.run()
    assert [rig.end(each).__class__.__name__ for each in first] == ["Completed"] * 3 + ["Failed"] * 2
    assert rig.end(first[-1]).code == "queue_full"
    assert rig.end(others[0]).__class__.__name__ == "Completed"


def test_without_tenants_all_places_can_be_filled():
    rig = Rig(max_running=1, max_waiting=4)
    served = [rig.generate(one(seed)) for seed in range(5)]
    rig.run()
    assert all(rig.end(each).__class__.__name__ == "Completed" for each in served)


def test_members_are_told_nothing_of_where_they_differ():
    """Their conversations stand under one tenant, and only their digests part them."""
    rig = Rig()
    rig.serve(one(1, "house"))
    for member, start in (("x", 7), ("", 8)):
        asked = prompt([*text(1, 18), *text(start, 5)])
        message = Generate(f"by-{member}", asked.ids, asked.boundaries, Sampling(2), tenant="house", member=member)
        rig.scheduler.add(b"gateway", message)
    rig.run()
    assert (rig.accepted("by-").reason, rig.accepted("by-").diverged_token) == ("diverged", 18)
    assert (rig.accepted("by-x").reason, rig.accepted("by-x").diverged_token) == ("cold", None)
