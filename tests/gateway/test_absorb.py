"""A finished answer is handed to the worker as the next turn will send it."""

from __future__ import annotations

import pytest
from fake_worker import FakeWorker, say
from served import Served

from gateway.absorb import next_turn
from gateway.conversation import Conversation, Message
from gateway.prompts import PromptMaker
from gateway.reply import Reply
from protocol.errors import WorkerUnavailable
from protocol.messages import ModelInfo

QUESTION = [{"role": "user", "content": "Hello?"}]


async def ask(served: Served, **fields: object) -> str:
    answer = await (await served.chat(messages=QUESTION, **fields)).json()
    return str(answer["choices"][0]["message"]["content"])


async def absorbed_after_one_more(served: Served, worker: FakeWorker) -> int:
    """Absorptions of the requests before this one, whose own shows that theirs would have come."""
    await ask(served)
    await served.until(lambda: len(worker.absorbed) > 0)
    return len(worker.absorbed) - 1


async def test_the_next_turn_begins_with_what_was_absorbed(served: Served, worker: FakeWorker):
    said = await ask(served)
    await served.until(lambda: bool(worker.absorbed))
    absorbed = worker.absorbed[0]
    assert absorbed.request_id == worker.requests[0].request_id
    history = [*QUESTION, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}]
    await served.chat(messages=history)
    following = worker.requests[1]
    end = absorbed.boundaries[-1].end
    assert len(absorbed.token_ids) == end
    assert following.token_ids[:end] == absorbed.token_ids
    assert following.boundaries[: len(absorbed.boundaries)] == absorbed.boundaries
    assert absorbed.boundaries[-1].messages == 2


async def test_a_stream_is_absorbed_too(served: Served, worker: FakeWorker):
    response = await served.chat(messages=QUESTION, stream=True)
    await response.read()
    await served.until(lambda: bool(worker.absorbed))


@pytest.mark.parametrize("fields", [{"max_tokens": 1}, {"n": 2}, {"cache_prompt": False}])
async def test_what_is_cut_off_or_ambiguous_or_private_is_not(
    served: Served, worker: FakeWorker, fields: dict[str, object]
):
    await ask(served, **fields)
    assert await absorbed_after_one_more(served, worker) == 0


async def test_a_fault_in_preparing_it_is_told_and_counted_and_costs_nothing_else(
    served: Served, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def count() -> float | None:
        return served.gateway.metrics.registry.get_sample_value("prefixd_absorb_faults_total")

    assert count() == 0
    with monkeypatch.context() as patch:
        patch.setattr("gateway.service.next_turn", lambda *_: 1 / 0)
        assert await ask(served)
        await served.until(lambda: count() == 1)
    assert "cannot be absorbed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    await ask(served)
    await served.until(lambda: len(worker.absorbed) == 1)
    assert count() == 1


async def test_an_answer_stands_though_the_worker_is_lost_a_moment_later(
    served: Served, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
):
    model = served.gateway.client.model

    def lost_once_asked() -> ModelInfo:
        if worker.requests:
            raise WorkerUnavailable("gone")
        return model()

    monkeypatch.setattr(served.gateway.client, "model", lost_once_asked)
    assert await ask(served)
    assert not worker.absorbed


async def test_an_empty_answer_is_not(served: Served, worker: FakeWorker):
    worker.script = say("")
    await ask(served)
    worker.script = say("Hello there!")
    assert await absorbed_after_one_more(served, worker) == 0


def test_an_answer_that_went_on_from_the_clients_own_words_is_one_message(maker: PromptMaker, worker: FakeWorker):
    begun = Conversation((Message("user", "Hello?"), Message("assistant", "Well,")))
    whole = Conversation((Message("user", "Hello?"),))
    went_on = next_turn(maker, worker.model, "r", begun, Reply(" hello."))
    at_once = next_turn(maker, worker.model, "r", whole, Reply("Well, hello."))
    assert went_on is not None
    assert went_on == at_once


def test_a_full_context_is_absorbed_by_nobody(maker: PromptMaker, worker: FakeWorker):
    long = Conversation((Message("user", "word " * worker.model.max_model_len),))
    assert next_turn(maker, worker.model, "r", long, Reply("Yes.")) is None
