"""Hints of clients: what they keep, how much of it, and that they never change what is found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_rig import Engine, Prompt, chat, one_shot, prompt, words

from protocol.messages import Generate, Hint, Mark, Sampling
from worker.retention import BUDGET, HEAD_TIMES, Retention
from worker.snapshot_view import slot_info


def play(engine: Engine, request: Prompt, hint: Hint | None = None) -> tuple[int, str, str]:
    """One request with a hint; where it started, and why."""
    run = engine.play(request)
    note(engine, request, hint)
    return run.lookup.depth, run.lookup.outcome, run.lookup.reason


def note(engine: Engine, request: Prompt, hint: Hint | None) -> None:
    message = Generate("r", request.ids, request.boundaries, Sampling(1), tenant=request.tenant, hint=hint)
    Retention(engine.store).note(message)


def marked(request: Prompt, seconds: int = 300, *ends: int) -> Hint:
    return Hint(marks=tuple(Mark(end, seconds) for end in ends or (request.boundaries[0].end,)))


def hinted_for(engine: Engine) -> frozenset[int]:
    """The slots that hints speak for in either way."""
    kept = Retention(engine.store).kept()
    assert not kept.held & kept.named
    return kept.held | kept.named


def crowd(engine: Engine, count: int = 40) -> None:
    """So many other conversations, each asked twice, over some time."""
    for who in range(count):
        other = prompt(words(500 + who, 30), words(600 + who, 20))
        for _ in range(2):
            engine.play(other)
            engine.clock.now += 5


def test_a_marked_head_outlives_a_crowd_and_an_unmarked_one_does_not():
    for hinted in (True, False):
        engine = Engine(8)
        request = chat(2)
        play(engine, request, marked(request) if hinted else None)
        crowd(engine)
        assert (30 in engine.kept() and play(engine, chat(1, who=77))[0] == 30) is hinted


def test_a_mark_on_a_message_holds_for_its_time_after_the_last_use():
    engine = Engine(8)
    request = chat(2)
    end = request.last.end
    play(engine, request, marked(request, 300, end))
    engine.clock.now += 299
    assert {engine.store.known(slot).tokens for slot in Retention(engine.store).held()} == {end}
    engine.play(chat(3))  # passes it
    engine.clock.now += 299
    assert Retention(engine.store).held()
    engine.clock.now += 2
    assert not Retention(engine.store).held()


def test_a_longer_mark_is_not_shortened_by_a_later_request():
    engine = Engine(8)
    request = chat(2)
    for seconds in (3600, 300):
        play(engine, request, marked(request, seconds, request.last.end))
    engine.clock.now += 3000
    assert Retention(engine.store).held()


def test_of_a_conversation_that_marks_every_turn_the_deepest_are_held():
    engine = Engine(16)
    for turns in range(2, 12):
        request = chat(turns)
        play(engine, request, marked(request, 300, request.last.end))
        engine.clock.now += 60
    held = sorted(engine.store.known(slot).tokens for slot in Retention(engine.store).held())
    ends = [boundary.end for boundary in request.boundaries]
    assert held == ends[-len(held) :]
    assert 0 < len(held) <= 16 // BUDGET


def test_a_snapshot_that_is_shortened_keeps_its_marks():
    engine = Engine(8)
    request = chat(3)
    play(engine, request, Hint("s", (Mark(request.last.end, 300),)))
    (snapshot,) = (s for s in engine.store.slots.snapshots() if s.node.end == request.last.end)
    above = next(node for node in snapshot.node.ancestors() if node.slot is None)
    engine.store.shorten(snapshot, above, above.end)
    shorter = engine.store.known(above.slot)
    assert (shorter.session, shorter.hold_seconds) == ("s", 300)


def test_a_session_counts_as_a_conversation_that_comes_back():
    kept = []
    for hint in (None, Hint("1234abcd")):
        engine = Engine(4)
        named, others = (
            prompt(words(1, 30), head=False),
            [prompt(words(who, 35 + who), head=False) for who in range(2, 6)],
        )
        play(engine, named, hint)
        engine.clock.now += 10
        for other in others:
            engine.play(other)
        kept.append(30 in engine.kept())
    assert kept == [False, True]


def test_sessions_count_for_no_more_than_their_share_of_slots(monkeypatch: pytest.MonkeyPatch):
    """Who names each request another session pushes out nobody whose conversation has really come back."""
    engine = Engine(8)
    shares = {"repeated": 0.8, "going_on": 0.8, "new": 0.02, "before_last": 0.0}
    monkeypatch.setattr(engine.store.returns, "share", shares.get)
    for _ in range(2):
        for who in range(4):
            engine.play(prompt(words(10 + who, 30), head=False))
    for who in range(40):
        play(engine, prompt(words(100 + who, 40), head=False), Hint(f"{who:08x}"))
    assert engine.kept().count(30) == 4
    assert Retention(engine.store).kept().named == frozenset(newest(engine, 8 // BUDGET))


def newest(engine: Engine, count: int) -> list[int]:
    """The slots that were written last."""
    made = sorted(engine.store.slots.snapshots(), key=lambda snapshot: -snapshot.created_at)
    return [snapshot.slot for snapshot in made[:count]]


def test_marks_come_before_sessions_and_both_fit_one_budget():
    engine = Engine(8)
    marked_ones = [prompt(words(who, 20), words(50 + who, 10)) for who in range(1, 3)]
    for request in marked_ones:
        play(engine, request, marked(request))
    for who in range(10, 14):
        play(engine, prompt(words(who, 31), head=False), Hint(f"{who:08x}"))
    kept = Retention(engine.store).kept()
    assert {engine.store.known(slot).tokens for slot in kept.held} == {20}
    assert (len(kept.held), len(kept.named)) == (2, 0)


@pytest.mark.parametrize("seconds", [300, 3600])
def test_a_mark_on_a_head_ages_too(seconds: int):
    engine = Engine(8)
    request = chat(2)
    play(engine, request, marked(request, seconds))
    engine.clock.now += HEAD_TIMES * seconds - 10
    assert Retention(engine.store).held()
    engine.play(chat(1, who=50))  # another conversation with that head uses it
    engine.clock.now += HEAD_TIMES * seconds - 10
    assert Retention(engine.store).held()
    engine.clock.now += 20
    assert not Retention(engine.store).held()


def test_of_marked_heads_the_last_used_are_held():
    engine = Engine(16)
    heads = [words(who, 20 + who) for who in range(1, 8)]
    for head in heads:
        request = prompt(head, words(90, 5))
        play(engine, request, marked(request))
        engine.clock.now += 5
    engine.play(prompt(heads[1], words(91, 5)))
    held = {engine.store.known(slot).tokens for slot in Retention(engine.store).held()}
    assert held == {22, 25, 26, 27}


def test_a_head_marked_once_does_not_outlive_those_in_use():
    """Marked long ago, never asked for since: others that are marked as well have pushed it out of the budget."""
    engine = Engine(8)
    forgotten = prompt(words(1, 20), words(2, 5))
    play(engine, forgotten, marked(forgotten, 3600))
    for who in range(3, 9):
        for turns in (1, 2):
            request = chat(turns, head=words(who, 30), who=20 + who)
            play(engine, request, marked(request))
            engine.clock.now += 30
    assert 20 not in engine.kept()


def test_what_is_held_goes_rather_than_a_request_fails():
    engine = Engine(8, blocks=32)
    request = prompt(words(1, 20), words(2, 10))
    play(engine, request, marked(request))
    assert Retention(engine.store).held()
    large = prompt(words(3, 4 * 31), head=False, tail=())
    engine.play(large)
    assert not Retention(engine.store).held()


def test_flush_and_evict_do_not_ask_for_marks():
    engine = Engine(8)
    request = chat(2)
    play(engine, request, marked(request))
    assert not engine.clearing.flush().busy
    assert engine.kept() == []


def test_an_operator_sees_them():
    engine = Engine(8)
    request = chat(1)
    play(engine, request, Hint("1234abcd", marked(request, 3600).marks))
    (head,) = engine.slots_at(30)
    info = slot_info(engine.store, head)
    assert (info.session, info.hold_seconds) == ("1234abcd", HEAD_TIMES * 3600)


@pytest.mark.parametrize("slots", [1, 3])
def test_few_slots_hold_nothing(slots: int):
    engine = Engine(slots)
    request = chat(1)
    play(engine, request, marked(request))
    assert not Retention(engine.store).held()


turn = st.tuples(
    st.integers(0, 3),  # whose conversation
    st.integers(1, 4),  # turns
    st.sampled_from(["", "aaaaaaaa", "bbbbbbbb"]),
    st.sets(st.integers(0, 4), max_size=3),  # marked boundaries
    st.sampled_from([300, 3600]),
    st.integers(0, 400),  # seconds that pass
)


def hint_for(request: Prompt, session: str, at: set[int], seconds: int) -> Hint:
    ends = sorted(request.boundaries[i].end for i in at if i < len(request.boundaries))
    return Hint(session, tuple(Mark(end, seconds) for end in ends))


def conversation(who: int, turns: int) -> Prompt:
    return chat(turns, size=7, head=words(90 + who % 2, 9), who=100 + 10 * who)


@settings(max_examples=60, deadline=None)
@given(st.lists(turn, max_size=12))
def test_where_there_is_room_hints_change_no_lookup_at_all(turns: Sequence[tuple]):
    with_hints, without = Engine(64), Engine(64)
    for who, length, session, at, seconds, pause in turns:
        request = conversation(who, length)
        assert play(with_hints, request, hint_for(request, session, at, seconds)) == play(without, request)
        for engine in (with_hints, without):
            engine.clock.now += pause
    assert with_hints.kept() == without.kept()


@settings(max_examples=60, deadline=None)
@given(st.lists(turn, max_size=14), st.integers(0, 9), st.integers(30, 60))
def test_where_there_is_not_the_budget_is_kept_and_what_is_found_is_right(
    turns: Sequence[tuple], slots: int, blocks: int
):
    """The engine checks every restored state against the tokens it was found for."""
    engine = Engine(slots, blocks)
    for who, length, session, at, seconds, pause in turns:
        request = conversation(who, length)
        depth, *_ = play(engine, request, hint_for(request, session, at, seconds))
        assert depth in {0, *(boundary.end for boundary in request.boundaries)}
        favoured = hinted_for(engine)
        assert len(favoured) <= slots // BUDGET
        assert len({b for slot in favoured for b in engine.store.known(slot).blocks}) <= blocks // BUDGET
        engine.clock.now += pause
    engine.play(one_shot(400, 4 * blocks - 9))  # whatever is held, a request that fits is served
