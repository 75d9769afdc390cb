"""Who runs when, and how requests begin and end: single courses, told as such."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from scheduler_rig import Rig, one, text
from snapshot_rig import prompt
from toy_model import answer

from protocol.messages import Accepted, Boundary, Completed, Failed, Finished, Generate, Progress, Sampling, Tokens
from worker.io import FromGateway
from worker.snapshot_finding import Finding

HEAD = text(1, 20)


# A request from end to end


def test_the_events_of_one_request_in_order():
    rig = Rig()
    request = rig.serve(one(1, 20), max_tokens=2)
    assert [type(event) for event in rig.events(request)] == [
        Accepted,
        Progress,
        Progress,
        Tokens,
        Tokens,
        Finished,
        Completed,
    ]
    assert [event.computed for event in rig.of(request, Progress)] == [8, 16]
    end = rig.end(request)
    assert (end.prompt_tokens, end.completion_tokens, end.outcome, end.depth) == (21, 2, "miss", 0)


def test_the_same_request_again_computes_one_token_of_the_prompt():
    rig = Rig()
    rig.serve(one(1, 20))
    request = rig.serve(one(1, 20))
    rig.assert_answered(request)
    assert (rig.accepted(request).outcome, rig.accepted(request).depth) == ("hit", 20)
    assert rig.runner.prefilled[-1] == (request, 20, 21)


def test_uncached_requests_neither_read_nor_write():
    rig = Rig()
    rig.serve(one(1, 20), cache=False)
    assert rig.kept() == []
    rig.serve(one(1, 20))
    request = rig.serve(one(1, 20), cache=False)
    assert (rig.accepted(request).outcome, rig.accepted(request).reason) == ("miss", "disabled")
    assert rig.count("prefixd_cache_lookups_total", outcome="miss", reason="disabled") == 2


def test_choices_share_the_prompt_and_write_apart():
    rig = Rig()
    request = rig.serve(one(1, 21), n=3, max_tokens=9)
    rig.assert_answered(request)
    assert rig.reasons(request) == ["length"] * 3
    assert rig.end(request).completion_tokens == 27


def test_a_stop_token_is_counted_and_not_sent():
    rig = Rig()
    ids = one(1, 20)
    first, second, *_ = answer(ids.ids, 8)
    assert first != second
    request = rig.serve(ids, max_tokens=8, stop_token_ids=(second,))
    assert rig.tokens(request) == [first]
    assert rig.reasons(request) == ["stop"]
    assert rig.end(request).completion_tokens == 2


# Refusals


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"token_ids": []}, "invalid", "empty"),
        ({"token_ids": [1, 64]}, "invalid", "outside"),
        ({"token_ids": [-1]}, "invalid", "outside"),
        ({"n": 0}, "invalid", "n must"),
        ({"n": 257}, "invalid", "n must"),
        ({"max_tokens": 0}, "invalid", "max_tokens"),
        ({"ends": [2, 2]}, "invalid", "rise"),
        ({"ends": [4]}, "invalid", "rise"),
        ({"ends": [0]}, "invalid", "rise"),
        ({"token_ids": [1] * 40}, "too_long", "the context holds 40"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(changes, code, word):
    rig = Rig(max_model_len=40)
    ids = one(1, 2).ids[:0]
    ids.extend(changes.get("token_ids", [1, 2, 3]))
    boundaries = tuple(Boundary(end, bytes(16), "message", 1) for end in changes.get("ends", ()))
    message = Generate("r", ids, boundaries, Sampling(changes.get("max_tokens", 1)), changes.get("n", 1))
    rig.asked["r"] = message
    rig.sockets.inbox.put(FromGateway(b"gateway", message))
    rig.run()
    end = rig.end("r")
    assert isinstance(end, Failed)
    assert end.code == code
    assert word in end.message
    assert rig.events("r") == [end]
    assert rig.count("prefixd_requests_total", result=f"refused_{code}") == 1
    assert rig.journal.explain("r").state == "failed"


def test_a_prompt_that_only_the_pool_is_too_small_for_is_told_so():
    rig = Rig(blocks=4)
    end = rig.end(rig.serve(one(1, 15)))
    assert (end.code, end.message) == (
        "too_long",
        "prompt is too long: 16 tokens > 15 maximum; kv_memory holds 16 tokens, and the answer needs at least one",
    )


def test_the_queue_is_bounded():
    rig = Rig(max_running=1, max_waiting=2)
    requests = [rig.generate(one(i, 8)) for i in range(4)]
    rig.turn()
    assert rig.end(requests[3]).code == "queue_full"
    rig.run()
    for request in requests[:3]:
        rig.assert_answered(request)


def test_a_wait_in_the_queue_has_an_end():
    """Whoever has started is served, however long it takes; the others are told, oldest first, and leave nothing."""
    rig = Rig(max_running=1, max_queue_seconds=20.0)
    first = rig.generate(one(1, 8), max_tokens=60)
    waiting = [rig.generate(one(number, 8)) for number in (2, 3)]
    rig.turn()
    started = rig.clock()
    rig.turn_until(lambda: rig.of(waiting[1], Failed))
    assert rig.clock() - started < 30.0, "told in time, not at the end of who runs"
    assert rig.scheduler.running_count == 1
    for request in waiting:
        end = rig.end(request)
        assert end.code == "queue_full"
        assert end.message == "no turn came in 20 seconds of waiting in the queue"
        assert not rig.of(request, Accepted)
    late = rig.generate(one(4, 8))
    rig.run()
    rig.assert_answered(first)
    assert rig.end(late).code == "queue_full", "it waited for the first one as well"
    last = rig.generate(one(5, 8))
    rig.run()
    rig.assert_answered(last)
    assert rig.metrics.values(rig.metrics.failures, "cause")["queue_full"] == 3


def test_an_id_in_use_is_refused_and_the_open_request_goes_on():
    rig = Rig()
    request = rig.generate(one(1, 20))
    rig.turn()
    rig.sockets.inbox.put(FromGateway(b"gateway", rig.asked[request]))
    rig.turn()
    (refused,) = rig.of(request, Failed)
    assert "in use" in refused.message
    assert rig.journal.explain(request).state == "prefill"
    rig.turn_until(lambda: rig.scheduler.is_idle)
    assert len(rig.of(request, Completed)) == 1


# Order and fairness


def test_prefill_and_decode_take_turns():
    rig = Rig()
    talker = rig.generate(one(1, 6), max_tokens=40)
    rig.turns(2)
    rig.generate(one(2, 80))
    rig.run()
    by_time = [type(event) for _, event in rig.sockets.sent if isinstance(event, Tokens | Progress)]
    between = "".join("t" if kind is Tokens else "p" for kind in by_time).strip("t")
    assert "pp" not in between
    assert "tt" not in between
    rig.assert_answered(talker)


def test_a_long_prompt_goes_on_beside_a_stream_of_short_ones():
    rig = Rig(max_running=3)
    long = rig.generate(one(1, 160), max_tokens=1)
    passes = 0
    while not rig.tokens(long):
        if len(rig.scheduler.running.prefilling) < 2:
            rig.generate(one(100 + passes, 7), max_tokens=1)
        rig.turn()
        passes += 1
        assert passes < 200, "the long prompt starves"
    # 21 passes of its own, of at least every fourth.
    assert sum(1 for request, _, _ in rig.runner.prefilled if request == long) == 21
    assert len(rig.runner.prefilled) <= 4 * 21


def test_a_short_request_does_not_wait_for_a_long_prefill():
    rig = Rig()
    long = rig.generate(one(1, 160))
    rig.turns(3)
    short = rig.generate(one(2, 6))
    rig.turns(12)
    rig.assert_answered(short)
    assert not rig.tokens(long)


def test_twenty_clients_at_once_are_all_served():
    rig = Rig(blocks=30, max_running=4)
    requests = [rig.generate(prompt(HEAD, text(10 + i, 5 + i)), max_tokens=10) for i in range(20)]
    rig.run()
    for request in requests:
        rig.assert_answered(request)


def test_requests_start_in_the_order_they_came():
    rig = Rig(max_running=1)
    requests = [rig.generate(one(i, 6 + 30 * (i % 2))) for i in range(6)]
    rig.run()
    started = [event.request_id for _, event in rig.sockets.sent if isinstance(event, Accepted)]
    assert started == requests


@pytest.mark.parametrize("n", [3, 8])
def test_more_choices_than_run_at_once_take_turns(n):
    rig = Rig(max_running=2)
    request = rig.generate(one(1, 6), n=n, max_tokens=12)
    later = rig.generate(one(2, 6), max_tokens=3)
    rig.run()
    rig.assert_answered(request)
    rig.assert_answered(later)
    per_choice = [[i for i, row in enumerate(rig.runner.decoded) if (request, c) in row] for c in range(n)]
    gaps = [b - a for turns in per_choice for a, b in pairwise(turns)]
    assert max(gaps) <= n, "a choice waits longer than one round"


# The accounts


def test_restores_and_commits_are_timed():
    rig = Rig()
    rig.serve(one(1, 20))
    rig.serve(one(1, 20))
    assert rig.count("prefixd_restore_seconds_count") == 1
    assert rig.count("prefixd_commit_seconds_count") == 1


def test_a_lookup_that_finds_what_is_gone_at_once_starts_cleanly(monkeypatch):
    rig = Rig()
    rig.serve(one(1, 20))
    monkeypatch.setattr(Finding, "begin_restore", lambda *_, **__: None)
    request = rig.serve(one(1, 20))
    rig.assert_answered(request)
    accepted = rig.accepted(request)
    assert (accepted.outcome, accepted.reason, accepted.depth) == ("miss", "restore_failed", 0)


@pytest.mark.parametrize("entries", [0, 12])
@pytest.mark.parametrize(
    "asked",
    [
        one(1, 12, tail=0),
        one(1, 20, tail=0),
        one(2, 30),
        prompt(text(2, 20), text(3, 5)),
    ],
    ids=["longer than the prompt", "as long as it", "at no boundary of it", "of other tokens"],
)
def test_a_lookup_that_is_wrong_is_not_believed(monkeypatch, entries, asked):
    """S1-3 and S1-4."""
    rig = Rig(entries=entries)
    rig.serve(one(1, 20, tail=2))
    lookup = Finding.lookup

    def wrong(self, *words, **options):
        return replace(lookup(self, *words, **options), slot=0, generation=1, depth=20, outcome="hit")

    with monkeypatch.context() as patch:
        patch.setattr(Finding, "lookup", wrong)
        request = rig.serve(asked)
    rig.assert_answered(request)
    accepted = rig.accepted(request)
    assert (accepted.outcome, accepted.reason, accepted.depth) == ("miss", "restore_failed", 0)
    assert 20 in rig.kept(), "what it is the snapshot of can have it still"
    assert rig.accepted(rig.serve(one(1, 20, tail=2))).depth == 20


def test_tokens_are_counted_once():
    rig = Rig()
    for turns in range(1, 6):
        rig.serve(prompt(*(text(i, 9) for i in range(turns))))
    prompts = sum(len(message.token_ids) for message in rig.asked.values())
    computed = rig.count("prefixd_cache_tokens_total", source="computed")
    restored = rig.count("prefixd_cache_tokens_total", source="device")
    assert computed + restored == prompts
    assert restored == sum(rig.accepted(request).depth for request in rig.asked)
