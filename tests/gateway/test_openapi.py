"""The API's own description is true: whatever is sent by it, or against it, is answered as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from threaded_gateway import ThreadedGateway

from gateway.app import build_runner
from gateway.openapi import description
from gateway.prompts import PromptMaker

CONFIG = {
    "max-stream-events": 100_000,
    "generation": {"mode": "all", "allow-x00": True},
    "phases": {"coverage": {"enabled": False}, "examples": {"enabled": False}},
}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,  # what is accepted against the description would be missing in it
]
API = schemathesis.openapi.from_dict(description(), config=schemathesis.Config.from_dict(CONFIG))
EXAMPLES = settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
STREAM_SECONDS = 20
ENDS = {
    "/v1/chat/completions": b"data: [DONE]",
    "/v1/completions": b"data: [DONE]",
    "/v1/messages": b"event: message_stop",
    "/v1/responses": b'"type":"response.',
}


@pytest.fixture(scope="module")
def running(maker: PromptMaker, model_dir: Path) -> Iterator[ThreadedGateway]:
    with ThreadedGateway(maker, model_dir) as running:
        yield running


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@API.parametrize()
@EXAMPLES
def test_requests_are_answered_as_described(
    case: schemathesis.Case, running: ThreadedGateway, session: requests.Session
):
    """No refused request reaches the worker, and every stream ends."""
    name = token_hex(8)
    response = case.call(
        base_url=running.url, session=session, headers={"x-request-id": name}, timeout=STREAM_SECONDS
    )
    case.validate_response(response, checks=CHECKS)
    assert response.headers["x-request-id"] == [name]
    sent = [request for request in running.worker.requests if request.request_id.partition(".")[0] == name]
    assert bool(sent) == (response.status_code == 200 and case.operation.path in ENDS)
    if "text/event-stream" in response.headers["content-type"][0]:
        assert response.content.endswith(b"\n\n")
        assert ENDS[case.operation.path] in response.content


def test_every_route_is_described_and_no_other(running: ThreadedGateway):
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in build_runner(running.gateway).app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {(method, path) for path, methods in description()["paths"].items() for method in methods}
    assert described == routes


def test_it_is_served_and_nothing_in_it_is_unused(running: ThreadedGateway, session: requests.Session):
    document = session.get(running.url + "/openapi.json", timeout=STREAM_SECONDS).json()
    assert document == description()
    text = json.dumps(document)
    assert [name for name in document["components"]["schemas"] if f'schemas/{name}"' not in text] == []
