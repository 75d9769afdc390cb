"""The scheduler under any course of events, on pools so small that everything is evicted and swapped all the time.

Every pass checks that what it reads is the state of its own tokens (`toy_model.py`). The last tests put faults
into the worker and see that the machine finds each.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from scheduler_rig import Rig
from snapshot_rig import StartsAnywhere, prompt
from toy_model import answer

from protocol.messages import Completed, Failed
from worker.block_pool import BlockError
from worker.commits import Commits
from worker.invariants import InvariantViolation
from worker.io import GatewayLost
from worker.scheduler import Scheduler
from worker.sequence_memory import SequenceMemory
from worker.sequence_states import SequenceStates
from worker.swapping import Swapping

message = st.lists(st.integers(1, 3), min_size=1, max_size=7).map(tuple)
messages = st.lists(message, min_size=1, max_size=4).map(tuple)
SENDERS = (b"one", b"two")


class SchedulerMachine(RuleBasedStateMachine):
    """Requests that share prefixes, cancelled at any moment, among an operator's verbs and failing steps."""

    divisible = False

    def __init__(self) -> None:
        super().__init__()
        self.histories: list[tuple[tuple[int, ...], ...]] = [((1, 2, 3, 1, 2),)]
        self.senders: dict[str, bytes] = {}
        self.cut_off: set[str] = set()  # cancelled by somebody
        self.pinned: set[int] = set()
        self.allowed = {"too_long", "queue_full"}  # codes that a request may fail with

    @initialize(
        blocks=st.integers(2, 12),
        slots=st.sampled_from([0, 1, 2, 4, 8]),
        max_running=st.integers(1, 4),
        rows=st.sampled_from([2, 5, 8, 64]),
        entries=st.sampled_from([0, 3, 4, 8]),
        verify=st.sampled_from([0.0, 1.0]),
    )
    def start(self, blocks, slots, max_running, rows, entries, verify):
        self.rig = Rig(
            blocks=blocks,
            slots=slots,
            max_running=max_running,
            prefill_rows=rows,
            max_waiting=6,
            entries=0 if self.divisible else entries,
            verify_hits=verify,
            divisible=self.divisible,
        )

    # Requests

    @rule(
        data=st.data(),
        keep=st.integers(0, 4),
        added=st.lists(message, max_size=2),
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 12),
        cache=st.sampled_from([True, True, True, False]),
        tenant=st.sampled_from(["", "", "other"]),
        sender=st.sampled_from(SENDERS),
        stops=st.sampled_from([(), (), tuple(range(16))]),
    )
    def ask(self, data, keep, added, n, max_tokens, cache, tenant, sender, stops):
        history = data.draw(st.sampled_from(self.histories))[:keep] + tuple(added)
        if not history:
            return
        self.histories.append(history)
        request = prompt(*history, tail=(4,), tenant=tenant)
        request_id = self.rig.generate(
            request, n=n, max_tokens=max_tokens, cache=cache, sender=sender, stop_token_ids=stops
        )
        self.senders[request_id] = sender

    @rule(count=st.integers(1, 6))
    def go_on(self, count):
        self.rig.turns(count)

    @precondition(lambda self: self._open())
    @rule(
        data=st.data(),
        cause=st.sampled_from(["disconnect", "shutdown", "stop"]),
        choice=st.sampled_from([None, 0, 1]),
    )
    def cancel(self, data, cause, choice):
        request_id = data.draw(st.sampled_from(self._open()))
        self.cut_off.add(request_id)
        self.rig.cancel(request_id, cause, choice, sender=self.senders[request_id])

    @rule(sender=st.sampled_from(SENDERS))
    def a_gateway_is_lost(self, sender):
        self.cut_off.update(request_id for request_id in self._open() if self.senders[request_id] == sender)
        self.rig.sockets.inbox.put(GatewayLost(sender))

    @precondition(lambda self: not self.rig.runner.faults)
    @rule(kind=st.sampled_from(["prefill", "head", "decode"]), memory=st.booleans())
    def a_step_will_fail(self, kind, memory):
        self.allowed.add("out_of_memory" if memory else "internal")
        self.rig.runner.faults.append((kind, MemoryError() if memory else RuntimeError("a fault")))

    # The operator

    @rule(slots=st.lists(st.integers(0, 7), max_size=2))
    def evict(self, slots):
        self._try("evict", slots=slots)

    @rule()
    def flush(self):
        self._try("flush")

    @rule(slot=st.integers(0, 7))
    def pin(self, slot):
        if self._try("pin", slot=slot):
            self.pinned.add(slot)
            self.allowed.add("out_of_memory")

    @rule()
    def unpin_all(self):
        for slot in self.pinned:
            self._try("unpin", slot=slot)
        self.pinned.clear()

    @rule()
    def look(self):
        for verb in ("stats", "list", "tree", "metrics"):
            assert self._try(verb)

    # What must hold

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        self.unpin_all()
        self.rig.runner.faults.clear()
        self.rig.rest()
        for request_id in self.senders:
            self._check_end(request_id)
        assert self.rig.scheduler.background.mismatched == 0
        self.rig.ask("flush")
        assert self.rig.pool.used_count == 0
        states = self.rig.store.states
        assert states is None or states.used_count == 0

    def _check_end(self, request_id):
        asked, end = self.rig.asked[request_id], self.rig.end(request_id)
        expected = answer(asked.token_ids, asked.sampling.max_tokens, asked.sampling.stop_token_ids)
        for choice in range(asked.n):
            tokens = self.rig.tokens(request_id, choice)
            assert tokens == expected[: len(tokens)]
        if isinstance(end, Failed):
            assert end.code in self.allowed
        elif request_id not in self.cut_off:
            self.rig.assert_answered(request_id)

    def _open(self):
        ended = {m.request_id for _, m in self.rig.sockets.sent if isinstance(m, Completed | Failed)}
        return [request_id for request_id in self.senders if request_id not in ended]

    def _try(self, verb, **args):
        return self.rig.ask(verb, **args).error is None


