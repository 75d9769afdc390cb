"""Decode steps that are started before the one before them is reported: the same answers, and nothing left behind."""

from __future__ import annotations

import random

import pytest
import torch
from scheduler_rig import Rig, one
from snapshot_rig import prompt, states
from toy_model import answer

from protocol.messages import Accepted, Completed
from worker.ahead import Ahead


class FollowingRig(Rig):
    """A rig whose runner goes on by itself, from logits of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.followed = []  # rows of each step that was started ahead
        self._last = None
        self._decode = self.runner.decode
        self.runner.decode = self.decode
        self.runner.follow = self.follow
        self.engine._ahead = Ahead(self.scheduler, self.runner)

    def decode(self, token_ids, tables, lengths, entries):
        self._last = self._decode(token_ids, tables, lengths, entries)
        self._entries = list(entries)
        return self._last

    def follow(self, tables):
        runner, rows = self.runner, []
        for index, (table, token) in enumerate(zip(tables, self._last.argmax(-1).tolist(), strict=True)):
            choice = runner._choice(table)
            request = choice.request
            assert (request.request_id, choice.index) == runner.decoded[-1][index]
            ids = [*request.message.token_ids, *self.tokens(request.request_id, choice.index), token]
            expected = states(ids)
            runner._expect(table, expected[:-1], request)
            runner.cache.write(table, len(ids) - 1, expected[-1])
            if self._entries:
                runner._own(self._entries[index])
                runner.entries[self._entries[index]] = expected[-1]
            rows.append(runner.logits(expected[-1]))
        self.followed.append(len(rows))
        self._last = torch.stack(rows)
        return self._last


@pytest.mark.parametrize("options", [{}, {"entries": 12}])
def test_steps_follow_each_other_until_an_answer_has_its_length(options):
    rig = FollowingRig(**options)
    request = rig.serve(one(1, 20), max_tokens=12)
    rig.assert_answered(request)
    # The first token is prefill's; of the eleven steps that make the others only one is begun from the host.
    assert len(rig.runner.decoded) == 1
    assert rig.followed == [1] * 10


def test_choices_that_end_at_a_stop_token_leave_the_others_right():
    rig = FollowingRig(max_running=8)
    stops = answer(one(1, 9).ids, 12, ())[5]
    stopped = rig.generate(one(1, 9), max_tokens=12, stop_token_ids=(stops,))
    others = [rig.generate(one(seed, 8 + seed), max_tokens=15, n=2) for seed in (2, 3)]
    rig.run()
    for request in (stopped, *others):
        rig.assert_answered(request)
    assert len(rig.tokens(stopped)) <= 5
    assert 5 in rig.followed
    assert 4 in rig.followed


def test_what_comes_or_goes_meanwhile_is_seen():
    rig = FollowingRig()
    leaving, staying = (rig.generate(one(seed, 10), max_tokens=40) for seed in (1, 2))
    rig.turn_until(lambda: len(rig.followed) > 2)
    assert rig.engine._ahead.step is not None
    rig.cancel(leaving)
    rig.turn()
    coming = rig.generate(one(3, 10), max_tokens=5)
    rig.run()
    assert isinstance(rig.end(leaving), Completed)
    rig.assert_answered(staying)
    rig.assert_answered(coming)


@pytest.mark.parametrize("options", [{}, {"entries": 12}])
def test_room_that_an_operator_makes_is_taken_at_once(options):
    rig = FollowingRig(blocks=16, **options)
    rig.serve(one(1, 36))
    rig.ask("pin", slot=0)
    running = rig.generate(one(2, 10), max_tokens=20)
    rig.turn_until(lambda: len(rig.followed) > 2)
    waiting = rig.generate(one(3, 14), max_tokens=6)
    rig.turns(2)
    assert rig.scheduler.waiting
    assert rig.engine._ahead.step is not None
    rig.ask("unpin", slot=0)
    rig.ask("evict", slots=[0])
    rig.turns(2)
    assert not rig.scheduler.waiting
    rig.run()
    for request in (running, waiting):
        rig.assert_answered(request)
    assert rig.of(waiting, Accepted)[0].depth == 0


def test_all_may_leave_while_a_step_is_under_way():
    rig = FollowingRig()
    request = rig.generate(one(1, 10), max_tokens=40)
    rig.turn_until(lambda: rig.engine._ahead.step is not None)
    rig.cancel(request)
    rig.turns(2)
    assert rig.scheduler.is_idle
    assert rig.engine._ahead.step is None
    rig.assert_answered(rig.serve(one(1, 10)))


def test_a_token_that_is_drawn_is_waited_for():
    rig = FollowingRig()
    rig.serve(one(1, 10), max_tokens=6, temperature=1.0, seed=1)
    assert rig.followed == []
    assert len(rig.runner.decoded) == 5


def test_a_step_that_fails_costs_its_requests_and_what_followed_it():
    rig = FollowingRig()
    failing = rig.generate(one(1, 10), max_tokens=20)
    rig.turn_until(lambda: len(rig.followed) > 1)
    largest = rig.runner.largest
    rig.runner.largest = lambda _logits: (_ for _ in ()).throw(RuntimeError("a fault"))
    rig.turn()
    rig.runner.largest = largest
    rig.run()
    assert rig.end(failing).code == "internal"
    rig.assert_answered(rig.serve(one(1, 10), max_tokens=7))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("options", [{"blocks": 14}, {"blocks": 30, "entries": 9}])
def test_answers_are_right_whatever_comes_and_goes(seed, options):
    source = random.Random(seed)
    rig = FollowingRig(max_running=4, **options)
    asked, cancelled = [], set()
    for _ in range(60):
        if source.random() < 0.15:
            size, most = source.randint(1, 14), source.randint(1, 12)
            request = prompt([source.randrange(40) for _ in range(size)], tail=[1, 2])
            asked.append(rig.generate(request, max_tokens=most, n=source.choice([1, 1, 2])))
        if asked and source.random() < 0.03:
            cancelled.add(asked[-1])
            rig.cancel(asked[-1])
        rig.turn()
    rig.run()
    for request_id in asked:
        if request_id not in cancelled:
            rig.assert_answered(request_id)
    assert rig.followed
