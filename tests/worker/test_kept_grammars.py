"""Grammars are compiled once each and beside the engine: who waits for one, who does not, and what is kept."""

from __future__ import annotations

import queue
import threading

import pytest
from scheduler_rig import Rig, one
from test_grammar import TOLD, spelled
from toy_model import VOCAB

from protocol.messages import Vocabulary
from worker import grammars
from worker.grammar import Compiler, Constraint, GrammarError
from worker.grammars import Grammars
from worker.io import FromGateway

OTHER = Vocabulary(TOLD.tokens.replace("61", "62", 1), TOLD.special_token_ids, TOLD.end_token_ids)


class Counted(Grammars):
    """Grammars that are compiled at once, with what was counted of them."""

    def __init__(self) -> None:
        self.counted: list[str] = []
        super().__init__(VOCAB, self.counted.append)
        self.learn(TOLD)


class Held:
    """A rig whose grammars are compiled on their own thread, one as soon as it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._go: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._woken = threading.Semaphore(0)
        compiled = Compiler.constraint

        def held(compiler: Compiler, grammar: str) -> Constraint:
            self._go.get()
            return compiled(compiler, grammar)

        monkeypatch.setattr(Compiler, "constraint", held)
        self.rig = Rig()
        count = self.rig.metrics.grammars
        self.grammars = Grammars(VOCAB, lambda source: count.labels(source=source).inc(), self._woken.release)
        self.rig.scheduler.grammars = self.grammars
        self.rig.sockets.inbox.put(FromGateway(b"gateway", TOLD))

    def let_go(self) -> None:
        """Let the next one be compiled, and wait until it is."""
        self._go.put(None)
        assert self._woken.acquire(timeout=60)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch):
    made = Held(monkeypatch)
    yield made
    made.grammars.close()


def test_a_grammar_is_compiled_once():
    made = Counted()
    first = made.ask('start: "a"')
    assert made.ask('start: "a"') is first
    assert made.ask('start: "b"') is not first
    assert made.counted == ["compiled", "kept", "compiled"]


def test_what_cannot_be_compiled_is_not_tried_again():
    made = Counted()
    for _ in range(2):
        with pytest.raises(GrammarError, match="Expected"):
            made.ask("garbage").result()
    assert made.counted == ["refused", "kept"]


def test_another_vocabulary_has_grammars_of_its_own():
    made = Counted()
    first = made.ask('start: "a"')
    made.learn(TOLD)
    assert made.ask('start: "a"') is first
    made.learn(OTHER)
    assert made.ask('start: "a"') is not first


def test_before_any_vocabulary_there_are_none():
    made = Grammars(VOCAB)
    with pytest.raises(GrammarError, match="no vocabulary has been told"):
        made.ask('start: "a"').result()
    made.learn(TOLD)
    assert made.ask('start: "a"').result()


@pytest.mark.parametrize("limit", ["MAX_KEPT", "MAX_KEPT_CHARACTERS"])
def test_the_one_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch, limit: str):
    texts = [f'start: "{letter}"' for letter in "abc"]
    monkeypatch.setattr(grammars, limit, 2 if limit == "MAX_KEPT" else len("".join(texts[:2])))
    made = Counted()
    for text in (texts[0], texts[1], texts[0], texts[2], texts[0], texts[1]):
        made.ask(text)
    assert made.counted == ["compiled", "compiled", "kept", "compiled", "kept", "compiled"]


def test_others_go_on_while_a_grammar_is_compiled(held: Held):
    rig = held.rig
    waiting = rig.generate(one(1, 9), grammar='start: "abc"', max_tokens=9)
    other = rig.generate(one(2, 9), max_tokens=6)
    rig.turn_until(lambda: rig.reasons(other))
    rig.assert_answered(other)
    assert rig.events(waiting) == []
    rig.turn()  # nothing runs, and nothing is wrong with that
    held.let_go()
    rig.run()
    assert spelled(rig.tokens(waiting)) == "abc"
    again = rig.serve(one(1, 9), grammar='start: "abc"', max_tokens=9)
    assert spelled(rig.tokens(again)) == "abc"


def test_one_that_cannot_be_compiled_fails_and_computes_nothing(held: Held):
    rig = held.rig
    failing = rig.generate(one(1, 9), grammar="start: nothing")
    rig.turn()
    held.let_go()
    rig.run()
    (end,) = rig.events(failing)
    assert (end.code, end.message.startswith("grammar: ")) == ("invalid", True)
    assert (rig.runner.prefilled, rig.kept()) == ([], [])


def test_a_request_can_be_given_up_while_its_grammar_is_compiled(held: Held):
    rig = held.rig
    given_up = rig.generate(one(1, 9), grammar='start: "abc"')
    rig.turn()
    rig.cancel(given_up)
    rig.run()
    assert rig.tokens(given_up) == []
    held.let_go()
    later = rig.serve(one(2, 9), grammar='start: "abc"', max_tokens=9)
    assert spelled(rig.tokens(later)) == "abc"
