"""OpenCode, without a terminal: turns and a file it reads."""

from __future__ import annotations

import json

import pytest
from chat_model import words
from stage import LONG, WORD, Run, Stage, call
from wire import Exchange, Usage

pytestmark = pytest.mark.clients

RUN = ("opencode", "run", "--format", "json")


def set_up(stage: Stage) -> Stage:
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


@pytest.fixture
def opencode(stage: Stage) -> Stage:
    return set_up(stage)


@pytest.fixture
def narrow(narrow_stage: Stage) -> Stage:
    return set_up(narrow_stage)


def main(run: Run) -> list[tuple[Exchange, Usage]]:
    """The requests of the agent itself; a title is asked for without tools."""
    return [pair for pair in zip(run.answers, run.usages, strict=True) if pair[0].has_tools]


def said(run: Run) -> str:
    texts = [event["part"]["text"] for event in run.events() if event["type"] == "text"]
    return str(texts[-1]).strip()


def test_turns_and_a_tool(opencode: Stage):
    first = opencode.run(*RUN, "What is the word in note.txt?", label="opencode, a tool")
    assert said(first) == "It is in the file."
    results = [message for message in main(first)[1][0].body["messages"] if message["role"] == "tool"]
    assert WORD in json.dumps(results)
    second = opencode.run(*RUN, "-c", "And what else?", label="opencode, run -c")
    assert said(second) == "Nothing else."
    assert not [event for event in first.events() + second.events() if event["type"] == "error"]
    used = [usage for _, usage in main(first) + main(second)]
    told = [
        event["part"]["tokens"] for event in first.events() + second.events() if event["type"] == "step_finish"
    ]
    assert [tokens["cache"]["read"] for tokens in told] == [usage.cached for usage in used]
    assert [t["input"] + t["cache"]["read"] + t["cache"]["write"] for t in told] == [
        usage.prompt for usage in used
    ]
    assert len(used) == 3
    assert min(usage.cached / usage.prompt for usage in used[1:]) > 0.9


def test_a_stream_that_breaks_off_is_asked_for_again_and_hits(opencode: Stage):
    opencode.script(("", LONG))
    opencode.wire.cut_next = True
    run = opencode.run(*RUN, "Go on.", label="opencode, broken off and retried")
    assert run.reuse_after_cut() > 0.99


def test_a_context_that_overflows_is_summed_up(narrow: Stage):
    narrow.run(*RUN, words("first", 5000))
    run = narrow.run_into_refusal(*RUN, "-c", words("second", 5000), label="opencode, overflow")
    assert len(run.refused) == 1
    [(_, used)] = main(run)  # summing up is asked for without tools
    assert used.cached / used.prompt > 0.5  # the head
    later = narrow.run(*RUN, "-c", "And now?", label="opencode, after overflow")
    assert said(later) == "Nothing else."
    assert later.reuse()[0] > 0.9
