"""Codex, without a terminal: turns and a command it runs."""

from __future__ import annotations

import json

import pytest
from chat_model import words
from stage import LONG, WORD, Run, Stage, call

pytestmark = pytest.mark.clients

CONFIG = """
model = "tiny"
model_provider = "local"

[model_providers.local]
name = "local"
base_url = "{url}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
"""
EXEC = ("codex", "exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def set_up(stage: Stage) -> Stage:
    config = stage.home / ".codex" / "config.toml"
    config.parent.mkdir()
    config.write_text(CONFIG.format(url=stage.wire.url))
    stage.environment = {"LOCAL_KEY": "none"}
    stage.script(
        (f"is {WORD}", "It is in the file."),
        ("the word in note", call("exec_command", "A file. I print it.", cmd="cat note.txt")),
        ("", "Nothing else."),
    )
    return stage


@pytest.fixture
def codex(stage: Stage) -> Stage:
    return set_up(stage)


@pytest.fixture
def narrow(narrow_stage: Stage) -> Stage:
    return set_up(narrow_stage)


def ask(stage: Stage, *words: str, label: str = "") -> Run:
    """A run whose own events tell of no error, and of as many tokens as its requests used."""
    run = stage.run(*EXEC, *words, label=label)
    kinds = [event["type"] for event in run.events()]
    assert not {"error", "turn.failed"} & set(kinds)
    assert kinds[-1] == "turn.completed"
    return run


def said(run: Run) -> str:
    """The last message."""
    items = [event["item"] for event in run.events() if event["type"] == "item.completed"]
    return str([item["text"] for item in items if item["type"] == "agent_message"][-1])


def test_turns_and_a_tool(codex: Stage):
    first = ask(codex, "What is the word in note.txt?", label="codex, a tool")
    assert said(first) == "It is in the file."
    assert len(first.answers) == 2
    outputs = [item for item in first.answers[1].body["input"] if item["type"] == "function_call_output"]
    assert WORD in json.dumps(outputs)
    usage = first.events()[-1]["usage"]
    assert usage["input_tokens"] == sum(used.prompt for used in first.usages)
    assert usage["cached_input_tokens"] == sum(used.cached for used in first.usages)
    assert usage["output_tokens"] == sum(used.output for used in first.usages)
    second = ask(codex, "resume", "--last", "And what else?", label="codex, resume --last")
    assert said(second) == "Nothing else."
    assert min((first.reuse() + second.reuse())[1:]) > 0.9


def test_sessions_share_their_head(codex: Stage):
    ask(codex, "Hello.")
    other = ask(codex, "Good day.", label="codex, another session")
    assert other.reuse()[0] > 0.9


def test_a_context_that_overflows_is_understood(narrow: Stage):
    ask(narrow, words("first", 4500))
    run = narrow.run_into_refusal(*EXEC, "resume", "--last", words("second", 4500), label="codex, overflow")
    assert run.events()[-1]["type"] == "turn.failed"
    assert "ran out of room in the model's context window" in run.output
    assert len(run.refused) == 1


def test_compaction_keeps_what_it_keeps(narrow: Stage):
    """At a limit of its own, for which it goes by the usage it was told."""
    limits = ("-c", "model_context_window=16000", "-c", "model_auto_compact_token_limit=12000")
    ask(narrow, *limits, words("first", 4500))
    later = ask(narrow, *limits, "resume", "--last", "And what else?", label="codex, compaction and a turn")
    summing_up, turn = later.answers
    assert not summing_up.has_tools  # so it is another prompt from the first tool on: nothing to reuse
    assert turn.has_tools
    assert later.reuse()[1] > 0.9
    assert said(later) == "Nothing else."


def test_a_client_that_was_killed_finds_what_its_first_try_stored(codex: Stage):
    codex.script(("", "and on " * 3000))
    process = codex.start(*EXEC, "Go on and on.")
    cut = codex.until_answering()
    codex.kill(process)
    assert not cut.is_whole
    codex.script(("", "Done."))
    again = codex.client.request("POST", "/v1/responses", cut.sent)
    explained = codex.daemon.ask("explain", request_id=again.request_id)
    assert explained["outcome"] == "hit"
    assert explained["depth"] > 0.99 * explained["prompt_tokens"]


def test_a_stream_that_breaks_off_is_asked_for_again_and_hits(codex: Stage):
    codex.script(("", LONG))
    codex.wire.cut_next = True
    run = codex.run(*EXEC, "Go on.", label="codex, broken off and retried")
    assert run.events()[-1]["type"] == "turn.completed"
    assert run.reuse_after_cut() > 0.99
