"""Every label combination is there from the start, and counts agree with what happened."""

from __future__ import annotations

from typing import get_args

from scheduler_rig import Rig, one

from protocol.messages import FailureCode, Outcome, Reason
from worker.metrics import CANCEL_CAUSES, StateCollector, WorkerMetrics, reasons_of


def test_every_combination_is_there_at_zero():
    metrics = WorkerMetrics()
    counts = metrics.values(metrics.lookups, "outcome", "reason")
    assert set(counts) == {
        f"{outcome}/{reason}" for outcome in get_args(Outcome) for reason in reasons_of(outcome)
    }
    assert not any(counts.values())
    text = metrics.exposition()
    for cause in CANCEL_CAUSES:
        assert f'prefixd_cancellations_total{{cause="{cause}"}} 0.0' in text
    for code in get_args(FailureCode):
        assert f'prefixd_failures_total{{cause="{code}"}} 0.0' in text
        assert f'prefixd_requests_total{{result="refused_{code}"}} 0.0' in text
    for outcome in get_args(Outcome):
        assert f'prefixd_prefill_seconds_count{{outcome="{outcome}"}} 0.0' in text


def test_every_reason_belongs_to_an_outcome():
    assert {reason for outcome in get_args(Outcome) for reason in reasons_of(outcome)} == set(get_args(Reason))
    assert reasons_of("hit") == ("none",)


def test_a_hundred_requests_that_end_in_all_ways_add_up():
    rig = Rig(blocks=40, max_waiting=1000)
    requests = [rig.generate(one(i % 7, 5 + i % 11), max_tokens=1 + i % 5) for i in range(100)]
    for i, request in enumerate(requests):
        rig.turn()
        if i % 3 == 0:
            rig.cancel(request, ("disconnect", "shutdown", "stop")[i % 9 // 3])
    rig.run()
    results = rig.metrics.values(rig.metrics.requests, "result")
    assert sum(results.values()) == results["finished"] + results["cancelled"] == 100
    causes = rig.metrics.values(rig.metrics.cancellations, "cause")
    assert sum(causes.values()) == results["cancelled"] > 0
    started = rig.count("prefixd_queue_seconds_count")
    assert sum(rig.metrics.values(rig.metrics.lookups, "outcome", "reason").values()) == started
    stats = rig.stats()
    assert (stats.requests_running, stats.requests_waiting) == (0, 0)


def test_state_is_read_when_scraped():
    metrics, held = WorkerMetrics(), {"": 1.0}
    metrics.registry.register(
        StateCollector(
            lambda: {"prefixd_snapshots": ("Snapshots held", "", held)},
            lambda: {"prefixd_aborts": ("Aborts", "cause", {"length": 3.0})},
        )
    )
    assert "prefixd_snapshots 1.0\n" in metrics.exposition()
    held[""] = 2.0
    text = metrics.exposition()
    assert "prefixd_snapshots 2.0\n" in text
    assert 'prefixd_aborts_total{cause="length"} 3.0\n' in text
