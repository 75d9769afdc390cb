"""Calls and reasoning through the chat templates of released models: read back as written, and echoed unchanged."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fake_worker import MODEL
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import tiny_tokenizer

from gateway.absorb import next_turn
from gateway.canonical import parse_messages
from gateway.config import GatewaySettings
from gateway.conversation import Conversation, Message, ToolCall
from gateway.model_files import ModelFiles
from gateway.openai_answers import ChatAnswer
from gateway.openai_params import ChatParams
from gateway.prompts import INSIDE, PromptMaker
from gateway.renderer import Renderer
from gateway.reply import Reply
from gateway.reply_calls import Calls
from gateway.reply_formats import NOTATIONS, THINKINGS
from gateway.reply_parser import StreamParser
from gateway.reply_probe import find_formats
from gateway.reply_reader import ReplyReaders
from gateway.template import ChatTemplate
from gateway.template_probe import learn
from gateway.turn import Delta

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja")) if FOLDER.is_dir() else []
FORMATS = {
    "Apertus-8B-Instruct": ("apertus", "apertus"),
    "ByteDance-Seed-OSS": ("seed", "seed"),
    "Cohere2MoE": ("cohere", "cohere"),
    "CohereForAI-c4ai-command-r-plus-tool_use": ("command_r", "none"),
    "GLM-4.6": ("glm", "think"),
    "GigaChat3-10B-A1.8B": ("gigachat", "none"),
    "HuggingFaceTB-SmolLM3-3B": ("hermes", "think"),
    "LFM2.5-Instruct": ("hermes", "think"),
    "MiniMax-M1": ("tool_calls", "none"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", "none"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "think"),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-V3": ("deepseek_v3", "none"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v3_1", "think"),
    "fireworks-ai-llama-3-firefunction-v2": ("functools", "none"),
    "ibm-granite-granite-3.3-2B-Instruct": ("hermes", "think"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "think"),
    "llama-cpp-rwkv-world": ("hermes", "think"),
    "meetkai-functionary-medium-v3.1": ("functionary", "none"),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama", "none"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral", "none"),
    "moonshotai-Kimi-K2": ("kimi", "none"),
    "muse-glimmer": ("muse", "muse"),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "openbmb-MiniCPM5-1B": ("minicpm", "think"),
    "poolside-Laguna-XS-2.1": ("glm", "think"),
    "poolside-Laguna-XS.2": ("glm", "think"),
    "unsloth-Apriel-1.5": ("tool_calls", "none"),
    "upstage-Solar-Open-100B": ("solar", "solar"),
}
WRITTEN_BY_US = ("hermes", "none")  # and templates that write calls as Hermes does
CALLING = [name for name in NAMES if FORMATS.get(name, WRITTEN_BY_US)[0] != "none"]
needs_templates = pytest.mark.skipif(not NAMES, reason="the shared data folder is not here")

TYPES = {"q": "string", "n": "integer", "x": "number", "on": "boolean", "list": "array"}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Look up.",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": kind, "description": key} for key, kind in TYPES.items()},
        },
    },
}
LARGE = replace(MODEL, max_model_len=1 << 16)
QUESTION = {"role": "user", "content": "userprobe"}
USER, SAID = Message("user", "userprobe"), "Let me look."
GEMMA = (
    "{% for m in messages %}{{ '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{% if m.reasoning_content %}{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name + '{' }}"
    "{% for k, v in c.function.arguments | items %}{{ k + ':' }}"
    "{{ '<|\"|>' + v + '<|\"|>' if v is string else v | tojson }}{{ ',' if not loop.last }}{% endfor %}"
    "{{ '}<tool_call|>' }}{% endfor %}{{ '<turn|>\n' }}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\n' }}{% endif %}"
)
QWEN_XML = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
OURS = {"gemma": (GEMMA, ("gemma4", "gemma4")), "qwen xml": (QWEN_XML, ("qwen_xml", "think"))}


def source(name: str) -> str:
    return OURS[name][0] if name in OURS else (FOLDER / f"{name}.jinja").read_text()


@cache
def renderer(name: str) -> Renderer:
    return learn(ChatTemplate(source(name), {"bos_token": "<BOS>", "eos_token": "<EOS>"}))


@cache
def maker(name: str) -> PromptMaker:
    return PromptMaker(ModelFiles(tiny_tokenizer(), {"default": source(name)}, {}, frozenset({2})))


def arguments() -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of the types that the tool declares. Markers themselves cannot be written in every notation."""
    word = st.text(alphabet="aZ é日😀\"'\\{}[]:,.\n\t-1", max_size=20)
    numbers = st.integers(-(1 << 63), (1 << 64) - 1)  # a request can hold no larger ones
    values = {
        "q": word,
        "n": numbers,
        "x": st.floats(allow_nan=False, allow_infinity=False),
        "on": st.booleans(),
        "list": st.lists(st.one_of(numbers, st.booleans()), max_size=3),
    }
    return st.fixed_dictionaries({"q": values.pop("q")}, optional=values)


def written(name: str, message: Message) -> str:
    """What the template makes of an answer, up to what follows it; the header is left out where it can be."""
    results = tuple(Message("tool", "resultprobe", tool_call_id=call.id) for call in message.tool_calls)
    asked = renderer(name).run(Conversation((USER,), (TOOL,)), True).text
    whole = renderer(name).run(Conversation((USER, message, *results), (TOOL,)), True).text
    start = whole.rfind("userprobe") + len("userprobe")
    if whole.startswith(asked):
        start = len(asked)
    return whole[start:].partition("resultprobe")[0]


