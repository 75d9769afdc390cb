"""The scenarios of hybrid models' caches (S5) on the card: depths, and every answer equal to one without cache.

Those of rendering and of the generation suffix (S5-7, S5-8) are the gateway's, which knows no card.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from exact_rig import Worker, ids
from gpu_rig import MIXED, models, on_a_card
from snapshot_rig import Prompt, prompt

pytestmark = on_a_card
STEPS = 8
PERIOD, LATE = 8192, 4096  # of snapshots in long stretches: so far apart, and so far behind a multiple at most


path = models(MIXED)


@pytest.fixture(scope="module")
def worker(path: Path) -> Worker:
    return Worker(path, device="cuda", kv_memory="4GiB", slots=256)


def ask(worker: Worker, request: Prompt, max_tokens: int = STEPS) -> int:
    """The depth that it started from; its answer is compared with a cold one."""
    cold = worker.serve(request, cache=False, max_tokens=max_tokens)
    request_id = worker.ask(request, max_tokens=max_tokens)
    worker.run()
    assert worker.answer(request_id) == cold
    return worker.depth(request_id)


def chat(seed: int, turns: int, *, size: int = 61, head: int = 300) -> Prompt:
    """A head and messages of lengths that are multiples of nothing."""
    return prompt(ids(seed, head), *(ids(seed + 1 + turn, size + turn) for turn in range(turns)), tail=(3, 4))


def test_short_conversations_hit_at_the_last_boundary_from_their_second_turn_on(worker: Worker):
    """S5-1 and S5-4: 3,000 tokens, far below the distance of periodic snapshots."""
    two = prompt(ids(70, 1200), ids(71, 1750), tail=ids(72, 50))
    assert ask(worker, two) == 0
    assert ask(worker, prompt(ids(70, 1200), ids(71, 1750), ids(73, 80), tail=(1,))) == 2950
    depths = [ask(worker, chat(1000, turns)) for turns in range(1, 9)]
    assert depths == [0, *(chat(1000, turns).last.end for turns in range(1, 8))]


def test_long_stretches_have_snapshots_in_between(worker: Worker):
    """S5-2: who goes back in 30,000 tokens starts at the last periodic one before."""
    whole = chat(2000, 50, size=570)
    assert len(whole) > 30_000
    assert ask(worker, whole) == 0
    ends = [boundary.end for boundary in whole.boundaries]
    kept = [300, *(max(end for end in ends if end <= mark + LATE) for mark in range(PERIOD, len(whole), PERIOD))]
    for turns in (16, 31, 46):
        edited = prompt(*(whole.ids[a:b] for a, b in spans(whole)[:turns]), ids(2900 + turns, 40), tail=(3, 4))
        shared = edited.boundaries[-2].end
        assert ask(worker, edited) >= max(end for end in kept if end <= shared), turns


def spans(request: Prompt) -> list[tuple[int, int]]:
    """Where each message lies."""
    ends = [0, *(boundary.end for boundary in request.boundaries)]
    return list(pairwise(ends))


def test_a_single_message_has_a_boundary_and_can_be_asked_again(worker: Worker):
    """S5-3 and S5-11: with and without a generation suffix.

    Without one the prompt is all that is kept, and its last token has to be computed: states that divide allow that.
    """
    inside = 333 - 1 if worker.engine._store.divisible else 0
    for tail in ((5, 6), ()):
        request = prompt(ids(3000 + len(tail), 333), tail=tail, head=False)
        ask(worker, request)
        depth = ask(worker, request)
        assert depth == (333 if tail else inside)


def test_what_was_generated_is_not_in_the_kept_state(worker: Worker):
    """S5-5: a long answer moves the running state far past the boundary that was kept."""
    asked = chat(4000, 2)
    ask(worker, asked, max_tokens=300)
    assert ask(worker, asked, max_tokens=300) == asked.last.end
    assert ask(worker, chat(4000, 3)) == asked.last.end


def test_branches_and_their_stem_hit_at_once(worker: Worker):
    """S5-6: X, Y, X again, and all of them at the same time."""
    stem = chat(5000, 2)
    ask(worker, stem)
    parts = [stem.ids[a:b] for a, b in spans(stem)]
    branches = [prompt(*parts, ids(5100 + n, 50 + n), tail=(3, 4)) for n in range(6)]
    cold = [worker.serve(request, cache=False, max_tokens=STEPS) for request in (*branches, stem)]
    asked = [worker.ask(request, max_tokens=STEPS) for request in (*branches, stem)]
    worker.run()
    assert [worker.answer(request_id) for request_id in asked] == cold
    assert all(worker.depth(request_id) == stem.last.end for request_id in asked)
    assert ask(worker, stem) == stem.last.end


def test_every_step_of_an_agent_starts_where_the_one_before_ended(worker: Worker):
    """S5-9: an answer and a tool's result a step."""
    depths = [ask(worker, chat(6000, 2 * step, size=40)) for step in range(1, 8)]
    assert depths == [0, *(chat(6000, 2 * step, size=40).last.end for step in range(1, 7))]


def test_a_conversation_stays_while_another_goes_on(path: Path):
    """S5-10: few slots, two conversations by turns, and each turn hits."""
    small = Worker(path, device="cuda", kv_memory="1GiB", slots=6, max_running=4)
    for turns in range(1, 9):
        for seed in (7000, 7500):
            depth = ask(small, chat(seed, turns))
            assert depth == (chat(seed, turns - 1).last.end if turns > 1 else 0)
