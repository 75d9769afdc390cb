"""`/v1/completions` over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from fake_worker import Call, FakeWorker, ids_of, say
from served import Served


async def test_text_ids_and_lists_of_both_are_prompts(served: Served, worker: FakeWorker):
    ids = ids_of("hello world")
    for prompt, count in (("hello world", 1), (ids, 1), (["hello world", "other"], 2), ([ids, ids_of("x")], 2)):
        worker.requests.clear()
        body = await (await served.post("/v1/completions", {"prompt": prompt, "n": 2})).json()
        assert list(worker.requests[0].token_ids) == ids
        assert [choice["index"] for choice in body["choices"]] == list(range(2 * count))
        assert body["usage"]["prompt_tokens"] == sum(len(r.token_ids) for r in worker.requests)
        assert len({r.request_id for r in worker.requests}) == count


async def test_control_tokens_in_a_plain_prompt_are_recognised(served: Served, worker: FakeWorker):
    await served.post("/v1/completions", {"prompt": "<|im_start|>user"})
    assert worker.requests[0].token_ids[0] == 1


async def test_boundaries_lie_every_512_tokens_and_at_the_end(served: Served, worker: FakeWorker):
    worker.model = worker.model.__class__(
        **{f: getattr(worker.model, f) for f in worker.model.__slots__} | {"max_model_len": 4096}
    )
    await served.until(lambda: served.gateway.client.model().max_model_len == 4096)
    await served.post("/v1/completions", {"prompt": [5] * 1300})
    found = [(b.end, b.kind) for b in worker.requests[0].boundaries]
    assert found == [(512, "interior"), (1024, "interior"), (1300, "message")]


async def test_sixteen_tokens_are_the_default(served: Served, worker: FakeWorker):
    worker.script = say("and so on " * 20)
    body = await (await served.post("/v1/completions", {"prompt": "x"})).json()
    assert body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"


async def test_logprobs_have_the_older_form(served: Served, worker: FakeWorker):
    worker.script = say("Hello world")
    body = await (await served.post("/v1/completions", {"prompt": "x", "logprobs": 2})).json()
    scored = body["choices"][0]["logprobs"]
    assert "".join(scored["tokens"]) == "Hello world"
    offsets = scored["text_offset"]
    assert [("Hello world"[at:]).startswith(t) for at, t in zip(offsets, scored["tokens"], strict=True)]
    assert len(scored["token_logprobs"]) == len(scored["top_logprobs"]) == len(scored["tokens"])


async def test_a_stream_of_two_prompts_tells_them_apart(served: Served, worker: FakeWorker):
    body = {"prompt": ["a", "b"], "stream": True, "stream_options": {"include_usage": True}}
    response = await served.post("/v1/completions", body)
    lines = [line for line in (await response.text()).split("\n") if line.startswith("data: {")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    texts = {0: "", 1: ""}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "Hello there!", 1: "Hello there!"}
    assert events[-1]["usage"]["prompt_tokens"] == 2


def room_for(worker: FakeWorker, most: int) -> Callable[[Call], Awaitable[None]]:
    """A script: as `say`, but a request that finds `most` others open is refused."""
    open_now = 0

    async def script(call: Call) -> None:
        nonlocal open_now
        if open_now >= most:
            await call.fail("queue_full", "too many are waiting")
            return
        open_now += 1
        await asyncio.sleep(0.01)  # the others come meanwhile
        open_now -= 1
        await say("Done.")(call)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_prompts_of_one_body_wait_for_each_other_where_the_queue_is_short(
    served: Served, worker: FakeWorker, stream: bool
):
    worker.script = room_for(worker, 2)
    response = await served.post("/v1/completions", {"prompt": ["a", "b", "c", "d"], "stream": stream})
    text = await response.text()
    assert response.status == 200
    if stream:
        assert text.endswith("data: [DONE]\n\n")
    else:
        assert [choice["text"] for choice in json.loads(text)["choices"]] == ["Done."] * 4


async def test_a_queue_that_others_fill_refuses_all_prompts(served: Served, worker: FakeWorker):
    worker.script = room_for(worker, 0)
    response = await served.post("/v1/completions", {"prompt": ["a", "b"]})
    assert response.status == 429
    assert len(worker.requests) == 2
