"""Requests that are cancelled, wherever they stand, and those of a gateway that is lost."""

from __future__ import annotations

import pytest
from scheduler_rig import Rig, one, text
from snapshot_rig import prompt

from protocol.messages import Completed
from worker.io import GatewayLost


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
