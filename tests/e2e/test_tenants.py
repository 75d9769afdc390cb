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
    yield from serving(chat_model, "--api-keys", file, "--log-level", "debug", "--verify-hits", "1")


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
    said = words("nearly", 300)
    ask(keyed, "amy", [system("Be brief."), user(said)])
    for guess in (said[:-5], said + " and", said.rsplit(" ", 1)[0] + " other"):
        answer = ask(keyed, "ben", [system("Be brief."), user(guess)])
        explained = keyed.daemon.ask("explain", request_id=answer.request_id)
        assert (explained["outcome"], explained["depth"], explained["deepest_known"]) in (
            ("miss", 0, 0),
            ("hit", answer.cached_tokens, answer.cached_tokens),  # of ben's own head, once he has sent it
        )
        assert answer.cached_tokens < 50
    other = ask(keyed, "amy", [system("Be brief."), user(said[:-5])])
    assert keyed.daemon.ask("explain", request_id=other.request_id)["diverged_token"] > 100


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


def test_monitoring_and_logs_hold_no_text_no_ids_no_digests_and_no_keys(keyed: Served):
    """Of whatever was sent in this file too, at the most talkative level."""
    secret = "xylophone zeppelin quokka"
    answer = ask(keyed, "amy", [system(secret), user(f"{secret} " * 20)], session="quokka-session")
    bad = {"messages": [{"role": secret, "content": secret}], secret: secret}
    keyed.client.request("POST", "/v1/chat/completions", bad, bearing("amy"))
    keyed.client.request("POST", "/v1/chat/completions", secret.encode(), bearing("amy"))
    keyed.client.request("POST", f"/v1/{secret.replace(' ', '-')}", b"{}", bearing("amy"))
    form = {"type": "object", "properties": {"zeppelin": {"type": "string", "pattern": "quokka("}}}
    formed = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": form}},
        "messages": [user("hi")],
    }
    assert keyed.client.request("POST", "/v1/chat/completions", formed, bearing("amy")).status == 400
    scrape = keyed.client.request("GET", "/metrics", headers=bearing("admin"))
    assert scrape.status == 200
    assert keyed.client.get("/metrics").status == 401
    told = [scrape.raw.decode(), keyed.daemon.log()]
    told += [keyed.client.get(path).raw.decode() for path in ("/", "/health", "/ready")]
    for command in (["list"], ["tree"], ["explain", answer.request_id]):
        told.append(keyed.daemon.cachectl(*command).stdout)
    told += [json.dumps(keyed.daemon.ask(verb)) for verb in ("list", "tree", "stats")]
    for text in told:
        assert text
        assert not any(word in text for word in secret.split())
        assert not any(key in text for key in KEYS.values())
        assert "5ecre7" not in text
        assert not re.search(r"\b[0-9a-f]{32}\b", text), "a whole digest"
        plain = "\n".join(line for line in text.splitlines() if "row check" not in line)  # which lists row counts
        assert not re.search(r"\d{1,6}(, ?\d{1,6}){15}", plain), "token ids"
    assert not any(f'"{name}"' in told[0] for name in KEYS), "no label is a tenant"
