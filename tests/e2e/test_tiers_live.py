"""What lies on disk alone, by the installed commands: seen, pinned, carried to another daemon and removed."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_model import words
from conftest import Served
from daemon import Daemon, until
from http_client import Answer, assistant, system, user

KEYS = {name: f"the-key-of-{name}-0123456789" for name in ("amy", "ben")}
FILE = f'secret = "{"5ecre7" * 8}"\n' + "".join(f'[tenants.{name}]\nkeys = ["{KEYS[name]}"]\n' for name in KEYS)
DONE, REFUSED, USAGE = 0, 1, 2


@pytest.fixture
def begin(chat_model: Path, tmp_path: Path) -> Iterator[Callable[[str], Served]]:
    """Start a daemon with a disk cache of this name; all have the same keys."""
    keys = tmp_path / "keys.toml"
    keys.write_text(FILE)
    keys.chmod(0o600)
    daemons: list[Daemon] = []

    def start(name: str) -> Served:
        tiers = ["--disk-cache", tmp_path / name, "--host-memory", "64KiB"]
        daemons.append(Daemon(chat_model, *map(str, tiers), "--api-keys", str(keys), "--verify-hits", "1"))
        return Served(daemons[-1], daemons[-1].wait_ready())

    yield start
    for daemon in daemons:
        daemon.close()


def ask(served: Served, who: str, messages: list[dict[str, Any]], **fields: Any) -> Answer:
    body = {"temperature": 0, "max_tokens": 8, "messages": messages, **fields}
    answer = served.client.request("POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {KEYS[who]}"})
    assert answer.status == 200, answer.raw
    return answer


def ctl(served: Served, *arguments: str | Path, code: int = DONE) -> Any:
    """What a command prints, as JSON."""
    run = served.daemon.cachectl("--json", *map(str, arguments))
    assert run.returncode == code, run.stdout + run.stderr
    return json.loads(run.stdout) if run.stdout else run.stderr


def settle(served: Served) -> None:
    served.daemon.wait_idle()
    until(lambda: not served.daemon.stats()["tier_pending"], "all snapshots are copied")


def alone(served: Served) -> dict[str, dict[str, Any]]:
    """By tenant, what is in no slot."""
    return {row["tenant"]: row for row in ctl(served, "list") if row["slot"] is None}


def test_what_is_on_disk_alone(begin: Callable[[str], Served], tmp_path: Path):
    here = begin("here")
    told = {name: [system(words(name, 60)), user(words(f"{name} asks", 80))] for name in KEYS}
    for name, messages in told.items():
        messages += [assistant(ask(here, name, messages).text), user("Go on.")]
        ask(here, name, messages)
    settle(here)
    written = here.daemon.ask("events", after=0)["events"]
    assert {(e["tier"], e["part"]) for e in written if e["kind"] == "write"} == {("disk", "kv"), ("host", "kv")}
    here.daemon.restart_worker(signal.SIGKILL)

    # Seen
    rows = alone(here)
    assert set(rows) == set(KEYS)
    assert all((row["state"], row["tiers"]) == ("stored", ["disk"]) for row in rows.values())
    shown = here.daemon.cachectl("list").stdout
    assert re.search(rf"^ *-  {rows['amy']['digest']}  message  stored .* amy +disk$", shown, re.MULTILINE), shown
    assert rows["ben"]["digest"] in here.daemon.cachectl("tree").stdout
    assert "2 snapshots (2 not on the device)" in here.daemon.cachectl("stats").stdout
    one = here.daemon.cachectl("show", "--digest", rows["amy"]["digest"]).stdout
    assert f"{rows['amy']['name']}.*" in one
    files = {path.name for path in (tmp_path / "here").rglob(f"{rows['amy']['name']}.*")}
    assert files == {f"{rows['amy']['name']}.kv.safetensors"}

    # Carried to another daemon, one tenant's alone
    away = tmp_path / "away"
    assert ctl(here, "export", away, "--tenant", "amy")["files"] == len(list(away.iterdir())) > 0
    there = begin("there")
    assert ctl(there, "import", away)["refused"] == {}
    for name, messages in told.items():
        went_on = [*messages, assistant("Yes."), user("And then?")]
        answer = ask(there, name, went_on)
        assert answer.outcome == (("hit", rows["amy"]["tokens"], "none") if name == "amy" else ("miss", 0, "cold"))
        assert answer.cached_tokens == answer.outcome[1]
        assert answer.choices == ask(there, name, went_on, cache_prompt=False).choices
    there.daemon.wait_idle()
    assert there.daemon.cachectl("verify", "--wait").stdout.startswith("verified 1, mismatched 0")
    there.daemon.close()

    # Pinned on disk, it outlives a flush; its tenant goes on from it
    assert "pinned" in here.daemon.cachectl("pin", "--digest", rows["ben"]["digest"]).stdout
    dry = ctl(here, "flush", "--dry-run")
    flushed = here.daemon.cachectl("flush").stdout
    assert re.match(r"flushed 0, busy 0: 0B back; in slower tiers 1 more snapshots, \S+ back\n", flushed), flushed
    assert (dry["tier_snapshots"], dry["tier_bytes"] > 0) == (1, True)
    assert set(alone(here)) == {"ben"}
    assert ctl(here, "evict", "--digest", rows["ben"]["digest"], code=REFUSED)["kept"] == [rows["ben"]["name"]]
    assert ask(here, "amy", told["amy"]).outcome == ("miss", 0, "flushed")
    answer = ask(here, "ben", [*told["ben"], assistant("Yes."), user("And then?")])
    assert answer.outcome == ("hit", rows["ben"]["tokens"], "none")
    slot = next(row for row in ctl(here, "list") if row["digest"] == rows["ben"]["digest"])
    assert (slot["pinned"], slot["slot"] is not None) == (True, True)

    # Removed, from one tier and from all
    settle(here)
    gone = ctl(here, "evict", "--tier", "disk", "--tenant", "amy")
    assert gone["removed"] == []
    assert gone["tier_bytes"] > 0
    ctl(here, "unpin", "--digest", rows["ben"]["digest"])
    ctl(here, "evict", "--older", "0s")
    assert ctl(here, "list") == []
    assert list((tmp_path / "here").rglob("*.safetensors")) == []
    drops = {event["cause"] for event in here.daemon.ask("events", after=0)["events"] if event["kind"] == "drop"}
    assert drops == {"flushed", "evicted"}
