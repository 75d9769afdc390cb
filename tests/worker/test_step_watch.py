"""When the loop counts as hung: by what such steps took, on a clock of the test's own."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.step_watch import COPY_SECONDS, LEAST_SECONDS, MOST_SECONDS, StepWatch
from worker.steps import Decode, Prefill, Step, SwapIn, SwapOut


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> StepWatch:
    return StepWatch(clock)


def prefill(rows: int, start: int = 64) -> Step:
    return Prefill(None, start, start + rows, ())  # type: ignore[arg-type]


def decode(rows: int, length: int = 0) -> Step:
    return Decode((SimpleNamespace(length=length),) * rows, ())  # type: ignore[arg-type]


def swap(blocks: int) -> Step:
    return SwapOut(None, (1,) * blocks)  # type: ignore[arg-type]


def took(watch: StepWatch, clock: Clock, step: Step, seconds: float) -> None:
    with watch.step(step):
        clock.now += seconds


def limit(watch: StepWatch, clock: Clock, step: Step) -> float:
    """Seconds after which this step counts as hung, to a tenth."""
    before, tenths = clock.now, 0
    watch_longest = dict(watch._longest)
    with watch.step(step):
        while watch.verdict() is None:
            tenths += 1
            clock.now = before + tenths / 10
    watch._longest = watch_longest
    clock.now = before
    watch.turned()
    return tenths / 10


def test_a_step_hangs_when_it_takes_far_longer_than_such_steps_did(watch: StepWatch, clock: Clock):
    took(watch, clock, prefill(512), 2.0)
    with watch.step(prefill(500)):
        clock.now += 7.5
        assert watch.verdict() is None
        clock.now += 1.0
        verdict = watch.verdict()
        assert verdict is not None
        assert verdict.state == "hung"
        assert verdict.cause == (
            "a prefill step of 500 has been running for 8 s, where such a step took 2 s at most"
        )
        assert watch.age() == 8.5
        clock.now += 30
        assert watch.verdict().state == "failed"  # type: ignore[union-attr]
    assert watch.verdict() is None
    assert watch.age() == 0


def test_quick_steps_are_left_a_few_seconds_and_end_the_process_soon(watch: StepWatch, clock: Clock):
    took(watch, clock, decode(1), 0.01)
    with watch.step(decode(1)):
        clock.now += LEAST_SECONDS
        assert watch.verdict() is None
        clock.now += 0.1
        assert watch.verdict().state == "hung"  # type: ignore[union-attr]
        clock.now += 3 * LEAST_SECONDS
        assert watch.verdict().state == "failed"  # type: ignore[union-attr]


def test_what_nothing_is_known_of_may_take_a_minute(watch: StepWatch, clock: Clock):
    took(watch, clock, decode(1), 0.01)
    for step in (prefill(9), SwapOut(None, (1,)), SwapIn(None, (1,))):  # type: ignore[arg-type]
        assert limit(watch, clock, step) == pytest.approx(MOST_SECONDS, abs=0.2)
    clock.now += MOST_SECONDS
    assert watch.verdict() is None
    clock.now += 1
    verdict = watch.verdict()
    assert verdict is not None
    assert verdict.state == "failed"
    assert verdict.cause == "the engine's loop has been running for 61 s"
    watch.turned()
    assert watch.verdict() is None


def test_a_larger_step_is_given_its_share_and_a_smaller_one_what_a_larger_took(watch: StepWatch, clock: Clock):
    took(watch, clock, prefill(64), 0.5)
    assert limit(watch, clock, prefill(256)) == pytest.approx(4 * 4 * 0.5, abs=0.2)
    took(watch, clock, prefill(512), 1.0)
    assert limit(watch, clock, prefill(256)) == pytest.approx(4 * 1.0, abs=0.2)
    assert limit(watch, clock, prefill(8)) == pytest.approx(LEAST_SECONDS, abs=0.2), "what 64 rows took"


@pytest.mark.parametrize("kind", [prefill, decode])
def test_rows_that_attend_to_much_are_given_what_that_takes(kind, clock: Clock):
    """As the first pass of a long conversation that comes from a slower tier."""
    watch = StepWatch(clock, row_keys=1000)
    took(watch, clock, prefill(256, 0), 2.0)
    took(watch, clock, decode(1, 8), 2.0)
    rows = 256 if kind is prefill else 1
    assert limit(watch, clock, kind(rows, 0)) == pytest.approx(4 * 2.0, abs=0.2)
    assert limit(watch, clock, kind(rows, 3000)) == pytest.approx(4 * 4 * 2.0, abs=0.2)
    assert limit(watch, clock, kind(rows, 100_000)) == pytest.approx(MOST_SECONDS, abs=0.2)
    took(watch, clock, kind(rows, 100_000), 3.0)
    assert limit(watch, clock, kind(rows, 100_000)) == pytest.approx(4 * 3.0, abs=0.2), "what it took"


def test_blocks_that_are_swapped_count_each(watch: StepWatch, clock: Clock):
    took(watch, clock, swap(8), 0.1)
    assert limit(watch, clock, swap(4)) == pytest.approx(LEAST_SECONDS, abs=0.2)
    assert limit(watch, clock, swap(1024)) == pytest.approx(4 * 128 * 0.1, abs=0.2)


def test_a_step_that_took_no_time_at_all_is_known(watch: StepWatch, clock: Clock):
    """As where the machine stood still meanwhile."""
    took(watch, clock, decode(1), 0.0)
    assert limit(watch, clock, decode(1)) == pytest.approx(LEAST_SECONDS, abs=0.2)


@pytest.mark.parametrize(("longest", "most"), [(None, MOST_SECONDS), (0.1, COPY_SECONDS), (5.0, 20.0)])
def test_a_copy_between_tiers_may_wait_for_a_step_that_the_device_runs(
    watch: StepWatch, clock: Clock, longest: float | None, most: float
):
    if longest is not None:
        took(watch, clock, prefill(256), longest)
    with watch.copying():
        clock.now += most
        assert watch.verdict() is None
        clock.now += 0.1
        verdict = watch.verdict()
        assert verdict is not None
        assert verdict.cause == f"a copy between tiers has been running for {most:.0f} s"
    assert watch.verdict() is None


def test_a_step_that_failed_teaches_nothing_and_one_that_took_long_is_forgotten(watch: StepWatch, clock: Clock):
    with suppress(MemoryError), watch.step(prefill(64)):
        clock.now += 3
        raise MemoryError
    assert watch.age() == 0
    assert limit(watch, clock, prefill(64)) == pytest.approx(MOST_SECONDS, abs=0.2)
    took(watch, clock, prefill(64), 8.0)
    assert limit(watch, clock, prefill(64)) == pytest.approx(4 * 8.0, abs=0.2)
    for _ in range(500):
        took(watch, clock, prefill(64), 0.01)
    assert limit(watch, clock, prefill(64)) == pytest.approx(LEAST_SECONDS, abs=0.2)


def test_waiting_for_a_processor_is_no_hang_but_for_a_minute(clock: Clock):
    starved = Clock()
    watch = StepWatch(clock, starved)
    took(watch, clock, decode(1), 0.01)
    with watch.step(decode(1)):
        clock.now += 40.0
        starved.now += 37.0
        assert watch.verdict() is None
        clock.now += 1.0
        verdict = watch.verdict()
        assert verdict is not None
        assert verdict.state == "hung"
        starved.now += 1.0
        assert watch.verdict() is None
        clock.now += 20.0
        starved.now += 20.0
        assert watch.verdict().state == "failed"  # type: ignore[union-attr]


@given(
    st.lists(st.tuples(st.integers(1, 4096), st.floats(0.001, 5)), min_size=1, max_size=20), st.floats(0.25, 2.5)
)
def test_work_that_is_a_few_times_slower_than_the_work_before_never_hangs(steps: list, slower: float):
    """Where time goes with rows, at whatever pace, no step is taken for a hang: contexts and company may vary."""
    clock = Clock()
    watch = StepWatch(clock)
    pace = max(seconds / rows for rows, seconds in steps) / 4
    for rows, _ in steps:
        with watch.step(prefill(rows)):
            clock.now += min(pace * rows, MOST_SECONDS / 2.6)
    for rows, _ in steps:
        with watch.step(prefill(rows)):
            clock.now += min(pace * rows, MOST_SECONDS / 2.6) * slower
            assert watch.verdict() is None


@given(
    st.floats(0.0001, 0.01),
    st.integers(500, 20_000),
    st.floats(1, 10),
    st.lists(st.tuples(st.integers(1, 256), st.integers(0, 130_000)), min_size=1, max_size=20),
    st.floats(0.25, 1.95),
)
def test_first_steps_behind_any_prefix_never_hang(
    pace: float, row_keys: int, cheaper: float, steps: list, slower: float
):
    """All that is known is how long rows took that attended to nothing. Keys may cost less than is believed of them."""
    clock = Clock()
    watch = StepWatch(clock, row_keys=row_keys)

    def seconds(rows: int, start: int) -> float:
        return pace * (rows + rows * (start + rows / 2) / (row_keys * cheaper))

    for rows in (8, 256):
        took(watch, clock, prefill(rows, 0), seconds(rows, 0))
    for rows, start in steps:
        with watch.step(prefill(rows, start)):
            clock.now += min(seconds(rows, start) * slower, 0.99 * MOST_SECONDS)
            assert watch.verdict() is None
