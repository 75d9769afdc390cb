"""The simulator on small workloads whose answers are known, and the replay against a server that caches by message."""

import json

import aiohttp
import pytest
import trace_sim
from aiohttp import web
from aiohttp.test_utils import TestServer
from baselines import block_lru, capacity_for, infinite, snapshot_lru
from lookup import measure
from replay import Replay, Violated
from trace_sim import Player, simulate
from workloads import UnknownFormat, load


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mooncake(tmp_path, *requests):
    """Requests of (seconds, tokens, ids of blocks of 512 tokens)."""
    rows = [{"timestamp": at * 1000, "input_length": n, "hash_ids": ids} for at, n, ids in requests]
    return load(write(tmp_path / "mooncake.jsonl", rows), users=1)


def chat_row(name, turns, words=40, spans=None):
    texts = [" ".join(f"{name}{turn}{word}" for word in range(words)) for turn in range(2 * turns)]
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    requests = [{"t": None, "prompt": (spans or {}).get(i, [[0, 2 * i + 1]]), "output": 1} for i in range(turns)]
    return {"id": name, "tools": None, "messages": messages, "requests": requests}


def test_block_traces_have_boundaries_where_prompts_end_and_part(tmp_path):
    first, second, third = mooncake(
        tmp_path, (0, 1100, [1, 2, 90]), (1, 2100, [1, 2, 3, 4, 91]), (2, 1600, [1, 2, 5, 92])
    )
    assert [boundary.end for boundary in second.boundaries] == [1024, 2048]
    assert [turn.tokens for turn in (first, second, third)] == [1100, 2100, 1600]
    assert first.token_ids[:1024] == third.token_ids[:1024]
    assert first.boundaries[0] == second.boundaries[0] == third.boundaries[0]
    assert not set(first.token_ids[1024:]) & set(second.token_ids)


def test_long_stretches_are_cut_as_long_messages_are(tmp_path):
    first, second = mooncake(tmp_path, (0, 20_000, list(range(40))), (1, 20_500, list(range(41))))
    assert [(boundary.end, boundary.kind) for boundary in second.boundaries] == [
        (8192, "interior"),
        (16_384, "interior"),
        (19_968, "message"),
        (20_480, "message"),
    ]
    assert first.boundaries == second.boundaries[:3]


def test_sessions_share_tools_and_system_and_what_forks_have_in_common(tmp_path):
    def session(name, *requests):
        rows = [{"t": at, "in": 64 * count + 5, "out": 9, "hash_runs": [[1, count]]} for at, count in requests]
        return {"session": name, "block_size": 64, "tool_tokens": 100, "system_tokens": 40, "requests": rows}

    rows = [session("a", (0, 4), (9, 6)), session("fork", (0, 4), (9, 8)), session("other", (0, 5))]
    turns = load(write(tmp_path / "sessions.jsonl", rows), users=1)
    a, _, fork, longer, other = turns
    assert a.boundaries[0].kind == "head"
    assert a.boundaries[0].end == 128
    assert a.token_ids[:256] == fork.token_ids[:256]
    assert [boundary.end for boundary in longer.boundaries] == [128, 256, 512]
    assert other.token_ids[:128] == a.token_ids[:128]
    assert not set(other.token_ids[128:]) & set(a.token_ids)


def test_users_play_one_session_after_the_other(tmp_path):
    rows = [chat_row(name, 2) for name in "abc"]
    together = load(write(tmp_path / "chats.jsonl", rows), users=3)
    assert [turn.session for turn in together] == ["a", "b", "c", "a", "b", "c"]
    alone = load(tmp_path / "chats.jsonl", users=1)
    assert [turn.session for turn in alone] == ["a", "a", "b", "b", "c", "c"]


