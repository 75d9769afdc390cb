"""langchain-openai over either API of OpenAI: turns and a tool."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stage import WORD, Stage, call
from wire import Usage

pytestmark = pytest.mark.clients

AGENT = Path(__file__).with_name("langchain_agent.py")


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_turns_and_a_tool(stage: Stage, api: str):
    stage.script(
        (f"is {WORD}", "It is in the file."),
        ("the word in note", call("read_note", "A file. I read it.", path=str(stage.note))),
        ("", "Nothing else."),
    )
    python = str(stage.clients / "python" / "bin" / "python")
    questions = ("What is the word in note.txt?", "And what else?")
    run = stage.run(python, str(AGENT), f"{stage.wire.url}/v1", api, *questions, label=f"langchain-openai, {api}")
    told = run.events()
    assert [answer["text"].strip() for answer in told] == ["", "It is in the file.", "Nothing else."]
    assert WORD in json.dumps(run.answers[1].body)
    assert min(run.reuse()[1:]) > 0.9
    counted = [answer["usage"] for answer in told]
    reported = [
        Usage(used["input_tokens"], used["input_token_details"]["cache_read"], used["output_tokens"])
        for used in counted
    ]
    assert reported == run.usages
