"""`return_progress`: streams of both OpenAI dialects tell how far a prompt has been computed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from fake_worker import Call, FakeWorker, ids_of
from served import Served

from protocol.messages import Progress

WORDS = "one two three four five six seven eight nine ten"


async def in_passes(call: Call) -> None:
    """Of the prompt, 4 tokens are restored and the others computed in three passes."""
    total = len(call.request.token_ids)
    await call.accept("hit", 4, "none")
    for computed in (6, total - 1):
        await call.send(Progress(call.worker.epoch, call.request.request_id, computed))
    await call.tokens(ids_of("Fine."))
    await call.tokens(ids_of("Thanks."))
    await call.finish()
    await call.complete("hit", 4, "none")


async def chunks(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    response = await served.post(path, {"stream": True, **fields})
    assert response.status == 200
    lines = (await response.text()).split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORDS}]})
PLAIN = ("/v1/completions", {"prompt": WORDS})


@pytest.mark.parametrize(("path", "fields"), [CHAT, PLAIN], ids=["chat", "completions"])
async def test_it_rises_from_what_was_restored_to_the_whole_prompt(
    served: Served, worker: FakeWorker, path: str, fields: dict[str, Any]
):
    worker.script = in_passes
    got = await chunks(served, path, return_progress=True, **fields)
    total = len(worker.requests[0].token_ids)
    told = [chunk["prompt_progress"] for chunk in got if "prompt_progress" in chunk]
    assert told, "nothing was told"
    assert told[-1]["processed"] == total
    assert [each["processed"] for each in told] == sorted({each["processed"] for each in told})
    assert {each["processed"] for each in told} <= {4, 6, total - 1, total}
    for each in told:
        assert set(each) == {"total", "cache", "processed", "time_ms"}
        assert (each["total"], each["cache"]) == (total, 4)
        assert isinstance(each["time_ms"], int)
    kinds = ["prompt_progress" in chunk for chunk in got]
    first_text = next(at for at, chunk in enumerate(got) if _said(chunk))
    assert not any(kinds[first_text:]), "no progress once there is text"
    assert all(_said(chunk) == "" for chunk, is_progress in zip(got, kinds, strict=True) if is_progress)


def _said(chunk: dict[str, Any]) -> str:
    """The text of a chunk's choices."""
    parts = (choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in chunk["choices"])
    return "".join(parts)


async def test_it_does_not_come_unasked_and_not_in_whole_answers(served: Served, worker: FakeWorker):
    worker.script = in_passes
    for path, fields in (CHAT, PLAIN):
        plain = await chunks(served, path, **fields)
        asked = await chunks(served, path, return_progress=True, **fields)
        assert not any("prompt_progress" in chunk for chunk in plain)
        assert "".join(map(_said, plain)) == "".join(map(_said, asked))
        whole = await (await served.post(path, {"return_progress": True, **fields})).json()
        assert "prompt_progress" not in whole


async def test_each_prompt_is_told_at_its_own_choice(served: Served, worker: FakeWorker):
    worker.script = in_passes
    got = await chunks(served, "/v1/completions", prompt=[WORDS, WORDS + " eleven"], return_progress=True)
    told = [
        (chunk["choices"][0]["index"], chunk["prompt_progress"]) for chunk in got if "prompt_progress" in chunk
    ]
    totals = [len(request.token_ids) for request in worker.requests]
    for index, total in enumerate(totals):
        mine = [each for at, each in told if at == index]
        assert mine[-1]["processed"] == total
        assert {each["total"] for each in mine} == {total}


async def test_the_official_client_gets_on_with_it(served: Served, worker: FakeWorker):
    worker.script = in_passes
    question = [{"role": "user", "content": WORDS}]
    async with (
        openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client,
        client.chat.completions.stream(
            model="tiny", messages=question, extra_body={"return_progress": True}
        ) as stream,
    ):
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Fine.Thanks."
