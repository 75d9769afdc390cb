"""What a fault costs: a step its requests, the bookkeeping the process. And how the loop starts and stops."""

from __future__ import annotations

import math
import threading

import pytest
import torch
from scheduler_rig import Rig, one, text
from snapshot_rig import prompt
from toy_model import VOCAB

from protocol.messages import Accepted, Cancel, Completed, Failed, Finished, Message, Progress, Tokens
from worker import engine as engine_module
from worker.engine import EngineFault
from worker.invariants import InvariantViolation
from worker.io import FromGateway, SocketsFailed


@pytest.mark.parametrize("kind", ["prefill", "head", "decode"])
def test_a_step_that_fails_costs_its_requests_only(kind):
    rig = Rig()
    old = rig.generate(one(1, 20), max_tokens=3)
    rig.turn()
    rig.runner.faults.append((kind, RuntimeError("a fault")))
    rig.run()
    end = rig.end(old)
    assert (end.code, end.message) == ("internal", "RuntimeError in the engine")
    assert rig.count("prefixd_failures_total", cause="internal") == 1
    rig.assert_answered(rig.serve(one(1, 20), max_tokens=3))


def test_a_decode_that_fails_costs_those_who_were_in_it():
    rig = Rig()
    in_it = [rig.generate(one(i, 3), max_tokens=9) for i in range(2)]
    rig.turns(5)
    waiting = rig.generate(one(5, 30))
    rig.turn()
    rig.runner.faults.append(("decode", RuntimeError("a fault")))
    rig.run()
    assert [rig.end(request).code for request in in_it] == ["internal", "internal"]
    rig.assert_answered(waiting)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_out_of_memory_drops_all_snapshots_and_fails_one_request(error):
    rig = Rig()
    rig.serve(one(1, 20))
    rig.ask("pin", slot=0)
    rig.runner.faults.append(("prefill", error))
    failed = rig.serve(one(2, 4))
    assert rig.end(failed).code == "out_of_memory"
    assert rig.kept() == []
    rig.assert_answered(rig.serve(one(1, 20)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_fail_the_request_they_belong_to(bad):
    rig = Rig()
    good = rig.generate(one(1, 3), max_tokens=6)
    spoilt = rig.generate(one(2, 3), max_tokens=6)
    decode = rig.runner.decode

    def spoil(token_ids, tables, lengths, entries):
        rows, chosen = decode(token_ids, tables, lengths, entries), rig.runner.decoded[-1]
        if (spoilt, 0) in chosen:
            rows[chosen.index((spoilt, 0))] = bad
        return rows

    rig.runner.decode = spoil
    rig.run()
    assert "not finite" in rig.end(spoilt).message
    rig.assert_answered(good)


@pytest.mark.parametrize("entries", [0, 12])
@pytest.mark.parametrize("fault", ["pass", "logits"])
def test_what_a_request_started_from_when_it_met_a_fault_serves_nobody_else(fault, entries, monkeypatch):
    """S4-h: else every later turn of the conversation would meet it again."""
    rig = Rig(entries=entries, prefill_rows=64)
    other = prompt(text(9, 12))
    turns = [prompt(*(text(turn, 10) for turn in range(count))) for count in (1, 2, 3)]
    for request in (other, *turns[:2]):
        rig.serve(request)
    prefill, head_row = rig.runner.prefill, rig.runner.head_row
    spoilt = []

    def spoil(token_ids, blocks, start, *rest):
        """Everything that is computed from the snapshot of 20 tokens."""
        spoilt.append(start == 20)
        if fault == "pass" and spoilt[-1]:
            raise RuntimeError("a corrupt state")
        return prefill(token_ids, blocks, start, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(rig.runner, "prefill", spoil)
        patch.setattr(rig.runner, "head_row", lambda row: head_row(row) * (math.nan if spoilt[-1] else 1))
        assert rig.end(rig.serve(turns[2])).code == "internal"
        assert spoilt[-1]
        assert rig.kept() == [10, 12], "what is built on it is not kept either"
        again = rig.serve(turns[2])
    rig.assert_answered(again)
    assert (rig.accepted(again).depth, rig.accepted(again).reason) == (10, "stale")
    assert rig.store.stale_drops["verify"] == 1 + (fault == "logits")
    assert rig.accepted(rig.serve(other)).depth == 12, "nobody else has lost anything"


def test_a_fault_in_choosing_costs_one_request(monkeypatch):
    rig = Rig()
    good = rig.generate(one(1, 3), max_tokens=6)
    drawn = rig.generate(one(2, 3), max_tokens=6, temperature=1.0, seed=1)
    monkeypatch.setattr("worker.sampling.Sampler._draw", lambda *_: 1 / 0)
    rig.run()
    assert rig.end(drawn).code == "internal"
    assert "ZeroDivisionError while sampling" in rig.end(drawn).message
    rig.assert_answered(good)


def test_first_tokens_go_before_the_prompt_is_kept_and_last_words_after():
    rig = Rig()
    kept: list[tuple[type[Message], list[int]]] = []
    rig.sockets.on_send = lambda message: kept.append((type(message), rig.kept()))
    rig.serve(one(1, 12), max_tokens=1, n=2)
    assert kept == [
        (Accepted, []),
        (Progress, []),
        (Tokens, []),
        (Tokens, []),
        (Finished, [12]),
        (Finished, [12]),
        (Completed, [12]),
    ]


def test_a_request_that_fails_with_its_first_choice_is_not_sampled_further():
    rig = Rig()
    request = rig.generate(one(1, 3), n=3)
    rig.runner.logits = lambda _state: torch.full((VOCAB,), math.nan)
    rig.run()
    assert [type(event) for event in rig.events(request)][1:] == [Failed]


@pytest.mark.parametrize("part", ["prefill_done", "decode_done", "token_chosen", "next_step", "add", "cancel"])
def test_a_fault_in_the_bookkeeping_ends_the_loop_and_everybody_is_told(part, monkeypatch):
    rig = Rig()
    open_ones = {rig.generate(one(1, 3), max_tokens=9), rig.generate(one(2, 30), sender=b"another")}
    rig.turns(2)

    def broken(*_args):
        raise KeyError("x")

    monkeypatch.setattr(rig.scheduler, part, broken)
    rig.cancel("unknown")
    if part == "add":
        rig.generate(one(3, 3))
    with pytest.raises(EngineFault, match=r"^the engine's bookkeeping failed: KeyError: 'x'$"):
        rig.engine.run()
    for request in open_ones:
        assert (rig.end(request).code, rig.end(request).message) == (
            "internal",
            "the worker failed and starts again",
        )


def test_a_lost_device_ends_the_loop():
    rig = Rig()
    request = rig.generate(one(1, 3))
    rig.runner.faults.append(("prefill", torch.AcceleratorError("an illegal memory access was encountered")))
    with pytest.raises(EngineFault, match="illegal memory access"):
        rig.engine.run()
    assert rig.end(request).code == "internal"


def test_a_dead_socket_thread_ends_the_loop():
    rig = Rig()
    rig.sockets.inbox.put(SocketsFailed(OSError("too many open files")))
    with pytest.raises(EngineFault, match="too many open files"):
        rig.engine.run()


def test_stop_answers_what_is_open_and_what_comes_too_late():
    rig = Rig(max_running=1)
    requests = [rig.generate(one(i, 20)) for i in range(3)]
    rig.turns(2)
    rig.engine.stop()
    requests.append(rig.generate(one(5, 20)))
    rig.cancel(requests[0])
    rig.engine.run()
    for request in requests:
        assert rig.end(request).code == "stopping"
    rig.check_rest()


def test_the_loop_waits_for_work_and_stops_from_another_thread():
    rig = Rig()
    answered = threading.Event()
    rig.sockets.on_send = lambda message: isinstance(message, Completed) and answered.set()
    thread = threading.Thread(target=rig.engine.run)
    thread.start()
    request = rig.generate(one(1, 20))
    assert answered.wait(10)
    rig.engine.stop()
    thread.join(10)
    assert not thread.is_alive()
    rig.assert_answered(request)
    assert rig.engine.watch.verdict() is None
    assert (rig.engine.running_count, rig.engine.waiting_count) == (0, 0)


def test_idle_time_finds_blocks_that_nobody_accounts_for(monkeypatch):
    monkeypatch.setattr(engine_module, "_IDLE_SECONDS", 0.0)
    rig = Rig()
    rig.serve(one(1, 20))
    rig.engine.turn(wait=True)
    rig.pool.allocate(1)
    rig.engine.turn(wait=True)  # checked already since anything last happened
    rig.cancel("nothing")
    rig.engine.turn(wait=False)
    with pytest.raises(Exception, match="invariant 10"):
        rig.engine.turn(wait=True)


@pytest.mark.parametrize("check_each", [True, False])
def test_a_wrong_account_is_found_after_a_step_where_each_is_checked(check_each):
    rig = Rig(check_each=check_each)
    rig.serve(one(1, 20))
    rig.generate(one(2, 60))
    rig.engine.turn(wait=False)
    rig.store.held_count += 1
    if check_each:
        with pytest.raises(InvariantViolation, match="invariant 10"):
            rig.engine.turn(wait=False)
    else:
        rig.engine.turn(wait=False)
        assert rig.engine.running_count == 1


def test_control_is_answered_between_the_passes_of_a_prefill():
    rig = Rig()
    request = rig.generate(prompt(text(1, 60), head=False))
    rig.turn()
    assert rig.stats().requests_running == 1
    assert rig.ask("explain", request_id=request).data["state"] == "prefill"
    rig.sockets.inbox.put(FromGateway(b"gateway", Cancel(request, "disconnect")))
    rig.run()
    assert rig.runner.prefilled[-1][2] == 24


def test_drawn_tokens_of_a_step_are_those_drawn_one_by_one(monkeypatch):
    def tokens(together: bool):
        rig = Rig()
        rig.runner.logits = lambda state: torch.randn(VOCAB, generator=torch.Generator().manual_seed(state % 1000))
        monkeypatch.setattr("worker.logit_rows._DRAWN_TOGETHER", ("cpu",) if together else ())
        asked = [rig.generate(one(1, 3), max_tokens=9, temperature=0.0)]
        kinds = [{"temperature": 1.0, "seed": 1}, {"temperature": 0.7, "seed": 2, "top_p": 0.8, "min_p": 0.01}]
        asked += [rig.generate(one(i, 3 + i), max_tokens=9, **kind) for i, kind in enumerate(kinds)]
        rig.runner.decode = unchecked(rig)
        rig.run()
        return [rig.tokens(request, 0) for request in asked]

    def unchecked(rig):
        """Decode steps whose logits are those of the tokens so far, whatever was drawn."""
        rig.runner.decoded = []

        def decode(ids, _tables, lengths, _entries):
            rig.runner.decoded.append(ids)
            return torch.stack([rig.runner.logits(hash(pair)) for pair in zip(ids, lengths, strict=True)])

        return decode

    apart = tokens(together=True)
    assert [len(each) for each in apart] == [9, 9, 9]
    assert tokens(together=False) == apart
