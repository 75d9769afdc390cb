"""Continue's command, without a terminal: turns and a file it reads."""

from __future__ import annotations

import json

import pytest
from stage import WORD, Stage, call

pytestmark = pytest.mark.clients

CONFIG = """
name: local
version: 0.0.1
schema: v1
models:
  - name: tiny
    provider: openai
    model: tiny
    apiBase: {url}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
"""


def test_turns_and_a_tool(stage: Stage):
    config = stage.home / "continue.yaml"
    config.write_text(CONFIG.format(url=stage.wire.url))
    stage.script(
        (f"is {WORD}", "It is in the file."),
        ("the word in note", call("Read", "A file. I read it.", filepath=str(stage.note))),
        ("", "Nothing else."),
    )
    chat = ("cn", "--config", str(config), "--auto", "-p")
    first = stage.run(*chat, "What is the word in note.txt?", label="continue, a tool")
    assert first.output.strip() == "It is in the file."
    assert WORD in json.dumps(first.answers[1].body["messages"][-1])
    second = stage.run(*chat, "--resume", "And what else?", label="continue, --resume")
    assert second.output.strip() == "Nothing else."
    assert min((first.reuse() + second.reuse())[1:]) > 0.9
