"""`cachectl events` against a worker that speaks the real protocol: everything is told, or that it was missed."""

import json
import re
import time

import pytest

from cachectl import events as command
from cachectl.main import DONE, USAGE, main
from protocol.control import CacheEvent, EventPage


class Script:
    """Answers the verb from a list of what the worker knows at each question; the operator leaves after the last."""

    def __init__(self, *pages):
        self.pages = list(pages)
        self.after = []

    def __call__(self, after=None):
        self.after.append(after)
        return self.pages.pop(0)


def event(number, kind="commit", cause="", request_id="", slot=3, tokens=640):
    return CacheEvent(number, 1_700_000_000.25, kind, cause, slot, "0badcafe", tokens, request_id)


def page(*numbers, last=None, missed=0, epoch="e1"):
    return EventPage(epoch, [event(number) for number in numbers], numbers[-1] if last is None else last, missed)


@pytest.fixture
def follow(worker, cachectl, monkeypatch):
    """Run the command until the script is at its end."""

    def run(script, *argv):
        worker.events = script

        def pause(seconds):
            if not script.pages:
                raise KeyboardInterrupt

        monkeypatch.setattr(command.time, "sleep", pause)
        code, out, err = cachectl(*argv, "events")
        assert (code, err) == (DONE, "")
        return out

    return run


def test_only_what_is_still_to_come_is_told(follow):
    script = Script(page(last=40), page(last=40), page(41, 42), page(last=42))
    out = follow(script)
    assert [line.split()[1] for line in out.splitlines()] == ["41", "42"]
    assert script.after == [None, 40, 40, 42]


def test_each_line_says_what_happened_to_what(follow, monkeypatch):
    monkeypatch.setattr(command.time, "localtime", time.gmtime)
    shown = [
        event(1, "miss", "diverged", "req-1", slot=None, tokens=0),
        event(2, "commit"),
        event(3, "hit", "", "req-2"),
        event(4, "evict", "slots"),
        event(5, "stale", "checksum"),
    ]
    out = follow(Script(page(last=0), EventPage("e1", shown, 5, 0), page(last=5)))
    assert [re.sub(" +", " ", line) for line in out.splitlines()] == [
        "22:13:20.250 1 miss 0badcafe diverged request req-1",
        "22:13:20.250 2 commit slot 3 0badcafe 640 tokens",
        "22:13:20.250 3 hit slot 3 0badcafe 640 tokens request req-2",
        "22:13:20.250 4 evict slot 3 0badcafe 640 tokens slots",
        "22:13:20.250 5 stale drop slot 3 0badcafe 640 tokens checksum",
    ]


def test_what_was_missed_is_counted(follow):
    script = Script(page(last=5), page(last=5), page(30, 31, missed=24), page(last=31))
    lines = follow(script).splitlines()
    assert lines[0] == "missed 24 events: they came faster than they could be told"
    assert len(lines) == 3


@pytest.mark.parametrize(("past", "after"), [(3, 37), (400, 0)])
def test_as_many_of_the_past_as_asked_for(worker, tmp_path, capsys, monkeypatch, past, after):
    # Forgotten ones are not missed by who asks for more than there are.
    worker.events = Script(page(last=40), page(38, 39, 40, missed=37 if past > 40 else 0), page(last=40))
    monkeypatch.setattr(command.time, "sleep", lambda seconds: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["--run-dir", str(tmp_path), "events", "--past", str(past)]) == DONE
    assert worker.events.after[1] == after
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_worker_that_starts_again_is_told_and_followed_from_its_first_event(follow):
    again = [page(last=2, epoch="e2"), page(1, 2, epoch="e2"), page(last=2, epoch="e2")]
    script = Script(page(last=40), page(41), *again)
    lines = [json.loads(line) for line in follow(script, "--json").splitlines()]
    assert [line.get("number") or line.get("restarted") for line in lines] == [41, "e2", 1, 2]
    assert script.after == [None, 40, 41, 0, 2]


@pytest.mark.parametrize("past", ["-1", "many"])
def test_a_past_that_is_no_count_is_refused(tmp_path, capsys, past):
    with pytest.raises(SystemExit) as ended:
        main(["--run-dir", str(tmp_path), "events", "--past", past])
    assert ended.value.code == USAGE
    assert "--past" in capsys.readouterr().err
