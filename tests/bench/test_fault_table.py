"""What the fault table says of how requests ended, and what it takes for a violation."""

import json

import pytest
from fault_clients import DIALECTS, Seen, stream_end, whole_end
from fault_kinds import FAULTS
from faults import Row, _bad, table

ERROR = {"type": "server_error", "message": "the worker was lost"}
PIECES = [
    {"choices": [{"delta": {"content": "a"}}], "usage": None},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "error"}},
    {"type": "response.output_text.delta", "delta": "error"},
]


def lines(*events):
    for event in events:
        yield b"event: x\n"
        yield (event if isinstance(event, str) else f"data: {json.dumps(event)}").encode() + b"\n"
        yield b"\n"


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ("data: [DONE]", "whole answer"),
        ({"type": "message_stop"}, "whole answer"),
        ({"type": "response.completed", "response": {}}, "whole answer"),
        ({"error": ERROR}, "error event `server_error`: the worker was lost"),
        ({"type": "error", "error": ERROR}, "error event `server_error`: the worker was lost"),
        (
            {"type": "error", "code": "worker_unavailable", "message": "gone"},
            "error event `worker_unavailable`: gone",
        ),
        (": a comment", "stream broken off"),
    ],
)
def test_the_end_of_a_stream(last, end):
    seen = Seen("chat", True)
    assert stream_end(lines(*PIECES, last), seen) == end
    assert seen.events == len(PIECES) + (last != ": a comment")


def test_the_end_of_a_whole_answer():
    assert whole_end(200, b'{"error": null}') == "whole answer"
    assert whole_end(503, json.dumps({"error": ERROR}).encode()) == "503 `server_error`: the worker was lost"


def kind(name):
    return next(fault for fault in FAULTS if fault.name.startswith(name))


@pytest.mark.parametrize(
    ("name", "end", "told", "back", "bad"),
    [
        ("worker killed (kill", "error event `server_error`: gone", 3.0, 4.0, ""),
        ("worker killed (kill", "error event `server_error`: gone", 5.1, 4.0, "told later than 5 s"),
        ("worker killed (kill", "stream broken off", 1.0, 4.0, "1 clients were told nothing"),
        ("worker killed (kill", "connection closed", 1.0, 4.0, "1 clients were told nothing"),
        ("worker killed (kill", "error event `server_error`: gone", 3.0, None, "service did not come back"),
        ("gateway killed", "connection closed", 0.1, 4.0, ""),
        ("gateway killed", "hung for 120 s", 120.0, 4.0, "1 clients were told nothing"),
        ("SIGTERM", "whole answer", 9.0, None, ""),
    ],
)
def test_what_should_not_be(name, end, told, back, bad):
    assert _bad(kind(name), [Seen("chat", True, end)], [told], back) == bad


def test_a_line_tells_dialects_apart_only_where_they_differ():
    seen = [Seen(dialect.name, streamed, "whole answer") for dialect in DIALECTS for streamed in (True, False)]
    seen[0].end = "stream broken off"
    [*_, line] = table([Row("a | b", tuple(seen), (0.5, 2.0), 1.0, "noted", "bad")]).splitlines()
    assert line == (
        "| a / b | chat: stream broken off; messages, responses: whole answer | whole answer | 0.5 to 2.0 s | 1.0 s "
        "| noted; **bad** |"
    )