def test_baselines_reuse_what_they_can_hold(tmp_path):
    turns = mooncake(
        tmp_path, (0, 1030, [1, 2, 9]), (1, 1030, [3, 4, 8]), (2, 1030, [1, 2, 7]), (3, 1030, [3, 4, 6])
    )
    assert infinite(turns) == block_lru(turns, 2048) == snapshot_lru(turns, 2, count_tokens=False) == 2048
    assert block_lru(turns, 1024) == snapshot_lru(turns, 1, count_tokens=False) == 0
    assert snapshot_lru(turns, 2047, count_tokens=True) == 0
    assert capacity_for(1.0, 2048, lambda n: snapshot_lru(turns, n, count_tokens=False), 1) == 2
    assert capacity_for(1.0, 4096, lambda n: snapshot_lru(turns, n, count_tokens=False), 1) is None


def test_blocks_at_the_end_of_a_prompt_go_first(tmp_path):
    turns = mooncake(tmp_path, (0, 2050, [1, 2, 3, 4, 9]), (1, 1030, [5, 6, 8]), (2, 2050, [1, 2, 3, 4, 7]))
    assert block_lru(turns, 2050) == 1024


def test_the_store_restores_the_end_of_the_last_prompt(tmp_path):
    turns = load(write(tmp_path / "chats.jsonl", [chat_row("a", 4)]), users=1)
    player = Player(4, 4000)
    restored = [player.play(turn) for turn in turns]
    assert restored == [0, *(turn.boundaries[-1].end for turn in turns[:-1])]
    player.store.check_invariants([])


@pytest.mark.parametrize(
    "capacity", [{"slots": 3, "memory_bytes": None}, {"slots": None, "memory_bytes": 1 << 30}]
)
def test_a_row_says_what_each_cache_reuses(tmp_path, capacity):
    turns = load(write(tmp_path / "chats.jsonl", [chat_row(name, 6) for name in "ab"]), users=2)
    row = simulate("chats", turns, **capacity)
    assert row.requests == 12
    assert 0.9 * row.infinite_tokens < row.ours_tokens <= row.input_tokens
    assert row.blocks_tokens <= row.infinite_tokens
    assert row.ours_tokens <= row.best_tokens + 15 * row.requests
    assert row.memory_bytes > 0


