"""What is remembered of requests, and the one line each leaves in the log."""

from __future__ import annotations

import logging

from scheduler_rig import Rig, one, text
from snapshot_rig import prompt

from worker.journal import Journal
from worker.sequences import Request


def test_one_line_for_each_request_with_its_outcome(caplog):
    rig = Rig()
    caplog.set_level(logging.INFO, "worker.journal")
    first = rig.serve(prompt(text(1, 20), text(2, 20), head=False))
    second = rig.serve(prompt(text(1, 20), text(3, 20), head=False))
    refused = rig.serve(one(1, 5000))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert lines[0].startswith(
        f"request={first} state=finished outcome=miss reason=cold depth=0 prompt_tokens=41 "
    )
    assert "committed=40" in lines[0]
    assert f"request={second} " in lines[1]
    assert lines[1].endswith("diverged_message=1 diverged_token=20")
    assert lines[2] == f"request={refused} state=refused cause=too_long: prompt is too long"


def test_a_cancelled_request_names_its_cause(caplog):
    rig = Rig()
    caplog.set_level(logging.INFO, "worker.journal")
    request = rig.generate(one(1, 20))
    rig.turn()
    rig.cancel(request, "shutdown")
    rig.run()
    assert f"request={request} state=cancelled cause=shutdown " in caplog.text


def test_explain_follows_a_request_through_its_states():
    rig = Rig(max_running=1)
    first, second = rig.generate(one(1, 20), max_tokens=3), rig.generate(one(2, 20))
    rig.turn()
    states = [rig.journal.explain(request).state for request in (first, second)]
    assert states == ["prefill", "queued"]
    rig.turns(3)
    assert rig.journal.explain(first).state == "decode"
    rig.run()
    explained = rig.journal.explain(first)
    assert (explained.state, explained.completion_tokens, explained.committed) == ("finished", 3, [20])
    assert (explained.queue_seconds, explained.prefill_seconds, explained.decode_seconds) == (0.0, 2.0, 2.0)
    age = explained.age_seconds
    rig.clock.now += 60
    assert rig.journal.explain(first).age_seconds == age + 60


def test_only_the_last_requests_are_remembered():
    journal = Journal(limit=2, clock=lambda: 0.0)
    rig = Rig()
    for number in range(3):
        message = rig.asked[rig.generate(one(number, 4))]
        journal.log_refusal(Request(b"g", message, 0.0, True), "queue_full", "full")
    assert [journal.explain(f"r{number}") is not None for number in (1, 2, 3)] == [False, True, True]
