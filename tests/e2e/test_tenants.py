"""Tenants by API key (K-SE1, K-SE4): none learns from hits, usage, reasons or monitoring what another one sent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from chat_model import words
from conftest import Served, emptied, serving
from http_client import Answer, cache_header, joined, system, user

KEYS = {name: f"the-key-of-{name}-0123456789" for name in ("amy", "ben", "cat", "dan", "admin")}
FILE = f"""
secret = "{"5ecre7" * 8}"
admin_keys = ["{KEYS["admin"]}"]
[tenants.amy]
keys = ["{KEYS["amy"]}"]
[tenants.ben]
keys = ["{KEYS["ben"]}"]
[tenants.cat]
keys = ["{KEYS["cat"]}"]
shared_head = "pets"
[tenants.dan]
keys = ["{KEYS["dan"]}"]
shared_head = "pets"
"""


@pytest.fixture(scope="module")
def _keyed(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(FILE)
    file.chmod(0o600)
    yield from serving(chat_model, "--api-keys", file, "--ui", "--log-level", "debug", "--verify-hits", "1")


@pytest.fixture
def keyed(_keyed: Served) -> Served:
    return emptied(_keyed)


def bearing(who: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[who]}"}


def ask(keyed: Served, who: str, messages: list[dict[str, Any]], **fields: Any) -> Answer:
    body = {"temperature": 0, "max_tokens": 12, "messages": messages, **fields}
    answer = keyed.client.request("POST", "/v1/chat/completions", body, bearing(who))
    assert answer.status == 200, answer.raw
    return answer


def test_the_same_prompt_is_cold_for_another_tenant(keyed: Served):
    secret = [system(words("secret", 400)), user(words("secret question", 200))]
    mine = ask(keyed, "amy", secret)
    again = ask(keyed, "amy", secret)
    theirs = ask(keyed, "ben", secret)
    assert mine.outcome == theirs.outcome == ("miss", 0, "cold")
    assert (mine.cached_tokens, theirs.cached_tokens) == (0, 0)
    assert again.outcome[0] == "hit"
    assert again.cached_tokens > 400
    assert mine.choices == again.choices == theirs.choices
    assert theirs.choices == ask(keyed, "ben", secret, cache_prompt=False).choices


def test_a_guess_that_is_nearly_right_is_told_nothing(keyed: Served):
    guesses = (lambda said: said[:-5], lambda said: said + " and", lambda said: said.rsplit(" ", 1)[0] + " other")
    for number, guess in enumerate(guesses):
        said = words(f"nearly {number}", 300)
        ask(keyed, "amy", [system("Be brief."), user(said)])
        answer = ask(keyed, "ben", [system("Be brief."), user(guess(said))])
        explained = keyed.daemon.ask("explain", request_id=answer.request_id)
        assert (explained["outcome"], explained["depth"], explained["deepest_known"]) in (
            ("miss", 0, 0),
            ("hit", answer.cached_tokens, answer.cached_tokens),  # of ben's own head, once he has sent it
        )
        assert answer.cached_tokens < 50
        assert (explained["diverged_token"] or 0) < 50, "of what ben said himself"
        other = ask(keyed, "amy", [system("Be brief."), user(guess(said))])
        assert other.cached_tokens > 100, "for whoever said it it is a good one"


def test_what_another_tenant_computes_now_is_not_waited_for(keyed: Served):
    prompt = [system(words("at once", 1500)), user("What now?")]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda who: ask(keyed, who, prompt), ("amy", "ben", "cat", "amy")))
    assert len({answer.text for answer in answers}) == 1
    assert [answer.cached_tokens for answer in answers[1:3]] == [0, 0]


def test_a_group_shares_its_head_and_nothing_behind_it(keyed: Served):
    head, question = system(words("house rules", 300)), user(words("their own", 200))
    first = ask(keyed, "cat", [head, question])
    known = {slot["kind"]: slot["tokens"] for slot in keyed.daemon.snapshots()}
    assert set(known) >= {"head", "message"}
    other = ask(keyed, "dan", [head, question])
    assert other.outcome == ("hit", known["head"], "none")
    assert other.choices == first.choices
    assert ask(keyed, "cat", [head, question]).cached_tokens == known["message"]
    assert ask(keyed, "amy", [head, question]).outcome == ("miss", 0, "cold")
    near = ask(keyed, "dan", [head, user(question["content"][:-4])])
    assert near.outcome == ("hit", known["head"], "none")
    answer = ask(keyed, "dan", [system(head["content"][:-4]), question])
    assert answer.outcome == ("miss", 0, "cold"), "heads that differ are not compared either"


def test_a_stream_says_no_more(keyed: Served):
    messages = [user(words("streamed", 100))]
    whole = ask(keyed, "amy", messages)
    options = {"include_usage": True}
    with keyed.client.stream(messages, bearing("ben"), stream_options=options) as stream:
        events = list(stream)
    assert cache_header(stream.headers) == ("miss", 0, "cold")
    assert joined(events) == whole.text
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_operator_sees_and_evicts_by_tenant(keyed: Served):
    for who in ("amy", "ben", "cat"):
        ask(keyed, who, [user(words("evict", 60))])
    listed = keyed.daemon.cachectl("list").stdout
    assert all(re.search(rf"\b{name}\b", listed) for name in ("amy", "ben", "pets"))
    gone = json.loads(keyed.daemon.cachectl("--json", "evict", "--tenant", "amy").stdout)
    assert gone["removed"]
    assert {slot["tenant"] for slot in keyed.daemon.snapshots()} == {"ben", "pets"}


def test_a_prompt_is_warmed_for_the_tenant_of_a_key(keyed: Served, tmp_path: Path):
    text = words("warmed", 200)
    (tmp_path / "prompt").write_text(text)
    (tmp_path / "key").write_text(KEYS["ben"] + "\n")
    run = keyed.daemon.cachectl(
        "--json", "warm", tmp_path / "prompt", "--url", keyed.client.url, "--api-key-file", tmp_path / "key"
    )
    assert run.returncode == 0, run.stderr
    pinned = json.loads(run.stdout)
    assert pinned["tenant"] == "ben"
    assert ask(keyed, "ben", [system(text), user("Well?")]).cached_tokens == pinned["tokens"]
    assert ask(keyed, "amy", [system(text), user("Well?")]).cached_tokens == 0


SECRET = "xylophone zeppelin quokka"


def asked_in_every_way(keyed: Served) -> list[str]:
    """Send the secret in whatever place a request has, also such as are refused. The ids of those that are answered."""
    look = {"name": "look", "description": SECRET, "parameters": {"type": "object", "title": SECRET}}
    said = f"{SECRET} " * 20
    sent: list[tuple[str, int, Any]] = [
        (
            "/v1/chat/completions",
            200,
            {"messages": [system(SECRET), user(said)], "stop": ["quokka!"], "user": SECRET},
        ),
        ("/v1/chat/completions", 200, {"messages": [user(said)], "stream": True, "prompt_cache_key": SECRET}),
        (
            "/v1/chat/completions",
            200,
            {"messages": [user("hi")], "tools": [{"type": "function", "function": look}]},
        ),
        ("/v1/completions", 200, {"prompt": said}),
        ("/v1/messages", 200, {"system": SECRET, "messages": [user(said)], "metadata": {"user_id": SECRET}}),
        ("/v1/messages/count_tokens", 200, {"messages": [user(said)]}),
        ("/v1/responses", 200, {"instructions": SECRET, "input": said, "model": SECRET}),
        ("/v1/chat/completions", 400, {"messages": [{"role": SECRET, "content": SECRET}], SECRET: SECRET}),
        ("/v1/chat/completions", 400, {"messages": [user(said * 4000)]}),
        ("/v1/chat/completions", 400, SECRET.encode()),
        ("/v1/messages", 400, {"messages": [user(said)], "max_tokens": SECRET}),
        ("/v1/responses", 400, {"input": [{"type": SECRET}]}),
        (f"/v1/{SECRET.replace(' ', '-')}", 404, b"{}"),
    ]
    form = {"type": "object", "properties": {"zeppelin": {"type": "string", "pattern": "quokka("}}}
    formed = {"type": "json_schema", "json_schema": {"schema": form}}
    sent.append(("/v1/chat/completions", 400, {"messages": [user("hi")], "response_format": formed}))
    ids = []
    for path, status, fields in sent:
        body = {"max_tokens": 4, **fields} if isinstance(fields, dict) and "count" not in path else fields
        if path == "/v1/responses":
            body = {name: value for name, value in body.items() if name != "max_tokens"} | {
                "max_output_tokens": 16
            }
        answer = keyed.client.request("POST", path, body, {**bearing("amy"), "x-session-id": "quokka-session"})
        assert answer.status == status, (path, answer.raw)
        ids += [answer.request_id] if status == 200 and "count" not in path else []
    return ids


def looked_at_in_every_way(keyed: Served, ids: list[str]) -> Iterator[str]:
    """All that monitoring, the log and `cachectl` tell of it."""
    scrape = keyed.client.request("GET", "/metrics", headers=bearing("admin"))
    assert scrape.status == 200
    yield scrape.raw.decode()
    with keyed.client.follow("/ui/events", bearing("admin")) as events:
        yield json.dumps(next(iter(events)))
    for path in ("/", "/health", "/ready"):
        yield keyed.client.get(path).raw.decode()
    slots = [slot["slot"] for slot in keyed.daemon.snapshots()]
    commands: list[list[str | int]] = [["list"], ["tree"], ["stats"], ["verify"], ["diff", ids[0], ids[1]]]
    commands += [["explain", each] for each in ids] + [["show", slot] for slot in slots]
    for command in commands:
        yield keyed.daemon.cachectl(*command).stdout
        yield keyed.daemon.cachectl("--json", *command).stdout
    yield json.dumps(keyed.daemon.ask("events", after=0))
    yield keyed.daemon.log()


def test_monitoring_and_logs_hold_no_text_no_ids_no_digests_and_no_keys(keyed: Served):
    """Of whatever was sent in this file too, at the most talkative level."""
    ids = asked_in_every_way(keyed)
    assert keyed.client.get("/metrics").status == keyed.client.get("/ui/events").status == 401
    for told in looked_at_in_every_way(keyed, ids):
        assert told
        assert not any(word in told for word in SECRET.split())
        assert not any(key in told for key in KEYS.values())
        assert "5ecre7" not in told
        assert not re.search(r"\b[0-9a-f]{32}\b", told), "a whole digest"
        plain = "\n".join(line for line in told.splitlines() if "row check" not in line)  # which lists row counts
        assert not re.search(r"\d{1,6}(, ?\d{1,6}){15}", plain), "token ids"


def test_no_label_is_a_tenant(keyed: Served):
    ask(keyed, "amy", [user("Hello")])
    scrape = keyed.client.request("GET", "/metrics", headers=bearing("admin")).raw.decode()
    assert not any(f'"{name}"' in scrape for name in KEYS)