COURSE = settings(max_examples=150, stateful_step_count=40, deadline=None)


class TestScheduler(SchedulerMachine.TestCase):
    settings = COURSE


class DivisibleMachine(StartsAnywhere, SchedulerMachine):
    """The same where snapshots can be divided."""


class TestDivisibleScheduler(DivisibleMachine.TestCase):
    settings = COURSE


def _no_copy(self, blocks, start, end):
    """Writes into shared blocks."""
    missing = max(-(-end // self._pool.block_tokens) - len(blocks), 0)
    if not self.room(missing):
        return None
    blocks.extend(self._pool.allocate(missing))
    return ()


def _no_tail_copy(self, request):
    """Goes on from a restored block without its content."""
    if request.tail_source is not None:
        self._pool.release([request.tail_source])
        request.tail_source = None
    return ()


def _forgets_choices(self, choice):
    """Ends a choice without giving its blocks back."""
    self.running.drop(choice)


def _mute(self, sender):
    """Drops what a lost gateway asked for without an end."""
    for key in [key for key in self._requests if key[0] == sender]:
        del self._requests[key]


_back = Swapping.back


def _wrong_way_back(self):
    """Brings a sequence back into its blocks in another order."""
    step = _back(self)
    if step is not None and len(step.blocks) > 1:
        step = type(step)(step.choice, step.blocks[::-1])
    return step


def _ahead(self, request):
    """Commits boundaries that are not computed yet."""
    while request.wanted:
        self._commit(request, request.wanted.pop(0))


_use = SequenceStates.use


def _captured_at_the_end(self, request, end):
    """A state is copied when the pass has ended, wherever its boundary lies."""
    use = _use(self, request, end)
    if use is None:
        return None
    return use._replace(captures=tuple((end - request.computed, target) for _, target in use.captures))


def _source_not_copied(self, request, end):
    """A restored sequence goes on from whatever its entry held."""
    use = _use(self, request, end)
    return use and use._replace(source=None)


def _goes_on(self, request):
    """After a failed pass the states it wrote are taken for good."""
    self.materialised(request)


def _released_early(self, request, source):
    """The restored state is not held until the first pass has copied it."""
    _take(self, request, source)
    if source is not None:
        self.release(source)
        request.entry_source = None


_take = SequenceStates.take


def _leaves_its_state(self, choice):
    """A choice that is swapped out or ends keeps its entry."""
    entry, choice.entry = choice.entry, None
    return entry


FAULTS = {
    "state captured at the end of the pass": (SequenceStates, "use", _captured_at_the_end),
    "restored state not copied": (SequenceStates, "use", _source_not_copied),
    "restored state not held": (SequenceStates, "take", _released_early),
    "states of a failed pass kept": (Commits, "lost", _goes_on),
    "state of a choice leaks": (SequenceStates, "drop_choice", _leaves_its_state),
    "no copy on write": (SequenceMemory, "own", _no_copy),
    "no copy of the restored tail": (SequenceMemory, "tail_copy", _no_tail_copy),
    "blocks of a choice leak": (Scheduler, "_drop_choice", _forgets_choices),
    "orphans without an end": (Scheduler, "drop_sender", _mute),
    "swapped back in another order": (Swapping, "back", _wrong_way_back),
    "committed before it is computed": (Commits, "materialised", _ahead),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, monkeypatch):
    owner, attribute, replacement = FAULTS[name]
    monkeypatch.setattr(owner, attribute, replacement)
    search = settings(COURSE, max_examples=1000, database=None, derandomize=True, phases=[Phase.generate])
    with pytest.raises((AssertionError, BlockError, InvariantViolation, KeyError)):
        run_state_machine_as_test(SchedulerMachine, settings=search)
