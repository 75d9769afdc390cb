"""What a service manager hears, on a socket of the test's own."""

import os
import socket
import subprocess
import sys

import pytest

from protocol import notify
from protocol.notify import Notifier


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.setblocking(False)
        yield listening


@pytest.fixture
def notifier(request, manager):
    """Told of a watchdog where the test's parameter says so."""
    made = Notifier({"NOTIFY_SOCKET": manager.getsockname(), **getattr(request, "param", {})})
    yield made
    made.close()


def heard(manager):
    messages = []
    try:
        while True:
            messages.append(manager.recv(4096).decode().splitlines())
    except BlockingIOError:
        return messages


def test_ready_status_and_stopping(notifier, manager):
    notifier.status("loading")
    notifier.ready("serving")
    notifier.stopping()
    assert heard(manager) == [["STATUS=loading"], ["READY=1", "STATUS=serving"], ["STOPPING=1", "STATUS=stopping"]]


def test_a_status_is_sent_where_it_is_news(notifier, manager):
    for text in ("loading", "loading", "ready", "loading"):
        notifier.status(text)
    assert heard(manager) == [["STATUS=loading"], ["STATUS=ready"], ["STATUS=loading"]]


def test_a_status_cannot_say_anything_else(notifier, manager):
    notifier.status("failed\nREADY=1")
    assert heard(manager) == [["STATUS=failed READY=1"]]


def test_a_process_that_cannot_go_on_asks_to_be_ended(notifier, manager):
    for _ in range(2):
        notifier.trigger_watchdog("a step hangs")
    assert heard(manager) == [["WATCHDOG=trigger", "STATUS=a step hangs"], ["WATCHDOG=trigger"]]


@pytest.mark.parametrize(
    "notifier",
    [{"WATCHDOG_USEC": "8000000"}, {"WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())}],
    indirect=True,
)
def test_signs_of_life_come_several_times_in_a_watchdogs_time(notifier, manager, monkeypatch):
    now = 100.0
    monkeypatch.setattr(notify.time, "monotonic", lambda: now)
    beats = []
    for _ in range(160):  # 16 seconds
        notifier.alive()
        beats += heard(manager)
        now += 0.1
    assert notifier.beat_seconds == 2
    assert beats == [["WATCHDOG=1"]] * 8


@pytest.mark.parametrize(
    "notifier",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid() + 1)},
    ],
    indirect=True,
)
def test_without_a_watchdog_of_this_process_there_is_none(notifier, manager):
    notifier.alive()
    assert notifier.beat_seconds is None
    assert heard(manager) == []


def test_an_abstract_address():
    name = f"prefixd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name)
        manager.setblocking(False)
        notifier = Notifier({"NOTIFY_SOCKET": "@" + name})
        notifier.ready("serving")
        notifier.close()
        assert heard(manager) == [["READY=1", "STATUS=serving"]]


def test_without_a_manager_nothing_happens():
    notifier = Notifier({"WATCHDOG_USEC": "8000000"})
    notifier.status("loading")
    notifier.ready("serving")
    notifier.alive()
    notifier.stopping()
    notifier.close()
    assert notifier.beat_seconds is None


def test_a_manager_that_is_gone_is_no_error(notifier, manager):
    os.unlink(manager.getsockname())
    notifier.ready("serving")


def test_a_manager_that_does_not_listen_holds_nobody_up(notifier, manager):
    """Once its queue is full, words are lost, but for a status: that is said when there is room again."""
    texts = [f"at {number}" for number in range(2000)]
    for text in texts:
        notifier.status(text)
    taken = [message[0].removeprefix("STATUS=") for message in heard(manager)]
    assert taken == texts[: len(taken)]
    assert len(taken) < len(texts)
    notifier.status(texts[-1])
    assert heard(manager) == [[f"STATUS={texts[-1]}"]]


def test_readiness_waits_a_little_for_room(notifier, manager, monkeypatch):
    for number in range(2000):
        notifier.status(f"at {number}")
    monkeypatch.setattr(notify.time, "sleep", lambda _seconds: heard(manager))
    notifier.ready("serving")
    assert heard(manager) == [["READY=1", "STATUS=serving"]]


def test_children_do_not_speak_in_our_name(manager):
    environ = {**os.environ, "NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}
    program = (
        "import os; from protocol.notify import Notifier; Notifier().close(); "
        "print([name for name in ('NOTIFY_SOCKET', 'WATCHDOG_USEC', 'WATCHDOG_PID') if name in os.environ])"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