def test_files_and_capacities_from_the_command_line(tmp_path, capsys):
    chats = write(tmp_path / "chats.jsonl", [chat_row(name, 6) for name in "abcd"])
    assert trace_sim.main([str(chats), "--slots", "80%", "--users", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"].endswith("slots")
    assert trace_sim.main([str(chats), "--bytes", "1GiB"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["chats", "1GiB"]
    lengths = tmp_path / "azure.csv.gz"
    lengths.touch()
    assert trace_sim.main([str(lengths), "--slots", "4"]) == 1
    assert "lengths and arrivals only" in capsys.readouterr().err
    with pytest.raises(UnknownFormat, match="neither"):
        load(write(tmp_path / "x.jsonl", [{"a": 1}]), users=1)


def test_the_lookup_is_timed_on_a_store_of_the_size_asked_for():
    times = measure(entries=800, runs=3)
    assert times.entries == 800
    assert times.lookup > 0


def test_the_table_tells_what_is_reached_beside_what_could_be(tmp_path, capsys):
    path = write(tmp_path / "chats.jsonl", [chat_row("a", 4), chat_row("b", 4)])
    assert trace_sim.main(["--slots", "1", "--users", "2", str(path)]) == 0
    titles, line = capsys.readouterr().out.replace("AT MOST", "AT_MOST").replace(" slots", "_slots").splitlines()
    told = dict(zip(titles.split(), line.split(), strict=True))
    assert told["CAPACITY"] == "1_slots"
    assert 0 <= float(told["REACHED"][:-1]) <= float(told["AT_MOST"][:-1]) < 100


class CachingServer:
    """Counts words as tokens and restores what was sent before, message by message; refuses more than 400 tokens."""

    def __init__(self):
        self.seen = set()
        self.forget_after = None
        self.keep_until = 1000
        self.asked = 0
        self.stale = 0
        self.silent = 0
        self.verifications = {"verified": 7, "skipped": 0}

    async def completions(self, request):
        self.asked += 1
        if self.asked == self.forget_after:
            self.seen.clear()
        messages = (await request.json())["messages"]
        prompt, cached = 3, 0
        for end in range(1, len(messages) + 1):
            prompt += len(messages[end - 1]["content"].split()) + 2
            key = json.dumps(messages[:end])
            cached = prompt - 3 if key in self.seen else cached
            if self.asked < self.keep_until:
                self.seen.add(key)
        if cached:
            self.verifications["skipped" if self.asked == self.keep_until else "verified"] += 1
        if prompt > 400:
            return web.json_response({"error": {"code": "context_length_exceeded"}}, status=400)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        events = [
            {"choices": [{"delta": {"content": "x"}, "finish_reason": "length"}]},
            {"choices": [], "usage": usage},
        ]
        return web.Response(text="".join(f"data: {json.dumps(event)}\n\n" for event in events))

    async def metrics(self, request):
        self.silent -= 1
        if self.silent >= 0:
            return web.Response(text="prefixd_worker_up 1.0\n")
        counts = self.verifications.items()
        results = "".join(f'prefixd_hit_verifications_total{{result="{name}"}} {n}.0\n' for name, n in counts)
        return web.Response(text=f'prefixd_stale_drops_total{{cause="tokens"}} {self.stale}.0\n{results}')


@pytest.fixture
async def caching():
    server = CachingServer()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.completions)
    app.router.add_get("/metrics", server.metrics)
    async with TestServer(app) as running, aiohttp.ClientSession() as session:
        server.replay = Replay(session, str(running.make_url("")).rstrip("/"), "m", gap=3)
        yield server


async def test_a_replay_of_sessions_and_windows_passes_and_adds_up(caching, tmp_path, capsys):
    rows = [chat_row("a", 3), chat_row("b", 9), chat_row("edited", 3, spans={2: [[0, 1], [3, 4]]})]
    await caching.replay.file(write(tmp_path / "chats.jsonl", rows), sessions=3, requests=100)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == ["chats", "chats,"]
    assert lines[0][1:3] == ["3", "11"]
    assert lines[0][-1] == "1"  # session b fills the context
    assert lines[1][2:4] == ["2", "8"]


async def test_a_replay_names_the_turn_that_lost_what_was_stored(caching, tmp_path):
    caching.forget_after = 3
    with pytest.raises(Violated, match=r"chats, session a, request 3: restored 0 tokens after"):
        await caching.replay.file(write(tmp_path / "chats.jsonl", [chat_row("a", 4)]), sessions=1, requests=100)


async def test_a_replay_names_the_turn_that_computed_too_much(caching, tmp_path):
    caching.forget_after = 2
    with pytest.raises(Violated, match=r"request 2: computed \d+ tokens, of which \d+ are new"):
        await caching.replay.file(write(tmp_path / "chats.jsonl", [chat_row("a", 4)]), sessions=1, requests=100)


async def test_a_replay_names_the_turn_that_restored_no_more_than_the_one_before(caching, tmp_path):
    caching.keep_until = 3
    caching.replay._gap = 100
    with pytest.raises(Violated, match=r"request 4: restored (\d+) tokens after \1 "):
        await caching.replay.file(write(tmp_path / "chats.jsonl", [chat_row("a", 4)]), sessions=1, requests=100)


async def test_a_replay_waits_until_each_hit_is_verified(caching, tmp_path):
    caching.replay._verified, caching.silent = True, 2
    await caching.replay.file(write(tmp_path / "chats.jsonl", [chat_row("a", 4)]), sessions=1, requests=100)
    assert await caching.replay.verifications() == {"verified": 7 + 3, "skipped": 0}
    caching.keep_until = caching.asked + 3
    with pytest.raises(Violated, match=r"request 3: the hit at \d+ tokens was not verified"):
        await caching.replay.file(write(tmp_path / "chats.jsonl", [chat_row("b", 4)]), sessions=1, requests=100)


async def test_a_stale_drop_fails_a_replay(caching, tmp_path, monkeypatch):
    turn = caching.replay._turn

    async def spoiled(*args):
        caching.stale += 1
        return await turn(*args)

    monkeypatch.setattr(caching.replay, "_turn", spoiled)
    with pytest.raises(Violated, match="stale drops or mismatches"):
        await caching.replay.file(write(tmp_path / "chats.jsonl", [chat_row("a", 1)]), sessions=1, requests=100)
