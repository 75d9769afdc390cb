"""Answers that follow a grammar: what may come, where they end, and that nobody else notices."""

from __future__ import annotations

import json
import re

import pytest
import torch
from scheduler_rig import Rig, one
from toy_model import VOCAB

from protocol.messages import Completed, Failed, Sampling, Vocabulary
from worker.grammar import Compiler, Constraint, GrammarError
from worker.io import FromGateway
from worker.sampling import Sampler, describe

END = 0
# Id 0 ends an answer, 1 is another special token, then come single characters and tokens of several.
TOKENS = ["<end>", "<mark>", *"abcdefgh", *'{}[]":, 0123456789', "ab", "abc", '{"', '":']
TOLD = Vocabulary(" ".join(token.encode().hex() for token in TOKENS), (0, 1), (END,))


def grammars(vocab_size: int = VOCAB) -> Compiler:
    return Compiler(vocab_size, TOLD)


def allowed(constraint: Constraint) -> set[int]:
    return {token for token, value in enumerate(constraint.mask()) if value}


def ids(*tokens: str) -> set[int]:
    return {TOKENS.index(token) for token in tokens}


def spelled(tokens: list[int]) -> str:
    return "".join(TOKENS[token] for token in tokens)


def knowing() -> Rig:
    """A worker that has been told the vocabulary."""
    rig = Rig()
    rig.sockets.inbox.put(FromGateway(b"gateway", TOLD))
    return rig


def test_every_token_that_begins_what_may_come_is_allowed():
    constraint = grammars().constraint('%llguidance {"no_forcing": true}\nstart: "abcd"')
    assert allowed(constraint) == ids("a", "ab", "abc")
    constraint.accept(TOKENS.index("ab"))
    assert allowed(constraint) == ids("c")


def test_an_end_is_allowed_only_where_the_grammar_accepts():
    constraint = grammars().constraint("start: /a{1,2}/")
    assert allowed(constraint) == ids("a")
    constraint.accept(TOKENS.index("a"))
    assert allowed(constraint) == ids("a", "<end>")
    assert not constraint.ended
    constraint.accept(TOKENS.index("a"))
    assert constraint.ended


def test_special_tokens_are_no_text_but_can_be_asked_for():
    assert END not in allowed(grammars().constraint("start: /<.*/"))
    assert allowed(grammars().constraint('start: <[1]> "a"')) == {1}


def test_rows_without_a_token_are_never_allowed():
    constraint = grammars().constraint("start: /(.|\\n)*/")
    assert allowed(constraint) == set(range(len(TOKENS))) - {1}
    assert len(constraint.mask()) == VOCAB
    assert len(grammars(8).constraint("start: /.*/").mask()) == 8


def test_an_object_may_have_many_properties():
    schema = {"type": "object", "properties": {f"a{at}": {"type": "integer"} for at in range(1000)}}
    constraint = grammars().constraint(f"start: %json {json.dumps(schema)}")
    for token in ("{", '"', "a", "3"):
        constraint.accept(TOKENS.index(token))
    assert ids("0", "9", '"') <= allowed(constraint)


def test_forced_text_is_cut_into_the_longest_tokens():
    assert allowed(grammars().constraint('start: "abcd"')) == ids("abc")


def test_a_copy_goes_its_own_way():
    first = grammars().constraint('start: "a" | "b"')
    second = first.copy()
    first.accept(TOKENS.index("a"))
    assert first.ended
    assert allowed(second) == ids("a", "b")


def test_a_token_that_does_not_fit_shows_at_the_next_mask():
    constraint = grammars().constraint('start: "a"')
    constraint.accept(TOKENS.index("b"))
    assert not constraint.ended
    with pytest.raises(GrammarError, match="failed on its way"):
        constraint.mask()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [("garbage", "Expected"), ('start: %json {"type": "strin"}', "strin"), ('start: %json {"not": {}}', "not")],
)
def test_a_grammar_that_cannot_be_followed_says_why(grammar, reason):
    with pytest.raises(GrammarError, match=reason):
        grammars().constraint(grammar)


def test_without_a_vocabulary_there_are_no_grammars():
    with pytest.raises(GrammarError, match="vocabulary"):
        Compiler(VOCAB, Vocabulary("zz", (), ())).constraint('start: "a"')


def test_a_choice_is_made_among_what_is_allowed_and_the_row_stays_as_it_is():
    logits = torch.linspace(3, -3, VOCAB)
    before = logits.clone()
    for temperature in (0.0, 1.0, 5.0):
        constraint = grammars().constraint("start: /[e-g]{3}/")
        sampler = Sampler(Sampling(9, temperature=temperature, top_k=40, seed=3), 0, (), constraint)
        assert not sampler.is_plain_greedy
        drawn = {sampler.choose(logits)[0] for _ in range(200)}
        assert drawn == (ids("e") if temperature == 0 else ids("e", "f", "g"))
    assert torch.equal(logits, before)


def test_log_probabilities_are_those_of_the_model():
    logits = torch.linspace(3, -3, VOCAB)
    sampler = Sampler(Sampling(9, temperature=0, logprobs=2), 0, (), grammars().constraint('start: "g"'))
    token, logprob = sampler.choose(logits)
    assert token == TOKENS.index("g")
    assert logprob == describe(logits, token, 2)
    assert [best for best, _ in logprob.top] == [0, 1]


