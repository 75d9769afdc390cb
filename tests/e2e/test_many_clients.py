"""Many at once: nobody ever sees anybody else's state, and nobody's answer depends on who else is there."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from chat_model import words
from conftest import Served
from daemon import until
from http_client import GREEDY, assistant, joined, system, user
from reference import Reference

SCORED = {"logprobs": True, "top_logprobs": 2}


def test_twenty_clients_with_four_slots(four_slots: Served, reference: Reference):
    """K-SE5: heads that differ in one word, edits and hang-ups; every answer is the one without cache."""
    client = four_slots.client
    common = words("instructions", 150)

    def live(number: int) -> list[tuple[list[dict], list[dict]]]:
        dice = random.Random(number)
        messages = [system(f"{common} The secret word is {words(f'secret {number}', 2)} {number}.")]
        seen = []
        for turn in range(3):
            messages.append(user(words(f"{number} {turn}", dice.randint(5, 60))))
            if dice.random() < 0.25:
                with client.stream(messages, max_tokens=3000, ignore_eos=True) as stream:
                    stream.take_text(dice.randint(1, 3))
            answer = client.chat(messages, **SCORED)
            seen.append((list(messages), answer.choices))
            messages.append(assistant(answer.text))
            if dice.random() < 0.3:
                del messages[-2:]  # asked anew
        return seen

    with ThreadPoolExecutor(20) as pool:
        lives = list(pool.map(live, range(20)))
    for messages, choices in (turn for seen in lives for turn in seen):
        assert choices == client.cold(messages, **SCORED).choices
    for messages, choices in (lives[0][-1], lives[19][0]):
        assert choices[0]["message"]["content"] == reference.text(messages)
    stats = four_slots.daemon.wait_idle()
    assert not any(stats["stale_drops"].values())
    assert stats["requests"]["failed"] == 0
    assert stats["cache_tokens"]["device"] > 0
    assert stats["kv_bytes_used"] == stats["snapshot_bytes"]


def test_an_answer_is_the_same_alone_and_beside_seven_others(served: Served, reference: Reference):
    """`--deterministic` is on by default on a CPU."""
    prompts = [[user(words(f"beside {number}", 30 + 60 * number))] for number in range(8)]
    fields = {**SCORED, "max_tokens": 50, "ignore_eos": True}
    alone = [served.client.cold(prompt, **fields).choices for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        for ask in (served.client.cold, served.client.chat, served.client.chat):
            beside = list(pool.map(partial(ask, **fields), prompts))
            assert [answer.choices for answer in beside] == alone
    assert all(answer.outcome[0] == "hit" for answer in beside)
    assert alone[0][0]["message"]["content"].startswith(reference.text(prompts[0]))


def test_a_gateway_that_stands_still_loses_nothing(served: Served):
    """K-LO8: while it is stopped the worker says all that it has to say, and every word of it arrives."""
    fields = {"max_tokens": 150, "ignore_eos": True}
    prompts = [[user(words(f"still {number}", 20))] for number in range(24)]
    streams = [served.client.stream(prompt, **fields) for prompt in prompts]
    [gateway] = served.daemon.processes("gateway")
    os.kill(gateway, signal.SIGSTOP)
    try:
        assert served.daemon.stats()["requests_running"]
        until(served.daemon.is_idle, "the worker is done")
    finally:
        os.kill(gateway, signal.SIGCONT)
    texts = [joined(list(stream)) for stream in streams]
    assert all(stream.is_done for stream in streams)
    for stream in streams:
        stream.close()
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert texts == [answer.text for answer in pool.map(partial(served.client.cold, **fields), prompts)]


def test_requests_with_the_same_new_head_at_once(served: Served, reference: Reference):
    """They follow the first one: the head is computed once."""
    head = system(words("new for all", 4000))
    questions = [[head, user(f"Question {number}?")] for number in range(8)]
    before = served.daemon.stats()["cache_tokens"]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(served.client.chat, questions))
    after = served.daemon.stats()["cache_tokens"]
    shared = reference.history_tokens([head])
    # The first one computes the head; whoever comes after it has begun takes the head from it.
    assert after["computed"] - before["computed"] < 2 * shared
    for question, answer in zip(questions, answers, strict=True):
        assert answer.text == served.client.cold(question).text
    assert answers[3].text == reference.text(questions[3])


def test_a_burst_past_the_queue_is_refused_with_a_time_to_come_back(strict: Served):
    client = strict.client
    with client.stream([user("runs")], max_tokens=15_000, ignore_eos=True) as running:
        running.take_text(1)
        with ThreadPoolExecutor(8) as pool:
            burst = [pool.submit(client.chat, [user(f"burst {n}")], **GREEDY) for n in range(8)]
            until(lambda: sum(one.done() for one in burst) == 6, "all but two are refused")
            refused = [one.result() for one in burst if one.done()]
            running.close()
            served = [one.result() for one in burst if one.result() not in refused]
    assert {answer.status for answer in refused} == {429}
    assert {answer.error["code"] for answer in refused} == {"overloaded"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert [answer.status for answer in served] == [200, 200]
