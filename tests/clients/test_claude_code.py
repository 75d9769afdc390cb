"""Claude Code, without a terminal: turns, tools, compaction, another system text, two windows, and a retry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from chat_model import words
from stage import LONG, WORD, Run, Stage, call
from wire import Exchange

pytestmark = pytest.mark.clients

QUESTION = "What is the word in note.txt?"
SUMMARY = "<analysis>\nA word was read.\n</analysis>\n\n<summary>\nThe user asked for a word.\n</summary>"


def set_up(stage: Stage) -> Stage:
    stage.environment = {
        "ANTHROPIC_BASE_URL": stage.wire.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "tiny",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",  # nothing leaves this machine
    }
    stage.script(
        ("REMINDER: Do NOT call any tools", SUMMARY),
        ("after all", "Nothing else."),  # first, for what was read stands in a summed-up history, too
        (f"is {WORD}.*is {WORD}", "It is in both."),
        (f"is {WORD}", "It is in the file."),
        (
            "the word in both",
            "\n".join(call("Read", file_path=str(note)) for note in (stage.note, stage.other_note)),
        ),
        ("the word in note", call("Read", "A file. I read it.", file_path=str(stage.note))),
        ("find a tool", call("ToolSearch", query="select:NotebookEdit")),
        (r'"name": "NotebookEdit"', call("NotebookEdit", notebook_path=str(stage.note), new_source="x")),
        ("", "Nothing else."),
    )
    return stage


@pytest.fixture
def claude(stage: Stage) -> Stage:
    return set_up(stage)


@pytest.fixture
def narrow(narrow_stage: Stage) -> Stage:
    return set_up(narrow_stage)


def command(prompt: str, *flags: str) -> tuple[str, ...]:
    return ("claude", "-p", prompt, "--allowedTools", "Read", "--output-format", "json", *flags)


def ask(stage: Stage, prompt: str, *flags: str, label: str = "", folder: Path | None = None) -> Run:
    return stage.run(*command(prompt, *flags), label=label, folder=folder)


def outcome(run: Run) -> dict[str, Any]:
    """What the client itself reports."""
    told: dict[str, Any] = json.loads(run.output)
    assert told["is_error"] is False
    return told


def results(answer: Exchange) -> list[Any]:
    """The contents of the results of tools in a request's last message."""
    content = answer.body["messages"][-1]["content"]
    return [block["content"] for block in content if block["type"] == "tool_result"]


def test_turns_and_a_tool(claude: Stage):
    first = ask(claude, QUESTION, label="claude, a tool")
    told = outcome(first)
    assert told["result"] == "It is in the file."
    assert len(first.answers) == told["num_turns"] == 2
    assert WORD in str(results(first.answers[1]))
    assert told["usage"]["cache_read_input_tokens"] == sum(usage.cached for usage in first.usages)
    assert told["usage"]["output_tokens"] == sum(usage.output for usage in first.usages)
    second = ask(claude, "And what else?", "--continue", label="claude, --continue")
    assert outcome(second)["result"] == "Nothing else."
    assert min((first.reuse() + second.reuse())[1:]) > 0.9


def test_two_calls_in_one_answer(claude: Stage):
    run = ask(claude, "What is the word in both notes?", label="claude, two calls")
    assert outcome(run)["result"] == "It is in both."
    assert len(results(run.answers[1])) == len(run.answers) == 2
    assert run.reuse()[1] > 0.9


def test_a_tool_that_a_search_brings_in(claude: Stage):
    """The search's result refers to the tool, which can be called then, and the head of the prompt stays."""
    run = ask(claude, "Please find a tool.", label="claude, deferred tools")
    assert len(run.answers) == 3
    assert results(run.answers[1])[0][0]["type"] == "tool_reference"
    assert "NotebookEdit" in str(run.answers[2].body["messages"][-2])
    assert results(run.answers[2])
    assert min(run.reuse()[1:]) > 0.9


def test_compaction_keeps_the_head(claude: Stage):
    ask(claude, QUESTION)
    compact = ask(claude, "/compact", "--continue", label="claude, /compact")
    assert "compact" in outcome(compact)["local_command"]
    assert min(compact.reuse()) > 0.8  # all but the order to sum up, which is long
    later = ask(claude, "And what, after all?", "--continue", label="claude, after /compact")
    assert outcome(later)["result"] == "Nothing else."
    assert "The user asked for a word." in later.answers[0].sent.decode()
    assert later.reuse()[0] > 0.5
    assert ask(claude, "And then?", "--continue").reuse()[0] > 0.9


def test_a_context_that_overflows_is_summed_up_and_asked_again(narrow: Stage):
    ask(narrow, words("first", 2300))
    run = narrow.run_into_refusal(*command(words("second", 2300), "--continue"), label="claude, overflow")
    assert outcome(run)["result"] == "Nothing else."
    assert len(run.refused) == 1
    assert run.reuse()[0] > 0.9  # the summing up
    assert run.reuse()[1] > 0.5  # the head
    assert ask(narrow, "And now?", "--continue").reuse()[0] > 0.9


def test_another_system_text_is_another_conversation_and_the_first_is_kept(claude: Stage):
    rhyme = ("--append-system-prompt", "Answer in rhyme.")
    ask(claude, "Hello.")
    changed = ask(claude, "Hello.", *rhyme, label="claude, changed system")
    assert b"Answer in rhyme." in changed.answers[0].sent
    assert changed.reuse()[0] < 0.9
    assert ask(claude, "Hello.", *rhyme, label="claude, the same again").reuse()[0] > 0.9
    assert ask(claude, "Hello.", label="claude, first system again").reuse()[0] > 0.9


def test_two_windows_at_once_compute_their_head_once(claude: Stage):
    """Of two projects, whose folders the client is told to keep out of its system text."""
    other = claude.add_project("other").parent

    def window(folder: Path) -> Any:
        hello = command("Hello.", "--exclude-dynamic-system-prompt-sections")
        return lambda: claude.start(*hello, folder=folder)

    one, two = claude.run_together(window(claude.project), window(other))
    claude.rows.append(("claude, two windows", one))
    assert one.code == two.code == 0
    assert outcome(one)["result"] == outcome(two)["result"] == "Nothing else."
    assert len(one.answers) == 2
    computed = sum(usage.prompt - usage.cached for usage in one.usages)
    assert computed < 1.4 * max(usage.prompt for usage in one.usages)


def test_a_client_that_was_killed_finds_what_its_first_try_stored(claude: Stage):
    claude.script(("", "and on " * 3000))
    process = claude.start(*command("Go on and on."))
    cut = claude.until_answering()
    claude.kill(process)
    assert not cut.is_whole
    claude.script(("", "Done."))
    again = claude.client.request("POST", "/v1/messages?beta=true", cut.sent)
    assert again.outcome[0] == "hit"
    assert again.outcome[1] > 0.99 * claude.daemon.ask("explain", request_id=again.request_id)["prompt_tokens"]
    retried = ask(claude, "Go on and on.", label="claude, killed and run again")
    assert retried.reuse()[0] > 0.99


def test_a_stream_that_breaks_off_is_asked_for_again_and_hits(claude: Stage):
    claude.script(("", LONG))
    claude.wire.cut_next = True
    run = ask(claude, "Go on.", label="claude, broken off and retried")
    assert run.reuse_after_cut() > 0.99
