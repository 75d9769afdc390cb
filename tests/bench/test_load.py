"""What load is measured with: tokens whose text is the time, and a client that reads them."""

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from load import Server, tiny_tokenizer
from load_peers import FIRST_TICK_ID, TICKS, _answer, add_ticks, tick_text


def test_times_are_tokens_of_answers_and_of_no_prompt():
    plain = tiny_tokenizer()
    timed = add_ticks(plain)
    assert timed.decode([FIRST_TICK_ID + TICKS - 1, FIRST_TICK_ID + 7]) == tick_text(TICKS - 1) + tick_text(7)
    text = f"Hello {tick_text(123)}!"
    assert timed.encode(text).ids == plain.encode(text).ids


async def test_a_client_sees_when_each_token_was_sent(monkeypatch):
    monkeypatch.setattr("load.RAMP_SECONDS", 0.0)
    monkeypatch.setattr("load_peers.INTERVAL_SECONDS", 0.0)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", _answer)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        seen = await Server(session, "bare", str(server.make_url("")).rstrip("/"), "load").streams(3, tokens=4)
    assert len(seen.first) == 3
    assert len(seen.delay) == 9
    assert all(0 <= delay < TICKS / 10_000 for delay in seen.delay)
