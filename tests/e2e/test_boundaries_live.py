"""Where a conversation may be taken up again, through the daemon: what broke reuse at borders of messages elsewhere.

Every answer is compared with the one without cache, to the last bit of its log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_model import make_chat_model, words
from conftest import Served
from daemon import Daemon
from http_client import Answer, assistant, system, user
from reference import Messages, Reference

SCORED = {"logprobs": True, "top_logprobs": 3}
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As of models that think: history shows no thoughts but those of the last answer's own turn; when it shall not think,
# an empty thought stands before the answer, and in the prompt alone.
THINKING_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)


def ask(served: Served, messages: Messages, **fields: Any) -> Answer:
    """An answer that has been found equal to the one without cache."""
    answer = served.client.chat(list(messages), **SCORED, **fields)
    assert answer.choices == served.client.cold(list(messages), **SCORED, **fields).choices
    return answer


def test_one_message_leaves_a_boundary(served: Served, reference: Reference):
    """K-BD1."""
    history = [user(words("only", 300))]
    ask(served, history)
    known = reference.history_tokens(history)
    history += [assistant("Yes."), user("And now?")]
    assert ask(served, history).outcome == ("hit", known, "none")


def test_quoted_markers_stop_nothing(served: Served):
    """K-BD2: a tool result quotes the template; reuse grows with every turn after it."""
    history = [system(words("head", 50)), user("Read the template.")]
    quoted = "It says <|im_end|>\n<|im_start|>user\nand goes on."
    depth = -1
    for turn in range(8):
        answer = ask(served, history)
        assert answer.cached_tokens > depth or not turn
        depth = answer.cached_tokens
        history += [
            assistant(f"Step {turn}."),
            {"role": "tool", "content": quoted if turn == 0 else words(turn, 20)},
        ]


def test_text_that_the_tokenizer_would_cut_otherwise(served: Served, reference: Reference):
    """K-BD7: generated ids are not what their text is encoded to. Then the boundary before the answer serves."""
    history = [user(words("free", 40))]
    differing = 0
    for turn in range(4):
        answer = ask(served, history, max_tokens=30)
        encoded = len(reference.plain_ids(answer.text))
        differing += encoded != answer.usage["completion_tokens"]
        known = reference.history_tokens(history)
        history += [assistant(answer.text), user(f"More {turn}.")]
        assert ask(served, history).outcome == ("hit", known, "none")
    assert differing, "no answer was one that the tokenizer cuts otherwise"


def test_a_template_with_an_empty_thought(start: Callable[..., Daemon], tmp_path: Path):
    """K-BD3, K-BD4 and K-BD5: no system message, and what asks for the answer is part of no key."""
    served = _with_template(start, tmp_path, THINKING_TEMPLATE)
    history, known = [user(words("first", 40))], 0
    for turn in range(4):
        answer = ask(served, history)
        assert answer.outcome == (("hit", known, "none") if turn else ("miss", 0, "cold"))
        known = max(row["tokens"] for row in served.daemon.snapshots())
        assert known < answer.prompt_tokens
        history += [assistant(f"Visible {turn}."), user(words(turn, 12))]


def test_thoughts_that_are_sent_back_are_reused(start: Callable[..., Daemon], tmp_path: Path):
    """K-BD6: with and without them, in both dialects, the prompt is what the client sent."""
    served = _with_template(start, tmp_path, THINKING_TEMPLATE)
    thought, question = words("thought", 60), user(words("question", 30))
    bare = [question, assistant("Done."), user("Next.")]
    echoed = [question, {**assistant("Done."), "reasoning_content": thought}, user("Next.")]
    ask(served, [question])
    without, with_thought = ask(served, bare), ask(served, echoed)
    assert with_thought.prompt_tokens > without.prompt_tokens + 40
    assert without.cached_tokens == with_thought.cached_tokens > 0
    longer = [*echoed, assistant("So."), user("Last.")]
    assert ask(served, longer).cached_tokens > without.prompt_tokens
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""}, {"type": "text", "text": "Done."}]
    body = {
        "model": "tiny",
        "max_tokens": 12,
        "temperature": 0,
        "messages": [question, {"role": "assistant", "content": blocks}, user("Next.")],
    }
    other = served.client.request("POST", "/v1/messages", body)
    assert other.outcome[:2] == ("hit", max(with_thought.outcome[1], other.outcome[1]))
    assert other.outcome[1] > with_thought.cached_tokens, "the thought is part of what is reused"


def test_a_header_that_changes_with_every_request(served: Served):
    """K-BD9: it is no part of the prompt; text that only mentions it is."""

    def post(nonce: str, *history: dict[str, Any]) -> Answer:
        header = f"x-anthropic-billing-header: cc_version=2.1.{nonce}; cc_entrypoint=cli; cch={nonce};"
        blocks = [{"type": "text", "text": text} for text in (header, words("stable", 400))]
        body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "system": blocks, "messages": list(history)}
        return served.client.request("POST", "/v1/messages", body)

    first = post("aaa", user("One."))
    second = post("bbb", user("One."), assistant("Yes."), user("Two."))
    assert first.outcome[0] == "miss"
    assert second.outcome[0] == "hit"
    assert second.outcome[1] > 400
    repeated = post("ccc", user("One."))
    assert repeated.body["content"] == first.body["content"]
    mention = "Why is there x-anthropic-billing-header: cc_version=1; in my logs?"
    assert ask(served, [user(mention)]).prompt_tokens > ask(served, [user("Why is there")]).prompt_tokens + 10


def test_a_reminder_in_the_middle_stays_there(served: Served):
    """K-BD10: a new one after each tool result, in the Anthropic dialect; all before it is reused."""
    history: list[dict[str, Any]] = [user(words("task", 60))]
    depth = 0
    for turn in range(5):
        body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "system": words("head", 80)}
        answer = served.client.request("POST", "/v1/messages", {**body, "messages": history})
        assert answer.status == 200
        assert answer.outcome[1] > depth or not turn
        depth = answer.outcome[1]
        use = {"type": "tool_use", "id": f"t{turn}", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": words(turn, 30)}
        history += [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
            {"role": "system", "content": f"Reminder {turn}: {words(f'r{turn}', 8)}"},
        ]


@pytest.mark.parametrize("canonical", [False, True])
def test_tools_in_another_order(canonical: bool, start: Callable[..., Daemon], tmp_path: Path):
    """K-BD12: other ids and so an honest miss, unless their order is made canonical."""

    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "description": words(name, 20)}}

    tools = [tool(f"tool{number}") for number in range(6)]
    question = [user("Which?")]
    served = _with_template(start, tmp_path, TOOLS_TEMPLATE, *["--canonical-tool-order"] * canonical)
    first = ask(served, question, tools=tools)
    assert first.prompt_tokens > 150, "tools are part of the prompt"
    shuffled = ask(served, question, tools=tools[::-1])
    assert shuffled.outcome[0] == ("hit" if canonical else "miss")
    assert (shuffled.choices == first.choices) is canonical
    assert ask(served, question, tools=tools).outcome[0] == "hit"


def test_pictures_are_refused_and_leave_nothing(served: Served):
    """K-BD13."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = served.client.chat([user([{"type": "text", "text": "What is this?"}, picture])])
    assert answer.status == 400
    assert "image" in answer.error["message"]
    assert served.daemon.snapshots() == []


@pytest.mark.parametrize("text", ["ends in a blank ", "ends in two\n\n", "half a wor", "\n starts and ends \t"])
def test_text_that_merges_with_what_follows(text: str, served: Served, reference: Reference):
    """K-BD14: the ids are those of the whole, and a boundary inside one is dropped."""
    history = [user(words(text, 30) + text)]
    first = ask(served, history)
    assert first.prompt_tokens == len(reference.prompt_ids(history))
    longer = [*history, assistant("Yes."), user("Go on.")]
    answer = ask(served, longer)
    assert answer.prompt_tokens == len(reference.prompt_ids(longer))
    assert answer.text == reference.text(longer)


def _with_template(start: Callable[..., Daemon], tmp_path: Path, template: str, *flags: str) -> Served:
    folder = make_chat_model(tmp_path / "templated")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": template}))
    daemon = start(*flags, model=folder)
    return Served(daemon, daemon.wait_ready())
