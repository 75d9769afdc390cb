"""What only slower tiers have: shown without a slot, and named by its digest."""

import json
from dataclasses import asdict, replace

import pytest
from fake_control import STATS, slot_info, stored_info

from cachectl import events, render, screen
from cachectl.main import DONE, REFUSED, USAGE
from cachectl.screen import Bars
from protocol.control import CacheEvent, Removed, TierInfo, TreeNode

HOUR = 3600.0


@pytest.fixture
def rows(worker):
    """Two conversations on disk, one of them of another tenant and pinned, and one that is in slot 1, too."""
    found = [
        stored_info("aa000001"),
        stored_info("bb000002", tenant="b", pinned=True, used_age_seconds=50 * HOUR),
        stored_info("cc000003", tenant="b", used_age_seconds=3 * HOUR, tiers=["host", "disk"], state="incomplete"),
        stored_info("00000001", slot=1, used_age_seconds=1.0),
    ]
    worker.stored_rows = {row.name: row for row in found}
    return found


def test_they_are_listed_last_page_by_page(cachectl, rows):
    code, out, _ = cachectl("list")
    lines = [line.split() for line in out.splitlines()[-3:]]
    assert code == DONE
    assert [(line[0], line[1], line[3]) for line in lines] == [
        ("-", "aa000001", "stored"),
        ("-", "bb000002", "stored"),
        ("-", "cc000003", "incomplete"),
    ]
    assert out.splitlines()[-2].endswith("b       pinned disk")
    listed = json.loads(cachectl("--json", "list")[1])
    assert [row["slot"] for row in listed] == [1, 2, 3, None, None, None]


def test_one_is_shown_by_its_digest(cachectl, rows):
    out = cachectl("show", "--digest", "cc")[1]
    assert "of no use: something that it extends is missing" in out
    assert f"{rows[2].name}.*" in out
    assert "host, disk" in out
    assert "slot 2" not in cachectl("show", "--digest", "00000002")[1]
    assert json.loads(cachectl("--json", "show", "--digest", "00000002")[1])["slot"] == 2
    assert cachectl("show", "--digest", "dd")[0] == REFUSED


def test_pinning_one(cachectl, rows, worker):
    assert cachectl("pin", "--digest", "cc")[:2] == (DONE, "pinned cc000003 in host and disk (400 tokens)\n")
    assert worker.asked[-1] == ("pin", {"name": rows[2].name})


@pytest.mark.parametrize(
    ("words", "slots", "digests"),
    [
        (["--older", "1h"], [], ["aa000001", "cc000003"]),
        (["--tenant", "b"], [], ["cc000003"]),
        (["--digest", "aa"], [], ["aa000001"]),
        (["--to", "0"], [2, 1], []),
        (["--tier", "disk", "--older", "0"], [], ["00000001", "aa000001", "cc000003"]),
        (["--tier", "host", "--tenant", "b"], [], ["cc000003"]),
        (["--tier", "disk", "--to", "2.5MiB"], [], ["cc000003", "aa000001"]),
        (["--tier", "disk", "--to", "4MiB"], [], []),
    ],
)
def test_evicting_what_is_described(cachectl, worker, rows, monkeypatch, words, slots, digests):
    stats = type(worker).stats(worker)
    tier = TierInfo("disk", 4 << 20, 1 << 30, 4, 0)
    monkeypatch.setattr(worker, "stats", lambda: replace(stats, tiers=[tier]))
    code, out, err = cachectl("--json", "evict", *words)
    assert code == DONE, err
    said = json.loads(out)
    assert (said["removed"], sorted(name[:8] for name in said["names"])) == (slots, sorted(digests))


def test_what_went_is_said(cachectl, rows):
    assert cachectl("evict", "--digest", "aa")[1] == (
        "evicted none in slots: 0B back; in slower tiers 1 more snapshots, 1MiB back\n"
    )
    code, out, _ = cachectl("evict", "--digest", "bb")
    assert code == REFUSED
    assert "left alone: 1 of slower tiers" in out


