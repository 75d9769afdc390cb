"""`cachectl top`: what it draws, on a real terminal too."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_control import STATS, slot_info
from hypothesis import given
from hypothesis import strategies as st

from cachectl.main import DONE, USAGE
from cachectl.screen import Bars, bar, bars_for, lines

ASCII = Bars("#", "=", ".")
LATER = replace(
    STATS,
    uptime_seconds=STATS.uptime_seconds + 2,
    lookups={"hit/none": 10, "partial/evicted": 1, "miss/cold": 4, "miss/diverged": 0},
    cache_tokens={"computed": 500, "device": 1300},
    commits=9,
    evictions={"space": 2},
)


def drawn(now, before, slots=(), columns=100, rows=30):
    """Lines by their first word."""
    return {line.split()[0]: line for line in lines(now, before, slots, columns, rows, ASCII) if line}


def test_bars_show_how_full_things_are():
    shown = drawn(replace(STATS, states_total=8, states_free=6, state_bytes=1 << 20), None)
    assert shown["kv"] == "kv memory   #" + "=" * 23 + "." * 16 + "  600MiB of 1GiB"
    assert shown["slots"] == "slots       " + "#" * 10 + "." * 30 + "  3 of 12"
    assert shown["states"] == "states      " + "#" * 10 + "." * 30 + "  2 of 8"
    assert "1 running, 0 waiting" in shown["requests"]


def test_rates_are_of_the_workers_own_seconds():
    shown = drawn(LATER, STATS)
    assert "hit 3.0  partial 0.0  miss 1.0" in shown["lookups/s"]
    assert "reused 300  computed 100" in shown["tokens/s"]
    assert shown["lookups/s"].count("#") == shown["tokens/s"].count("#") == 30
    assert shown["snapshots/s"].endswith("published 1.5, removed 0.5")
    assert "72% of prompt tokens reused" in shown["since"]


def test_a_worker_that_was_restarted_is_not_compared_with_the_one_before():
    shown = drawn(replace(LATER, epoch="e2", uptime_seconds=1.0, commits=0), STATS)
    assert "hit 0.0" in shown["lookups/s"]
    assert "published 0.0" in shown["snapshots/s"]


def test_the_snapshots_used_last_come_first_and_as_many_as_there_is_room_for():
    slots = [slot_info(slot, used_age_seconds=100.0 - slot) for slot in range(50)]
    shown = lines(STATS, None, slots, 100, 20, ASCII)
    assert len(shown) == 20
    header = next(number for number, line in enumerate(shown) if line.startswith("SLOT"))
    assert [int(line.split()[0]) for line in shown[header + 1 :]] == list(range(49, 49 - 19 + header, -1))


@given(st.integers(1, 200), st.integers(1, 60))
def test_nothing_reaches_past_the_screen(columns, rows):
    shown = lines(LATER, STATS, [slot_info(slot) for slot in range(30)], columns, rows, ASCII)
    assert len(shown) <= rows
    assert all(len(line) <= columns for line in shown)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 60))
def test_a_bar_is_as_wide_as_it_should_be(first, second, width):
    made = bar(first, second, width, ASCII)
    assert len(made) == width
    assert re.fullmatch("#*=*[.]*", made)
    assert "#" in made or not first or not width


def test_a_terminal_without_blocks_gets_plain_characters():
    assert bars_for("utf-8").first == "█"
    assert bars_for("ascii") == bars_for("no such encoding") == ASCII


def test_it_needs_a_terminal(cachectl):
    code, _, err = cachectl("top")
    assert code == USAGE
    assert "watch" in err


def test_as_json_it_prints_lines(worker, tmp_path):
    command = [sys.executable, "-m", "cachectl.main", "--run-dir", str(tmp_path), "top", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert json.loads(running.stdout.readline())["model"] == "tiny"
        running.terminate()


class Terminal:
    """`cachectl top` on a pseudo-terminal."""

    def __init__(self, run_dir):
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "cachectl.main", "--run-dir", str(run_dir), "top"]
        environ = {**os.environ, "COLUMNS": "100", "LINES": "30", "PYTHONIOENCODING": "utf-8"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ)
        os.close(theirs)
        self.seen = ""

    def until(self, text):
        """Read on until this has been drawn."""
        start = len(self.seen)
        while text not in self.seen[start:]:
            ready, _, _ = select.select([self._ours], [], [], 30)
            assert ready, self.seen
            self.seen += os.read(self._ours, 65536).decode(errors="replace")

    def press(self, key):
        os.write(self._ours, key.encode())

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(worker, tmp_path):
    made = Terminal(tmp_path)
    yield made
    made.close()


def test_it_draws_again_and_again_outlives_a_refusal_and_leaves_the_screen_as_it_was(
    terminal, worker, monkeypatch
):
    terminal.until("600MiB of 1GiB")
    assert "█" in terminal.seen
    assert terminal.seen.index("\x1b[?1049h") < terminal.seen.index("kv memory")

    def broken():
        raise KeyError("loading")

    monkeypatch.setattr(worker, "stats", broken)
    terminal.until("no such slot or request")
    monkeypatch.setattr(worker, "stats", lambda: replace(STATS, model="another"))
    terminal.until("prefixd  another")
    terminal.press("q")
    terminal.until("\x1b[?1049l")
    assert terminal.process.wait(30) == DONE


def test_an_interrupt_ends_it(terminal):
    terminal.until("kv memory")
    terminal.process.send_signal(signal.SIGINT)
    terminal.until("\x1b[?1049l")
    assert terminal.process.wait(30) == DONE
