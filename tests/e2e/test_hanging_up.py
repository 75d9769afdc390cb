"""Clients that leave: the work stops, the gauges return to 0, what was computed is kept, and the next one is served."""

from __future__ import annotations

import pytest
from chat_model import words
from conftest import Served
from daemon import metrics, until
from http_client import assistant, system, user
from reference import Reference

ENDLESS = {"max_tokens": 15_000, "ignore_eos": True}


def expect_cancelled(served: Served, cancelled_before: int) -> None:
    """The request ended as cancelled, nothing is left of it, and others are served."""
    stats = served.daemon.wait_idle()
    assert stats["requests"]["cancelled"] == cancelled_before + 1
    assert stats["kv_bytes_used"] == stats["snapshot_bytes"]
    assert stats["requests"]["failed"] == 0
    until(lambda: metrics(served.client)["prefixd_gateway_open_requests"] == 0, "the gateway has let go as well")
    messages = [user("Still there?")]
    assert served.client.chat(messages).text == served.client.cold(messages).text


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
def test_leaving_while_the_answer_is_decoded(streaming: bool, served: Served, reference: Reference):
    """K-LO1."""
    before = served.daemon.stats()["requests"]["cancelled"]
    messages = [user(words(f"leaving {streaming}", 50))]
    if streaming:
        with served.client.stream(messages, **ENDLESS) as stream:
            assert stream.take_text(5)
    else:
        connection = served.client.send(messages, **ENDLESS)
        until(lambda: served.daemon.snapshots(), "the prompt is computed")
        connection.close()
    expect_cancelled(served, before)
    assert served.client.chat(messages).outcome == ("hit", reference.history_tokens(messages), "none")


@pytest.mark.parametrize("streaming", [True, False], ids=["stream", "whole"])
def test_leaving_during_prefill_keeps_what_is_computed(streaming: bool, served: Served, reference: Reference):
    """K-LO2 and K-RC12: exactly a finished part is kept, under its own key."""
    messages = [system(words(f"long {streaming}", 100))]
    for number in range(45):
        messages += [user(words(f"q {streaming} {number}", 100)), assistant(words(f"a {number}", 130))]
    messages.append(user("And now?"))
    before = served.daemon.stats()
    connection = served.client.send(messages, stream=streaming)
    start = before["cache_tokens"]["computed"]
    until(lambda: served.daemon.stats()["cache_tokens"]["computed"] > start + 1000, "prefill is under way")
    connection.close()
    expect_cancelled(served, before["requests"]["cancelled"])
    ends = {reference.history_tokens(messages[:end]) for end in range(1, len(messages))}
    kept = max(row["tokens"] for row in served.daemon.snapshots() if row["tokens"] > 500)
    answer = served.client.chat(messages)
    assert answer.outcome == ("hit", kept, "none")
    assert 500 < kept < answer.prompt_tokens - 500, "the rest was not computed for nobody"
    assert kept in ends
    assert answer.choices == served.client.cold(messages).choices


def test_twenty_clients_that_leave(served: Served):
    """K-LO3, K-MT5 and K-SM4: every one is counted, and memory returns to what snapshots hold."""
    before = served.daemon.stats()["requests"]
    for number in range(20):
        messages = [user(words(f"leaver {number}", 30))]
        with served.client.stream(messages, **ENDLESS) as stream:
            stream.take_text(1 + number % 3)
    stats = served.daemon.wait_idle()
    assert stats["requests"]["cancelled"] == before["cancelled"] + 20
    assert stats["requests"]["finished"] == before["finished"]
    assert stats["kv_bytes_used"] == stats["snapshot_bytes"]
    assert served.client.chat([user("Hello")]).status == 200
    assert served.client.get("/ready").status == 200


def test_leaving_while_queued(strict: Served):
    daemon, client = strict.daemon, strict.client
    before = daemon.stats()["requests"]["cancelled"]
    with client.stream([user("runs")], **ENDLESS) as running:
        running.take_text(1)
        waiting = client.send([user("waits")])
        until(lambda: daemon.stats()["requests_waiting"] == 1, "the second request waits")
        waiting.close()
        until(lambda: daemon.stats()["requests_waiting"] == 0, "it is taken back")
        assert running.take_text(1), "the first one goes on"
        assert daemon.stats()["requests_running"] == 1
    assert daemon.wait_idle()["requests"]["cancelled"] == before + 2
