"""`cachectl evict` of what is described, against a worker that knows what it frees."""

from __future__ import annotations

import json

from chat_model import words
from conftest import Served
from http_client import system, user


def evict(served: Served, *options: str) -> dict:
    run = served.daemon.cachectl("--json", "evict", *options)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_the_cache_is_cut_down_to_a_size_and_what_was_used_last_stays(served: Served):
    head = system(words("described", 100))
    for number in range(4):
        served.client.chat([head, user(words(f"described {number}", 200))])
    before = served.daemon.stats()["snapshot_bytes"]
    rows = served.daemon.snapshots()
    latest = min(rows, key=lambda row: row["used_age_seconds"])
    target = before * 2 // 3
    would = evict(served, "--to", str(target), "--dry-run")
    assert served.daemon.stats()["snapshot_bytes"] == before
    done = evict(served, "--to", str(target))
    assert (done["removed"], done["freed_bytes"]) == (would["removed"], would["freed_bytes"])
    after = served.daemon.stats()["snapshot_bytes"]
    assert after == before - done["freed_bytes"] <= target
    assert latest["slot"] not in done["removed"]
    assert 0 < len(done["removed"]) < len(rows)
    assert evict(served, "--to", str(target))["removed"] == [], "there is room enough now"


def test_by_digest_and_by_age(served: Served):
    served.client.chat([user(words("by digest", 200))])
    row = max(served.daemon.snapshots(), key=lambda row: row["tokens"])
    assert evict(served, "--older", "1h")["removed"] == []
    assert evict(served, "--digest", row["digest"])["removed"] == [row["slot"]]
    evict(served, "--older", "0s")
    assert served.daemon.snapshots() == []
