"""What the daemon does while nobody asks: it absorbs answers and verifies hits."""

from __future__ import annotations

from collections.abc import Callable

from chat_model import words
from daemon import Daemon, metrics, until
from http_client import assistant, system, user
from reference import Reference


def test_a_turn_after_an_absorbed_answer_computes_its_new_message_alone(
    start: Callable[..., Daemon], reference: Reference
):
    daemon = start("--absorb", "--verify-hits", "1")
    client = daemon.wait_ready()
    messages = [system(words("head", 120))]
    hits = absorbed = 0
    for turn in range(4):
        messages.append(user(words(f"idle question {turn}", 40)))
        cold = client.cold(messages)
        # The random model does not end by itself: a piece of its own answer ends it.
        stop = cold.text[-4:]
        answer = client.chat(messages, stop=stop)
        assert answer.choices == client.cold(messages, stop=stop).choices
        hits += answer.outcome[0] == "hit"
        if turn:
            assert answer.outcome == ("hit", absorbed, "none")
        if not answer.text.strip():
            break
        messages.append(assistant(answer.text))
        absorbed = reference.history_tokens(messages)
        until(lambda end=absorbed: end in {s["tokens"] for s in daemon.snapshots()}, "the answer is absorbed")
    done = daemon.cachectl("--json", "verify", "--wait")
    assert done.returncode == 0, done.stdout
    counts = daemon.ask("verify")
    assert counts == {"verified": hits, "mismatched": 0, "skipped": 0, "pending": 0}
    assert hits > 0
    assert metrics(client)["prefixd_absorbed_tokens_total"] > 0
