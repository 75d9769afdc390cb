"""Two gateways on one port, in front of one worker: what one counts or breaks is no matter of the other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from chat_model import words
from daemon import DEADLINE_SECONDS, Daemon, metrics, until
from http_client import Client, Stream, system, user

ENDLESS = {"max_tokens": 15_000, "ignore_eos": True}
ANSWERED = "prefixd_http_requests_total{route=chat,status=200}"
OPEN = "prefixd_gateway_open_requests"
LOST = "prefixd_cancellations_total{cause=gateway_lost}"


@pytest.fixture(scope="module")
def daemon(chat_model: Path) -> Iterator[Daemon]:
    daemon = Daemon(chat_model, "--gateways", "2", "--hung-seconds", "4")
    yield daemon
    daemon.close()


def both(daemon: Daemon) -> list[int]:
    return until(lambda: len(found := daemon.processes("gateway")) == 2 and found, "both gateways are there")


@pytest.fixture
def client(daemon: Daemon) -> Client:
    client = daemon.wait_ready()
    port = int(client.url.rpartition(":")[2])
    until(lambda: all(listening(port) & sockets(gateway) for gateway in both(daemon)), "both gateways listen")
    until(lambda: all(client.get("/ready").status == 200 for _ in range(8)), "and serve")
    return client


class Streams:
    """Streams without end, opened until each gateway has so many, and known by their gateway."""

    def __init__(self, daemon: Daemon, client: Client, each: int) -> None:
        self.of: dict[int, list[Stream]] = {gateway: [] for gateway in daemon.processes("gateway")}
        self._stack = ExitStack()
        try:
            while any(len(streams) < each for streams in self.of.values()):
                self._open(client)
        except BaseException:
            self.close()
            raise

    def _open(self, client: Client) -> None:
        number = len(list(self))
        assert number < 30, "the kernel deals connections out"
        stream = client.stream([user(words(f"stream {number}", 30))], **ENDLESS)
        self._stack.callback(stream.close)
        assert stream.take_text(1)
        [gateway] = [gateway for gateway in self.of if other_end(stream) in sockets(gateway)]
        self.of[gateway].append(stream)

    def __iter__(self) -> Iterator[Stream]:
        return (stream for streams in self.of.values() for stream in streams)

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def streams(daemon: Daemon, client: Client) -> Iterator[Streams]:
    streams = Streams(daemon, client, each=1)
    yield streams
    streams.close()


def other_end(stream: Stream) -> str:
    """The inode of the server's socket."""
    near, far = stream._connection.sock.getsockname()[1], stream._connection.sock.getpeername()[1]
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    # Other connections may have our port number at one end, too, each towards another server. The list is not read at
    # one moment: a row may come twice, and an ended connection (its inode is 0) may have had the same two numbers.
    ends = (f":{far:04X}", f":{near:04X}")
    [inode] = {row[9] for row in rows if (row[1][-5:], row[2][-5:]) == ends} - {"0"}
    return inode


