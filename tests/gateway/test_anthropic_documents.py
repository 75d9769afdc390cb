"""Documents and search results are text in the prompt, wherever a block of text may be."""

from __future__ import annotations

from typing import Any

import pytest
from fake_worker import FakeWorker
from served import Served
from test_anthropic_input import IMAGE, MARK, parsed, result, text, use
from tiny_model import tiny_tokenizer

from gateway.conversation import Message
from protocol.errors import RequestError

TOLD = "<document>\n<document_content>\nAll is well.\n</document_content>\n</document>"
FOUND = (
    "<search_result>\n<source>https://a.example/b</source>\n<title>News</title>\nFirst.\nSecond.\n</search_result>"
)
CITED: dict[str, Any] = {"citations": {"enabled": True}}


def source(**fields: Any) -> dict[str, Any]:
    return {"type": "document", "source": fields}


PLAIN = source(type="text", media_type="text/plain", data="All is well.")
SEARCH = {
    "type": "search_result",
    "source": "https://a.example/b",
    "title": "News",
    "content": [text("First."), text("Second.")],
}


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (PLAIN, TOLD),
        (PLAIN | CITED | {"title": None}, TOLD),
        (source(type="content", content="All is well."), TOLD),
        (source(type="content", content=[text("All is"), text("well.")]), TOLD.replace("is ", "is\n")),
        (
            PLAIN | {"title": "Report", "context": "Of today"},
            TOLD.replace("<document_", "<title>Report</title>\n<context>Of today</context>\n<document_", 1),
        ),
        (SEARCH, FOUND),
        (SEARCH | CITED, FOUND),
    ],
)
def test_it_is_text_beside_text_and_in_results(block: dict[str, Any], told: str):
    asked = [block | MARK, text("What is new?")]
    (message,) = parsed({"role": "user", "content": asked})
    assert message == Message("user", f"{told}\nWhat is new?")
    assert message.mark_seconds == 3600
    called = {"role": "assistant", "content": [use("a")]}
    returned = {"role": "user", "content": [result("a", [text("Here:"), block])]}
    assert parsed(called, returned)[1] == Message("tool", f"Here:\n{told}", tool_call_id="a")


@pytest.mark.parametrize(
    ("block", "field", "problem"),
    [
        (source(type="base64", media_type="application/pdf", data="AA=="), "source", "has type 'base64'"),
        (source(type="url", url="https://a.example/b.pdf"), "source", "has type 'url'"),
        (source(type="file", file_id="file_1"), "source", "has type 'file'"),
        (source(), "source", "has type None"),
        (source(type="text", media_type="text/plain"), "source.data", "must be a string"),
        (source(type="content"), "source.content", "must be a string or a list"),
        (source(type="content", content=[text("x"), IMAGE]), "source.content.1", "takes text only"),
        ({"type": "document"}, "source", "must be an object"),
        (PLAIN | {"title": 3}, "title", "must be a string"),
        (PLAIN | {"context": []}, "context", "must be a string"),
        (SEARCH | {"title": None}, "title", "must be a string"),
        (SEARCH | {"source": 3}, "source", "must be a string"),
        (SEARCH | {"content": "First."}, "content", "must be a list"),
        (SEARCH | {"content": [IMAGE]}, "content.0", "takes text only"),
    ],
)
def test_what_is_no_text_is_refused_by_its_field(block: dict[str, Any], field: str, problem: str):
    called = {"role": "assistant", "content": [use("a")]}
    for messages, where in (
        ([{"role": "user", "content": [text("x"), block]}], "messages.0.content.1"),
        ([called, {"role": "user", "content": [result("a", [block])]}], "messages.1.content.0.content.0"),
    ):
        with pytest.raises(RequestError, match=problem) as refused:
            parsed(*messages)
        assert refused.value.param == f"{where}.{field}"


async def test_it_reaches_the_prompt_and_is_counted(served: Served, worker: FakeWorker):
    body = {"messages": [{"role": "user", "content": [PLAIN | CITED, text("Well?")]}], "max_tokens": 9}
    answer = await (await served.post("/v1/messages", body)).json()
    assert TOLD in tiny_tokenizer().decode(list(worker.requests[0].token_ids))
    usage = answer["usage"]
    counted = await (await served.post("/v1/messages/count_tokens", body)).json()
    assert counted["input_tokens"] == len(worker.requests[0].token_ids)
    assert usage["input_tokens"] + usage["cache_creation_input_tokens"] == counted["input_tokens"]
