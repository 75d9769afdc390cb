"""Idle work: answers are absorbed, hits are verified, and both give way."""

from __future__ import annotations

import re
from array import array
from typing import Any

import pytest
import torch
from scheduler_rig import Rig, text
from snapshot_rig import Prompt, prompt
from toy_model import VOCAB, answer, one_hot

from protocol.messages import Absorb, Command, Completed
from worker.background import PASS_ROWS, STALE_PAUSES
from worker.engine import _IDLE_SECONDS, _PAUSE_SECONDS
from worker.io import FromGateway, FromOperator
from worker.returns import PAUSE_SECONDS


def chat(*messages: int, size: int = 20) -> Prompt:
    """A conversation whose messages are told by their numbers."""
    return prompt(*(text(number, size) for number in messages), tail=text(999, 2), head=False)


def nearly(state: int) -> torch.Tensor:
    """Logits that differ in their last bits."""
    return one_hot(state) * (1 + 2**-20)


def absorb(rig: Rig, conversation: Prompt) -> None:
    """What a gateway sends after an answer: everything up to the last boundary."""
    end = conversation.boundaries[-1].end
    message = Absorb("r", conversation.ids[:end], conversation.boundaries)
    rig.sockets.inbox.put(FromGateway(b"gateway", message))


def test_the_turn_after_an_absorbed_answer_computes_the_new_message_alone():
    rig = Rig()
    rig.serve(chat(1))
    absorb(rig, chat(1, 2))
    rig.rest()
    assert rig.count("prefixd_absorbed_tokens_total") == 20
    request = rig.serve(chat(1, 2, 3))
    assert rig.accepted(request).depth == 40
    rig.assert_answered(request)


def test_lookups_and_cache_tokens_count_requests_alone():
    rig = Rig()
    rig.serve(chat(1))
    before = rig.stats()
    absorb(rig, chat(1, 2))
    rig.rest()
    after = rig.stats()
    assert after.lookups == before.lookups
    assert after.cache_tokens == before.cache_tokens
    assert after.commits == before.commits + 1


def test_absorbing_is_no_hit_of_the_conversation():
    rig = Rig()
    rig.serve(chat(1))
    absorb(rig, chat(1, 2))
    rig.rest()
    assert [s.node.hits for s in rig.store.slots.snapshots()] == [0, 0]


def test_what_is_kept_already_is_not_absorbed_again():
    rig = Rig()
    rig.serve(chat(1, 2))
    absorb(rig, chat(1, 2))
    rig.rest()
    assert rig.count("prefixd_absorbed_tokens_total") == 0


def test_an_answer_that_a_later_turn_has_computed_is_not_absorbed():
    """The message may come after the next turn, which is then on its way already."""
    rig = Rig()
    rig.serve(chat(1))
    request = rig.generate(chat(1, 2, 3))
    rig.turn()
    absorb(rig, chat(1, 2))
    rig.rest()
    rig.assert_answered(request)
    assert rig.count("prefixd_absorbed_tokens_total") == 0


def test_a_request_waits_for_one_pass_of_idle_work_at_most():
    rig = Rig(blocks=200)
    absorb(rig, chat(1, size=4 * PASS_ROWS))
    rig.turn()
    assert rig.scheduler.background.running is not None
    request = rig.generate(chat(5))
    rig.turn()
    assert rig.runner.prefilled[-1][0] == request
    rig.rest()
    rig.assert_answered(request)
    assert 4 * PASS_ROWS in rig.kept()


def test_a_request_for_the_same_messages_makes_absorbing_them_moot():
    rig = Rig(blocks=200)
    absorb(rig, chat(1, size=4 * PASS_ROWS))
    rig.turn()
    rig.serve(chat(1, 2, size=4 * PASS_ROWS))
    assert rig.scheduler.background.is_empty
    assert rig.count("prefixd_absorbed_tokens_total") <= PASS_ROWS


