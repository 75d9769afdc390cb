"""What gateways of one run directory count together, whoever of them lives, and who may share a port."""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys

import pytest
from aiohttp import web
from prometheus_client import Counter, Gauge, Histogram

from gateway import seats
from gateway.metrics import GatewayMetrics
from gateway.ports import listen, take_port
from gateway.seats import Seat, forget_counts
from protocol.errors import SettingsError
from protocol.rundir import METRICS_FOLDER

IP_LOCAL_PORT_RANGE = 51


class Counting:
    """A gateway's metrics, few enough to look at."""

    def __init__(self, run_dir):
        self.seat = Seat(run_dir)
        with self.seat.writing_through():
            self.asked = Counter("asked", "Requests", ["route"], registry=None)
            for route in ("chat", "models"):
                self.asked.labels(route)
            self.open = Gauge("open", "Requests", multiprocess_mode="livesum", registry=None)
            self.took = Histogram("took", "Seconds", buckets=(1, 2), registry=None)

    def samples(self):
        """Whole numbers by name and label."""
        found = {}
        for family in self.seat.totals():
            for sample in family.samples:
                found["/".join([sample.name, *sample.labels.values()])] = sample.value
        return found

    def close(self):
        self.seat.close()


def files(run_dir):
    return sorted(path.name for path in run_dir.rglob("*.db"))


def test_what_all_have_counted_is_added_up_at_once(tmp_path):
    one, two = Counting(tmp_path), Counting(tmp_path)
    one.asked.labels("chat").inc()
    two.asked.labels("chat").inc(2)
    two.asked.labels("models").inc(4)
    one.open.set(3)
    two.open.set(5)
    one.took.observe(0.5)
    two.took.observe(1.5)
    two.took.observe(7)
    expected = {
        "asked_total/chat": 3,
        "asked_total/models": 4,
        "open": 8,
        "took_bucket/1.0": 1,
        "took_bucket/2.0": 2,
        "took_bucket/+Inf": 3,
        "took_count": 3,
        "took_sum": 9,
    }
    assert one.samples() == two.samples() == expected
    one.close()
    two.close()


def test_what_has_left_still_counts_but_for_its_gauges(tmp_path):
    one, two = Counting(tmp_path), Counting(tmp_path)
    for each in (one, two):
        each.asked.labels("chat").inc()
        each.open.set(1)
    one.close()
    assert two.samples()["asked_total/chat"] == 2
    assert two.samples()["open"] == 1
    three = Counting(tmp_path)
    assert three.seat.number == 0, "the place is taken over, not another one"
    assert two.samples()["asked_total/chat"] == 2, "and so is what was counted there"
    three.asked.labels("chat").inc()
    assert two.samples()["asked_total/chat"] == 3
    two.close()
    three.close()


KILLED = """
import os, pathlib, signal, sys
from test_seats import Counting
counting = Counting(pathlib.Path(sys.argv[1]))
for _ in range(1000):
    counting.asked.labels("chat").inc()
counting.open.set(7)
print(counting.seat.number, flush=True)
signal.pause()
"""


def test_nothing_that_a_killed_one_has_counted_is_lost(tmp_path):
    """Up to its last increment, and over as many lives as it takes; process ids say nothing and may come again."""
    stays = Counting(tmp_path)
    for lives in range(1, 3):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "1\n"
            assert stays.samples()["open"] == 7
            process.send_signal(signal.SIGKILL)
        assert stays.samples()["asked_total/chat"] == 1000 * lives
        assert stays.samples()["open"] == 0, "gauges of the dead do not count"
    stays.close()


def test_the_last_to_leave_takes_the_files_along(tmp_path):
    one, two = Counting(tmp_path), Counting(tmp_path)
    one.close()
    assert files(tmp_path)
    forget_counts(tmp_path)
    assert files(tmp_path), "a gateway lives"
    two.close()
    assert not (tmp_path / METRICS_FOLDER).exists()
    again = Counting(tmp_path)
    assert again.samples()["asked_total/chat"] == 0
    again.close()


def test_a_file_that_makes_no_sense_costs_what_is_in_it(tmp_path, caplog):
    one, two, three = Counting(tmp_path), Counting(tmp_path), Counting(tmp_path)
    for each in (one, two, three):
        each.asked.labels("chat").inc()
    two.close()
    (tmp_path / METRICS_FOLDER / "counter_1.db").write_bytes(b"\\x7f" * 4096)
    assert one.samples()["asked_total/chat"] == 2
    assert "counter_1.db" in caplog.text
    again = Counting(tmp_path)
    assert again.seat.number == 1
    again.asked.labels("chat").inc()
    assert one.samples()["asked_total/chat"] == 3
    for each in (one, three, again):
        each.close()


