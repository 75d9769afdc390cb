"""What is learned of how often boundaries are asked for again."""

from __future__ import annotations

from snapshot_rig import Engine, chat, one_shot, prompt, words

from worker.returns import MEMORY, PAUSE_SECONDS, Returns, standing


def standings(engine: Engine) -> dict[int, str]:
    (root,) = engine.store.index.roots
    return {node.end: standing(node) for node in root.subtree() if node is not root}


def test_a_conversation_that_grows_is_asked_for_at_its_end_alone():
    engine = Engine(8)
    engine.play(chat(1))
    assert standings(engine) == {30: "head", 50: "new"}
    engine.play(chat(3))
    assert standings(engine) == {30: "head", 50: "passed", 70: "before_last", 90: "going_on"}
    engine.play(chat(3))
    assert standings(engine)[90] == "repeated"


def test_a_boundary_that_conversations_leave_in_two_ways_is_asked_for_again():
    engine = Engine(8)
    engine.play(prompt(words(1, 12), words(2, 12), head=False))
    engine.play(prompt(words(1, 12), words(3, 12), head=False))
    assert standings(engine)[12] == "again"


def test_what_was_evicted_is_asked_for_all_the_same():
    engine = Engine(1)
    for who in (1, 2, 1, 2):
        engine.play(prompt(words(who, 12), words(10 + who, 4), head=False))
    engine.clearing.flush()
    engine.play(prompt(words(1, 12), words(11, 4), words(5, 5), head=False))
    node = next(n for root in engine.store.index.roots for n in root.subtree() if n.end == 16 and n.children)
    assert node.slot is None
    assert node.asks == 2, "one found it, one did not"


def test_shares_follow_the_traffic():
    growing, single = Engine(8), Engine(8)
    for who in range(30):
        single.play(one_shot(100 + who))
        growing.play(chat(2 * who + 1))
    assert growing.store.returns.share("going_on") > 0.9
    assert single.store.returns.share("new") < 0.1
    assert growing.store.returns.share("passed") < 0.01


def test_what_adds_much_may_come_back_more_rarely_than_what_adds_little():
    engine = Engine(8)
    for who in range(20):
        engine.play(prompt(words(2 * who, 2000), head=False))
        for turn in (1, 2, 3):
            engine.play(chat(turn, head=words(1000 + who, 30), who=5000 + 20 * who))
    share = engine.store.returns.share
    assert share("new", 2000) < 0.2 < share("new") < 0.7 < share("new", 20)
    assert share("going_on", 2000) == share("going_on"), "none has been seen yet"


def test_an_absorbed_answer_counts_by_what_its_prompt_added():
    engine = Engine(8)
    engine.play(asked := prompt(words(1, 900), head=False))
    answered = prompt(words(1, 900), words(2, 5), head=False)
    engine.keeping.note("", answered.ids, answered.boundaries, 905, absorbed=True)
    engine.play(prompt(words(1, 900), words(2, 5), words(3, 30), head=False))
    (root,) = engine.store.index.roots
    assert {node.end: node.added for node in root.subtree() if node is not root} == {900: 900, 905: 900, 935: 30}
    assert len(asked.boundaries) == 1


def test_pauses_are_those_of_conversations_and_not_of_the_head_that_they_share():
    engine = Engine(8)
    for who in range(20):
        engine.clock.now += 1
        engine.play(chat(1, who=10 * who))
    before = engine.store.returns.pause
    engine.clock.now += 100
    engine.clearing.flush()
    for who in range(20):
        engine.play(chat(2, who=10 * who))
    assert before == PAUSE_SECONDS
    assert 90 < engine.store.returns.pause < 150, "also where it was evicted meanwhile"


def test_a_person_among_agents_finds_a_conversation_again_after_pauses_of_its_own():
    engine, found = Engine(5), []
    for turn in range(1, 9):
        found.append(engine.play(chat(turn, who=10)).lookup.depth)
        for agent in range(4):
            for step in range(1, 8):
                engine.clock.now += 2
                engine.play(chat(step, who=1000 + 100 * turn + 10 * agent))
        engine.clock.now += 60
    assert engine.store.returns.pause < 5
    assert found[2:] == [chat(turn - 1).last.end for turn in range(3, 9)]


def test_a_burst_of_one_prompt_is_no_pause_of_conversations():
    engine = Engine(8)
    for _ in range(20):
        engine.play(one_shot(1))
    assert engine.store.returns.pause == PAUSE_SECONDS
    assert engine.store.returns.share("repeated") > 0.8, "it is asked for all the same"


def test_what_traffic_was_like_before_fades():
    engine = Engine(2)
    for who in range(MEMORY + 50):
        engine.keeping.note("", (shot := one_shot(who, 2)).ids, shot.boundaries, 2)
    before = engine.store.returns.share("new")
    for who in range(60):
        shot, more = one_shot(who, 2), prompt(words(who, 2), words(1, 2), head=False)
        engine.keeping.wanted("", more.ids, more.boundaries, 0)
    assert engine.store.returns.share("new") > before + 0.1


def test_messages_that_are_written_anew_each_time_teach_to_keep_what_stands_before_them():
    engine = Engine(8)
    for turn in range(4):
        history = [words(1, 30), *(words(10 + t, 10) for t in range(turn))]
        engine.play(prompt(*history, words(100 + turn, 10), head=False))
    assert engine.kept().count(60) == 2, (
        "the end of one prompt, and what the next is to have in common with this one"
    )


def test_a_head_that_conversations_share_says_nothing_of_last_messages():
    engine = Engine(8)
    before = engine.store.returns.share("before_last")
    for who in range(8):
        engine.play(prompt(words(1, 30), words(10 + who, 10)))
    assert engine.store.returns.share("before_last") == before


def test_an_absorbed_answer_does_not_hide_which_message_was_the_last():
    engine = Engine(8)
    engine.play(asked := prompt(words(1, 30), words(2, 10), head=False))
    answered = prompt(words(1, 30), words(2, 10), words(3, 10), head=False)
    engine.keeping.note("", answered.ids, answered.boundaries, 50, absorbed=True)
    assert standings(engine) == {30: "before_last", 40: "inner", 50: "new"}
    assert len(asked.boundaries) == 2


def test_pauses_are_learned_from_the_first_ones_on():
    returns = Returns()
    for _ in range(3):
        returns.paused(5)
    assert 5 < returns.pause < 20
    for _ in range(100):
        returns.paused(5)
    returns.paused(5000)
    assert 5 < returns.pause < 10, "one long one says little"
    for _ in range(100):
        returns.paused(0.001)
    assert 1 <= returns.pause < 1.1