def test_flush_tells_of_slower_tiers(cachectl, worker, monkeypatch):
    monkeypatch.setattr(worker, "flush", lambda dry_run: Removed([1], [], 1 << 20, dry_run, 5 << 20, 7))
    assert cachectl("flush")[1] == "flushed 1, busy 0: 1MiB back; in slower tiers 7 more snapshots, 5MiB back\n"


@pytest.mark.parametrize("words", [["1", "--tier", "disk"], ["--digest", "aa", "--tier", "disk"]])
def test_a_tier_goes_with_a_description(cachectl, worker, words):
    code, _, err = cachectl("evict", *words)
    assert code == USAGE
    assert "--tier" in err
    assert worker.asked == []


@pytest.mark.parametrize("words", [["show"], ["pin", "1", "--digest", "aa"], ["export", "/tmp"]])
def test_one_snapshot_is_named_one_way(cachectl, words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cachectl(*words)
    assert stopped.value.code == USAGE


def test_stored_ones_stand_in_the_tree_where_they_belong():
    nodes = [
        TreeNode(None, None, 0, "aa000001", "head", 20, 1, 0, False, 0, "n1", "", ["disk"]),
        TreeNode(4, None, 0, "bb000002", "message", 60, 2, 1, False, 0, "", "n1", ["disk"]),
        TreeNode(None, 4, 0, "cc000003", "message", 90, 3, 0, True, 0, "n3", "", ["host", "disk"]),
    ]
    lines = render.tree(nodes).splitlines()
    assert [line[: line.index("00000")] for line in lines[1:]] == ["aa", "└ slot 4 bb", "  └ cc"]
    assert lines[3].endswith("pinned host disk")


def test_slots_and_stored_ones_share_columns():
    lines = render.slots([slot_info(12), stored_info("aa000001")]).splitlines()
    assert lines[1].split()[0] == "12"
    assert lines[2].split()[0] == "-"
    assert (
        len({line.index(word) for line, word in zip(lines, ("DIGEST", "0000000c", "aa000001"), strict=True)}) == 1
    )


def test_top_shows_how_full_each_tier_is():
    tiers = [TierInfo("host", 1 << 20, 4 << 20, 3, 0, 1), TierInfo("disk", 3 << 30, 3 << 30, 9, 2, 6)]
    lines = screen.lines(replace(STATS, tiers=tiers), None, [], 80, 30, Bars("#", "=", "."))
    host, disk = (next(line for line in lines if line.startswith(name)) for name in ("host", "disk"))
    assert host.endswith("1MiB of 4MiB, 3 snapshots")
    assert host.count("#") * 3 == host.count(".")
    assert (disk.count("."), disk.endswith("3GiB of 3GiB, 9 snapshots")) == (0, True)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (("write", "", None, 640, "disk", "kv"), "write       0badcafe  640 tokens  kv  to disk"),
        (
            ("drop", "evicted", None, 640, "host", "state"),
            "drop        0badcafe  640 tokens  state  evicted  from host",
        ),
        (
            ("fail", "disk_full", None, 640, "disk", "kv"),
            "fail        0badcafe  640 tokens  kv  disk_full  to disk",
        ),
        (("load", "", 4, 640, "host,disk", ""), "load        slot 4  0badcafe  640 tokens  from host,disk"),
        (("evict", "slots", 4, 640, "host", ""), "evict       slot 4  0badcafe  640 tokens  slots  still in host"),
        (("evict", "slots", 4, 640, "", ""), "evict       slot 4  0badcafe  640 tokens  slots"),
    ],
)
def test_events_say_which_tier(event, said):
    kind, cause, slot, tokens, tier, part = event
    line = events._line(asdict(CacheEvent(7, 1.0e9, kind, cause, slot, "0badcafe", tokens, "", tier, part)))
    assert line.endswith(said)
