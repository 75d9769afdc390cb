"""An agent of langchain-openai: `python langchain_agent.py URL API QUESTION...`. Writes each answer as a line of JSON.

It runs in an environment of its own, without anything of this project.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

SYSTEM = "You answer questions about notes. " * 150


@tool
def read_note(path: str) -> str:
    """Read a note."""
    return Path(path).read_text()


def main(url: str, api: str, *questions: str) -> None:
    chat = ChatOpenAI(base_url=url, api_key="none", model="tiny", use_responses_api=api == "responses")
    model = chat.bind_tools([read_note])
    history = [SystemMessage(SYSTEM)]
    for question in questions:
        history.append(HumanMessage(question))
        while True:
            answer = None
            for chunk in model.stream(history, stream_usage=True) if api == "chat" else model.stream(history):
                answer = chunk if answer is None else answer + chunk
            history.append(answer)
            print(json.dumps({"text": answer.text, "usage": answer.usage_metadata}))
            if not answer.tool_calls:
                break
            history += [read_note.invoke(call) for call in answer.tool_calls]


if __name__ == "__main__":
    main(*sys.argv[1:])
