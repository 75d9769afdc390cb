"""Every verb of the operator against a worker with something to tell."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter
from scheduler_rig import Rig, one, text
from snapshot_rig import prompt

from protocol.control import VERBS, Explanation, Removed, SlotInfo, Stats, TreeNode
from worker.snapshot_clearing import Clearing


def busy_rig() -> Rig:
    rig = Rig()
    for turns in (1, 2, 3):
        rig.serve(prompt(*(text(i, 10) for i in range(turns))))
    return rig


ARGS = {"show": {"slot": 0}, "explain": {"request_id": "r1"}, "evict": {"slots": [1]}, "pin": {"slot": 0}}
ARGS["unpin"] = ARGS["show"]


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        ("stats", Stats),
        ("show", SlotInfo),
        ("explain", Explanation),
        ("evict", Removed),
        ("flush", Removed),
        ("pin", SlotInfo),
        ("unpin", SlotInfo),
    ],
)
def test_answers_have_the_shape_of_the_protocol(verb, kind):
    reply = busy_rig().ask(verb, **ARGS.get(verb, {}))
    assert reply.error is None
    TypeAdapter(kind).validate_python(reply.data)


def test_every_verb_but_health_is_answered_here():
    for verb in VERBS:
        if verb != "health":
            assert busy_rig().ask(verb, **ARGS.get(verb, {})).error is None
    rig = busy_rig()
    assert rig.ask("health").error == "unknown verb health"
    assert rig.ask("dance").error == "unknown verb dance"


def test_pages_and_tree():
    rig = busy_rig()
    page = rig.ask("list", limit=2).data
    assert ([row["slot"] for row in page["slots"]], page["next_cursor"], page["total"]) == ([0, 1], 2, 3)
    nodes = TypeAdapter(list[TreeNode]).validate_python(rig.ask("tree").data["nodes"])
    assert [(node.tokens, node.parent_slot, node.level) for node in nodes] == [
        (10, None, 0),
        (20, 0, 0),
        (30, 1, 0),
    ]


def test_stats_agree_with_metrics():
    rig = busy_rig()
    rig.serve(one(9, 5000))
    stats = rig.stats()
    assert stats.lookups["hit/none"] == rig.count("prefixd_cache_lookups_total", outcome="hit", reason="none") == 2
    assert stats.cache_tokens["device"] == rig.count("prefixd_cache_tokens_total", source="device") == 30
    assert (stats.requests["finished"], stats.requests["refused_too_long"]) == (3, 1)
    assert stats.snapshot_bytes == stats.kv_bytes_used
    assert "prefixd_cache_tokens_total" in rig.ask("metrics").data["text"]


@pytest.mark.parametrize(
    ("verb", "args", "error"),
    [
        ("show", {"slot": 9}, "slot 9 holds no snapshot"),
        ("show", {}, "slot: must be an integer of at least 0"),
        ("show", {"slot": True}, "slot: must be an integer of at least 0"),
        ("pin", {"slot": -1}, "slot: must be an integer of at least 0"),
        ("unpin", {"slot": 99}, "slot 99 holds no snapshot"),
        ("list", {"cursor": "x"}, "cursor: must be an integer of at least 0"),
        ("explain", {"request_id": 1}, "request_id: must be a string"),
        ("explain", {"request_id": "r9"}, "request r9 is unknown or too long ago"),
        ("evict", {}, "slots: must be a list of integers"),
        ("evict", {"slots": [True]}, "slots: must be a list of integers"),
        ("evict", {"slots": [0, 9]}, "slot 9 holds no snapshot"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(verb, args, error):
    rig = busy_rig()
    kept = rig.kept()
    reply = rig.ask(verb, **args)
    assert (reply.data, reply.error) == (None, error)
    assert rig.kept() == kept


def test_a_dry_run_says_what_would_go():
    rig = busy_rig()
    would = rig.ask("flush", dry_run=True).data
    assert rig.kept() == [10, 20, 30]
    assert rig.ask("flush").data == {**would, "dry_run": False}
    assert rig.kept() == []


def test_a_refused_request_can_be_explained():
    rig = busy_rig()
    refused = rig.serve(one(9, 5000))
    assert rig.ask("explain", request_id=refused).data["state"] == "failed"


def test_a_fault_in_looking_is_told_and_one_in_changing_ends_the_loop(monkeypatch):
    rig = busy_rig()
    monkeypatch.setattr("worker.control.snapshot_tree", lambda store: 1 / 0)
    assert rig.ask("tree").error == "ZeroDivisionError in the worker"
    monkeypatch.setattr(Clearing, "flush", lambda self, dry_run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rig.ask("flush")
