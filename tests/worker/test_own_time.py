"""Time that a process had: on a clock and a line of the test's own, and in a process that is stopped."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.own_time import STILL_SECONDS, TICK_SECONDS, OwnTime, seconds_in_line


def own_time() -> tuple[SimpleNamespace, OwnTime]:
    at = SimpleNamespace(clock=100.0, line=7.0)
    return at, OwnTime(lambda: at.clock, lambda: at.line)


def test_time_passes_while_ticks_come_and_stands_still_with_them():
    at, own = own_time()
    began = own.awake()
    for _ in range(10):
        at.clock += TICK_SECONDS
        own.tick()
    assert own.awake() - began == pytest.approx(10 * TICK_SECONDS)
    at.clock += 60
    assert own.awake() - began == pytest.approx(10 * TICK_SECONDS + STILL_SECONDS), "also before the next tick"
    own.tick()
    at.clock += 0.2
    assert own.awake() - began == pytest.approx(10 * TICK_SECONDS + STILL_SECONDS + 0.2)
    assert own.starved() == 0


def test_waits_for_processors_add_up_to_no_more_than_the_time():
    at, own = own_time()
    for waited, starved in ((0.1, 0.1), (3.0, TICK_SECONDS), (-2.0, 0.0)):
        before = own.starved()
        at.clock += TICK_SECONDS
        at.line += waited
        own.tick()
        assert own.starved() - before == pytest.approx(starved)


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(-5, 20)), max_size=30))
def test_no_time_runs_backwards_or_faster_than_the_clock(ticks: list[tuple[float, float]]):
    at, own = own_time()
    for passed, waited in ticks:
        awake, starved = own.awake(), own.starved()
        at.clock += passed
        at.line += waited
        assert 0 <= own.awake() - awake <= passed + 1e-6
        own.tick()
        assert 0 <= own.awake() - awake <= passed + 1e-6
        assert 0 <= own.starved() - starved <= own.awake() - awake + 1e-6


def test_the_system_tells_how_long_threads_waited():
    before = seconds_in_line()
    threads = [threading.Thread(target=sum, args=(range(300_000),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert seconds_in_line() >= 0
    for thread in threads:
        thread.join()
    assert 0 <= before < 1e6