def test_there_is_an_end_to_seats(tmp_path, monkeypatch):
    monkeypatch.setattr(seats, "MAX_SEATS", 2)
    taken = [Seat(tmp_path), Seat(tmp_path)]
    with pytest.raises(SettingsError, match="2 gateways"):
        Seat(tmp_path)
    for seat in taken:
        seat.close()


def test_metrics_made_elsewhere_are_written_nowhere(tmp_path):
    one = Counting(tmp_path)
    elsewhere = Counter("elsewhere", "Not ours", registry=None)
    elsewhere.inc()
    assert not any("elsewhere" in name for name in one.samples())
    assert "PROMETHEUS_MULTIPROC_DIR" not in os.environ
    one.close()


def test_a_gateways_own_metrics_take_less_than_the_room_made_for_them(tmp_path):
    metrics = GatewayMetrics(tmp_path)
    sizes = {path.stat().st_size for path in (tmp_path / METRICS_FOLDER).iterdir()}
    assert sizes == {seats._FILE_BYTES}
    metrics.close()


@pytest.fixture
async def runner():
    runner = web.AppRunner(web.Application())
    await runner.setup()
    yield runner
    await runner.cleanup()


async def test_gateways_of_one_run_directory_share_a_port_and_others_do_not(tmp_path, runner):
    ours, another = tmp_path / "ours", tmp_path / "another"
    ours.mkdir()
    another.mkdir()
    one, two, stranger = Seat(ours), Seat(ours), Seat(another)
    await listen(runner, "127.0.0.1", 0, one)
    port = runner.addresses[0][1]
    with pytest.raises(SettingsError, match=f"port: cannot listen on 127.0.0.1:{port}: "):
        await listen(runner, "127.0.0.1", port, stranger)
    await listen(runner, "127.0.0.1", port, two)
    assert [address[1] for address in runner.addresses] == [port, port]
    one.close()
    assert not two.shares(port), "who has left shares nothing"
    two.close()
    stranger.close()


async def test_gateways_that_start_together_share_a_port_all_the_same(tmp_path, runner, monkeypatch):
    """While one has looked and does not listen yet, another one does not look."""
    seats_taken, order = [Seat(tmp_path), Seat(tmp_path)], []
    shares = Seat.shares

    def looks(seat, port):
        order.append("looks")
        return shares(seat, port)

    async def start(site):
        await asyncio.sleep(0.05)  # what the other one may use
        await started(site)
        order.append("listens")

    started = web.TCPSite.start
    monkeypatch.setattr(Seat, "shares", looks)
    monkeypatch.setattr(web.TCPSite, "start", start)
    with take_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        await asyncio.gather(*(listen(runner, "127.0.0.1", port, seat) for seat in seats_taken))
    assert order == ["looks", "listens"] * 2
    assert [address[1] for address in runner.addresses] == [port, port]
    for seat in seats_taken:
        seat.close()


async def test_a_port_that_some_other_program_has_is_named(tmp_path, runner):
    seat = Seat(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port: cannot listen on 127.0.0.1:{port}: "):
            await listen(runner, "127.0.0.1", port, seat)
    seat.close()


@pytest.mark.parametrize("host", ["999.1.1.1", "192.0.2.1"])  # no address, and none of this machine
async def test_a_host_where_nobody_can_listen_is_named(tmp_path, runner, host):
    seat = Seat(tmp_path)
    with pytest.raises(SettingsError, match=f"^host: cannot listen on {host}:0: "):
        await listen(runner, host, 0, seat)
    seat.close()


def test_a_port_that_was_taken_is_given_to_those_alone_who_name_it():
    """Not to who asks for any port, nor to a connection for its near end: here the kernel has no other for either."""
    with take_port("127.0.0.1", 0) as taken, socket.create_server(("127.0.0.1", 0)) as elsewhere:
        port = taken.getsockname()[1]
        for take in (lambda each: each.bind(("127.0.0.1", 0)), lambda each: each.connect(elsewhere.getsockname())):
            with socket.socket() as stranger:
                try:
                    stranger.setsockopt(
                        socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port << 16 | port)
                    )
                except OSError:
                    pytest.skip("this needs Linux 6.3")
                with pytest.raises(OSError, match="ddress"):
                    take(stranger)
        with socket.create_server(("127.0.0.1", port)):
            pass