def read(name: str, text: str) -> Reply:
    formats = find_formats(renderer(name))
    thinking = THINKINGS.get(formats.reasoning)
    asked = renderer(name).run(Conversation((USER,), (TOOL,)), True).text.partition("userprobe")[2]
    inside = thinking is not None and thinking.opened_by(asked)
    parser = StreamParser(
        thinking,
        NOTATIONS[formats.calls],
        Calls((TOOL,)),
        inside=inside,
        one_call=False,
        end=renderer(name).habits.end_before_calls,
    )
    return Reply.of([*parser.feed(text), *parser.finish()])


@needs_templates
def test_notations_are_found_in_the_templates():
    assert {name: find_formats(renderer(name)) for name in NAMES} == {
        name: FORMATS.get(name, WRITTEN_BY_US) for name in NAMES
    }


@pytest.mark.parametrize("name", OURS)
def test_notations_are_found_in_templates_like_others(name: str):
    assert find_formats(renderer(name)) == OURS[name][1]


@pytest.mark.parametrize("name", [*CALLING, *OURS])
def test_calls_are_read_as_the_template_writes_them(name: str):
    @settings(max_examples=20)
    @given(st.lists(arguments(), min_size=1, max_size=2))
    def check(values: list[dict[str, Any]]) -> None:
        calls = tuple(ToolCall(f"call_{at:016}", "lookup", value) for at, value in enumerate(values))
        if renderer(name).habits.calls_in_turn:
            calls = calls[:1]  # others have a turn of their own
        reply = read(name, written(name, Message("assistant", "", calls)))
        assert [(call.name, call.value()) for call in reply.calls] == [
            ("lookup", call.arguments) for call in calls
        ]

    check()


def echoes(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """The ways in which clients send an answer back."""
    compact = json.loads(json.dumps(answer))
    for call in compact["tool_calls"]:
        call["function"]["arguments"] = json.dumps(
            json.loads(call["function"]["arguments"]), separators=(",", ":"), ensure_ascii=False
        )
        call.pop("type")
    trimmed = answer | {"content": (answer["content"] or "").strip()}
    padded = answer | {"content": [{"type": "text", "text": f"{trimmed['content']}\n"}]}
    return [answer, compact, trimmed, padded, answer | {"content": trimmed["content"] or None}]


def answered(
    name: str, text: str, prompt_messages: list[dict[str, Any]]
) -> tuple[Conversation, Reply, dict[str, Any]]:
    """A conversation, the reply that a generated text is, and the message that the client gets."""
    conversation = Conversation(parse_messages(prompt_messages), (TOOL,))
    made = maker(name)
    reader = ReplyReaders(made, GatewaySettings()).reader(conversation, made.chat(conversation, LARGE))
    parser = reader.parser()
    parts = (*parser.feed(text), *parser.finish())
    answer = ChatAnswer("r", "tiny", made.token_bytes, ChatParams())
    message = answer._whole_choice(Delta(0, text, parts, (), "tool_calls"))["message"]
    return conversation, Reply.of(parts), message


@pytest.mark.parametrize("name", [*CALLING, *OURS])
@pytest.mark.parametrize("said", ["", SAID])
def test_what_clients_echo_is_what_was_absorbed(name: str, said: str):
    call = ToolCall("call_0123456789abcdef", "lookup", {"q": 'größe "x"\n', "n": 7, "x": 1.5})
    generated = written(name, Message("assistant", "", (call,)))
    if said and find_formats(renderer(name)).calls != "llama":
        generated = f"{said}\n\n{generated}"
    conversation, reply, answer = answered(name, generated, [QUESTION])
    assert [call.value() for call in reply.calls] == [call.arguments]
    absorbed = next_turn(maker(name), LARGE, "r", conversation, reply)
    results = [{"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "found"}]
    prompts = [
        maker(name).chat(Conversation(parse_messages([QUESTION, echo, *results]), (TOOL,)), LARGE)
        for echo in echoes(answer)
    ]
    for prompt in prompts:
        assert prompt.token_ids == prompts[0].token_ids
    if absorbed is not None:
        end = absorbed.boundaries[-1].end
        assert prompts[0].token_ids[:end] == absorbed.token_ids
        assert prompts[0].boundaries[: len(absorbed.boundaries)] == absorbed.boundaries


@pytest.mark.parametrize("name", [*CALLING, *OURS])
def test_an_answer_with_calls_can_be_absorbed(name: str):
    call = Message("assistant", "", (ToolCall("call_0123456789abcdef", "lookup", {"q": "x"}),))
    conversation, reply, _ = answered(name, written(name, call), [QUESTION])
    assert reply.calls
    absorbed = next_turn(maker(name), LARGE, "r", conversation, reply)
    if absorbed is None:  # this tokenizer cuts the blanks behind the calls in two ways
        following = Message("tool", "Done.", tool_call_id=reply.message().tool_calls[0].id)
        messages = (*conversation.messages, reply.message(), following)
        assert maker(name).trace(replace(conversation, messages=messages)).ends[-2] == INSIDE
        return
    assert "Done." not in tiny_tokenizer().decode(list(absorbed.token_ids))


@pytest.mark.parametrize("name", OURS)
def test_reasoning_is_absorbed_with_the_answer(name: str):
    thinking = THINKINGS[find_formats(renderer(name)).reasoning]
    opened = "" if name == "qwen xml" else thinking.open
    conversation, reply, answer = answered(name, f"{opened}Hm.\n{thinking.close}\n\nYes.", [QUESTION])
    assert (answer["reasoning_content"], answer["content"]) == ("Hm.", "Yes.")
    absorbed = next_turn(maker(name), LARGE, "r", conversation, reply)
    assert absorbed is not None
    following = [QUESTION, answer, QUESTION]
    prompt = maker(name).chat(Conversation(parse_messages(following), (TOOL,)), LARGE)
    assert prompt.token_ids[: len(absorbed.token_ids)] == absorbed.token_ids
