"""Every verb of the operator against a worker with something to tell."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter
from scheduler_rig import Rig, one, text
from snapshot_rig import prompt

from protocol.control import VERBS, Difference, Explanation, Removed, SlotInfo, Stats, TreeNode
from worker.snapshot_clearing import Clearing


def busy_rig() -> Rig:
    rig = Rig()
    for turns in (1, 2, 3):
        rig.serve(prompt(*(text(i, 10) for i in range(turns))))
    return rig


ARGS = {"show": {"slot": 0}, "explain": {"request_id": "r1"}, "evict": {"slots": [1]}, "pin": {"slot": 0}}
ARGS["diff"] = {"a": 0, "b": "r1"}
ARGS["unpin"] = ARGS["show"]


@pytest.mark.parametrize(
    ("verb", "kind"),
    [
        ("stats", Stats),
        ("show", SlotInfo),
        ("explain", Explanation),
        ("diff", Difference),
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
        if verb not in ("health", "export", "import", "transfer"):  # the last three need a disk cache
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
        ("diff", {"a": 0}, "b: must be a slot or a request id"),
        ("diff", {"a": True, "b": 0}, "a: must be a slot or a request id"),
        ("diff", {"a": 0, "b": 9}, "slot 9 holds no snapshot"),
        ("diff", {"a": "r9", "b": 0}, "request r9 is unknown or too long ago"),
        ("evict", {}, "slots: must be a list of integers"),
        ("evict", {"slots": [True]}, "slots: must be a list of integers"),
        ("evict", {"slots": [1], "generations": [True]}, "generations: must be a list of integers"),
        ("evict", {"slots": [1], "generations": []}, "generations: must be one a slot"),
        ("pin", {"request_id": 1}, "request_id: must be a string"),
        ("pin", {"request_id": "r9"}, "request r9 is unknown or too long ago"),
        ("evict", {"slots": [0, 9]}, "slot 9 holds no snapshot"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(verb, args, error):
    rig = busy_rig()
    kept = rig.kept()
    reply = rig.ask(verb, **args)
    assert (reply.data, reply.error) == (None, error)
    assert rig.kept() == kept


@pytest.mark.parametrize("emptied", [False, True])
def test_what_was_chosen_in_a_slot_that_holds_another_snapshot_by_now_is_passed_over(emptied):
    rig = Rig(slots=2)
    for who in (1, 2):
        rig.serve(one(who, 20))
    seen = rig.ask("list").data["slots"]
    rig.ask("evict", slots=[seen[0]["slot"]])
    if not emptied:
        rig.serve(one(3, 30))
    kept = rig.kept()
    both = {"slots": [row["slot"] for row in seen], "generations": [row["generation"] for row in seen]}
    would, did = (rig.ask("evict", **both, dry_run=dry_run).data for dry_run in (True, False))
    assert would["removed"] == did["removed"] == [seen[1]["slot"]]
    assert would["busy"] == did["busy"] == []
    assert rig.kept() == [tokens for tokens in kept if tokens != 20]


def test_what_a_request_has_left_is_pinned_by_its_name():
    rig = Rig()
    request = rig.serve(prompt(text(1, 10), text(2, 10), text(3, 10)))
    rows = {row["tokens"]: row["slot"] for row in rig.ask("list").data["slots"]}
    assert rig.ask("pin", request_id=request).data["slot"] == rows[30]
    assert rig.ask("pin", request_id=request, head=True).data["slot"] == rows[10]
    assert rig.ask("flush").data["busy"] == sorted([rows[10], rows[30]])
    for tokens in (10, 30):
        rig.ask("unpin", slot=rows[tokens])
    rig.ask("flush")
    rig.serve(one(9, 40))  # what is in the slots now is somebody else's
    assert "no snapshot is kept of the prompt" in rig.ask("pin", request_id=request).error
    assert "no snapshot is kept of the system message" in rig.ask("pin", request_id=request, head=True).error


def test_a_snapshot_that_is_going_cannot_be_pinned():
    rig = busy_rig()
    slot = rig.ask("list").data["slots"][0]["slot"]
    snapshot = rig.store.known(slot)
    rig.store.slots.acquire(slot)
    rig.ask("flush")
    assert snapshot.leaving
    assert rig.ask("pin", slot=slot).error == f"slot {slot} holds no snapshot"


def test_a_dry_run_says_what_would_go():
    rig = busy_rig()
    would = rig.ask("flush", dry_run=True).data
    assert rig.kept() == [10, 20, 30]
    assert rig.ask("flush").data == {**would, "dry_run": False}
    assert rig.kept() == []


def test_two_conversations_part_in_the_message_in_which_their_ids_do():
    rig = Rig()
    first = rig.serve(prompt(text(1, 10), text(2, 10), text(3, 10)))
    second = rig.serve(prompt(text(1, 10), [*text(2, 7), *text(9, 8)]))
    found = rig.ask("diff", a=first, b=second).data
    assert (found["common_tokens"], found["common_boundary"], found["message"]) == (17, 10, 1)
    a, b = found["a"], found["b"]
    assert (a["tokens"], a["tokens_after"], a["boundaries_after"], a["messages"]) == (30, 13, [20, 30], 3)
    assert (b["tokens"], b["tokens_after"], b["boundaries_after"], b["messages"]) == (25, 8, [25], 2)
    slots = {row["tokens"]: row["slot"] for row in rig.ask("list").data["slots"]}
    assert (a["slot"], b["slot"]) == (slots[30], slots[25])
    assert rig.ask("diff", a=slots[30], b=slots[25]).data == found
    before, after = rig.ask("diff", a=slots[10], b=first).data, rig.ask("diff", a=first, b=first).data
    assert (before["common_tokens"], before["message"], before["b"]["boundaries_after"]) == (10, 1, [20, 30])
    assert (after["common_tokens"], after["message"], after["a"]["boundaries_after"]) == (30, None, [])


def test_what_was_evicted_can_still_be_compared_and_what_was_never_computed_not():
    rig = Rig()
    first, second = rig.serve(one(1, 20)), rig.serve(one(2, 20))
    rig.ask("flush")
    found = rig.ask("diff", a=first, b=second).data
    assert (found["common_tokens"], found["common_boundary"], found["message"]) == (0, 0, 0)
    assert found["a"]["slot"] is None
    refused = rig.serve(one(9, 5000))
    assert (
        rig.ask("diff", a=first, b=refused).error
        == f"nothing is known any more of what request {refused} has computed"
    )


def test_a_refused_request_can_be_explained():
    rig = busy_rig()
    refused = rig.serve(one(9, 5000))
    assert rig.ask("explain", request_id=refused).data["state"] == "failed"


def test_a_fault_in_looking_is_told_and_one_in_changing_ends_the_loop(monkeypatch):
    rig = busy_rig()
    monkeypatch.setattr("worker.control.snapshot_tree", lambda store, stored: 1 / 0)
    assert rig.ask("tree").error == "ZeroDivisionError in the worker"
    monkeypatch.setattr(Clearing, "flush", lambda self, dry_run: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rig.ask("flush")
