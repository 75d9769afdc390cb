"""`cachectl evict` of snapshots that are described instead of named."""

import json

import pytest
from fake_control import slot_info

from cachectl.main import DONE, REFUSED, USAGE
from protocol.control import Removed

HOUR = 3600.0


@pytest.fixture
def rows(worker):
    """Slot 4 of another tenant and pinned, 5 unused for two hours, 6 for a day, 7 not yet written."""
    worker.page = 100
    worker.slots |= {
        4: slot_info(4, tenant="b", pinned=True, used_age_seconds=50 * HOUR),
        5: slot_info(5, tenant="b", used_age_seconds=2 * HOUR, digest="ab345678"),
        6: slot_info(6, used_age_seconds=24 * HOUR, digest="ab999999"),
        7: slot_info(7, state="writing", used_age_seconds=0, digest=""),
    }
    return worker.slots


def evicted(cachectl, *words):
    code, out, err = cachectl("--json", "evict", *words)
    assert code == DONE, err
    return json.loads(out)["removed"]


@pytest.mark.parametrize(
    ("words", "slots"),
    [
        (["--older", "1h"], [5, 6]),
        (["--older", "86399"], [6]),
        (["--older", "0.5d"], [6]),
        (["--older", "2d"], []),
        (["--tenant", "b"], [5]),
        (["--tenant", "nobody"], []),
        (["--digest", "ab3"], [5]),
        (["--digest", "AB345678ffff"], [5]),
    ],
)
def test_what_is_described_goes_and_what_is_pinned_or_busy_does_not(cachectl, rows, words, slots):
    assert evicted(cachectl, *words) == slots


@pytest.mark.parametrize("words", [["--older", "1h"], ["--tenant", "b"], ["--to", "3.5MiB"]])
def test_what_has_come_into_a_slot_meanwhile_is_not_what_was_described(cachectl, rows, worker, words, monkeypatch):
    """Slot 5 is used again between the looking and the clearing."""

    def listed(cursor, limit):
        page = type(worker).list(worker, cursor, limit)
        rows[5] = slot_info(5, tenant="c", generation=2)
        return page

    monkeypatch.setattr(worker, "list", listed)
    assert 5 not in evicted(cachectl, *words)


def test_a_digest_whose_snapshot_has_gone_meanwhile_is_refused(cachectl, rows, worker, monkeypatch):
    monkeypatch.setattr(worker, "evict", lambda slots, dry_run, generations: Removed([], [], 0, dry_run))
    assert cachectl("evict", "--digest", "ab3")[0] == REFUSED


@pytest.mark.parametrize("digest", ["ab", "ffff"])
def test_a_digest_that_names_no_single_snapshot_is_refused(cachectl, rows, digest, worker):
    code, _, err = cachectl("evict", "--digest", digest)
    assert code == REFUSED
    assert digest in err
    assert "evict" not in [verb for verb, _ in worker.asked]


@pytest.mark.parametrize(
    ("size", "slots"), [("5MiB", []), ("4MiB", [6]), ("3.5MiB", [6, 5]), ("3MiB", [6, 5]), ("0", [6, 5, 2, 1])]
)
def test_those_used_longest_ago_go_until_the_rest_is_small_enough(cachectl, rows, worker, size, slots):
    """Each frees 1 MiB of the 5 that are held; of equal age the deeper one goes first. What cannot be had is tried."""
    assert evicted(cachectl, "--to", size) == slots
    assert [args["dry_run"] for verb, args in worker.asked if verb == "evict"][-1] is False


def test_a_dry_run_removes_nothing(cachectl, rows, worker):
    code, out, _ = cachectl("evict", "--to", "4MiB", "--dry-run")
    assert (code, out) == (DONE, "would evict 6: 1MiB back\n")
    assert all(args["dry_run"] for verb, args in worker.asked if verb == "evict")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--dry-run"],
        ["1", "--older", "1h"],
        ["--tenant", "a", "--to", "1GiB"],
        ["--older", "soon"],
        ["--older", "-1h"],
        ["--older", "nan"],
        ["--to", "much"],
    ],
)
def test_one_description_and_a_sensible_one(cachectl, worker, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cachectl("evict", *words)
    assert stopped.value.code == USAGE
    assert worker.asked == []
