"""What a soak takes for a violation, and what for a fault that a killed worker explains."""

import random
from types import SimpleNamespace

import pytest
import soak
from soak_client import Seen, Tally, secret_words
from soak_watch import Away, Series, Watch, pooled_slope


def bad(lines):
    return {line.name for line in lines if line.bad}


def series(began, sizes):
    return Series(began, [began + at for at in range(len(sizes))], [float(size) for size in sizes])


def test_secret_words_are_not_parts_of_one_another():
    found = secret_words(16, random.Random(0))
    assert len(set(found)) == 16
    assert not [(a, b) for a in found for b in found if a != b and a in b]


def test_a_slope_is_of_all_lives_each_on_a_level_of_its_own():
    assert pooled_slope([([0, 1, 2], [5, 7, 9]), ([10, 11], [100, 102])]) == pytest.approx(2)
    assert pooled_slope([([0, 1, 2], [50, 50, 50]), ([9], [1]), ([], [])]) == 0
    assert pooled_slope([]) == 0


def test_memory_counts_after_the_warm_up_alone(tmp_path):
    watch = Watch(tmp_path)
    watch.memory["worker"] = {1: series(0, [0, 50, 100, 101, 102]), 2: series(50, [0, 70, 100, 101])}
    watch.memory["gateway"] = {3: series(0, [90] * 9)}
    assert watch.slope("worker", 2) == (pytest.approx(3600), 2)
    assert bad(soak._memory_lines(watch, 2, growth_mib=1)) == {"memory of the worker"}
    assert bad(soak._memory_lines(watch, 2, growth_mib=3)) == set()
    # Nothing was seen after the warm-up: that is no proof.
    assert bad(soak._memory_lines(watch, 99, growth_mib=3)) == {"memory of the worker", "memory of the gateway"}


def test_only_a_kill_excuses_a_failure():
    watch = SimpleNamespace(away=[Away(100.0, 110.0)])

    def lines(began, ended, end="failed"):
        return bad(soak._fault_lines(Tally(failures=[Seen(end, "", error="no", began=began, ended=ended)]), watch))

    assert lines(90, 101) == lines(105, 106) == lines(105, 111) == set()
    assert lines(90, 99) == lines(112, 113) == {"failed for no such reason"}
    assert lines(90, 106) == {"open requests that a kill failed"}, "it was told too late"
    assert lines(90, 101, "hung") == {"hung"}
    assert lines(90, 101, "cut off") == {"broken off without an end"}


def test_what_is_left_at_the_end_is_a_violation():
    rest = {
        "requests_running": 0, "requests_waiting": 0, "kv_bytes_used": 500, "snapshot_bytes": 520, "snapshots": 2,
        "state_bytes": 10, "slots": dict.fromkeys(("reserved", "writing", "restoring", "evicting"), 0),
        "verify": {"pending": 0},
    }  # fmt: skip
    assert bad(soak._rest_lines(rest, 0)) == set()
    assert bad(soak._rest_lines({**rest, "kv_bytes_used": 600}, 1)) == {
        "at the end: KV bytes nobody owns",
        "at the end: open in the gateway",
    }
    assert bad(soak._rest_lines({**rest, "slots": {**rest["slots"], "reserved": 1}}, 0)) == {
        "at the end: slots reserved"
    }
    assert bad(soak._rest_lines(None, 0))


def test_a_run_without_hits_echoes_or_comparisons_proves_nothing():
    assert bad(soak._answer_lines(Tally(), 1.0)) == {"answers with the client's own word", "unequal"}
    fine = Tally(compared=1, echoed=1)
    assert bad(soak._answer_lines(fine, 1.0)) == set()
    fine.foreign.append("brambex in 'brambex' to klambex")
    assert bad(soak._answer_lines(fine, 1.0)) == {"foreign words"}


@pytest.mark.parametrize(
    ("line", "is_fault"),
    [
        (
            "2026-01-02 03:04:05,678 worker ERROR request=r: the hit at depth 9 differs from a cold run; it goes",
            True,
        ),
        ("2026-01-02 03:04:05,678 ERROR prefixd.gateway: request r failed", True),
        ("Traceback (most recent call last):", True),
        ("2026-01-02 03:04:05,678 ERROR prefixd.gateway: the worker has been silent for 3.0 s", False),
        ("2026-01-02 03:04:05,678 worker INFO request=r state=finished", False),
    ],
)
def test_faults_are_found_in_the_log(line, is_fault):
    assert bool(bad(soak._log_lines(f"before\n{line}\nafter\n"))) == is_fault