@pytest.mark.parametrize("begun", [False, True])
def test_a_request_that_keeps_nothing_leaves_an_absorption_where_it_is(begun: bool):
    rig = Rig(blocks=200)
    absorb(rig, chat(1, size=4 * PASS_ROWS))
    if begun:
        rig.turn()
    request = rig.generate(chat(1, 2, size=4 * PASS_ROWS), cache=False)
    rig.run()
    rig.assert_answered(request)
    rig.rest()
    assert rig.count("prefixd_absorbed_tokens_total") == 4 * PASS_ROWS
    assert rig.accepted(rig.serve(chat(1, 2, size=4 * PASS_ROWS))).depth == 4 * PASS_ROWS


def test_idle_work_gives_its_blocks_up_before_any_snapshot_goes():
    rig = Rig(blocks=40)
    rig.serve(chat(1, size=8))
    absorb(rig, chat(2, size=100))
    rig.turn()
    request = rig.serve(chat(3, size=120))
    rig.assert_answered(request)
    assert 8 in rig.kept()
    assert rig.store.evictions["blocks"] == 0


class Waits:
    """An inbox that does not wait: time has passed instead, and is known."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._inner = rig.sockets.inbox
        self.waited = 0.0
        self.put, self.empty, self.get_nowait = self._inner.put, self._inner.empty, self._inner.get_nowait

    def get(self, timeout: float) -> Any:
        if self.empty():
            self.waited += timeout
            self._rig.clock.now += timeout
        return self.get_nowait()


@pytest.mark.parametrize("asked", [False, True], ids=["alone", "while an operator asks"])
def test_idle_work_makes_one_pause_after_a_request_and_none_between_its_passes(asked: bool):
    rig = Rig(blocks=200, verify_hits=1.0)
    rig.serve(chat(1, size=4 * PASS_ROWS))
    rig.serve(chat(1, 2, size=4 * PASS_ROWS))
    rig.sockets.inbox = waits = Waits(rig)
    passes = 8 + 1  # the tail of the prompt is another one
    for _ in range(passes + (4 if asked else 1)):
        if asked:
            rig.sockets.inbox.put(FromOperator(b"operator", Command("c", "verify", {})))
            rig.clock.now += _PAUSE_SECONDS / 4
        rig.engine.turn(wait=True)
    assert rig.scheduler.background.verified == 1
    assert waits.waited <= _PAUSE_SECONDS + _IDLE_SECONDS  # the latter when all is done


def test_an_answer_to_absorb_waits_for_the_next_turn_first():
    rig = Rig(blocks=200)
    rig.serve(chat(1))
    rig.clock.now += 60
    rig.sockets.inbox = waits = Waits(rig)
    absorb(rig, chat(1, 2))
    rig.engine.turn(wait=True)
    assert rig.scheduler.background.running is None
    rig.engine.turn(wait=True)
    assert waits.waited == pytest.approx(_PAUSE_SECONDS)
    assert rig.scheduler.background.is_empty
    assert rig.count("prefixd_absorbed_tokens_total") == 20


def test_a_fault_while_absorbing_costs_nobody_anything():
    rig = Rig()
    rig.serve(chat(1))
    rig.runner.faults = [("prefill", MemoryError("none left"))]
    absorb(rig, chat(1, 2))
    rig.rest()
    assert not rig.runner.faults
    request = rig.serve(chat(1, 2, 3))
    rig.assert_answered(request)


def test_every_hit_is_verified_when_asked_for():
    rig = Rig(verify_hits=1.0)
    for turns in ((1,), (1, 2), (1, 2, 3)):
        rig.serve(chat(*turns))
    rig.rest()
    background = rig.scheduler.background
    assert (background.verified, background.mismatched, background.skipped) == (2, 0, 0)
    reply = rig.ask("verify")
    assert reply.data == {"verified": 2, "mismatched": 0, "skipped": 0, "pending": 0}


def test_an_absorption_waits_for_no_verification():
    rig = Rig(blocks=200, verify_hits=1.0)
    rig.serve(chat(1, size=4 * PASS_ROWS))
    rig.serve(chat(1, 2, size=4 * PASS_ROWS))
    rig.turns(2)
    assert rig.scheduler.background.running is not None
    absorb(rig, chat(7, size=PASS_ROWS))
    rig.turns(2)
    assert PASS_ROWS in rig.kept()
    assert rig.ask("verify").data == {"verified": 0, "mismatched": 0, "skipped": 0, "pending": 1}
    rig.rest()
    assert (rig.scheduler.background.verified, rig.scheduler.background.skipped) == (1, 0)


def test_a_share_of_none_verifies_nothing():
    rig = Rig()
    rig.serve(chat(1))
    rig.serve(chat(1, 2))
    rig.rest()
    assert rig.scheduler.background.verified == 0


def test_a_mismatch_drops_the_entry_and_what_was_built_on_it(caplog: pytest.LogCaptureFixture):
    rig = Rig(verify_hits=1.0)
    rig.serve(chat(1))
    rig.serve(chat(7))  # another conversation, which has nothing to do with it

    rig.runner.logits = nearly  # the hit's logits differ in the last bits
    hit = rig.serve(chat(1, 2))
    rig.runner.logits = one_hot
    rig.rest()
    assert rig.scheduler.background.mismatched == 1
    assert rig.kept() == [20]
    assert rig.count("prefixd_hit_verifications_total", result="mismatched") == 1
    assert rig.store.stale_drops["verify"] == 2
    (line,) = [each for each in caplog.messages if hit in each and "differs" in each]
    first, second = re.findall(r"\b[0-9a-f]{16}\b", line)
    assert first != second
    again = rig.serve(chat(1, 2))
    assert rig.accepted(again).outcome == "miss"
    rig.assert_answered(again)


def test_a_verification_without_free_blocks_is_skipped_and_evicts_nothing():
    rig = Rig(blocks=24, verify_hits=1.0)
    rig.serve(chat(1, size=40))
    rig.serve(chat(1, 2, size=40))
    kept = rig.kept()
    rig.rest()
    assert rig.scheduler.background.skipped == 1
    assert rig.kept() == kept


def test_a_verification_takes_the_place_of_what_nobody_has_used_for_long():
    """Or none would run any more once the pool is full."""
    rig = Rig(blocks=24, verify_hits=1.0)
    rig.serve(chat(8, size=36))
    rig.clock.now += STALE_PAUSES * rig.store.returns.pause + 1
    rig.serve(chat(1, size=22))
    rig.serve(chat(1, 2, size=22))
    assert rig.kept() == [22, 36, 44]
    rig.rest()
    assert (rig.scheduler.background.verified, rig.scheduler.background.skipped) == (1, 0)
    assert rig.kept() == [22, 44], "what was used just now stays"


def test_a_verification_leaves_what_rests_for_minutes_however_fast_others_go_on():
    rig = Rig(blocks=24, verify_hits=1.0)
    for _ in range(20):
        rig.store.returns.paused(1)
    rig.serve(chat(8, size=36))
    rig.clock.now += PAUSE_SECONDS / 2
    rig.serve(chat(1, size=22))
    rig.serve(chat(1, 2, size=22))
    assert STALE_PAUSES * rig.store.returns.pause < PAUSE_SECONDS / 2
    rig.rest()
    assert (rig.scheduler.background.verified, rig.scheduler.background.skipped) == (0, 1)
    assert rig.kept() == [22, 36, 44]


def test_a_verification_that_had_to_wait_for_long_leaves_what_it_is_about():
    rig = Rig(blocks=17, verify_hits=1.0)
    rig.serve(chat(1, size=22))
    rig.generate(chat(1, 2, size=22))
    rig.turn_until(lambda: rig.scheduler.background.pending_verifications)
    assert not rig.scheduler.is_idle
    assert rig.kept() == [22, 44]
    rig.clock.now += max(STALE_PAUSES * rig.store.returns.pause, PAUSE_SECONDS) + 1
    rig.rest()
    assert rig.scheduler.background.skipped == 1
    assert 22 in rig.kept()


def test_a_verification_that_cannot_have_its_blocks_takes_no_state_either():
    rig = Rig(blocks=38, entries=4, verify_hits=1.0)
    rig.serve(chat(8, size=4))
    rig.clock.now += STALE_PAUSES * rig.store.returns.pause + 1
    rig.serve(chat(1, size=36))
    rig.serve(chat(1, 2, size=36))
    ended_early = rig.generate(chat(9, 10, size=8))
    rig.turns(1)
    rig.cancel(ended_early)  # it leaves its own state, the last one
    rig.rest()
    assert rig.scheduler.background.skipped == 1
    assert rig.kept() == [4, 8, 36, 72]


def test_a_verification_evicts_nothing_for_what_a_request_has_taken_meanwhile():
    rig = Rig(blocks=100, verify_hits=1.0)
    rig.serve(chat(1, size=70))
    rig.serve(chat(1, 2, size=70))
    rig.turns(2)
    assert rig.scheduler.background.running is not None
    rig.serve(chat(3, size=120))
    kept = rig.kept()
    rig.rest()
    assert rig.kept() == kept
    assert rig.store.evictions["blocks"] == 0
    assert (rig.scheduler.background.verified, rig.scheduler.background.skipped) == (0, 1)


def test_the_answer_is_that_of_the_model_whatever_runs_in_the_background():
    rig = Rig(verify_hits=1.0)
    history = [1]
    for number in range(2, 8):
        request = rig.generate(chat(*history))
        rig.turns(2)
        absorb(rig, chat(*history, number))
        rig.run()
        rig.assert_answered(request)
        assert isinstance(rig.end(request), Completed)
        history.append(number)
    rig.rest()
    assert rig.scheduler.background.mismatched == 0
    assert all(0 <= token < VOCAB for token in answer(array("i", [1, 2]), 4))


# Where states are divisible


def edited(who: int, same: int, *parts: int) -> Prompt:
    """A message that begins like all of 200 tokens that `who` wrote, and goes on with parts of 20."""
    whole = text(who, 200)[:same]
    return prompt(whole + [token for part in parts for token in text(part, 20)], tail=text(999, 2), head=False)


def test_an_answer_that_ends_inside_what_is_stored_is_absorbed_with_one_token():
    rig = Rig(blocks=200, divisible=True)
    rig.serve(edited(1, 200))
    absorb(rig, edited(1, 150))
    rig.rest()
    assert rig.count("prefixd_absorbed_tokens_total") == 1
    assert rig.kept() == [150, 200]


@pytest.mark.parametrize("blocks", [86, 90, 94, 98, 102])
def test_what_a_wrong_hit_inside_a_message_began_with_goes(blocks: int):
    """However little room there is to find out that it was wrong."""
    rig = Rig(blocks=blocks, verify_hits=1.0, divisible=True)
    rig.serve(edited(1, 200))
    rig.clock.now += STALE_PAUSES * rig.store.returns.pause + 1e6
    rig.runner.logits = nearly
    hit = rig.serve(edited(1, 150, 2))
    rig.runner.logits = one_hot
    assert rig.accepted(hit).depth == 150
    rig.rest()
    background = rig.scheduler.background
    assert background.mismatched + background.skipped == 1
    if background.mismatched:
        assert rig.accepted(rig.serve(edited(1, 150, 3))).depth == 0


@pytest.mark.parametrize("blocks", [86, 90, 94, 98, 102])
def test_a_verification_takes_no_room_of_what_its_hit_inside_a_message_began_with(blocks: int):
    rig = Rig(blocks=blocks, verify_hits=1.0, divisible=True)
    rig.serve(edited(1, 200))
    rig.clock.now += STALE_PAUSES * rig.store.returns.pause + 1e6
    rig.serve(edited(1, 150, 2))
    rig.rest()
    background = rig.scheduler.background
    assert background.verified + background.skipped == 1
    assert sorted(snapshot.tokens for snapshot in rig.store.slots.snapshots()) == [170, 200]


def test_a_wrong_hit_takes_all_along_that_holds_the_same_and_no_other():
    rig = Rig(blocks=900, slots=32, divisible=True)
    head = text(77, 40)

    def ask(*parts: list[int]) -> str:
        return rig.serve(prompt(head, *parts, tail=text(999, 2), head=False))

    for who in (1, 2, 3):
        ask(text(who, 200))
    ask(text(1, 200)[:150] + text(4, 50))  # has the blocks of the first
    rig.scheduler.background._verify_hits = 1.0
    rig.runner.logits = nearly
    hit = ask(text(1, 200)[:100] + text(5, 50))
    rig.runner.logits = one_hot
    assert rig.accepted(hit).depth == 140
    rig.rest()
    assert rig.scheduler.background.mismatched == 1
    assert rig.kept() == [40, 240, 240]
    assert rig.accepted(ask(text(1, 200)[:150] + text(6, 50))).depth == 40
