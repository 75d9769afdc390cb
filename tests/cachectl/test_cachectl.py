"""cachectl against a worker that speaks the real protocol over a real socket."""

import json
import subprocess
import sys

import pytest
from fake_control import slot_info, tree_node

from cachectl import live
from cachectl.main import DONE, REFUSED, UNREACHABLE, USAGE, main


def test_stats_shows_what_is_held(cachectl):
    code, out, _ = cachectl("stats")
    assert code == DONE
    assert "600MiB of 1GiB used" in out
    assert "hit/none 4, partial/evicted 1, miss/cold 2\n" in out


def test_list_pages_through_the_cursor_and_aligns(cachectl, worker):
    worker.slots |= {slot: slot_info(slot, tokens=slot) for slot in range(10, 17)}
    code, out, _ = cachectl("list")
    assert code == DONE
    header, *rows = out.splitlines()
    assert [int(row.split()[0]) for row in rows] == [1, 2, 3, *range(10, 17)]
    end = header.index("TOKENS") + len("TOKENS")
    assert all(row[end - 1].isdigit() and row[end] == " " for row in rows)
    assert [args["cursor"] for verb, args in worker.asked if verb == "list"] == [0, 3, 11, 13, 15]


def test_list_tells_tenants_where_there_are_any(cachectl, worker):
    assert "TENANT" not in cachectl("list")[1]
    worker.slots[7] = slot_info(7, tenant="amy")
    header, *rows = cachectl("list")[1].splitlines()
    assert header.split()[-2] == "TENANT"
    assert ["amy" in row.split() for row in rows] == [row.split()[0] == "7" for row in rows]


def test_list_of_nothing(cachectl, worker):
    worker.slots.clear()
    assert cachectl("list")[0] == DONE
    assert json.loads(cachectl("--json", "list")[1]) == []


def test_show_one_slot(cachectl):
    code, out, _ = cachectl("show", "2")
    assert code == DONE
    assert "1MiB (freed if this snapshot alone goes)" in out
    assert "1.5m ago" in out


def test_tree_puts_each_under_the_one_it_extends(cachectl):
    code, out, _ = cachectl("tree")
    assert code == DONE
    assert out.splitlines() == [
        "SNAPSHOT           PARENT  TOKENS  MSGS  KIND     HITS  FLAGS",
        "slot 1 00000001         -     100     2  message     5",
        "└ slot 2 00000002       1     200     2  message     5  busy",
        "└ slot 3 00000003       1     300     2  message     5  pinned",
    ]


def test_a_tree_as_deep_as_a_long_conversation(cachectl, worker):
    worker.nodes = [tree_node(slot, slot - 1 or None, level=slot) for slot in range(1, 2001)]
    rows = json.loads(cachectl("--json", "tree")[1])
    assert [(row["slot"], row["level"]) for row in rows] == [(slot, slot) for slot in range(1, 2001)]


def test_explain_says_where_it_diverged(cachectl):
    code, out, _ = cachectl("explain", "r1")
    assert code == DONE
    assert "miss (diverged)" in out
    assert "message 2, token 640" in out
    assert "250.0 ms" in out


def test_diff_says_where_two_conversations_part(cachectl, worker):
    code, out, _ = cachectl("diff", "1", "r1")
    assert code == DONE
    assert out.splitlines() == [
        "equal up to token 70 in message 1, where they part; the last boundary of both is at 60",
        "CONVERSATION  SLOT  TOKENS  MSGS  AFTER  BOUNDARIES AFTER",
        "1                1     100     2     30           80, 100",
        "r1               -      90     3     20                90",
    ]
    assert worker.asked == [("diff", {"a": 1, "b": "r1"})]
    assert json.loads(cachectl("--json", "diff", "r1", "1")[1])["b"]["boundaries_after"] == [80, 100]


def test_evict_prints_what_went_and_what_came_back(cachectl):
    assert cachectl("evict", "1", "2") == (DONE, "evicted 1, 2: 2MiB back\n", "")


def test_evict_of_a_busy_slot_is_refused_by_name(cachectl):
    code, out, _ = cachectl("evict", "1", "3")
    assert code == REFUSED
    assert out.splitlines() == ["evicted 1: 1MiB back", "busy or pinned, left alone: 3"]


def test_a_dry_run_is_passed_on_and_said(cachectl, worker):
    code, out, _ = cachectl("evict", "--dry-run", "1")
    assert (code, out) == (DONE, "would evict 1: 1MiB back\n")
    assert worker.asked == [("evict", {"slots": [1], "dry_run": True})]
    assert cachectl("flush", "--dry-run")[1].startswith("would flush 2, busy 1")


