"""Who may ask, and what a key decides about the requests that the worker gets."""

from __future__ import annotations

import logging
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_worker import FakeWorker
from served import Served

from gateway.api_keys import ApiKeys
from gateway.app import _build_app, build_metrics_runner
from gateway.config import GatewaySettings
from gateway.openapi import description
from gateway.word_memory import WordMemory
from protocol.errors import RequestError, SettingsError

SECRET = "0123456789abcdef" * 4
A, B, C, ADMIN = (f"key-of-{name}-0123456789" for name in ("a", "b", "c", "admin"))
HASHED_B = "sha256:" + sha256(B.encode()).hexdigest()
FILE = f"""
secret = "{SECRET}"
admin_keys = ["{ADMIN}"]
[tenants.a]
keys = ["{A}"]
shared_head = "house"
[tenants.b]
keys = ["{HASHED_B}"]
shared_head = "house"
[tenants.c]
keys = ["{C}"]
"""
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
POSTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
)


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    """A file that differs from the one before in what is looked at, however quickly it comes."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.write_text(text)
    path.chmod(mode)
    os.utime(path, ns=(before + 10**9, before + 10**9))
    return path


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write(tmp_path / "keys.toml", FILE)


@pytest.fixture
def settings(model_dir: Path, short_run_dir: Path, key_file: Path) -> GatewaySettings:
    return GatewaySettings(model=str(model_dir), run_dir=short_run_dir, api_keys=key_file)


async def ask(served: Served, key: str, content: str = "hi", **headers: str) -> aiohttp.ClientResponse:
    messages = [{"role": "system", "content": "Be brief. " * 4}, {"role": "user", "content": content}]
    headers["Authorization"] = f"Bearer {key}"
    return await served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8}, **headers)


# The file


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("secret = ", "TOML"),
        ("secret = " + "[" * 100_000, "TOML"),
        ('secret = "short"\n[tenants.a]\nkeys = ["0123456789abcdef"]', "secret"),
        (f'secret = "{SECRET}"', "tenants"),
        (f'secret = "{SECRET}"\n[tenants."a b"]\nkeys = ["0123456789abcdef"]', "tenants.a b"),
        (f'secret = "{SECRET}"\n[tenants.a]\nkeys = ["tiny-secret"]', "tenants.a.keys.0"),
        (f'secret = "{SECRET}"\n[tenants.a]\nkeys = []', "tenants.a.keys"),
        (f'secret = "{SECRET}"\n[tenants.a]\nkeys = ["sha256:0123456789abcdef"]', "tenants.a.keys.0"),
        (f'secret = "{SECRET}"\n[tenants.a]\nkey = ["0123456789abcdef"]', "tenants.a"),
        (FILE.replace(HASHED_B, A), "tenants.b.keys.0"),
        (FILE.replace(ADMIN, C), "admin_keys.0"),
        (FILE.replace('"house"', '"c"'), "shared_head c"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_by_name_and_not_cited(tmp_path, text, named):
    path = write(tmp_path / "keys.toml", text)
    with pytest.raises(SettingsError, match="api_keys: ") as refused:
        ApiKeys(path)
    assert named in str(refused.value)
    assert not any(secret in repr(refused.value) for secret in (SECRET, A, B, C, ADMIN, "tiny-secret"))


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o620, 0o644])
def test_a_file_that_others_can_read_or_write_is_refused(tmp_path, mode):
    with pytest.raises(SettingsError, match=f"open to others .mode {mode:04o}."):
        ApiKeys(write(tmp_path / "keys.toml", FILE, mode))


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o640])
def test_a_group_may_read_it(tmp_path, mode):
    assert ApiKeys(write(tmp_path / "keys.toml", FILE, mode)).tenant({"x-api-key": C}).name == "c"


def test_there_must_be_a_file(tmp_path):
    with pytest.raises(SettingsError, match="api_keys: cannot read"):
        ApiKeys(tmp_path / "none")


def test_a_pipe_is_no_file_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "keys", 0o600)
    with pytest.raises(SettingsError, match="is no file of keys"):
        ApiKeys(tmp_path / "keys")


def test_a_written_hash_is_no_key(key_file):
    with pytest.raises(RequestError, match="no such API key"):
        ApiKeys(key_file).tenant({"x-api-key": HASHED_B})


def test_a_change_is_taken_over_and_a_broken_one_is_not(key_file, caplog):
    keys, told = ApiKeys(key_file), []
    keys.on_read = told.append
    keys.refresh()
    assert told == []
    write(key_file, FILE.replace(A, "another-key-0123456789"))
    keys.refresh()
    assert told == [True]
    assert keys.tenant({"x-api-key": "another-key-0123456789"}).name == "a"
    with pytest.raises(RequestError):
        keys.tenant({"x-api-key": A})
    with caplog.at_level(logging.ERROR):
        for broken in ("secret = 1", FILE.replace("keys", "locks")):
            write(key_file, broken)
            keys.refresh()
            keys.refresh()
        key_file.unlink()
        keys.refresh()
    assert told == [True, False, False, False]
    assert len(caplog.records) == 3
    assert SECRET not in caplog.text
    assert keys.tenant({"x-api-key": "another-key-0123456789"}).name == "a"
    write(key_file, FILE)
    keys.refresh()
    assert told[-1]
    assert keys.tenant({"x-api-key": A}).name == "a"


# Who may ask


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer nobody"}, {"x-api-key": "nobody"}])
@pytest.mark.parametrize("path", POSTS)
async def test_without_a_key_nothing_is_served(served: Served, worker: FakeWorker, path, headers):
    answer = await served.post(path, BODY, **headers)
    told = await answer.json()
    assert answer.status == 401
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert told["error"]["type"] == "authentication_error"
    assert ("code" in told["error"]) != path.startswith("/v1/messages")
    if path.startswith("/v1/messages"):
        assert told["type"] == "error"
    assert not worker.requests


@pytest.mark.parametrize(
    "headers", [{"Authorization": f"Bearer {C}"}, {"authorization": f"bearer  {C} "}, {"x-api-key": C}]
)
async def test_either_header_bears_a_key_at_every_path(served: Served, worker: FakeWorker, headers):
    for path in POSTS:
        body = BODY | ({"prompt": "hi"} if path == "/v1/completions" else {"input": "hi"})
        assert (await served.post(path, body, **headers)).status == 200, path
    assert {request.tenant for request in worker.requests} == {"c"}
    for path in ("/v1/models", "/openapi.json"):
        assert (await served.http.get(served.url + path, headers=headers)).status == 200


async def test_of_two_keys_one_that_is_known_counts(served: Served, worker: FakeWorker):
    assert (await ask(served, "unknown", **{"x-api-key": C})).status == 200
    assert (await ask(served, C, **{"x-api-key": "unknown"})).status == 200
    assert [request.tenant for request in worker.requests] == ["c", "c"]


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
async def test_whether_there_is_a_server_shows_without_a_key(served: Served, path):
    answer = await served.http.get(served.url + path)
    assert answer.status == 200
    assert str(served.gateway.settings.model) not in await answer.text()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/x", "/openapi.json", "/metrics", "/nothing"])
async def test_nothing_else_does(served: Served, path):
    assert (await served.http.get(served.url + path)).status == 401


async def test_the_description_tells_where_a_key_is_wanted(served: Served):
    for path, methods in description()["paths"].items():
        for method, operation in methods.items():
            for key, status in (("nobody", 401), (ADMIN if path != "/metrics" else A, 403)):
                headers = {"x-api-key": key}
                response = await served.http.request(
                    method, served.url + path.replace("{id}", "x"), json={}, headers=headers
                )
                assert response.status == (200 if operation.get("security") == [] else status)
                assert str(response.status) in operation["responses"]


async def test_metrics_are_for_admins_and_nothing_else_is(served: Served):
    async def status(path: str, key: str) -> int:
        return (await served.http.get(served.url + path, headers={"x-api-key": key})).status

    assert await status("/metrics", C) == 403
    assert await status("/metrics", ADMIN) == 200
    assert await status("/v1/models", ADMIN) == 403
    text = served.gateway.metrics.exposition().decode()
    assert 'prefixd_http_requests_total{route="metrics",status="403"} 1.0' in text
    assert 'prefixd_api_key_reads_total{result="refused"} 0.0' in text


async def test_on_a_port_of_their_own_metrics_need_no_key(served: Served):
    runner = build_metrics_runner(served.gateway)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        answer = await served.http.get(url + "/metrics")
        assert answer.status == 200
        assert "prefixd_slots 4.0" in await answer.text()
        assert (await served.http.post(url + "/v1/chat/completions", json=BODY)).status == 404
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("port", [None, 9000])
async def test_and_then_they_are_not_on_the_public_one(served: Served, port: int | None):
    served.gateway.settings = served.gateway.settings.model_copy(update={"metrics_port": port})
    paths = {resource.canonical for resource in _build_app(served.gateway).router.resources()}
    assert ("/metrics" in paths) is (port is None)
    assert not any(verb in path for path in paths for verb in ("evict", "flush", "pin", "explain", "slot"))


# What a key decides


async def test_tenants_have_digests_of_their_own_that_last(served: Served, worker: FakeWorker, key_file, maker):
    for key in (A, B, C, C):
        assert (await ask(served, key)).status == 200
    a, b, c, again = worker.requests
    assert a.token_ids == b.token_ids == c.token_ids
    assert [request.tenant for request in worker.requests] == ["house", "house", "c", "c"]
    assert [request.member for request in worker.requests] == ["a", "b", "", ""]
    assert c.boundaries == again.boundaries
    heads = [request.boundaries[0] for request in (a, b, c)]
    assert [head.kind for head in heads] == ["head"] * 3
    assert heads[0] == heads[1] != heads[2]
    behind = [{boundary.digest for boundary in request.boundaries[1:]} for request in (a, b, c)]
    assert all(behind)
    assert sum(map(len, behind)) == len(behind[0] | behind[1] | behind[2])
    restarted = ApiKeys(key_file).tenant({"x-api-key": C})
    assert (
        c.boundaries[0].digest
        == maker._chains.boundaries(restarted.root(worker.model.fingerprint), c.token_ids, [heads[2]])[0].digest
    )


async def test_another_secret_gives_other_digests(served: Served, worker: FakeWorker, key_file):
    await ask(served, C)
    write(key_file, FILE.replace(SECRET, SECRET[::-1]))
    served.gateway.keys.refresh()
    await ask(served, C)
    before, after = worker.requests
    assert not {b.digest for b in before.boundaries} & {b.digest for b in after.boundaries}


async def test_without_a_head_nothing_is_shared(served: Served, worker: FakeWorker):
    for key in (A, B):
        headers = {"x-api-key": key}
        await served.post("/v1/completions", {"prompt": "The quick brown fox " * 8, "max_tokens": 4}, **headers)
    a, b = worker.requests
    assert a.token_ids == b.token_ids
    assert not {boundary.digest for boundary in a.boundaries} & {boundary.digest for boundary in b.boundaries}


async def test_members_of_a_group_go_on_from_a_shared_head_as_from_their_own(served: Served, worker: FakeWorker):
    """Positions are those that a tenant without a group has, interior ones too."""
    long = "The quick brown fox jumps. " * 8
    for key in (A, C):
        await ask(served, key, long)
    a, c = ([(b.end, b.kind, b.messages) for b in request.boundaries] for request in worker.requests)
    assert a == c


async def test_an_id_is_free_for_every_tenant(served: Served, worker: FakeWorker):
    """And it is the same one that the operator can ask for."""
    answers = [await ask(served, key, **{"x-request-id": "mine"}) for key in (A, B, C, C)]
    told = [answer.headers["x-request-id"] for answer in answers]
    assert told[:3] == ["a.mine", "b.mine", "c.mine"]
    assert told[3].startswith("c.mine-")
    assert [request.request_id for request in worker.requests] == told


async def test_what_is_absorbed_is_the_tenants(served: Served, worker: FakeWorker):
    answer = await (await ask(served, A, "hello")).json()
    await served.until(lambda: bool(worker.absorbed))
    [absorbed] = worker.absorbed
    assert absorbed.tenant == "house"
    messages = [
        {"role": "system", "content": "Be brief. " * 4},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
        {"role": "user", "content": "more"},
    ]
    await served.post("/v1/chat/completions", {"messages": messages}, **{"x-api-key": A})
    assert worker.requests[1].boundaries[: len(absorbed.boundaries)] == absorbed.boundaries


@pytest.mark.parametrize("watched", ["encode", "_encoded"])
async def test_what_one_tenant_had_encoded_makes_no_other_faster(
    served: Served, monkeypatch: pytest.MonkeyPatch, watched: str
):
    """Neither a text that came as it is nor the words of one that did."""
    worked_on: list[str] = []
    work = getattr(WordMemory, watched)

    def watch(self: WordMemory, text_or_words: Any, *owner: str) -> Any:
        worked_on.extend([text_or_words] if isinstance(text_or_words, str) else text_or_words)
        return work(self, text_or_words, *owner)

    monkeypatch.setattr(WordMemory, watched, watch)
    counts, nobody = [], f"quux{watched.strip('_')}"  # tests share the memory
    for key in (A, A, B, C):
        worked_on.clear()
        await ask(served, key, f"A secret that {nobody} guesses. " * 120)
        counts.append(sum(nobody in text for text in worked_on))
    assert counts == [1, 0, 1, 1]


async def test_session_names_of_tenants_are_apart(served: Served, worker: FakeWorker):
    for key in (A, B, C, C):
        await ask(served, key, **{"x-session-affinity": "mine"})
    a, b, c, again = (request.hint.session for request in worker.requests)
    assert len({a, b, c}) == 3
    assert c == again
