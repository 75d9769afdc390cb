"""The measuring client against a small server that says what it was asked."""

import json
import math

import aiohttp
import long_bench
import pytest
import serving
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from chat_client import Answer, ServerFailed, chat, parse_cache_header
from demo import Demo
from long_bench import LongBench, token_ms
from random_model import SHAPE, SHAPES, write_model
from server_process import split_command
from serving import Bench, Figures, Texts, render
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from worker.model_config import load_config, parse_config
from worker.weights import iter_weights, weight_names


class Server:
    """Streams as many words as asked for; counts words as tokens; remembers the requests."""

    def __init__(self):
        self.bodies = []
        self.fail = False

    async def completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.fail:
            return web.json_response({"error": {"message": "too busy"}}, status=429)
        response = web.StreamResponse(headers={"x-prefixd-cache": "partial; depth=7; reason=evicted"})
        await response.prepare(request)
        tokens = body["max_tokens"]
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        events = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        events += [{"choices": [{"delta": {"content": f"w{i} "}}]} for i in range(tokens)]
        events += [
            {"choices": [{"delta": {}, "finish_reason": "length"}]},
            {
                "choices": [],
                "usage": {
                    "prompt_tokens": prompt,
                    "completion_tokens": tokens,
                    "prompt_tokens_details": {"cached_tokens": 7},
                },
            },
        ]
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b": a comment\n\ndata: [DONE]\n\n")
        return response

    async def metrics(self, request):
        return web.Response(
            text='prefixd_stale_drops_total{cause="tokens"} 0.0\nprefixd_cache_lookups_total{outcome="hit"} 3.0\n'
        )


@pytest.fixture
async def server():
    server = Server()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.completions)
    app.router.add_get("/metrics", server.metrics)
    async with TestServer(app) as running, aiohttp.ClientSession() as session:
        server.session = session
        server.base_url = str(running.make_url("")).rstrip("/")
        yield server


async def test_an_answer_carries_times_usage_and_outcome(server):
    question = [{"role": "user", "content": "one two three"}]
    answer = await chat(server.session, server.base_url, "m", question, max_tokens=3)
    assert answer.text == "w0 w1 w2 "
    assert 0 < answer.first_seconds <= answer.last_seconds
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (3, 3, 7)
    assert (answer.outcome, answer.reason) == ("partial", "evicted")
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


async def test_a_refusal_is_told(server):
    server.fail = True
    with pytest.raises(ServerFailed, match="too busy"):
        await chat(server.session, server.base_url, "m", [{"role": "user", "content": "x"}], max_tokens=1)


async def test_each_measurement_asks_what_it_says(server, monkeypatch):
    monkeypatch.setattr(serving, "CHAT_TURNS", 3)
    monkeypatch.setattr(serving, "WINDOW_ROUNDS", 2)
    figures = await Bench(server.session, server.base_url, "m", Texts("salt", 1.0)).run(None)
    bodies = server.bodies
    chat_bodies, window_bodies, cold_bodies = bodies[:3], bodies[3:9], bodies[9:12]
    assert [len(body["messages"]) for body in chat_bodies] == [2, 4, 6]
    assert chat_bodies[2]["messages"][:4] == [*chat_bodies[1]["messages"]]
    assert len({body["messages"][0]["content"] for body in window_bodies}) == 1
    assert len({body["messages"][1]["content"] for body in window_bodies}) == serving.WINDOWS
    assert window_bodies[3]["messages"][:2] == window_bodies[0]["messages"]
    assert len({body["messages"][0]["content"][:40] for body in cold_bodies}) == serving.COLD_RUNS
    decoding = bodies[12:]
    assert len(decoding) == serving.DECODE_RUNS * (1 + serving.STREAMS)
    assert all(body["ignore_eos"] and body["max_tokens"] == serving.DECODE_TOKENS for body in decoding)
    assert figures.outcomes == {'prefixd_cache_lookups_total{outcome="hit"}': 3.0}
    assert figures.prompt_tokens["cold"] == pytest.approx(serving.COLD_TOKENS, abs=10)


