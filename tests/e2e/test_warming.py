"""`cachectl warm` and what it is good for: the first request of a client finds its head computed and pinned."""

from __future__ import annotations

import json

import pytest
from chat_model import words
from conftest import Served
from http_client import assistant, system, user

DONE, REFUSED, USAGE, UNREACHABLE = 0, 1, 2, 3


def warm(served: Served, file, *more: str):
    return served.daemon.cachectl("--json", "warm", file, "--url", served.client.url, *more)


def test_a_text_becomes_a_pinned_system_message(served: Served, tmp_path):
    text = words("warm text", 300)
    file = tmp_path / "system.txt"
    file.write_text(text)
    run = warm(served, file)
    assert run.returncode == DONE, run.stderr
    pinned = json.loads(run.stdout)
    assert pinned["pinned"] is True
    assert pinned["kind"] == "head"
    assert pinned["slot"] in served.daemon.ask("flush")["busy"], "it stays whatever happens"
    answer = served.client.chat([system(text), user("The first question.")])
    assert answer.cached_tokens == pinned["tokens"] > 300
    assert answer.text == served.client.cold([system(text), user("The first question.")]).text


def test_a_recorded_request_is_kept_up_to_its_last_message(served: Served, tmp_path):
    messages = [system("Be brief."), user(words("warm request", 200)), assistant("Yes."), user("And then?")]
    for name, content in (("request.json", {"messages": messages, "stream": True}), ("messages.json", messages)):
        file = tmp_path / name
        file.write_text(json.dumps(content))
        run = warm(served, file)
        assert run.returncode == DONE, run.stderr
        pinned = json.loads(run.stdout)
        assert pinned["messages"] == 4
    assert served.client.chat(messages).outcome == ("hit", pinned["tokens"], "none")
    assert "pinned slot" in served.daemon.cachectl("warm", file, "--url", served.client.url).stdout


def test_a_request_of_another_api(served: Served, tmp_path):
    file = tmp_path / "messages.json"
    body = {"model": "m", "max_tokens": 500, "system": "Be brief.", "messages": [user(words("other api", 80))]}
    file.write_text(json.dumps(body))
    run = warm(served, file)
    assert run.returncode == DONE, run.stderr
    [route] = [
        line
        for line in served.client.get("/metrics").raw.decode().splitlines()
        if 'route="messages",status="200"' in line
    ]
    assert float(route.split()[-1]) >= 1


@pytest.mark.parametrize(
    ("content", "code", "said"),
    [
        (None, USAGE, "cannot be read"),
        (" \n", USAGE, "no prompt"),
        (json.dumps({"messages": []}), REFUSED, "the gateway answered 400: "),
        (json.dumps([user(words("too long", 20_000))]), REFUSED, "the gateway answered 400: "),
    ],
)
def test_what_cannot_be_warmed(served: Served, tmp_path, content, code, said):
    file = tmp_path / "prompt"
    if content is not None:
        file.write_text(content)
    run = warm(served, file)
    assert run.returncode == code, run.stderr
    assert said in run.stderr
    assert served.daemon.snapshots() == []


def test_no_gateway_there(served: Served, tmp_path):
    file = tmp_path / "prompt"
    file.write_text("Be brief.")
    run = served.daemon.cachectl("warm", file, "--url", "http://127.0.0.1:1")
    assert run.returncode == UNREACHABLE
    assert "http://127.0.0.1:1" in run.stderr
    assert served.daemon.cachectl("warm", file, "--url", "ftp://x").returncode == USAGE
    assert served.daemon.cachectl("warm", file, "--api-key-file", tmp_path / "none").returncode == USAGE