def test_flush_counts_and_is_done_although_some_are_busy(cachectl):
    assert cachectl("flush") == (DONE, "flushed 2, busy 1: 2MiB back\n", "")


def test_pin_and_unpin(cachectl, worker):
    assert cachectl("pin", "1")[:2] == (DONE, "pinned slot 1 (100 tokens)\n")
    assert cachectl("unpin", "1")[:2] == (DONE, "unpinned slot 1 (100 tokens)\n")
    assert [verb for verb, _ in worker.asked] == ["pin", "unpin"]


@pytest.mark.parametrize(
    "argv", [("show", "77"), ("explain", "r9"), ("diff", "1", "r9"), ("evict", "77"), ("pin", "77")]
)
def test_an_unknown_slot_or_request_is_refused(cachectl, argv):
    code, out, err = cachectl(*argv)
    assert (code, out) == (REFUSED, "")
    assert err.startswith("cachectl: no such")


@pytest.mark.parametrize("argv", [("--json", "stats"), ("stats", "--json")])
def test_json_is_what_the_worker_said(cachectl, argv):
    assert json.loads(cachectl(*argv)[1])["kv_blocks_free"] == 40


@pytest.mark.parametrize(
    "argv", [(), ("nonsense",), ("show",), ("show", "x"), ("evict",), ("--timeout", "0", "stats")]
)
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(list(argv))
    assert stopped.value.code == USAGE
    assert "cachectl" in capsys.readouterr().err


def test_a_run_dir_that_is_too_long_is_wrong_usage(capsys):
    assert main(["--run-dir", "/" + "x" * 120, "stats"]) == USAGE
    assert "run_dir" in capsys.readouterr().err


def test_no_worker_is_3(tmp_path, capsys):
    assert main(["--run-dir", str(tmp_path), "stats"]) == UNREACHABLE
    assert str(tmp_path) in capsys.readouterr().err


def test_a_worker_of_another_version_is_3(cachectl, worker):
    worker.stats = lambda: {"phase": "ready"}
    code, _, err = cachectl("stats")
    assert code == UNREACHABLE
    assert "another version" in err


def test_the_run_dir_comes_from_the_environment(worker, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PREFIXD_RUN_DIR", str(tmp_path))
    assert main(["stats"]) == DONE
    assert "tiny" in capsys.readouterr().out


def test_a_home_directory_in_the_environment_is_found(worker, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.setenv("PREFIXD_RUN_DIR", f"~/{tmp_path.name}")
    assert main(["stats"]) == DONE


def test_watch_prints_lines_until_interrupted(worker, tmp_path, monkeypatch, capsys):
    turns = iter([None, None, KeyboardInterrupt()])

    def sleep(seconds):
        if (stop := next(turns)) is not None:
            raise stop

    monkeypatch.setattr(live.time, "sleep", sleep)
    assert main(["--run-dir", str(tmp_path), "watch"]) == DONE
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "snapshots"
    assert [line.split()[:2] for line in lines] == [["3", "5MiB"]] * 3
    assert all(len(line) == len(header) for line in lines)


def test_it_starts_without_the_heavy_libraries():
    program = (
        "import sys, cachectl.main; print([name for name in ('torch', 'aiohttp', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_reader_that_leaves_early_is_no_error(worker, tmp_path):
    worker.page = 5000
    worker.slots = {slot: slot_info(slot) for slot in range(1, 5000)}
    command = [sys.executable, "-m", "cachectl.main", "--run-dir", str(tmp_path), "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert "SLOT" in running.stdout.readline()
        running.stdout.close()
        assert running.stderr.read() == ""
        assert running.wait() == DONE


@pytest.mark.parametrize("closed", [False, True])
def test_what_cannot_be_written_is_a_complaint_and_no_fault(worker, tmp_path, closed):
    """A full disk; and where there is no output at all, nobody misses it."""
    worker.slots = {1: slot_info(1)}
    command = [sys.executable, "-m", "cachectl.main", "--run-dir", str(tmp_path), "list"]
    into = ">&-" if closed else ">/dev/full"
    done = subprocess.run(
        ["sh", "-c", f'"$@" {into}', "sh", *command], capture_output=True, text=True, check=False
    )
    assert done.stderr == ("" if closed else "cachectl: cannot write: No space left on device\n")
    assert done.returncode == (DONE if closed else REFUSED)
