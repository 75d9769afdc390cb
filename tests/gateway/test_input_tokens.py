"""Counting the input of a response, and what the official clients are told about all that would have to be stored."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from fake_worker import FakeWorker, say
from served import Served

from gateway.config import GatewaySettings

FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "lookup",
    "parameters": {"type": "object"},
    "strict": False,
}
BODY: dict[str, Any] = {
    "instructions": "Be brief.",
    "input": [{"role": "user", "content": "Where is Paris?"}],
    "tools": [FUNCTION],
}


@pytest.fixture
async def official(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "more", [{}, {"tool_choice": "none"}, {"tools": None}, {"input": "x" * 40, "reasoning": {"effort": "low"}}]
)
async def test_it_is_what_a_response_would_use(
    served: Served, worker: FakeWorker, official: openai.AsyncOpenAI, more: dict[str, Any]
):
    counted = await official.responses.input_tokens.count(model="tiny", **BODY | more)
    assert counted.object == "response.input_tokens"
    assert not worker.requests
    worker.script = say("x", outcome="hit", depth=4, reason="none")
    answer = await official.responses.create(model="tiny", **BODY | more)
    assert counted.input_tokens == answer.usage.input_tokens


async def test_instructions_alone_can_be_counted_and_nothing_cannot(official: openai.AsyncOpenAI):
    alone = await official.responses.input_tokens.count(instructions="Be brief.")
    more = await official.responses.input_tokens.count(instructions="Be brief.", input="hi")
    assert 0 < alone.input_tokens < more.input_tokens
    stored = {"input": "hi", "previous_response_id": "resp_1"}
    for fields, param in (({}, "input"), ({"input": []}, "input"), (stored, "previous_response_id")):
        with pytest.raises(openai.BadRequestError) as refused:
            await official.responses.input_tokens.count(**fields)
        assert refused.value.param == param


async def test_counting_goes_past_the_context(served: Served, worker: FakeWorker, official: openai.AsyncOpenAI):
    counted = await official.responses.input_tokens.count(input="word " * 600)
    assert counted.input_tokens > worker.model.max_model_len
    with pytest.raises(openai.BadRequestError, match=str(counted.input_tokens)):
        await official.responses.create(model="tiny", input="word " * 600)


class TestStrictModel:
    """Only listed names are served."""

    @pytest.fixture
    def settings(self, settings: GatewaySettings) -> GatewaySettings:
        return settings.model_copy(update={"strict_model": True})

    async def test_an_unknown_model_is_404(self, official: openai.AsyncOpenAI):
        with pytest.raises(openai.NotFoundError):
            await official.responses.input_tokens.count(model="other", input="hi")


async def test_what_would_have_to_be_stored_is_not_found_and_says_why(official: openai.AsyncOpenAI):
    for call, words in (
        (official.responses.retrieve("resp_1"), "send the whole conversation"),
        (official.responses.delete("resp_1"), "send the whole conversation"),
        (official.responses.cancel("resp_1"), "send the whole conversation"),
        (official.responses.compact(model="tiny", input="hi"), "send the whole conversation"),
        (official.conversations.create(), "send the whole conversation"),
        (official.chat.completions.retrieve("chatcmpl-1"), "send the whole conversation"),
        (official.batches.retrieve("batch_1"), "send each of the requests"),
        (official.files.retrieve("file_1"), "send their text"),
        (official.embeddings.create(model="tiny", input="hi"), "/openapi.json tells"),
    ):
        with pytest.raises(openai.NotFoundError, match=words) as refused:
            await call
        assert refused.value.type == "not_found_error"


async def test_the_other_client_is_told_in_its_own_shape(served: Served):
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="x", max_retries=0) as client:
        one = {"custom_id": "a", "params": {"model": "tiny", "max_tokens": 5, "messages": []}}
        for call, words in (
            (client.messages.batches.create(requests=[one]), "send each of the requests"),
            (client.messages.batches.retrieve("msgbatch_1"), "send each of the requests"),
            (client.files.retrieve_metadata("file_1"), "send their text"),
        ):
            with pytest.raises(anthropic.NotFoundError, match=words) as refused:
                await call
            assert refused.value.body["error"]["type"] == "not_found_error"
