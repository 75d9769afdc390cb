"""The official client understands what is sent."""

from __future__ import annotations

import openai
import pytest
from fake_worker import FakeWorker, say
from served import Served


async def test_chat_completion_and_errors_through_the_official_client(served: Served, worker: FakeWorker):
    worker.script = say("Paris it is.", outcome="hit", depth=3, reason="none")
    messages = [{"role": "user", "content": "Where?"}]
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=messages, logprobs=True, top_logprobs=1
        )
        assert whole.choices[0].message.content == "Paris it is."
        assert whole.usage.prompt_tokens_details.cached_tokens == 3
        assert whole.choices[0].logprobs.content[0].top_logprobs
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "Paris it is."
        assert chunks[-1].usage == whole.usage
        plain = await client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in plain.choices] == ["Paris it is."] * 2
        assert [model.id async for model in await client.models.list()][-1] == "tiny"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=[])
        assert refused.value.param == "messages"
        worker.script = lambda call: call.fail("queue_full")
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="tiny", messages=messages)
