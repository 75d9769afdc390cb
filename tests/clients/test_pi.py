"""Pi, without a terminal, over either API it speaks: turns and a file it reads."""

from __future__ import annotations

import json

import pytest
from stage import WORD, Run, Stage, call

pytestmark = pytest.mark.clients


@pytest.fixture(params=["openai-completions", "anthropic-messages"])
def pi(stage: Stage, request: pytest.FixtureRequest) -> Stage:
    url = stage.wire.url if request.param == "anthropic-messages" else f"{stage.wire.url}/v1"
    model = {"id": "tiny", "contextWindow": 131072, "maxTokens": 8192, "reasoning": True}
    provider = {"baseUrl": url, "api": request.param, "apiKey": "none", "models": [model]}
    config = stage.home / ".pi" / "agent" / "models.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"providers": {"local": provider}}))
    stage.environment = {"PI_OFFLINE": "1"}
    stage.script(
        (f"is {WORD}", "It is in the file."),
        ("the word in note", call("read", "A file. I read it.", path="note.txt")),
        ("", "Nothing else."),
    )
    return stage


def ask(stage: Stage, *words: str, label: str) -> Run:
    command = ("pi", "--provider", "local", "--model", "tiny", "--mode", "json", *words)
    return stage.run(*command, label=label)


def said(run: Run) -> str:
    """The last message, which ended well."""
    [*_, last] = [event["message"] for event in run.events() if event["type"] == "message_end"]
    assert last["stopReason"] == "stop"
    return "".join(block["text"] for block in last["content"] if block["type"] == "text").strip()


def test_turns_and_a_tool(pi: Stage):
    first = ask(pi, "-p", "What is the word in note.txt?", label="pi, a tool")
    assert said(first) == "It is in the file."
    assert len(first.answers) == 2
    assert WORD in json.dumps(first.answers[1].body["messages"][-1])
    second = ask(pi, "-c", "-p", "And what else?", label="pi, -c")
    assert said(second) == "Nothing else."
    assert min((first.reuse() + second.reuse())[1:]) > 0.9
