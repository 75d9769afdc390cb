"""When a request hears that it was let in: once its first pass is started, and before anything else."""

from __future__ import annotations

from typing import Any

import pytest
from scheduler_rig import Rig, one

from protocol.messages import Accepted, Completed, Failed, Message, Tokens


def passes_before_accepted(rig: Rig) -> list[int]:
    """How many passes had been started when each request was told."""
    told: list[int] = []

    def note(message: Message) -> None:
        if isinstance(message, Accepted):
            told.append(len(rig.runner.prefilled))

    rig.sockets.on_send = note
    return told


@pytest.mark.parametrize("holds", [False, True])
def test_a_first_pass_is_not_kept_waiting(holds: bool):
    rig = Rig(holds=holds)
    told = passes_before_accepted(rig)
    request_id = rig.serve(one(1, 6))
    assert told == [int(holds)]
    kinds = [type(event) for event in rig.events(request_id)]
    assert kinds[0] is Accepted
    assert kinds[-1] is Completed
    assert Tokens in kinds


def test_nobody_waits_for_the_pass_to_end():
    rig = Rig(holds=True)
    head_row, told = rig.runner.head_row, []

    def look(row: Any) -> Any:
        told.append([type(message) for _, message in rig.sockets.sent])
        return head_row(row)

    rig.runner.head_row = look  # type: ignore[method-assign]
    rig.serve(one(1, 6))
    assert told == [[Accepted]]


def test_what_is_held_goes_out_within_a_turn_that_sends_nothing(monkeypatch: pytest.MonkeyPatch):
    rig = Rig(holds=True)
    with monkeypatch.context() as patch:
        patch.setattr(rig.scheduler, "next_step", lambda: None)
        request_id = rig.generate(one(1, 6))
        rig.turn()
    assert [type(event) for event in rig.events(request_id)] == [Accepted]


def test_who_is_let_in_beside_a_pass_hears_so_within_the_turn():
    rig = Rig(holds=True)
    first = rig.generate(one(1, 30), max_tokens=20)
    rig.turn_until(lambda: rig.of(first, Tokens))
    second = rig.generate(one(2, 30))
    rig.turn()
    assert rig.of(second, Accepted)
    assert not rig.of(second, Tokens)


def test_a_pass_that_fails_at_once_is_told_behind_it():
    rig = Rig(holds=True)
    rig.runner.faults.append(("prefill", RuntimeError("broken")))
    request_id = rig.serve(one(1, 6))
    assert [type(event) for event in rig.events(request_id)] == [Accepted, Failed]


def test_a_request_that_ends_before_its_first_pass_is_told_in_order():
    rig = Rig(holds=True)
    request_id = rig.generate(one(1, 6))
    rig.cancel(request_id)
    rig.run()
    assert [type(event) for event in rig.events(request_id)] == [Accepted, Completed]