async def test_the_long_measurements_ask_what_they_say(server, monkeypatch):
    sizes = {"HISTORY_TOKENS": 2600, "TURNS": 2, "WINDOW_TOKENS": 1800, "WINDOW_ROUNDS": 1}
    for name, value in {**sizes, "DECODE_TOKENS": 2, "STREAMS": {"decode_1": 1, "decode_8": 2}}.items():
        monkeypatch.setattr(long_bench, name, value)
    monkeypatch.setattr(long_bench, "COLD_TOKENS", {"cold_2k": 20, "cold_8k": 30})
    client = LongBench(server.session, server.base_url, "m", Texts("salt", 1.0))
    messages, chat = await client.growing()
    cut, cut_to_head = await client.cut(messages)
    bodies = [body["messages"] for body in server.bodies]
    assert [len(messages) for messages in bodies] == [8, 10, 12, *[4, 2] * long_bench.COLD_RUNS]
    assert [message["role"] for message in bodies[2]] == ["system", *["user", "assistant"] * 5, "user"]
    assert bodies[2][:10] == bodies[1]
    assert (len(chat), len(cut), len(cut_to_head)) == (2, long_bench.COLD_RUNS, long_bench.COLD_RUNS)
    assert [message["role"] for message in bodies[3]] == ["system", "user", "assistant", "user"]
    assert bodies[3][:3] == [*bodies[0][:1], *bodies[0][3:5]]
    assert bodies[5][1:3] == bodies[0][5:7]
    assert bodies[4][:1] == bodies[0][:1]
    del server.bodies[:]
    assert len(await client.windows()) == long_bench.WINDOWS
    assert len({body["messages"][0]["content"] for body in server.bodies}) == long_bench.WINDOWS
    del server.bodies[:]
    await client.decode(1)
    assert [body["max_tokens"] for body in server.bodies] == [6] * 2


def test_time_per_token_is_that_while_all_streams_run():
    def answer(sent, arrivals, tokens):
        return Answer("", arrivals[0], arrivals[-1], 1, tokens, None, "", "", None, sent, tuple(arrivals))

    # Two tokens a piece, a piece every second from the start of the second stream on, faster before.
    first = answer(0.0, [1.0, 1.1, 1.2, *range(2, 8)], 18)
    second = answer(1.5, [0.5, *(0.5 + n for n in range(1, 8))], 16)
    assert token_ms([first, second]) == pytest.approx(500.0)
    with pytest.raises(ServerFailed, match="never ran at the same time"):
        token_ms([first, answer(9.0, [1.0, 2.0], 2)])


def test_a_random_model_is_one_that_loads(tmp_path):
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(70)}, unk_token="w0"))
    (tmp_path / "from").mkdir()
    words.save(str(tmp_path / "from" / "tokenizer.json"))
    (tmp_path / "from" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    shape = SHAPE | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    write_model(tmp_path / "to", tmp_path / "from", shape, torch.device("cpu"))
    config = load_config(tmp_path / "to")
    assert config.vocab_size == 128
    weights = dict(iter_weights(tmp_path / "to", config))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == weight_names(config)
    assert (tmp_path / "to" / "tokenizer_config.json").read_text() == '{"chat_template": "x"}'


@pytest.mark.parametrize(("name", "billions"), [("dense", 7.3), ("hybrid", 7.3), ("sliding", 6.9)])
def test_shapes_are_of_the_size_that_they_name(name, billions):
    sizes = weight_names(parse_config(SHAPES[name])).values()
    assert sum(map(math.prod, sizes)) == pytest.approx(billions * 1e9, rel=0.02)


async def test_the_demo_prints_a_line_for_each_request(server, capsys):
    await Demo(server.session, server.base_url, "m").play()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(server.bodies)
    assert all("partial" in line and "evicted" in line for line in lines[1:])


def test_texts_are_equal_within_a_run_and_new_in_the_next():
    assert Texts("a", 1.3).make("x", 100) == Texts("a", 1.3).make("x", 100)
    words = [
        set(Texts(salt, 1.3).make(label, 100).split()[2:10])
        for salt, label in (("a", "x"), ("a", "y"), ("b", "x"))
    ]
    assert len(set(map(frozenset, words))) == 3


def test_ratios_are_ours_to_each_peer():
    ours = Figures(None, 0.5, 0.004, 0.2, 0.2, 0.2, 2.0, 30.0, 90.0, {"cold": 2046}, {})
    peer = Figures(1.0, 1.0, None, 0.4, 0.2, 0.8, 8.0, 10.0, 30.0, {}, {})
    lines = render({"prefixd": ours, "peer": peer}).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:11]]
    assert [row[-1] for row in cells] == ["-", "0.50", "-", "0.50", "1.00", "0.25", "0.25", "3.00", "3.00"]


@pytest.mark.parametrize(
    ("header", "fields"),
    [
        ("", {}),
        ("hit; depth=5; reason=none", {"outcome": "hit", "depth": "5", "reason": "none"}),
    ],
)
def test_the_cache_header(header, fields):
    assert parse_cache_header(header) == fields


def test_a_command_may_set_its_environment():
    assert split_command("A=1 run 'a b'") == ["env", "A=1", "run", "a b"]
    assert split_command("run --x=1") == ["run", "--x=1"]
