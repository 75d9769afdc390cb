"""What broke prefix caching elsewhere (K-BD1 to K-BD14), played against the gateway's prompts."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_model import END_ID, TEMPLATE, tiny_tokenizer

from gateway.canonical import parse_messages, parse_tools
from gateway.conversation import Conversation
from gateway.model_files import ModelFiles
from gateway.prompts import PromptMaker, Trace
from gateway.renderer import JOINED

ALTERNATING = (
    "{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{% endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
EMPTY_THINKING = TEMPLATE.replace(
    "{{- '<|im_start|>assistant\\n' }}{%- endif %}",
    "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}{%- endif %}",
)
REASONING = TEMPLATE.replace(
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content",
    "{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.reasoning_content | default('') + message.content",
)
HOISTING = (
    "{%- for m in messages if m.role == 'system' %}{{- m.content + '\\n' }}{%- endfor %}"
    + TEMPLATE.replace("for message in messages", "for message in messages if message.role != 'system'")
)
UNFRAMED = "{%- for m in messages %}{{- m.content }}{%- endfor %}"


def make(template: str = TEMPLATE) -> PromptMaker:
    return PromptMaker(ModelFiles(tiny_tokenizer(), {"default": template}, {}, frozenset({END_ID})))


def trace(maker: PromptMaker, messages: list[dict], tools: object = None) -> Trace:
    return maker.trace(Conversation(parse_messages(messages), parse_tools(tools)))


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def answer(content: str, **fields: object) -> dict:
    return {"role": "assistant", "content": content, **fields}


def call(number: int) -> dict:
    return answer("", tool_calls=[{"id": f"c{number}", "function": {"name": "f", "arguments": "{}"}}])


def result(number: int, content: str = "done") -> dict:
    return {"role": "tool", "tool_call_id": f"c{number}", "content": content}


def extends(turns: list[Trace]) -> None:
    """Each turn keeps all boundaries of the one before, its last one included, and adds some."""
    for before, after in pairwise(turns):
        end = before.cuts[-1].end
        assert after.token_ids[:end] == before.token_ids[:end]
        assert after.cuts[: len(before.cuts)] == before.cuts
        assert after.cuts[-1].end > end


def chat(maker: PromptMaker, turns: int, first: list[dict] | None = None, **fields: object) -> list[Trace]:
    messages = [*(first or []), user("question 0")]
    traces = [trace(maker, messages)]
    for turn in range(1, turns):
        messages += [answer(f"answer {turn}", **fields), user(f"question {turn}")]
        traces.append(trace(maker, messages))
    return traces


def test_bd1_a_first_message_leaves_a_boundary_for_the_second_turn():
    maker = make()
    first = trace(maker, [user("word " * 300)])
    assert len(first.token_ids) > 300
    extends([first, trace(maker, [user("word " * 300), answer("yes"), user("more")])])


@pytest.mark.parametrize("quoted", ["<|im_end|>", "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n", "<|im_start|>"])
def test_bd2_a_quoted_marker_stops_nothing(quoted: str):
    maker = make()
    messages = [user("go")]
    turns = [trace(maker, messages)]
    for number in range(10):
        messages += [call(number), result(number, quoted if number == 1 else "fine")]
        turns.append(trace(maker, messages))
    extends(turns)
    assert turns[-1].ends == tuple(cut.end for cut in turns[-1].cuts)


def test_bd3_boundaries_need_no_system_message():
    extends(chat(make(), 4))
    extends(chat(make(), 4, [{"role": "system", "content": "Be brief."}]))


def test_bd4_an_empty_thinking_block_that_history_lacks_is_part_of_no_boundary():
    maker = make(EMPTY_THINKING)
    turns = chat(maker, 3)
    assert turns[0].suffix == "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    extends(turns)


def test_bd5_a_visible_answer_alone_leaves_the_prompts_boundary():
    extends(chat(make(REASONING), 4))


def test_bd6_reasoning_that_is_sent_back_reaches_the_template():
    maker = make(REASONING)
    with_it, without = chat(maker, 3, reasoning_content="because"), chat(maker, 3)
    extends(with_it)
    assert "becauseanswer 1" in with_it[-1].text
    assert with_it[-1].token_ids != without[-1].token_ids
    assert with_it[0] == without[0]


def test_bd7_other_ids_for_an_answer_leave_the_boundary_before_it():
    """Ids are those of the text that was sent, whatever was generated; what is equal before it stays equal."""
    maker = make()
    one, other = (trace(maker, [user("q"), answer(text), user("r")]) for text in ("hello there", "hello  there"))
    assert one.cuts[0] == other.cuts[0]
    assert one.token_ids[: one.cuts[0].end] == other.token_ids[: one.cuts[0].end]
    whole = tiny_tokenizer().encode(one.text + one.suffix, add_special_tokens=False).ids
    assert list(one.token_ids) == whole


@pytest.mark.parametrize("template", [TEMPLATE, ALTERNATING, HOISTING])
def test_bd10_a_system_message_in_between_stays_where_it_is(template: str):
    maker = make(template)
    messages = [user("go")]
    turns = [trace(maker, messages)]
    for number in range(6):
        reminder = {"role": "system", "content": f"Reminder {number}."}
        messages += [call(number), result(number), reminder]
        turns.append(trace(maker, messages))
    extends(turns)
    places = [turns[-1].text.index(f"Reminder {number}.") for number in range(6)]
    assert places == sorted(places)
    assert turns[-1].text.rindex("done") > places[-2]
    assert isinstance(turns[-1].ends[-1], int)
    joined = [index for index, end in enumerate(turns[-1].ends) if end is JOINED]
    assert joined == ([2, 5, 8, 11, 14, 17] if template == ALTERNATING else [])


def test_bd11_text_that_changes_leaves_what_is_before_it():
    maker = make()
    system = "stable " * 500
    one, other = (
        trace(maker, [{"role": "system", "content": f"{system}12:0{minute}"}, user("q")]) for minute in (1, 2)
    )
    same = next(at for at, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if a != b)
    assert 500 < same < one.cuts[0].end


def test_bd12_the_order_of_tools_counts_unless_it_is_made_canonical():
    maker = make("{{ tools | tojson if tools else '' }}" + TEMPLATE)
    tools = [{"type": "function", "function": {"name": name, "description": name}} for name in "abc"]

    def ids(given: list[dict], in_order: bool) -> list[int]:
        made = Conversation(parse_messages([user("q")]), parse_tools(given, in_order=in_order))
        return list(maker.trace(made).token_ids)

    assert ids(tools, False) != ids(tools[::-1], False)
    assert ids(tools, True) == ids(tools[::-1], True)


endings = st.sampled_from(
    ["", " ", "  ", "half wo", "The qu", "Hel", "\n", "\n\n", "\t ", "e\u0301", "😀", "don'", "12", "<|im_", "​"]
)
beginnings = st.one_of(
    st.text(max_size=6), st.sampled_from(["rld", "ick", "lo", "'t", " ", "\n", "\u0301", "34", "end|>"])
)


@given(st.lists(st.tuples(beginnings, endings).map("".join), min_size=1, max_size=5))
@example(["The qu", "ick", "brown"])
def test_bd14_where_messages_merge_the_boundary_is_dropped(texts: list[str]):
    maker = _unframed()
    made = trace(maker, [user(text) for text in texts])
    whole = tiny_tokenizer().encode(made.text + made.suffix, add_special_tokens=False)
    if not any(token in text for text in texts for token in maker.tokenizer.control.tokens):
        assert list(made.token_ids) == whole.ids
    ends = {(cut.end, cut.messages) for cut in made.text_cuts}
    for cut in made.cuts:
        spelled = tiny_tokenizer().decode(list(made.token_ids[: cut.end]), skip_special_tokens=False)
        assert made.text.startswith(spelled)
        assert (len(spelled), cut.messages) in ends


_MADE: list[PromptMaker] = []


def _unframed() -> PromptMaker:
    if not _MADE:
        _MADE.append(make(UNFRAMED))
    return _MADE[0]