def sockets(process_id: int) -> set[str]:
    """The inodes of those that a process has open; none of one that has ended."""
    found = set()
    with suppress(FileNotFoundError):
        for entry in Path(f"/proc/{process_id}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since it was listed
                found.add(os.readlink(entry))
    return {link[8:-1] for link in found if link.startswith("socket:[")}


def listening(port: int) -> set[str]:
    """The inodes of sockets that take connections there."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}


def told(client: Client) -> dict[str, float]:
    """The metrics; nothing where the kernel had given the connection to a gateway that was just killed."""
    try:
        return metrics(client)
    except ConnectionError:
        return {}


def test_every_scrape_is_of_the_whole_daemon(daemon: Daemon, client: Client):
    """Whichever gateway answers, it knows of all answers, also of those just given by the other one."""
    before = metrics(client)[ANSWERED]
    for number in range(1, 13):
        assert client.chat([user("Hello")]).status == 200
        assert metrics(client)[ANSWERED] == before + number
    scrapes = [metrics(client) for _ in range(8)]
    assert {scrape[ANSWERED] for scrape in scrapes} == {before + 12}
    assert {scrape["prefixd_worker_up"] for scrape in scrapes} == {1}
    assert len({frozenset(scrape) for scrape in scrapes}) == 1, "the same series"


def test_both_say_the_same(client: Client):
    """And both share what either has had computed."""
    assert len({client.get("/v1/models").raw for _ in range(8)}) == 1
    messages = [system(words("shared by gateways", 60)), user("Hello")]
    first, *others = [client.chat(messages) for _ in range(8)]
    assert first.outcome[0] == "miss"
    assert {answer.outcome for answer in others} == {("hit", others[0].cached_tokens, "none")}
    assert {answer.text for answer in others} == {first.text}


def test_ids_are_unique_and_explained_wherever_they_were_given(daemon: Daemon, client: Client):
    answers = [client.chat([user("Hello")]) for _ in range(8)]
    ids = [answer.request_id for answer in answers]
    assert len(set(ids)) == len(ids)
    assert [daemon.ask("explain", request_id=name)["outcome"] for name in ids] == [a.outcome[0] for a in answers]


def test_open_requests_of_both_are_added_up(client: Client, streams: Streams):
    count = len(list(streams))
    assert [metrics(client)[OPEN] for _ in range(4)] == [count] * 4
    streams.close()
    until(lambda: metrics(client)[OPEN] == 0, "they have let go")


def test_a_gateway_that_is_killed_costs_its_own_requests(daemon: Daemon, client: Client, streams: Streams):
    """The worker cancels them, the others go on, no count is lost, and the gateway comes back."""
    before = metrics(client)
    (killed, orphans), (kept, others) = streams.of.items()
    os.kill(killed, signal.SIGKILL)
    for stream in orphans:
        list(stream)
        assert not stream.is_done, "a stream that broke off must not look complete"
    for stream in others:
        assert stream.take_text(3), "the other gateway's go on"
    expected = before[LOST] + len(orphans)
    until(lambda: told(client).get(LOST) == expected, "the worker cancels the orphans")
    assert daemon.stats()["requests_running"] == len(others)
    until(lambda: "is ready again" in daemon.log(), "it is started again")
    assert "died (killed by SIGKILL): starting it again in" in daemon.log()
    assert kept in daemon.processes("gateway")
    after = metrics(client)
    assert after[OPEN] == len(others), "gauges of the dead do not count"
    counts = [name for name in before if re.search(r"_(total|count|sum|bucket)\b", name)]
    assert not [name for name in counts if after[name] < before[name]], "no count falls"
    assert after[ANSWERED] == before[ANSWERED]
    for _ in range(8):
        assert client.chat([user("Hello")]).status == 200


def test_a_gateway_that_hangs_is_started_again(daemon: Daemon, client: Client):
    hung, other = daemon.processes("gateway")
    os.kill(hung, signal.SIGSTOP)
    until(lambda: hung not in daemon.processes("gateway"), "it is killed")
    until(lambda: len(daemon.processes("gateway")) == 2, "another one takes its place")
    assert "died (killed, as its event loop has been silent for" in daemon.log()
    assert other in daemon.processes("gateway")


def test_a_gateway_that_is_told_to_stop_leaves_newcomers_to_the_other(
    daemon: Daemon, client: Client, streams: Streams
):
    """So one after the other can be upgraded: what it answers goes on, and nobody is turned away."""
    (leaving, its_own), _ = streams.of.items()
    port = int(client.url.rpartition(":")[2])
    os.kill(leaving, signal.SIGTERM)
    until(lambda: not listening(port) & sockets(leaving), "it takes no more connections")
    for _ in range(8):
        assert client.get("/ready").status == 200
        assert client.chat([user("Hello")]).status == 200
    for stream in its_own:
        assert stream.take_text(3)
    streams.close()
    until(lambda: leaving not in daemon.processes("gateway"), "it has drained")

    def replaced() -> bool:
        assert client.chat([user("Hello")]).status == 200
        found = daemon.processes("gateway")
        return len(found) == 2 and all(listening(port) & sockets(gateway) for gateway in found)

    until(replaced, "another one listens in its place")
    for _ in range(8):
        assert client.chat([user("Hello")]).status == 200, "which knows the worker from the first"


SPEAKS_ANOTHER = (
    "import sys, protocol.codec as c; c.PROTOCOL_VERSION += 1; from gateway.main import main; sys.exit(main())"
)


def test_a_gateway_of_another_version_is_refused_and_disturbs_nobody(
    daemon: Daemon, client: Client, tmp_path: Path
):
    """As after an upgrade of one side. It shares the port of no other gateway here, so that it can be asked."""
    command = [sys.executable, "-c", SPEAKS_ANOTHER, "--port", "0"]
    command += ["--model", daemon.process.args[daemon.process.args.index("--model") + 1]]
    command += ["--run-dir", str(daemon.run_dir)]
    said = "do not understand each other: protocol version 1 is not 2: upgrade both sides"
    log = tmp_path / "log"
    with log.open("wb") as out, subprocess.Popen(command, stderr=out) as process:
        try:
            until(lambda: "listening on" in log.read_text(), "it listens")
            stranger = Client(log.read_text().split("listening on ")[1].split()[0])
            answer = until(lambda: said in str((a := stranger.get("/ready")).body) and a, "it says why")
            assert answer.status == 503
            refused = stranger.chat([user("Hello")])
            assert refused.status == 503
            assert said in refused.error["message"]
            assert "prefixd_worker_up 0.0" in stranger.get("/metrics").raw.decode()
        finally:
            process.terminate()
            assert process.wait(DEADLINE_SECONDS) == 0
    assert log.read_text().count(said) == 2, "once for itself and once for the request"
    assert "cannot talk to a gateway: protocol version 2 is not 1: upgrade both sides" in daemon.log()
    assert client.chat([user("Hello")]).status == 200


def test_both_drain_and_leave_nothing(daemon: Daemon, client: Client, streams: Streams):
    """The last test of this daemon."""
    daemon.terminate()
    until(lambda: "stopping" in str(client.get("/ready").body), "one says that it stops")
    daemon.process.send_signal(signal.SIGINT)
    for stream in streams:
        assert list(stream)[-1]["error"]["message"] == "the server is shutting down"
        assert not stream.is_done
    assert daemon.wait_exit() == 0
    assert daemon.processes() == []
    assert {path.suffix for path in daemon.run_dir.iterdir()} == {".lock"}
