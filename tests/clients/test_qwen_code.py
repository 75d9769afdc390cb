"""Qwen Code, without a terminal: turns, a file it reads, and an answer that broke off."""

from __future__ import annotations

import json

import pytest
from stage import LONG, WORD, Stage, call

pytestmark = pytest.mark.clients

QWEN = ("qwen", "--auth-type", "openai", "-y")
# What it would have kept of a turn is asked for behind the last answer, and may be cut off by its end.
SETTINGS = {"memory": {"enableManagedAutoMemory": False}}


@pytest.fixture
def qwen(stage: Stage) -> Stage:
    settings = stage.home / ".qwen" / "settings.json"
    settings.parent.mkdir()
    settings.write_text(json.dumps(SETTINGS))
    stage.environment = {
        "OPENAI_BASE_URL": f"{stage.wire.url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": "tiny",
    }
    stage.script(
        (f"is {WORD}", "It is in the file."),
        ("the word in note", call("read_file", "A file. I read it.", file_path=str(stage.note))),
        ("", "Nothing else."),
    )
    return stage


def test_turns_and_a_tool(qwen: Stage):
    first = qwen.run(*QWEN, "What is the word in note.txt?", label="qwen code, a tool")
    assert first.output.strip() == "It is in the file."
    results = [message for message in first.answers[1].body["messages"] if message["role"] == "tool"]
    assert WORD in json.dumps(results)
    second = qwen.run(*QWEN, "-c", "And what else?", label="qwen code, -c")
    assert second.output.strip() == "Nothing else."
    assert min((first.reuse() + second.reuse())[1:]) > 0.9


def test_what_broke_off_is_found_when_it_is_run_again(qwen: Stage):
    qwen.script(("", LONG))
    qwen.wire.cut_next = True
    [broken] = qwen.run_together(lambda: qwen.start(*QWEN, "Go on."))
    assert broken.code != 0  # it does not try again by itself
    again = qwen.run(*QWEN, "Go on.", label="qwen code, broken off and run again")
    assert again.reuse()[0] > 0.99
