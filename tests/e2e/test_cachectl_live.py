"""Every command of `cachectl` against a daemon at work, with its exit codes."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from chat_model import words
from conftest import Served
from daemon import BIN, until
from http_client import assistant, joined, system, user

DONE, REFUSED, USAGE, UNREACHABLE = 0, 1, 2, 3
ENDLESS = {"max_tokens": 15_000, "ignore_eos": True}


def ctl(served: Served, *arguments: str | int, code: int = DONE):
    """What a command prints as JSON."""
    run = served.daemon.cachectl("--json", *arguments)
    assert run.returncode == code, run.stderr
    return json.loads(run.stdout) if run.stdout else run.stderr


def deepest(served: Served) -> dict:
    """The snapshot of the only conversation; the head that the template gives it may be kept beside it."""
    return max(ctl(served, "list"), key=lambda row: row["tokens"])


def test_looking_around(served: Served):
    head = system(words("looking", 100))
    first = served.client.chat([head, user("first")])
    second = served.client.chat([head, user(words("second", 50)), assistant("Yes."), user("third")])
    rows = ctl(served, "list")
    assert len(rows) == 3
    assert {row["kind"] for row in rows} == {"head", "message"}
    [root] = [row for row in rows if row["parent_slot"] is None]
    assert root["children"] == 2
    assert root["hits"] == 1
    assert ctl(served, "show", root["slot"]) | {"used_age_seconds": 0, "created_age_seconds": 0} == root | {
        "used_age_seconds": 0,
        "created_age_seconds": 0,
    }
    assert [node["level"] for node in ctl(served, "tree")] == [0, 1, 1]
    stats = ctl(served, "stats")
    assert stats["snapshots"] == stats["slots"]["ready"] == 3
    assert stats["snapshot_bytes"] == stats["kv_bytes_used"]
    explained = ctl(served, "explain", second.request_id)
    assert (explained["outcome"], explained["depth"]) == ("hit", root["tokens"])
    assert sorted(row["tokens"] for row in rows)[-1] == explained["committed"][-1]
    assert ctl(served, "explain", first.request_id)["outcome"] == "miss"
    for command in ("list", "tree", "stats"):
        run = served.daemon.cachectl(command)
        assert run.returncode == DONE
        assert str(root["slot"]) in run.stdout
        assert words("looking", 3) not in run.stdout


def test_a_request_is_known_by_the_id_of_its_answer_too(served: Served):
    client, message = served.client, {"max_tokens": 2, "messages": [user("Known by its answer.")]}
    answers = [
        client.chat(message["messages"]),
        client.complete("Known by its answer."),
        client.request("POST", "/v1/messages", message),
        client.request("POST", "/v1/responses", {"max_output_tokens": 16, "input": "Known by its answer."}),
    ]
    for answer in answers:
        assert answer.body["id"] != answer.request_id
        assert ctl(served, "explain", answer.body["id"])["request_id"] == answer.request_id
    assert ctl(served, "diff", answers[0].body["id"], answers[2].body["id"])["b"]["slot"] is not None


def test_where_two_conversations_part(served: Served):
    head = system(words("diff", 60))
    first = served.client.chat([head, user("Same start, one end.")])
    second = served.client.chat([head, user("Same start, other end."), assistant("Yes."), user("More.")])
    found = ctl(served, "diff", first.request_id, second.request_id)
    by_tokens = {row["tokens"]: row["slot"] for row in ctl(served, "list")}
    assert found["message"] == 1
    assert found["common_boundary"] in by_tokens
    assert found["common_boundary"] < found["common_tokens"] < found["a"]["tokens"]
    for side in (found["a"], found["b"]):
        assert side["tokens_after"] == side["tokens"] - found["common_tokens"]
        assert side["boundaries_after"][-1] == side["tokens"]
        assert side["slot"] == by_tokens[side["tokens"]]
    assert ctl(served, "diff", found["a"]["slot"], found["b"]["slot"]) == found
    assert "they part" in served.daemon.cachectl("diff", first.request_id, second.request_id).stdout
    assert served.daemon.cachectl("diff", first.request_id, "never-seen").returncode == REFUSED
    assert served.daemon.cachectl("diff", first.request_id).returncode == 2


def test_reading_does_not_count_as_use(served: Served):
    served.client.chat([user(words("recency", 40))])
    before = deepest(served)
    for command in ("list", "tree", "stats"):
        ctl(served, command)
    ctl(served, "show", before["slot"])
    after = deepest(served)
    assert after["hits"] == before["hits"] == 0
    assert after["used_age_seconds"] > before["used_age_seconds"]


def test_evicting(served: Served):
    messages = [user(words("evicted", 300))]
    known = served.client.chat(messages)
    row = deepest(served)
    would = ctl(served, "evict", row["slot"], "--dry-run")
    assert would == {
        "removed": [row["slot"]],
        "busy": [],
        "freed_bytes": row["own_bytes"],
        "tier_bytes": 0,
        "tier_snapshots": 0,
        "names": [],
        "kept": [],
        "dry_run": True,
    }
    assert served.client.chat(messages).outcome[0] == "hit"
    assert ctl(served, "evict", row["slot"]) == would | {"dry_run": False}
    assert row["slot"] not in [other["slot"] for other in ctl(served, "list")]
    again = served.client.chat(messages)
    assert again.cached_tokens < 100
    assert again.outcome[2] == "evicted"
    assert again.text == known.text
    assert "500" in ctl(served, "evict", 500, code=REFUSED)
    assert "explain" not in ctl(served, "show", 9999, code=REFUSED)


def test_a_pinned_snapshot_stays(two_slots: Served):
    kept = [user(words("pinned", 200))]
    two_slots.client.chat(kept)
    row = deepest(two_slots)
    assert ctl(two_slots, "pin", row["slot"])["pinned"] is True
    for number in range(6):
        two_slots.client.chat([user(words(f"pusher {number}", 400))])
    assert ctl(two_slots, "evict", row["slot"], code=REFUSED)["busy"] == [row["slot"]]
    assert row["slot"] in ctl(two_slots, "flush")["busy"]
    answer = two_slots.client.chat(kept)
    assert answer.outcome == ("hit", row["tokens"], "none")
    assert answer.text == two_slots.client.cold(kept).text
    two_slots.client.chat([user(words("another", 200))])
    for other in ctl(two_slots, "list"):
        ctl(two_slots, "pin", other["slot"])
    assert two_slots.client.chat([user("All slots are pinned.")]).status == 200
    assert sorted(s["tokens"] for s in ctl(two_slots, "list"))[-1] == row["tokens"]
    assert ctl(two_slots, "unpin", row["slot"])["pinned"] is False
    assert row["slot"] in ctl(two_slots, "evict", row["slot"])["removed"]


def test_flushing_under_load(served: Served):
    """K-LO9: it says what it did, running requests end right, and nothing is found afterwards."""
    messages = [user(words("flushed", 300))]
    cold = served.client.cold(messages, max_tokens=400).text
    served.client.chat(messages)
    with served.client.stream(messages, max_tokens=400) as stream:
        events = stream.take_text(2)
        assert ctl(served, "flush", "--dry-run")["dry_run"] is True
        assert deepest(served)["tokens"] > 300
        answers = [ctl(served, "flush"), ctl(served, "flush")]
        assert sum(len(answer["removed"]) + len(answer["busy"]) for answer in answers) >= 1
        events += list(stream)
    assert joined(events) == cold
    assert ctl(served, "list") == []
    again = served.client.chat(messages)
    assert again.outcome == ("miss", 0, "flushed")
    assert again.cached_tokens == 0
    assert "flushed" in served.daemon.cachectl("flush").stdout


def test_watching(served: Served):
    command = [BIN / "cachectl", "--run-dir", served.daemon.run_dir, "watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        assert "snapshots" in watch.stdout.readline()
        assert watch.stdout.readline().split()[0].isdigit()
        watch.send_signal(signal.SIGINT)
        assert watch.wait(30) == DONE


def test_exit_codes(served: Served, tmp_path):
    assert served.daemon.cachectl("explain", "never-seen").returncode == REFUSED
    assert served.daemon.cachectl("pin", 400).returncode == REFUSED
    assert served.daemon.cachectl("dance").returncode == USAGE
    assert served.daemon.cachectl("show", "seven").returncode == USAGE
    elsewhere = subprocess.run(
        [BIN / "cachectl", "--run-dir", tmp_path, "list"], capture_output=True, text=True, check=False
    )
    assert elsewhere.returncode == UNREACHABLE
    assert str(tmp_path) in elsewhere.stderr


def test_while_the_model_loads(start):
    daemon = start()
    until(daemon.is_reachable, "the worker has its sockets")
    run = daemon.cachectl("stats")
    assert run.returncode in (DONE, REFUSED)
    if run.returncode == REFUSED:
        assert "loading" in run.stderr or "starting" in run.stderr


@pytest.mark.parametrize("verb", ["evict", "show", "pin", "unpin", "explain"])
def test_a_command_without_its_argument(verb: str, served: Served):
    run = served.daemon.cachectl(verb)
    assert run.returncode == USAGE
    assert "required" in run.stderr
