"""Who runs when, who waits for whom, and how requests end: single courses, told as such."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from scheduler_rig import Rig, answer, one, text
from snapshot_rig import Prompt, prompt

from protocol.messages import Accepted, Boundary, Completed, Failed, Finished, Generate, Progress, Sampling, Tokens
from worker.io import FromGateway, GatewayLost
from worker.snapshot_finding import Finding

HEAD = text(1, 20)


def forks(*tails: int, head: int = 20, tail: int = 12) -> list[Prompt]:
    """Prompts that share a head and go on each in its own way."""
    return [prompt(text(1, head), text(start, tail), head=False) for start in tails]


# A request from end to end


def test_the_events_of_one_request_in_order():
    rig = Rig()
    request = rig.serve(one(1, 20), max_tokens=2)
    assert [type(event) for event in rig.events(request)] == [
        Accepted,
        Progress,
        Progress,
        Tokens,
        Tokens,
        Finished,
        Completed,
    ]
    assert [event.computed for event in rig.of(request, Progress)] == [8, 16]
    end = rig.end(request)
    assert (end.prompt_tokens, end.completion_tokens, end.outcome, end.depth) == (21, 2, "miss", 0)


def test_the_same_request_again_computes_one_token_of_the_prompt():
    rig = Rig()
    rig.serve(one(1, 20))
    request = rig.serve(one(1, 20))
    rig.assert_answered(request)
    assert (rig.accepted(request).outcome, rig.accepted(request).depth) == ("hit", 20)
    assert rig.runner.prefilled[-1] == (request, 20, 21)


def test_uncached_requests_neither_read_nor_write():
    rig = Rig()
    rig.serve(one(1, 20), cache=False)
    assert rig.kept() == []
    rig.serve(one(1, 20))
    request = rig.serve(one(1, 20), cache=False)
    assert (rig.accepted(request).outcome, rig.accepted(request).reason) == ("miss", "disabled")
    assert rig.count("prefixd_cache_lookups_total", outcome="miss", reason="disabled") == 2


def test_choices_share_the_prompt_and_write_apart():
    rig = Rig()
    request = rig.serve(one(1, 21), n=3, max_tokens=9)
    rig.assert_answered(request)
    assert rig.reasons(request) == ["length"] * 3
    assert rig.end(request).completion_tokens == 27


def test_a_stop_token_is_counted_and_not_sent():
    rig = Rig()
    ids = one(1, 20)
    first, second, *_ = answer(ids.ids, 8)
    assert first != second
    request = rig.serve(ids, max_tokens=8, stop_token_ids=(second,))
    assert rig.tokens(request) == [first]
    assert rig.reasons(request) == ["stop"]
    assert rig.end(request).completion_tokens == 2


# Refusals


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"token_ids": []}, "invalid", "empty"),
        ({"token_ids": [1, 64]}, "invalid", "outside"),
        ({"token_ids": [-1]}, "invalid", "outside"),
        ({"n": 0}, "invalid", "n must"),
        ({"n": 257}, "invalid", "n must"),
        ({"max_tokens": 0}, "invalid", "max_tokens"),
        ({"ends": [2, 2]}, "invalid", "rise"),
        ({"ends": [4]}, "invalid", "rise"),
        ({"ends": [0]}, "invalid", "rise"),
        ({"token_ids": [1] * 40}, "too_long", "the context holds 40"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(changes, code, word):
    rig = Rig(max_model_len=40)
    ids = one(1, 2).ids[:0]
    ids.extend(changes.get("token_ids", [1, 2, 3]))
    boundaries = tuple(Boundary(end, bytes(16), "message", 1) for end in changes.get("ends", ()))
    message = Generate("r", ids, boundaries, Sampling(changes.get("max_tokens", 1)), changes.get("n", 1))
    rig.asked["r"] = message
    rig.sockets.inbox.put(FromGateway(b"gateway", message))
    rig.run()
    end = rig.end("r")
    assert isinstance(end, Failed)
    assert end.code == code
    assert word in end.message
    assert rig.events("r") == [end]
    assert rig.count("prefixd_requests_total", result=f"refused_{code}") == 1
    assert rig.journal.explain("r").state == "failed"


def test_a_prompt_that_only_the_pool_is_too_small_for_is_told_so():
    rig = Rig(blocks=4)
    end = rig.end(rig.serve(one(1, 15)))
    assert (end.code, end.message) == (
        "too_long",
        "prompt is too long: 16 tokens > 15 maximum; kv_memory holds 16 tokens, and the answer needs at least one",
    )


def test_the_queue_is_bounded():
    rig = Rig(max_running=1, max_waiting=2)
    requests = [rig.generate(one(i, 8)) for i in range(4)]
    rig.turn()
    assert rig.end(requests[3]).code == "queue_full"
    rig.run()
    for request in requests[:3]:
        rig.assert_answered(request)


def test_a_wait_in_the_queue_has_an_end():
    """Whoever has started is served, however long it takes; the others are told, oldest first, and leave nothing."""
    rig = Rig(max_running=1, max_queue_seconds=20.0)
    first = rig.generate(one(1, 8), max_tokens=60)
    waiting = [rig.generate(one(number, 8)) for number in (2, 3)]
    rig.turn()
    started = rig.clock()
    rig.turn_until(lambda: rig.of(waiting[1], Failed))
    assert rig.clock() - started < 30.0, "told in time, not at the end of who runs"
    assert rig.scheduler.running_count == 1
    for request in waiting:
        end = rig.end(request)
        assert end.code == "queue_full"
        assert end.message == "no turn came in 20 seconds of waiting in the queue"
        assert not rig.of(request, Accepted)
    late = rig.generate(one(4, 8))
    rig.run()
    rig.assert_answered(first)
    assert rig.end(late).code == "queue_full", "it waited for the first one as well"
    last = rig.generate(one(5, 8))
    rig.run()
    rig.assert_answered(last)
    assert rig.metrics.values(rig.metrics.failures, "cause")["queue_full"] == 3


def test_an_id_in_use_is_refused_and_the_open_request_goes_on():
    rig = Rig()
    request = rig.generate(one(1, 20))
    rig.turn()
    rig.sockets.inbox.put(FromGateway(b"gateway", rig.asked[request]))
    rig.turn()
    (refused,) = rig.of(request, Failed)
    assert "in use" in refused.message
    assert rig.journal.explain(request).state == "prefill"
    rig.turn_until(lambda: rig.scheduler.is_idle)
    assert len(rig.of(request, Completed)) == 1


# Cancelling


def test_a_cancelled_queued_request_ends_without_having_started():
    rig = Rig(max_running=1)
    first, second = rig.generate(one(1, 20)), rig.generate(one(2, 20))
    rig.turn()
    rig.cancel(second)
    rig.run()
    assert [type(event) for event in rig.events(second)] == [Completed]
    rig.assert_answered(first)
    assert rig.count("prefixd_cancellations_total", cause="disconnect") == 1


def test_a_cancelled_prefill_stops_at_the_next_pass_and_keeps_what_is_whole():
    rig = Rig()
    request = prompt(text(1, 10), text(2, 60), head=False)
    cancelled = rig.generate(request)
    rig.turns(2)
    rig.cancel(cancelled)
    rig.run()
    assert rig.runner.prefilled[-1][2] == 16
    assert rig.kept() == [10]
    again = rig.serve(request)
    assert rig.accepted(again).depth == 10
    rig.assert_answered(again)


def test_a_cancelled_decode_counts_by_its_cause():
    rig = Rig()
    request = rig.generate(one(1, 6), n=2, max_tokens=50)
    rig.turns(4)
    rig.cancel(request, "shutdown")
    rig.run()
    assert rig.reasons(request) == ["cancelled", "cancelled"]
    assert rig.count("prefixd_requests_total", result="cancelled") == 1
    assert rig.count("prefixd_cancellations_total", cause="shutdown") == 1
    assert rig.journal.explain(request).state == "cancelled"


def test_a_choice_ended_by_a_stop_string_ended_well():
    rig = Rig()
    request = rig.generate(one(1, 6), n=2, max_tokens=9)
    rig.turns(4)
    rig.cancel(request, "stop", choice=1)
    rig.run()
    assert rig.reasons(request) == ["length", "stop"]
    assert rig.count("prefixd_requests_total", result="finished") == 1


@pytest.mark.parametrize("choice", [None, 0])
def test_a_request_whose_choices_all_met_a_stop_string_is_finished(choice):
    rig = Rig()
    request = rig.generate(one(1, 6), max_tokens=50)
    rig.turns(4)
    rig.cancel(request, "stop", choice)
    rig.run()
    assert rig.reasons(request) == ["stop"]
    assert rig.journal.explain(request).state == "finished"
    assert rig.count("prefixd_requests_total", result="finished") == 1
    assert rig.count("prefixd_requests_total", result="cancelled") == 0


def test_a_request_that_lost_one_choice_is_cancelled():
    rig = Rig()
    request = rig.generate(one(1, 6), n=2, max_tokens=50)
    rig.turns(4)
    rig.cancel(request, "stop", choice=0)
    rig.cancel(request, "disconnect")
    rig.run()
    assert rig.reasons(request) == ["stop", "cancelled"]
    assert rig.count("prefixd_requests_total", result="cancelled") == 1


def test_cancelling_what_has_ended_or_is_another_gateways_does_nothing():
    rig = Rig()
    request = rig.serve(one(1, 6))
    rig.cancel(request)
    open_one = rig.generate(one(2, 6))
    rig.cancel(open_one, sender=b"another")
    rig.run()
    rig.assert_answered(open_one)


def test_requests_of_a_lost_gateway_end_in_every_state_and_others_go_on():
    rig = Rig(max_running=2)
    decoding = rig.generate(one(1, 6), max_tokens=30)
    rig.turns(3)
    prefilling = rig.generate(one(2, 60))
    waiting = rig.generate(one(3, 6))
    other = rig.generate(one(4, 6), sender=b"another")
    rig.turn()
    assert [rig.journal.explain(r).state for r in (decoding, prefilling, waiting)] == [
        "decode",
        "prefill",
        "queued",
    ]
    rig.sockets.inbox.put(GatewayLost(b"gateway"))
    rig.run()
    rig.assert_answered(other)
    assert rig.count("prefixd_cancellations_total", cause="gateway_lost") == 3


# Order and fairness


def test_prefill_and_decode_take_turns():
    rig = Rig()
    talker = rig.generate(one(1, 6), max_tokens=40)
    rig.turns(2)
    rig.generate(one(2, 80))
    rig.run()
    by_time = [type(event) for _, event in rig.sockets.sent if isinstance(event, Tokens | Progress)]
    between = "".join("t" if kind is Tokens else "p" for kind in by_time).strip("t")
    assert "pp" not in between
    assert "tt" not in between
    rig.assert_answered(talker)


def test_a_long_prompt_goes_on_beside_a_stream_of_short_ones():
    rig = Rig(max_running=3)
    long = rig.generate(one(1, 160), max_tokens=1)
    passes = 0
    while not rig.tokens(long):
        if len(rig.scheduler.running.prefilling) < 2:
            rig.generate(one(100 + passes, 7), max_tokens=1)
        rig.turn()
        passes += 1
        assert passes < 200, "the long prompt starves"
    # 21 passes of its own, of at least every fourth.
    assert sum(1 for request, _, _ in rig.runner.prefilled if request == long) == 21
    assert len(rig.runner.prefilled) <= 4 * 21


def test_a_short_request_does_not_wait_for_a_long_prefill():
    rig = Rig()
    long = rig.generate(one(1, 160))
    rig.turns(3)
    short = rig.generate(one(2, 6))
    rig.turns(12)
    rig.assert_answered(short)
    assert not rig.tokens(long)


def test_twenty_clients_at_once_are_all_served():
    rig = Rig(blocks=30, max_running=4)
    requests = [rig.generate(prompt(HEAD, text(10 + i, 5 + i)), max_tokens=10) for i in range(20)]
    rig.run()
    for request in requests:
        rig.assert_answered(request)


def test_requests_start_in_the_order_they_came():
    rig = Rig(max_running=1)
    requests = [rig.generate(one(i, 6 + 30 * (i % 2))) for i in range(6)]
    rig.run()
    started = [event.request_id for _, event in rig.sockets.sent if isinstance(event, Accepted)]
    assert started == requests


@pytest.mark.parametrize("n", [3, 8])
def test_more_choices_than_run_at_once_take_turns(n):
    rig = Rig(max_running=2)
    request = rig.generate(one(1, 6), n=n, max_tokens=12)
    later = rig.generate(one(2, 6), max_tokens=3)
    rig.run()
    rig.assert_answered(request)
    rig.assert_answered(later)
    per_choice = [[i for i, row in enumerate(rig.runner.decoded) if (request, c) in row] for c in range(n)]
    gaps = [b - a for turns in per_choice for a, b in pairwise(turns)]
    assert max(gaps) <= n, "a choice waits longer than one round"


# Room


@pytest.mark.parametrize("blocks", [2, 3, 4])
@pytest.mark.parametrize("block_tokens", [4, 32])
def test_a_pool_of_almost_nothing_serves_what_fits(blocks, block_tokens):
    rig = Rig(blocks=blocks, block_tokens=block_tokens)
    size = blocks * block_tokens
    for length in (1, block_tokens - 1, block_tokens, size - 2, size - 1):
        request = rig.serve(one(length, length - 1 or 1, tail=1 if length > 1 else 0), max_tokens=2 * size)
        rig.assert_answered(request)
        assert rig.reasons(request) == ["length"]
    assert rig.end(rig.serve(one(7, size - 1))).code == "too_long"


def test_a_prompt_that_fills_the_pool_starts_from_the_snapshot_in_its_way():
    rig = Rig(blocks=6)
    first = prompt(text(1, 18), tail=text(2, 1), head=False)
    rig.serve(first, max_tokens=1)
    assert rig.kept() == [18]
    whole = prompt(text(1, 18), text(3, 4), head=False)
    request = rig.serve(whole, max_tokens=9)
    rig.assert_answered(request)
    assert rig.accepted(request).depth == 18
    assert rig.count("prefixd_requests_total", result="failed") == 0


def crowded(n: int = 1, count: int = 2) -> tuple[Rig, list[str]]:
    """A worker whose requests all fit with their margins, but not with their answers."""
    rig, requests = Rig(blocks=20 * n * count, slots=0, max_running=8), []
    for i in range(count):
        requests.append(rig.generate(one(i, 5), n=n, max_tokens=110))
        rig.turn()
    return rig, requests


def test_the_youngest_is_swapped_out_and_comes_back():
    rig, requests = crowded()
    rig.run()
    for request in requests:
        rig.assert_answered(request)
    assert (
        rig.count("prefixd_swaps_total", direction="out") == rig.count("prefixd_swaps_total", direction="in") > 0
    )
    alone = [rows[0] for rows in rig.runner.decoded[20:] if len(rows) == 1]
    assert alone[0] == (requests[0], 0), "the oldest stays"


@pytest.mark.parametrize(("n", "count"), [(1, 2), (1, 4), (2, 2), (3, 1)])
def test_whoever_comes_back_gets_on_before_it_leaves_again(n, count):
    rig, requests = crowded(n, count)
    made: dict[object, int] = {}

    def swapped():
        for choice in rig.scheduler.running.swapped:
            key = (choice.request.request_id, choice.index)
            if key not in away:
                assert made.get(key) != choice.generated, "swapped out twice with no token between"
                made[key] = choice.generated
        return {(c.request.request_id, c.index) for c in rig.scheduler.running.swapped}

    away: set[object] = set()
    while not rig.scheduler.is_idle:
        away = swapped()
        rig.turn()
    assert made
    rig.check_rest()
    for request in requests:
        rig.assert_answered(request)


def test_new_requests_wait_while_somebody_is_swapped_out():
    rig, _ = crowded()
    rig.turn_until(lambda: rig.scheduler.running.swapped)
    third = rig.generate(one(3, 5), max_tokens=2)
    rig.turn_until(lambda: rig.events(third))
    assert not rig.scheduler.running.swapped
    rig.run()
    rig.assert_answered(third)


@pytest.mark.parametrize("cause", ["disconnect", "stop"])
def test_a_swapped_out_request_can_be_cancelled(cause):
    rig, requests = crowded()
    rig.turn_until(lambda: rig.scheduler.running.swapped)
    rig.cancel(requests[1], cause)
    rig.run()
    rig.assert_answered(requests[0])
    assert rig.reasons(requests[1]) == [{"disconnect": "cancelled", "stop": "stop"}[cause]]


def test_pinned_snapshots_that_hold_too_much_fail_the_request_with_the_numbers():
    rig = Rig(blocks=8)
    rig.serve(one(1, 20))
    rig.ask("pin", slot=0)
    end = rig.end(rig.serve(one(2, 24)))
    assert end.code == "out_of_memory"
    assert "8 blocks of 4 tokens, 3 free" in end.message
    rig.ask("unpin", slot=0)
    rig.assert_answered(rig.serve(one(2, 24)))


def test_pinning_while_others_decode_fails_the_youngest_only():
    rig = Rig(blocks=10)
    rig.serve(one(9, 10), max_tokens=1)
    rig.ask("pin", slot=0)
    old, young = (rig.generate(one(i, 5), max_tokens=20, cache=False) for i in (1, 2))
    rig.run()
    rig.assert_answered(old)
    rig.assert_answered(young)
    assert rig.kept() == [10]


def test_room_is_looked_for_again_only_when_something_was_released(monkeypatch):
    rig = Rig(blocks=12)
    rig.serve(one(1, 12), max_tokens=1)
    rig.generate(one(2, 20), max_tokens=8, cache=False)
    rig.turns(2)
    waiting = rig.generate(one(1, 12), max_tokens=16)
    lookups = []
    lookup = Finding.lookup
    monkeypatch.setattr(Finding, "lookup", lambda *a, **k: lookups.append(a) or lookup(*a, **k))
    rig.turn()
    assert not rig.events(waiting)
    before, node = len(lookups), rig.store.slots[0].snapshot.node
    hits = node.hits
    rig.turns(4)
    assert len(lookups) == before == 1
    assert node.hits == hits
    rig.run()
    assert rig.accepted(waiting).depth == 12
    assert node.hits == hits + 1
    rig.assert_answered(waiting)


def test_a_flush_makes_room_for_who_waits():
    rig = Rig(blocks=12)
    rig.serve(one(1, 16), max_tokens=1)
    rig.ask("pin", slot=0)
    running = rig.generate(one(2, 9), max_tokens=9)
    rig.turns(2)
    waiting = rig.generate(one(3, 12), max_tokens=4)
    rig.turn()
    assert not rig.events(waiting)
    rig.ask("unpin", slot=0)
    rig.ask("flush")
    assert rig.accepted(waiting)
    rig.run()
    rig.assert_answered(running)


# Shared prefixes


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


# One slot


@pytest.mark.parametrize("entries", [0, 3, 8])
@pytest.mark.parametrize("rows", [5, 64])
def test_an_only_slot_goes_forward_with_its_conversation(entries, rows):
    """The fewest states that a worker starts with: a sequence's, its source's and one to keep beside that."""
    rig = Rig(slots=1, entries=entries, prefill_rows=rows)
    for turns in range(1, 7):
        request = prompt(*(text(i, 9) for i in range(turns)))
        known = request.boundaries[-2].end if turns > 1 else 0
        assert rig.accepted(rig.serve(request)).depth == known
        assert rig.kept() == [request.last.end]
    other = prompt(text(50, 80), head=False)
    rig.serve(other)
    assert rig.kept() == [80], "and with another one, where that is worth more"
    rig.assert_answered(rig.serve(prompt(text(50, 80), text(51, 9), head=False)))
    assert rig.kept() == [89]


@pytest.mark.parametrize("entries", [0, 8])
def test_an_only_slot_that_is_pinned_stays(entries):
    rig = Rig(slots=1, entries=entries)
    rig.serve(prompt(text(0, 9)))
    rig.ask("pin", slot=0)
    for turns in (2, 3):
        rig.assert_answered(rig.serve(prompt(*(text(i, 9) for i in range(turns)))))
        assert rig.kept() == [9]
    rig.ask("unpin", slot=0)
    rig.serve(prompt(*(text(i, 9) for i in range(4))))
    assert rig.kept() == [36]


def test_two_that_go_on_from_an_only_slot_at_once():
    """One has taken the slot that the other one's state is yet to be copied from."""
    rig = Rig(slots=1, entries=8, prefill_rows=4)
    rig.serve(prompt(text(0, 12)))
    both = [rig.generate(prompt(text(0, 12), text(who, size)), max_tokens=6) for who, size in ((1, 4), (2, 30))]
    rig.run()
    for request in both:
        rig.assert_answered(request)
        assert rig.accepted(request).depth == 12
    assert len(rig.kept()) == 1


