"""Hermes Agent, without a terminal: turns and a file it reads."""

from __future__ import annotations

import json

import pytest
from stage import WORD, Stage, call

pytestmark = pytest.mark.clients

CONFIG = """
model:
  default: tiny
  provider: custom
  base_url: {url}/v1
  api_key: none
"""


def test_turns_and_a_tool(stage: Stage):
    config = stage.home / ".hermes" / "config.yaml"
    config.parent.mkdir()
    config.write_text(CONFIG.format(url=stage.wire.url))
    stage.script(
        (f"is {WORD}", "It is in the file."),
        ("the word in note", call("read_file", "A file. I read it.", path=str(stage.note))),
        ("", "Nothing else."),
    )
    chat = (str(stage.clients / "hermes" / "bin" / "hermes"), "chat", "-Q", "--yolo")
    first = stage.run(*chat, "-q", "What is the word in note.txt?", label="hermes, a tool")
    assert "It is in the file." in first.output
    results = [message for message in first.answers[1].body["messages"] if message["role"] == "tool"]
    assert WORD in json.dumps(results)
    second = stage.run(*chat, "--continue", "-q", "And what else?", label="hermes, --continue")
    assert "Nothing else." in second.output
    assert min((first.reuse() + second.reuse())[1:]) > 0.9
