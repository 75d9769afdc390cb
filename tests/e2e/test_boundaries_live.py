"""Where a conversation may be taken up again, through the daemon: what broke reuse at borders of messages elsewhere.

Every answer is compared with the one without cache, to the last bit of its log-probabilities.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_model import make_chat_model, words
from conftest import Served, emptied, serving
from http_client import Answer, assistant, user
from reference import Messages, Reference
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

SCORED = {"logprobs": True, "top_logprobs": 3}
BOS = "<|endoftext|>"
# As of models that think: history shows no thoughts but those of the last answer's own turn; when it shall not think,
# an empty thought stands before the answer, and in the prompt alone.
ASKING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}" + ASKING + "{% endif %}"
)


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with that template, whose tokenizer adds BOS of its own accord as well."""
    folder = make_chat_model(tmp_path_factory.mktemp("model") / "templated")
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": BOS, "chat_template": TEMPLATE}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def _thinking(templated: Path) -> Iterator[Served]:
    yield from serving(templated)


@pytest.fixture
def thinking(_thinking: Served) -> Served:
    return emptied(_thinking)


@pytest.fixture(scope="module")
def canonical(templated: Path) -> Iterator[Served]:
    yield from serving(templated, "--canonical-tool-order")


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


def test_a_template_with_an_empty_thought(thinking: Served):
    """K-BD3, K-BD4 and K-BD5: no system message, and what asks for the answer is part of no key."""
    history, known = [user(words("first", 40))], 0
    for turn in range(4):
        answer = ask(thinking, history)
        assert answer.outcome == (("hit", known, "none") if turn else ("miss", 0, "cold"))
        known = max(row["tokens"] for row in thinking.daemon.snapshots() if row["tokens"] <= answer.prompt_tokens)
        assert known < answer.prompt_tokens
        history += [assistant(f"Visible {turn}."), user(words(turn, 12))]


def test_thoughts_that_are_sent_back_are_reused(thinking: Served):
    """K-BD6: with and without them, in both dialects, the prompt is what the client sent."""
    thought, question = words("thought", 60), user(words("question", 30))
    bare = [question, assistant("Done."), user("Next.")]
    echoed = [question, {**assistant("Done."), "reasoning_content": thought}, user("Next.")]
    ask(thinking, [question])
    without, with_thought = ask(thinking, bare), ask(thinking, echoed)
    assert with_thought.prompt_tokens > without.prompt_tokens + 40
    assert without.cached_tokens == with_thought.cached_tokens > 0
    longer = [*echoed, assistant("So."), user("Last.")]
    assert ask(thinking, longer).cached_tokens > without.prompt_tokens
    blocks = [{"type": "thinking", "thinking": thought, "signature": ""}, {"type": "text", "text": "Done."}]
    body = {
        "model": "tiny",
        "max_tokens": 12,
        "temperature": 0,
        "messages": [question, {"role": "assistant", "content": blocks}, user("Next.")],
    }
    other = thinking.client.request("POST", "/v1/messages", body)
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


def test_a_reminder_in_the_middle_stays_there(served: Served, reference: Reference):
    """K-BD10: a new one after each tool result, in the Anthropic dialect; all before it is reused."""
    history: list[dict[str, Any]] = [user(words("task", 60))]
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "system": words("head", 80)}
    asking = len(reference.prompt_ids(history)) - reference.history_tokens(history)
    known = 0
    for turn in range(5):
        answer = served.client.request("POST", "/v1/messages", {**body, "messages": history})
        assert answer.outcome == (("hit", known, "none") if turn else ("miss", 0, "cold"))
        cold = served.client.request("POST", "/v1/messages", {**body, "messages": history, "cache_prompt": False})
        assert answer.body["content"] == cold.body["content"]
        known = sum(n for name, n in answer.usage.items() if name.endswith("input_tokens")) - asking
        use = {"type": "tool_use", "id": f"t{turn}", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": words(turn, 30)}
        history += [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
            {"role": "system", "content": f"Reminder {turn}: {words(f'r{turn}', 8)}"},
        ]


@pytest.mark.parametrize("order", ["thinking", "canonical"])
def test_tools_in_another_order(order: str, request: pytest.FixtureRequest):
    """K-BD12: other ids and so an honest miss, unless their order is made canonical."""

    def tool(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "description": words(name, 20)}}

    tools = [tool(f"tool{number}") for number in range(6)]
    question = [user("Which?")]
    served: Served = request.getfixturevalue(order)
    first = ask(served, question, tools=tools)
    assert first.prompt_tokens > 150, "tools are part of the prompt"
    shuffled = ask(served, question, tools=tools[::-1])
    assert shuffled.outcome[0] == ("hit" if order == "canonical" else "miss")
    assert (shuffled.choices == first.choices) is (order == "canonical")
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


def test_a_template_and_a_tokenizer_that_both_begin_with_bos(thinking: Served, templated: Path):
    """K-BD8: there is one of it on every path, and the same text has the same ids."""
    question = words("bos", 30)
    text = f"<|im_start|>user\n{question}<|im_end|>\n{ASKING}"
    ids = Tokenizer.from_file(str(templated / "tokenizer.json")).encode(text).ids
    assert ids[0] not in ids[1:]
    chat = ask(thinking, [user(question)])
    assert chat.prompt_tokens == len(ids)
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "messages": [user(question)]}
    message = thinking.client.request("POST", "/v1/messages", body)
    [row] = thinking.daemon.snapshots()
    assert message.outcome == ("hit", row["tokens"], "none")
    assert sum(n for name, n in message.usage.items() if name.endswith("input_tokens")) == len(ids)
    assert message.body["content"][0]["text"] == chat.text
    scores = [token["logprob"] for token in chat.choices[0]["logprobs"]["content"]]
    for prompt in (text, ids):
        plain = thinking.client.complete(prompt, logprobs=3)
        assert plain.prompt_tokens == len(ids)
        assert plain.text == chat.text
        assert plain.choices[0]["logprobs"]["token_logprobs"] == scores