def test_the_last_possible_token_is_drawn_and_never_one_behind_it(monkeypatch):
    sampler = Sampler(Sampling(9, temperature=1.0, top_k=9), 0, (), grammars().constraint('start: "a" | "c"'))
    monkeypatch.setattr(sampler._random, "random", lambda: 1.0)  # as if it had been rounded up
    assert sampler.choose(torch.zeros(VOCAB))[0] in ids("a", "c")


def test_an_answer_follows_its_grammar_and_stops_with_it():
    rig = knowing()
    request = rig.serve(one(1, 9), grammar='start: "abc" /[0-9]{2}/', max_tokens=30)
    assert re.fullmatch(r"abc\d\d", spelled(rig.tokens(request)))
    assert rig.reasons(request) == ["stop"]
    assert isinstance(rig.end(request), Completed)


def test_an_end_token_ends_an_open_grammar():
    rig = knowing()

    def ends_if_it_may(_state: int) -> torch.Tensor:
        row = torch.zeros(VOCAB)
        row[END] = 9
        return row

    rig.runner.logits = ends_if_it_may
    request = rig.serve(one(1, 9), grammar="start: /a{2,9}/", stop_token_ids=(END,), max_tokens=30)
    assert spelled(rig.tokens(request)) == "aa"
    assert rig.reasons(request) == ["stop"]
    (finished,) = (e for e in rig.events(request) if type(e).__name__ == "Finished")
    assert finished.completion_tokens == 3


def test_a_limit_cuts_an_answer_off_before_its_grammar_ends():
    rig = knowing()
    request = rig.serve(one(1, 9), grammar='start: "abcdefgh"', max_tokens=2)
    assert rig.reasons(request) == ["length"]
    assert "abcdefgh".startswith(spelled(rig.tokens(request)))


def test_choices_follow_the_grammar_each_on_its_own():
    rig = knowing()
    rig.runner.logits = lambda _state: torch.zeros(VOCAB)
    request = rig.serve(one(1, 9), n=4, grammar="start: /[a-h]{6}/", max_tokens=30, temperature=1.0, seed=5)
    answers = [spelled(rig.tokens(request, choice)) for choice in range(4)]
    assert all(re.fullmatch("[a-h]{6}", answer) for answer in answers)
    assert len(set(answers)) > 1
    assert rig.reasons(request) == ["stop"] * 4


def test_a_bad_grammar_is_refused_before_anything_is_computed():
    rig = knowing()
    request = rig.serve(one(1, 9), grammar="start: nothing")
    end = rig.end(request)
    assert isinstance(end, Failed)
    assert end.code == "invalid"
    assert end.message.startswith("grammar: ")
    assert rig.events(request) == [end]
    assert rig.runner.prefilled == []
    assert rig.kept() == []


def test_a_grammar_before_any_vocabulary_is_refused():
    rig = Rig()
    assert "vocabulary" in rig.end(rig.serve(one(1, 9), grammar='start: "a"')).message


def test_those_beside_a_constrained_answer_get_the_same_tokens_and_log_probabilities():
    def served(*grammar: str) -> list:
        rig = knowing()
        others = [rig.generate(one(i, 9), max_tokens=12, logprobs=3) for i in (1, 2)]
        for each in grammar:
            rig.generate(one(7, 9), max_tokens=12, grammar=each)
        rig.run()
        for other in others:
            rig.assert_answered(other)
        kinds = [event for other in others for event in rig.events(other) if type(event).__name__ == "Tokens"]
        return [(event.token_ids, event.logprobs) for event in kinds]

    assert served('start: "abcdefgh"') == served()


def test_a_grammar_is_no_part_of_what_is_kept():
    rig = knowing()
    prompt = one(1, 20)
    rig.serve(prompt, grammar='start: "ab"')
    free = rig.serve(prompt)
    assert rig.accepted(free).outcome == "hit"
    rig.assert_answered(free)
    constrained = rig.serve(prompt, grammar='start: "ba"')
    assert rig.accepted(constrained).outcome == "hit"
    assert spelled(rig.tokens(constrained)) == "ba"


def test_a_grammar_that_fails_on_its_way_costs_its_request_alone(monkeypatch):
    rig = knowing()
    other = rig.generate(one(2, 9), max_tokens=6)
    failing = rig.generate(one(1, 9), grammar='start: "ab" "cd"', max_tokens=6)
    monkeypatch.setattr(Constraint, "mask", lambda _self: bytearray(VOCAB))
    rig.run()
    assert (rig.end(failing).code, rig.end(failing).message) == ("invalid", "grammar: it allows no token")
    rig.assert_answered(other)


def test_a_schema_that_never_comes_to_a_value_is_the_request_s_fault():
    rig = knowing()
    request = rig.serve(one(1, 9), grammar='start: %json {"$ref": "#"}')
    assert (rig.end(request).code, rig.tokens(request)) == ("invalid", [])
    assert rig.end(request).message.startswith("grammar: ")
    assert "non-verbose" not in rig.end(request).message


def test_a_vocabulary_in_which_nothing_ends_an_answer_is_refused():
    rig = Rig()
    rig.sockets.inbox.put(FromGateway(b"gateway", Vocabulary(TOLD.tokens, (1,), (-1, VOCAB))))
    request = rig.serve(one(1, 9), grammar='start: "ab"')
    assert (rig.end(request).code, rig.end(request).message) == (
        "invalid",
        "grammar: the vocabulary has no token that ends an answer",
    )
