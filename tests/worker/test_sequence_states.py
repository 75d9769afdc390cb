"""Recurrent states of sequences and snapshots: who has one, what goes when they are short, what ends with a pass."""

from __future__ import annotations

import pytest
import torch
from scheduler_rig import Rig, one, text
from snapshot_rig import Prompt, prompt

from protocol.errors import SettingsError
from protocol.messages import Failed
from worker.memory import split_memory

CPU = torch.device("cpu")


def turns(count: int, who: int = 1, size: int = 6) -> Prompt:
    return prompt(text(who, 5), *(text(10 * who + turn, size) for turn in range(count)), tail=(7,))


def test_every_turn_is_kept_by_the_pass_that_crosses_its_end():
    rig = Rig(entries=12, prefill_rows=64)
    for count in range(1, 5):
        request_id = rig.serve(turns(count))
        rig.assert_answered(request_id)
        assert rig.accepted(request_id).depth == (turns(count - 1).last.end if count > 1 else 0)
    assert rig.kept() == [5, *(turns(count).last.end for count in range(1, 5))]
    assert rig.stats().states_free == 12 - 5


def test_interior_snapshots_go_first_and_leave_their_blocks_to_what_extends_them():
    rig = Rig(entries=4)
    for count in range(1, 6):
        rig.assert_answered(rig.serve(turns(count)))
    # One of the four was the running sequence's. The head is an anchor, the newest is not interior.
    assert rig.kept() == [5, 29, turns(5).last.end]
    assert rig.store.evictions["states"] > 0
    assert rig.store.evictions["blocks"] == 0
    assert rig.accepted(rig.serve(turns(6))).depth == turns(5).last.end


def test_what_is_pinned_leaves_no_state_and_nothing_is_kept_then():
    rig = Rig(entries=3)
    rig.serve(turns(1))
    assert rig.kept() == [5, 11]
    for row in rig.ask("list").data["slots"]:
        rig.ask("pin", slot=row["slot"])
    request_id = rig.serve(turns(3))
    rig.assert_answered(request_id)
    assert rig.accepted(request_id).depth == 11
    assert rig.kept() == [5, 11]
    assert rig.store.aborts["no_state"] + rig.store.aborts["not_worth"] > 0


def test_a_request_for_more_choices_than_states_is_refused():
    rig = Rig(entries=3)
    assert rig.end(rig.serve(one(1, 9), n=4)) == Failed(
        "e", "r1", "invalid", "n must be at most 3: kv_memory holds no more recurrent states"
    )
    rig.assert_answered(rig.serve(one(1, 9), n=3))


def test_choices_go_on_from_states_of_their_own():
    rig = Rig(entries=8)
    rig.serve(one(1, 9))
    request_id = rig.serve(one(1, 9), n=3, max_tokens=9)
    assert rig.accepted(request_id).depth == 9
    rig.assert_answered(request_id)


def test_sequences_wait_until_a_state_is_free():
    rig = Rig(entries=2, slots=0)
    asked = [rig.generate(one(who, 20), max_tokens=5) for who in range(5)]
    rig.turn()
    assert rig.scheduler.running.choice_count == 2
    rig.run()
    for request_id in asked:
        rig.assert_answered(request_id)


def test_swapped_sequences_take_their_state_along():
    rig = Rig(blocks=42, slots=0, entries=2)
    asked = [rig.generate(one(who, 9), max_tokens=100) for who in range(2)]
    rig.run()
    assert rig.count("prefixd_swaps_total", direction="out") > 0
    for request_id in asked:
        rig.assert_answered(request_id)


@pytest.mark.parametrize("kind", ["prefill", "head"])
def test_a_failed_pass_leaves_no_state(kind: str):
    rig = Rig(entries=6, prefill_rows=8)
    rig.serve(turns(1))
    before = rig.kept()
    rig.runner.faults.append((kind, RuntimeError("a fault")))
    assert isinstance(rig.end(rig.serve(turns(4))), Failed)
    # What it had started from is trusted no longer, and all before that still is.
    assert set(rig.kept()) == set(before) - {max(before)}
    again = rig.serve(turns(4))
    rig.assert_answered(again)
    assert rig.accepted(again).depth in rig.kept()


def test_a_cancelled_prefill_keeps_the_last_boundary_it_passed():
    """Nobody asked for a snapshot there, and the state has moved past it."""
    rig = Rig(entries=6, prefill_rows=8)
    request = turns(10)
    request_id = rig.generate(request)
    rig.turn_until(lambda: rig.runner.prefilled and rig.runner.prefilled[-1][2] == 40)
    rig.cancel(request_id)
    rig.run()
    assert rig.kept() == [5, 35]
    again = rig.serve(request)
    assert rig.accepted(again).depth == 35
    rig.assert_answered(again)


def test_a_follower_goes_on_from_where_its_leader_was_cut_off():
    rig = Rig(entries=6, prefill_rows=8)
    leader, follower = rig.generate(turns(10)), rig.generate(turns(10))
    rig.turn_until(lambda: rig.runner.prefilled and rig.runner.prefilled[-1][2] == 40)
    rig.cancel(leader)
    rig.run()
    rig.assert_answered(follower)
    assert rig.accepted(follower).depth == 35


def test_bytes_of_states_are_counted():
    rig = Rig(entries=12)
    rig.serve(turns(2))
    stats, rows = rig.stats(), rig.ask("list").data["slots"]
    assert stats.state_bytes == 7
    assert stats.snapshot_bytes == stats.kv_bytes_used + len(rows) * 7
    would = rig.ask("flush", dry_run=True).data
    assert would["freed_bytes"] == stats.snapshot_bytes
    assert rig.ask("flush").data["freed_bytes"] == would["freed_bytes"]
    assert rig.stats().states_free == 12


def test_the_budget_is_split_once():
    shares = split_memory(1000, 10, 20, 8, CPU, 10)
    assert shares == (82, 9)  # as many states as can be used, and the empty one
    assert split_memory(1000, 10, 20, 500, CPU, 10) == (50, 25)  # half at most
    assert split_memory(1000, 10, 0, 8, CPU, 10) == (100, 0)
    with pytest.raises(SettingsError, match=r"^kv_memory: half of 100B is less than 4 recurrent states"):
        split_memory(100, 10, 20, 8, CPU, 10)
