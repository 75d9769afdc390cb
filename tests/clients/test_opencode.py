"""OpenCode, without a terminal: turns and a file it reads."""

from __future__ import annotations

import json

import pytest
from stage import WORD, Run, Stage, call
from wire import Exchange, Usage

pytestmark = pytest.mark.clients


@pytest.fixture
def opencode(stage: Stage) -> Stage:
    models = {"tiny": {"name": "tiny", "limit": {"context": 131072, "output": 8192}, "tool_call": True}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{stage.wire.url}/v1", "apiKey": "none"},
        "models": models,
    }
    config = {"model": "local/tiny", "small_model": "local/tiny", "autoupdate": False, "share": "disabled"}
    (stage.project / "opencode.json").write_text(json.dumps({**config, "provider": {"local": provider}}))
    stage.environment = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    stage.script(
        (f"is {WORD}", "It is in the file."),
        ("[Tt]itle", "A word"),
        ("the word in note", call("read", "A file. I read it.", filePath=str(stage.note))),
        ("", "Nothing else."),
    )
    return stage


def main(run: Run) -> list[tuple[Exchange, Usage]]:
    """The requests of the agent itself; a title is asked for without tools."""
    return [pair for pair in zip(run.answers, run.usages, strict=True) if pair[0].body.get("tools")]


def said(run: Run) -> str:
    texts = [event["part"]["text"] for event in run.events() if event["type"] == "text"]
    return str(texts[-1]).strip()


def test_turns_and_a_tool(opencode: Stage):
    first = opencode.run(
        "opencode", "run", "--format", "json", "What is the word in note.txt?", label="opencode, a tool"
    )
    assert said(first) == "It is in the file."
    results = [message for message in main(first)[1][0].body["messages"] if message["role"] == "tool"]
    assert WORD in json.dumps(results)
    second = opencode.run("opencode", "run", "--format", "json", "-c", "And what else?", label="opencode, run -c")
    assert said(second) == "Nothing else."
    assert not [event for event in first.events() + second.events() if event["type"] == "error"]
    used = [usage for _, usage in main(first) + main(second)]
    assert len(used) == 3
    assert min(usage.cached / usage.prompt for usage in used[1:]) > 0.9
