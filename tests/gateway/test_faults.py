"""Faults of our own are logged without the words of clients."""

from __future__ import annotations

import logging

import pytest
from fake_worker import FakeWorker
from served import Served

SECRET = "what-nobody-must-read"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_a_fault_is_logged_by_its_place_and_by_its_words_only_where_asked(
    served: Served,
    worker: FakeWorker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    path: str,
    level: int,
):
    def faulty(*_: object) -> None:
        raise KeyError(SECRET)

    monkeypatch.setattr(served.gateway.maker, "chat", faulty)
    with caplog.at_level(level, logger="prefixd.gateway"):
        body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 1}
        response = await served.post(path, body, **{"x-request-id": "mine"})
    assert response.status == 500
    assert SECRET not in await response.text()
    assert "request mine failed" in caplog.text
    assert "in faulty" in caplog.text
    assert "KeyError" in caplog.text
    assert (SECRET in caplog.text) is (level == logging.DEBUG)


async def test_a_stream_that_breaks_off_is_logged_alike(
    served: Served, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def faulty(*_: object) -> None:
        raise ValueError(SECRET)

    monkeypatch.setattr("gateway.openai_answers.ChatAnswer.opening", faulty)  # the headers are out
    with caplog.at_level(logging.INFO, logger="prefixd.gateway"):
        response = await served.chat(SECRET, stream=True)
        told = await response.text()
    assert "internal error" in told
    assert "broke off: ValueError" in caplog.text
    assert SECRET not in told + caplog.text
