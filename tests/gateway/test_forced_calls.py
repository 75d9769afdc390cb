"""What must have a form, over sockets: the worker is told the vocabulary once, and a grammar with the request."""

from __future__ import annotations

from typing import Any

import pytest
from fake_worker import FakeWorker, restarted, say
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from served import Served
from test_tool_calls import ASKED, LOOKUP, ONE
from tiny_model import END_ID, tiny_tokenizer

from protocol.messages import Vocabulary

SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string"}},
    "required": ["q"],
    "additionalProperties": False,
}
PARAMETERS = LOOKUP["function"]["parameters"]
NAMED = {"type": "function", "function": {"name": "lookup"}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION = {"type": "function", "name": "lookup", "parameters": PARAMETERS}
CUSTOM = {"name": "lookup", "input_schema": PARAMETERS}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
JSON_TEXT = '{"q": "größe"}'
CALLS = [
    (CHAT, {"messages": ASKED, "tools": [LOOKUP], "tool_choice": "required"}),
    (CHAT, {"messages": ASKED, "tools": [LOOKUP], "tool_choice": NAMED}),
    (CHAT, {"messages": ASKED, "tools": [LOOKUP], "tool_choice": NAMED, "response_format": JSON_SCHEMA}),
    (RESPONSES, {"input": "hi", "tools": [FUNCTION], "tool_choice": "required"}),
    (RESPONSES, {"input": "hi", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": "lookup"}}),
    (MESSAGES, {"messages": ASKED, "max_tokens": 300, "tools": [CUSTOM], "tool_choice": {"type": "any"}}),
    (
        MESSAGES,
        {
            "messages": ASKED,
            "max_tokens": 300,
            "tools": [CUSTOM],
            "tool_choice": {"type": "tool", "name": "lookup"},
        },
    ),
]
SCHEMAS = [
    (CHAT, {"messages": ASKED, "response_format": JSON_SCHEMA}),
    (CHAT, {"messages": ASKED, "response_format": {"type": "json_object"}}),
    (CHAT, {"messages": ASKED, "response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}),
    (CHAT, {"messages": ASKED, "tools": [LOOKUP], "tool_choice": "none", "response_format": JSON_SCHEMA}),
    (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}}),
    (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_object"}}}),
    (
        MESSAGES,
        {
            "messages": ASKED,
            "max_tokens": 300,
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
    (
        MESSAGES,
        {"messages": ASKED, "max_tokens": 300, "output_format": {"type": "json_schema", "schema": SCHEMA}},
    ),
]


class Told:
    """A vocabulary as the worker has it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = [bytes.fromhex(token) for token in vocabulary.tokens.split(" ")]
        self.special_token_ids = vocabulary.special_token_ids
        self.eos_token_id = vocabulary.end_token_ids[0]

    def __call__(self, text: object) -> list[int]:
        raise TypeError("no text is forced")


def fits(worker: FakeWorker, text: str) -> bool:
    """Whether a text, in the model's own tokens, is a whole answer to the last request."""
    tokenizer = LLTokenizer(TokenizerWrapper(Told(worker.vocabularies[-1])))
    matcher = LLMatcher(tokenizer, worker.requests[-1].sampling.grammar or "", log_level=0)
    ids = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_a_forced_call_has_a_grammar(served: Served, worker: FakeWorker, path: str, body: dict[str, Any]):
    worker.script = say(ONE)
    response = await served.post(path, body)
    assert response.status == 200
    assert '"q":"größe' in (await response.text()).replace("\\", "").replace(" ", "")
    assert fits(worker, ONE)
    assert not fits(worker, "I cannot.")
    assert not fits(worker, JSON_TEXT)


@pytest.mark.parametrize(
    ("index", "wish"),
    [
        (0, {"parallel_tool_calls": True}),
        (3, {"parallel_tool_calls": True}),
        (5, {"tool_choice": {"type": "any", "disable_parallel_tool_use": False}}),
    ],
)
async def test_more_calls_than_one_must_be_asked_for(
    served: Served, worker: FakeWorker, index: int, wish: dict[str, Any]
):
    path, body = CALLS[index]
    two = f"{ONE}\n{ONE}"
    for extra, fitting in (({}, False), (wish, True)):
        worker.script = say(two)
        response = await served.post(path, body | extra)
        assert (await response.text()).replace("\\", "").replace(" ", "").count('"q":"größe') == 2
        assert (fits(worker, ONE), fits(worker, two)) == (True, fitting)


STRICT_CALLS = [
    (
        CHAT,
        {"messages": ASKED, "tools": [{"type": "function", "function": LOOKUP["function"] | {"strict": True}}]},
    ),
    (RESPONSES, {"input": "hi", "tools": [FUNCTION | {"strict": True}], "tool_choice": "auto"}),
    (MESSAGES, {"messages": ASKED, "max_tokens": 300, "tools": [CUSTOM | {"strict": True}]}),
]


@pytest.mark.parametrize(("path", "body"), STRICT_CALLS)
async def test_strict_tools_have_a_grammar_that_lets_text_be(
    served: Served, worker: FakeWorker, path: str, body: dict[str, Any]
):
    worker.script = say(ONE)
    assert (await served.post(path, body)).status == 200
    assert fits(worker, ONE)
    assert fits(worker, f"I look.\n{ONE}")
    assert fits(worker, "I cannot.")
    assert not fits(worker, ONE.replace('"n": 1', '"n": "one"'))
    begun = {"messages": [*ASKED, {"role": "assistant", "content": "I"}]} if path != RESPONSES else {}
    none = {"tool_choice": {"type": "none"} if path == MESSAGES else "none"}
    for other in (begun or none, none):
        assert (await served.post(path, body | other)).status == 200
        assert worker.requests[-1].sampling.grammar is None


async def test_strict_tools_of_a_namespace_are_held_by_their_full_names(served: Served, worker: FakeWorker):
    worker.script = say(ONE)
    spaced = {"type": "namespace", "name": "files", "tools": [FUNCTION | {"strict": True}]}
    assert (await served.post(RESPONSES, {"input": "hi", "tools": [spaced]})).status == 200
    call = ONE.replace("lookup", "files__lookup")
    assert fits(worker, call)
    assert not fits(worker, call.replace('"n": 1', '"n": "one"'))
    assert fits(worker, "I cannot.")


@pytest.mark.parametrize(("path", "body"), SCHEMAS)
async def test_json_has_a_grammar(served: Served, worker: FakeWorker, path: str, body: dict[str, Any]):
    worker.script = say(JSON_TEXT)
    assert (await served.post(path, body)).status == 200
    assert fits(worker, JSON_TEXT)
    assert not fits(worker, "I cannot.")
    assert not fits(worker, ONE)


async def test_json_may_be_left_for_a_call(served: Served, worker: FakeWorker):
    worker.script = say(ONE)
    await served.post(CHAT, {"messages": ASKED, "tools": [LOOKUP], "response_format": JSON_SCHEMA})
    assert fits(worker, ONE)
    assert fits(worker, JSON_TEXT)
    assert not fits(worker, '{"q": 3}')


async def test_the_format_asked_for_is_told_back(served: Served, worker: FakeWorker):
    worker.script = say(JSON_TEXT)
    path, body = SCHEMAS[4]
    assert (await (await served.post(path, body)).json())["text"] == body["text"]


async def test_the_vocabulary_is_told_once_to_each_worker_and_only_when_needed(served: Served, worker: FakeWorker):
    worker.script = say(JSON_TEXT)
    await served.chat()
    assert worker.vocabularies == []
    assert worker.requests[0].sampling.grammar is None
    path, body = SCHEMAS[0]
    for _ in range(2):
        await served.post(path, body)
    (told,) = worker.vocabularies
    assert told.end_token_ids == worker.requests[0].sampling.stop_token_ids
    assert END_ID in told.special_token_ids
    restarted(worker, "epoch-2")
    await served.until(lambda: served.gateway.client.heartbeat.epoch == "epoch-2")
    await served.post(path, body)
    assert worker.vocabularies == [told, told]


async def test_every_token_is_told_by_its_bytes(served: Served, worker: FakeWorker):
    vocabulary = served.gateway.maker.vocabulary
    tokens = Told(vocabulary).tokens
    text = "größe 😀 12 <tool_call>"
    ids = tiny_tokenizer().encode(text, add_special_tokens=False).ids
    assert b"".join(tokens[token] for token in ids).decode() == text
    assert len(tokens) == tiny_tokenizer().get_vocab_size()


async def test_the_prompt_is_the_same_whatever_is_forced(served: Served, worker: FakeWorker):
    for extra in ({}, {"tool_choice": "required"}, {"response_format": JSON_SCHEMA}):
        await served.post(CHAT, {"messages": ASKED, "tools": [LOOKUP], **extra})
    first, *others = worker.requests
    assert all(other.token_ids == first.token_ids for other in others)
    assert all(other.boundaries == first.boundaries for other in others)


async def test_what_the_worker_refuses_reaches_the_client(served: Served, worker: FakeWorker):
    async def refuse(call: Any) -> None:
        await call.fail("invalid", "grammar: too large")

    worker.script = refuse
    path, body = SCHEMAS[0]
    response = await served.post(path, body)
    assert response.status == 400
    assert (await response.json())["error"]["message"] == "grammar: too large"


async def test_an_answer_that_goes_on_from_a_message_cannot_be_forced(served: Served, worker: FakeWorker):
    begun = [*ASKED, {"role": "assistant", "content": "{"}]
    response = await served.post(CHAT, {"messages": begun, "response_format": {"type": "json_object"}})
    assert response.status == 400
    assert (await response.json())["error"]["param"] == "response_format"
    assert not worker.requests