def test_a_pass_that_fails_gives_back_the_state_that_it_was_to_fill():
    rig = Rig(slots=1, entries=8)
    rig.serve(prompt(text(0, 9)))
    rig.runner.faults.append(("prefill", MemoryError()))
    longer = prompt(text(0, 9), text(1, 9))
    rig.serve(longer)
    assert rig.store.states is not None
    assert rig.store.states.free_count == 8
    rig.assert_answered(rig.serve(longer))
    assert rig.kept() == [18]


# The accounts


def test_restores_and_commits_are_timed():
    rig = Rig()
    rig.serve(one(1, 20))
    rig.serve(one(1, 20))
    assert rig.count("prefixd_restore_seconds_count") == 1
    assert rig.count("prefixd_commit_seconds_count") == 1


def test_a_lookup_that_finds_what_is_gone_at_once_starts_cleanly(monkeypatch):
    rig = Rig()
    rig.serve(one(1, 20))
    monkeypatch.setattr(Finding, "begin_restore", lambda *_, **__: None)
    request = rig.serve(one(1, 20))
    rig.assert_answered(request)
    accepted = rig.accepted(request)
    assert (accepted.outcome, accepted.reason, accepted.depth) == ("miss", "restore_failed", 0)


@pytest.mark.parametrize("entries", [0, 12])
@pytest.mark.parametrize(
    "asked",
    [
        one(1, 12, tail=0),
        one(1, 20, tail=0),
        one(2, 30),
        prompt(text(2, 20), text(3, 5)),
    ],
    ids=["longer than the prompt", "as long as it", "at no boundary of it", "of other tokens"],
)
def test_a_lookup_that_is_wrong_is_not_believed(monkeypatch, entries, asked):
    """S1-3 and S1-4."""
    rig = Rig(entries=entries)
    rig.serve(one(1, 20, tail=2))
    lookup = Finding.lookup

    def wrong(self, *words, **options):
        return replace(lookup(self, *words, **options), slot=0, generation=1, depth=20, outcome="hit")

    with monkeypatch.context() as patch:
        patch.setattr(Finding, "lookup", wrong)
        request = rig.serve(asked)
    rig.assert_answered(request)
    accepted = rig.accepted(request)
    assert (accepted.outcome, accepted.reason, accepted.depth) == ("miss", "restore_failed", 0)
    assert 20 in rig.kept(), "what it is the snapshot of can have it still"
    assert rig.accepted(rig.serve(one(1, 20, tail=2))).depth == 20


def test_tokens_are_counted_once():
    rig = Rig()
    for turns in range(1, 6):
        rig.serve(prompt(*(text(i, 9) for i in range(turns))))
    prompts = sum(len(message.token_ids) for message in rig.asked.values())
    computed = rig.count("prefixd_cache_tokens_total", source="computed")
    restored = rig.count("prefixd_cache_tokens_total", source="device")
    assert computed + restored == prompts
    assert restored == sum(rig.accepted(request).depth for request in rig.asked)
