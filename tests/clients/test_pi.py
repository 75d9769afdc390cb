"""Pi, without a terminal, over either API it speaks: turns and a file it reads."""

from __future__ import annotations

import json

import pytest
from chat_model import words
from stage import LONG, WORD, Run, Stage, call
from wire import Usage

pytestmark = pytest.mark.clients

APIS = ("openai-completions", "anthropic-messages")
PI = ("pi", "--provider", "local", "--model", "tiny", "--mode", "json")


def set_up(stage: Stage, api: str) -> Stage:
    url = stage.wire.url if api == "anthropic-messages" else f"{stage.wire.url}/v1"
    model = {"id": "tiny", "contextWindow": 131072, "maxTokens": 8192, "reasoning": True}
    provider = {"baseUrl": url, "api": api, "apiKey": "none", "models": [model]}
    config = stage.home / ".pi" / "agent" / "models.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"providers": {"local": provider}}))
    settings = {"compaction": {"enabled": True, "reserveTokens": 2000, "keepRecentTokens": 1000}}
    config.with_name("settings.json").write_text(json.dumps(settings))
    stage.environment = {"PI_OFFLINE": "1"}
    stage.script(
        (f"is {WORD}", "It is in the file."),
        ("the word in note", call("read", "A file. I read it.", path="note.txt")),
        ("", "Nothing else."),
    )
    return stage


@pytest.fixture(params=APIS)
def pi(stage: Stage, request: pytest.FixtureRequest) -> Stage:
    return set_up(stage, request.param)


@pytest.fixture(params=APIS)
def narrow(narrow_stage: Stage, request: pytest.FixtureRequest) -> Stage:
    return set_up(narrow_stage, request.param)


def ask(stage: Stage, *arguments: str, label: str) -> Run:
    return stage.run(*PI, *arguments, label=label)


def said(run: Run) -> str:
    """The last message, which ended well."""
    [*_, last] = [event["message"] for event in run.events() if event["type"] == "message_end"]
    assert last["stopReason"] == "stop"
    return "".join(block["text"] for block in last["content"] if block["type"] == "text").strip()


def reported(run: Run) -> list[Usage]:
    """What the client says that each answer used."""
    messages = [event["message"] for event in run.events() if event["type"] == "message_end"]
    used = [message["usage"] for message in messages if message["role"] == "assistant"]
    return [Usage(u["input"] + u["cacheRead"] + u["cacheWrite"], u["cacheRead"], u["output"]) for u in used]


def test_turns_and_a_tool(pi: Stage):
    first = ask(pi, "-p", "What is the word in note.txt?", label="pi, a tool")
    assert said(first) == "It is in the file."
    assert len(first.answers) == 2
    assert WORD in json.dumps(first.answers[1].body["messages"][-1])
    second = ask(pi, "-c", "-p", "And what else?", label="pi, -c")
    assert said(second) == "Nothing else."
    assert reported(first) + reported(second) == first.usages + second.usages
    assert min((first.reuse() + second.reuse())[1:]) > 0.9


def test_a_stream_that_breaks_off_is_asked_for_again_and_hits(pi: Stage):
    pi.script(("", LONG))
    pi.wire.cut_next = True
    run = ask(pi, "-p", "Go on.", label="pi, broken off and retried")
    assert run.reuse_after_cut() > 0.99


def test_a_context_that_overflows_is_summed_up_and_asked_again(narrow: Stage):
    ask(narrow, "-p", words("first", 7000), label="pi, a long message")
    ask(narrow, "-c", "-p", words("second", 5000), label="pi, another")
    run = narrow.run_into_refusal(*PI, "-c", "-p", words("third", 4000), label="pi, overflow")
    assert len(run.refused) == 1
    assert [answer.has_tools for answer in run.answers] == [False, True]  # summing up, and the same question again
    later = ask(narrow, "-c", "-p", "And now?", label="pi, after overflow")
    assert said(later) == "Nothing else."
    assert later.reuse()[0] > 0.9
