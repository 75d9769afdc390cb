"""`llm`: a question with a tool, and another one behind it."""

from __future__ import annotations

import json

import pytest
from stage import WORD, Stage, call

pytestmark = pytest.mark.clients

MODEL = """
- model_id: local
  model_name: tiny
  api_base: "{url}/v1"
  api_key_name: local
  supports_tools: true
"""
TOOL = '''
def read_note(path: str) -> str:
    """Read a note."""
    return open(path).read()
'''
SYSTEM = "You answer questions about notes. " * 150


def test_turns_and_a_tool(stage: Stage):
    (stage.home / "extra-openai-models.yaml").write_text(MODEL.format(url=stage.wire.url))
    (stage.home / "keys.json").write_text(json.dumps({"local": "none"}))
    stage.environment = {"LLM_USER_PATH": str(stage.home)}
    stage.script(
        (f"is {WORD}", "It is in the file."),
        ("the word in note", call("read_note", "A file. I read it.", path=str(stage.note))),
        ("", "Nothing else."),
    )
    llm = str(stage.clients / "python" / "bin" / "llm")
    first = stage.run(
        *(llm, "-m", "local", "-s", SYSTEM, "--functions", TOOL, "What is the word in note.txt?"),
        label="llm, a tool",
    )
    assert first.output.strip().endswith("It is in the file.")
    assert WORD in json.dumps(first.answers[1].body["messages"][-1])
    second = stage.run(llm, "-c", "--functions", TOOL, "And what else?", label="llm, -c")
    assert second.output.strip() == "Nothing else."
    assert min((first.reuse() + second.reuse())[1:]) > 0.9
