"""Snapshots that outlast the worker: the real engine on memory of plain Python, where every mistake shows."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_rig import Rig, one, text
from snapshot_rig import Prompt, prompt
from tier_rig import HERE, TierRig

from protocol.errors import SettingsError
from worker.tiers.part_file import Identity

ENTRIES = [0, 12]
Start = Callable[..., TierRig]


def chat(turns: int, who: int = 0, size: int = 9, head: int = 17) -> Prompt:
    """A head that all share and `turns` messages."""
    return prompt(text(1, head), *(text(100 * who + turn + 2, size) for turn in range(turns)))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a worker in place of the one before, which is killed."""
    rigs: list[TierRig] = []

    def begin(**options: Any) -> TierRig:
        if rigs:
            rigs.pop().close()
        rigs.append(TierRig(tmp_path / "cache", **options))
        return rigs[-1]

    yield begin
    for rig in rigs:
        rig.close()


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy one position a turn."""
    monkeypatch.setattr("worker.tiers.tiers._BUSY_SHARE", 0)
    monkeypatch.setattr("worker.tiers.tiers._BUSY_BYTES", 8)
    monkeypatch.setattr("worker.tiers.tiers._IDLE_BYTES", 8)


@pytest.mark.parametrize("entries", ENTRIES)
def test_after_a_restart_the_next_turn_hits_at_the_same_depth(start: Start, entries: int):
    rig = start(entries=entries)
    for turns in range(1, 5):
        rig.serve(chat(turns))
    rig.settle()
    rig = start(entries=entries)
    request = rig.serve(chat(5))
    assert rig.depth(request) == (chat(4).last.end, "hit", "none")
    rig.assert_answered(request)
    assert rig.count("prefixd_cache_tokens_total", source="disk") == chat(4).last.end
    assert rig.count("prefixd_cache_tokens_total", source="device") == 0
    assert rig.count("prefixd_cache_tokens_total", source="computed") == len(chat(5)) - chat(4).last.end
    assert rig.ask("explain", request_id=request).data["sources"] == {"disk": chat(4).last.end}
    rig.settle()


@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("turns", [1, 2, 3])
def test_every_boundary_that_was_kept_is_found_at_its_own_depth(start: Start, entries: int, turns: int):
    rig = start(entries=entries)
    for kept in (1, 2, 3):
        rig.serve(chat(kept))
    rig.settle()
    rig = start(entries=entries)
    branch = prompt(text(1, 17), *(text(turn + 2, 9) for turn in range(turns)), text(77, 5))
    request = rig.serve(branch)
    assert rig.depth(request) == (chat(turns).last.end, "hit", "none")
    rig.assert_answered(request)


@pytest.mark.parametrize("entries", ENTRIES)
def test_what_was_on_the_device_is_not_loaded_again(start: Start, entries: int):
    rig = start(entries=entries)
    rig.serve(chat(2))
    rig.serve(chat(4))
    rig.settle()
    rig = start(entries=entries)
    rig.serve(prompt(text(1, 17), text(50, 3)))  # brings the head
    assert rig.count("prefixd_cache_tokens_total", source="disk") == 17
    request = rig.serve(chat(5))
    assert rig.depth(request) == (chat(4).last.end, "hit", "none")
    assert rig.count("prefixd_cache_tokens_total", source="disk") == chat(4).last.end
    assert rig.count("prefixd_cache_tokens_total", source="device") == 17
    rig.assert_answered(request)


def test_what_conversations_share_is_on_disk_once(start: Start):
    rig = start()
    for who in range(5):
        rig.serve(chat(2, who=who))
    rig.settle()
    assert len(rig.disk.ledger.parts) == 1 + 5 * 2


def test_what_left_the_device_comes_back_from_the_disk(start: Start):
    rig = start(slots=2, blocks=24)
    rig.serve(chat(3, who=1))
    rig.settle()
    for who in range(2, 6):
        rig.serve(chat(3, who=who))
        rig.settle()
    request = rig.serve(chat(4, who=1))
    assert rig.depth(request) == (chat(3).last.end, "hit", "none")
    assert rig.count("prefixd_cache_tokens_total", source="disk") > 0
    rig.assert_answered(request)
    rig.settle()


@pytest.mark.parametrize("entries", ENTRIES)
def test_the_budget_holds_and_the_last_used_stay(start: Start, entries: int):
    rig = start(entries=entries, disk_bytes=14_000)
    for who in range(12):
        rig.serve(chat(2, who=who))
        rig.settle()
    assert rig.disk.ledger.evictions > 0
    rig = start(entries=entries, disk_bytes=14_000)
    request = rig.serve(chat(3, who=11))
    assert rig.depth(request) == (chat(2).last.end, "hit", "none")
    gone = rig.serve(chat(3, who=0))
    assert rig.accepted(gone).depth <= 17
    rig.assert_answered(gone)
    rig.settle()


def test_a_budget_that_holds_nothing_is_no_fault(start: Start):
    rig = start(disk_bytes=100)
    for turns in (1, 2):
        rig.assert_answered(rig.serve(chat(turns)))
    rig.settle()
    assert rig.tiers.failures()["no_room"] > 0
    assert rig.disk.ledger.held == 0


def test_a_smaller_budget_at_the_next_start_is_kept_at_once(start: Start):
    rig = start()
    for who in range(6):
        rig.serve(chat(2, who=who))
    rig.settle()
    half = rig.disk.ledger.held // 2
    rig = start(disk_bytes=half)
    assert 0 < rig.disk.ledger.held <= half
    rig.check_disk()


# Files that are not as they were


@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("how", ["flipped", "truncated", "empty", "grown", "header"])
def test_a_broken_file_costs_its_own_boundary_only(start: Start, entries: int, how: str):
    rig = start(entries=entries)
    for turns in range(1, 4):
        rig.serve(chat(turns))
    rig.settle()
    (part,) = (p for p in rig.disk.ledger.parts if p.node.end == chat(3).last.end and p.kind != "state")
    break_file(part.place.path, how)
    rig = start(entries=entries)
    request = rig.serve(chat(4))
    assert rig.depth(request) == (chat(2).last.end, "partial", "stale")
    rig.assert_answered(request)
    assert rig.store.stale_drops["checksum"] == 1
    rig.settle()
    again = rig.serve(chat(5))
    assert rig.depth(again) == (chat(4).last.end, "hit", "none")


def break_file(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "flipped":
            tensors_start = 8 + int.from_bytes(data[:8], "little")
            data[tensors_start + 3] ^= 16
        case "truncated":
            del data[len(data) * 2 // 3 :]
        case "empty":
            data.clear()
        case "grown":
            data += b"\0"
        case "header":
            data[40] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("entries", ENTRIES)
def test_a_file_that_breaks_while_the_worker_runs(start: Start, entries: int):
    """One in the middle of what is needed: nothing deeper can be had, and what lies above it can."""
    rig = start(entries=entries)
    for turns in range(1, 5):
        rig.serve(chat(turns))
    rig.settle()
    rig = start(entries=entries)
    (part,) = (p for p in rig.disk.ledger.parts if p.node.end == chat(3).last.end and p.kind == "kv")
    part.place.path.unlink()
    request = rig.serve(chat(5))
    assert rig.depth(request) == (chat(2).last.end, "partial", "stale")
    assert rig.store.stale_drops["checksum"] == 1
    assert rig.tiers.failures()["unreadable"] == 1
    rig.assert_answered(request)
    rig.settle()


def test_files_of_another_model_are_left_out(start: Start, tmp_path: Path):
    rig = start()
    rig.serve(chat(2))
    rig.settle()
    other = Identity("e" * 32, HERE.numerics)
    rig.disk.folder.rename(tmp_path / "cache" / other.fingerprint)
    rig = start(identity=other)
    request = rig.serve(chat(3))
    assert rig.depth(request) == (0, "miss", "fingerprint")
    assert rig.store.stale_drops["fingerprint"] == 3
    rig.assert_answered(request)
    rig.settle()
    assert len(rig.disk.ledger.parts) == 4


def test_files_of_other_numerics_are_used_only_if_asked_for(start: Start):
    elsewhere = Identity(HERE.fingerprint, "m" * 16)
    rig = start(identity=elsewhere)
    rig.serve(chat(2))
    rig.settle()
    rig = start(foreign_numerics=True)
    request = rig.serve(chat(3))
    assert rig.depth(request) == (chat(2).last.end, "hit", "none")
    explained = rig.ask("explain", request_id=request).data
    assert not explained["exact"]
    rig.settle()
    assert all(part.foreign for part in rig.disk.ledger.parts), "what is built on it is not passed on"
    after = rig.serve(chat(4))
    assert not rig.ask("explain", request_id=after).data["exact"]
    rig = start()
    request = rig.serve(chat(3))
    assert rig.depth(request) == (0, "miss", "fingerprint")
    assert rig.store.stale_drops["fingerprint"] == 3
    assert rig.ask("explain", request_id=request).data["exact"]
    rig.settle()
    assert not any(part.foreign for part in rig.disk.ledger.parts), "they were replaced"
    rig = start()
    assert rig.depth(rig.serve(chat(4))) == (chat(3).last.end, "hit", "none")


def test_what_a_killed_worker_leaves_is_cleared(start: Start):
    rig = start()
    for turns in (1, 2, 3):
        rig.serve(chat(turns))
    rig.settle()
    paths = {part.node.end: part.place.path for part in rig.disk.ledger.parts}
    paths[chat(1).last.end].unlink()
    half = paths[chat(2).last.end]
    half.with_name(half.name + ".tmp").write_bytes(half.read_bytes()[:50])
    (rig.disk.folder / "notes.txt").write_text("not ours")
    rig = start()
    rig.check_disk()
    assert [part.node.end for part in rig.disk.ledger.parts] == [17]
    assert (rig.disk.folder / "notes.txt").exists()


def test_a_full_disk_costs_what_could_not_be_written(start: Start, monkeypatch: pytest.MonkeyPatch):
    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    rig = start()
    rig.serve(chat(1))
    rig.settle()
    with monkeypatch.context() as patched:
        patched.setattr("worker.tiers.part_file.os.replace", full)
        rig.assert_answered(rig.serve(chat(2)))
        rig.settle()
    assert rig.tiers.failures()["disk_full"] == 1
    rig.assert_answered(rig.serve(chat(3)))
    rig.settle()
    rig = start()
    assert rig.depth(rig.serve(chat(4))) == (chat(3).last.end, "hit", "none")
    assert not any(rig.store.stale_drops.values())


@pytest.mark.parametrize("entries", ENTRIES)
def test_with_every_slot_taken_for_good_a_prompt_is_computed(start: Start, entries: int):
    """S2-e: what is loaded has no slot of its own to pass through, and takes none that is pinned."""
    rig = start(slots=2, entries=entries)
    rig.serve(chat(3))
    rig.settle()
    rig = start(slots=2, entries=entries)
    for who, slot in ((5, 0), (6, 1)):
        rig.serve(one(who, 12))
        rig.ask("pin", slot=slot)
    request = rig.serve(chat(4))
    rig.assert_answered(request)
    assert rig.kept() == [12, 12]
    rig.settle()


# The folder


def test_only_its_owner_may_look_into_it(start: Start):
    os.umask(before := os.umask(0))
    try:
        os.umask(0)
        rig = start()
        rig.serve(chat(1))
        rig.settle()
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in rig.disk.folder.iterdir()}
    assert modes == {0o600}
    assert rig.disk.folder.stat().st_mode & 0o777 == rig.disk.folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_another_worker_holds_is_refused(start: Start):
    rig = start()
    with pytest.raises(
        SettingsError, match=rf"disk_cache: .* is held by another worker \(process {os.getpid()}\)"
    ):
        TierRig(rig.disk.folder.parent)
    rig.close()
    with open(rig.disk.folder / "lock", "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="disk_cache: cannot use"):
        TierRig(tmp_path / "file")


# The operator


def test_flushing_takes_everything_but_what_is_pinned(start: Start):
    rig = start()
    rig.serve(chat(2))
    rig.serve(one(5, 8))
    rig.settle()
    (slot,) = (s.slot for s in rig.store.slots.snapshots() if s.node.end == 8)
    rig.ask("pin", slot=slot)
    removed = rig.ask("flush").data
    assert removed["tier_bytes"] > 0
    rig.settle()
    assert [part.node.end for part in rig.disk.ledger.parts] == [8]
    assert rig.depth(rig.serve(chat(3))) == (0, "miss", "flushed")


def test_flushing_reaches_what_is_being_written_and_read(start: Start):
    rig = start()
    rig.disk._writer.is_held = True
    rig.serve(chat(2))
    rig.turns(10)
    assert rig.disk.is_writing
    rig.ask("flush")
    rig.disk._writer.let_go()
    rig.settle()
    assert rig.disk.ledger.held == 0
    rig.serve(chat(2))
    rig.settle()
    rig = start()
    rig.disk._readers.is_held = True
    request = rig.generate(chat(3))
    rig.turns(3)
    assert rig.scheduler.is_loading
    rig.ask("flush")
    rig.disk._readers.let_go()
    rig.run()
    assert rig.depth(request) == (0, "miss", "flushed")
    rig.assert_answered(request)


@pytest.mark.parametrize("entries", ENTRIES)
def test_evicting_a_snapshot_takes_what_only_it_needs(start: Start, entries: int):
    rig = start(entries=entries)
    rig.serve(chat(2, who=1))
    rig.serve(chat(2, who=2))
    rig.settle()
    (slot,) = (
        s.slot for s in rig.store.slots.snapshots() if s.node.end == 35 and s.node.hits == 0 and s.slot == 1
    )
    assert rig.ask("show", slot=slot).data["tiers"] == ["disk"]
    held = rig.disk.ledger.held
    removed = rig.ask("evict", slots=[slot]).data
    assert removed["removed"] == [slot]
    rig.settle()
    assert held - rig.disk.ledger.held == removed["tier_bytes"] > 0
    rig = start(entries=entries)
    depths = sorted(rig.accepted(rig.serve(chat(3, who=who))).depth for who in (1, 2))
    assert depths == [17, 35]


def test_the_operator_sees_the_tiers(start: Start):
    rig = start()
    rig.serve(chat(2))
    rig.settle()
    (tier,) = rig.ask("stats").data["tiers"]
    assert (tier["tier"], tier["bytes"]) == ("disk", rig.disk.ledger.held)
    assert tier["snapshots"] == 1


# Loading beside others


def test_others_decode_while_one_is_loaded(start: Start):
    rig = start()
    rig.serve(chat(3))
    rig.settle()
    rig = start()
    running = rig.generate(one(9, 6), max_tokens=40)
    rig.turns(4)
    rig.disk._readers.is_held = True
    waiting, behind = rig.generate(chat(4)), rig.generate(one(8, 6))
    said = len(rig.tokens(running))
    rig.turns(10)
    assert not rig.of(waiting, object)
    assert len(rig.tokens(running)) > said
    rig.turn_until(lambda: rig.tokens(behind))
    rig.disk._readers.let_go()
    rig.run()
    for request in (running, waiting, behind):
        rig.assert_answered(request)
    assert rig.depth(waiting) == (chat(3).last.end, "hit", "none")


def test_two_that_want_the_same_load_it_once(start: Start):
    rig = start()
    rig.serve(chat(3))
    rig.settle()
    rig = start()
    both = [
        rig.generate(chat(4)),
        rig.generate(prompt(text(1, 17), *(text(t + 2, 9) for t in range(3)), text(9, 4))),
    ]
    rig.run()
    assert [rig.depth(request) for request in both] == [(chat(3).last.end, "hit", "none")] * 2
    assert rig.store.commits == 1 + 2


def test_a_request_that_leaves_while_it_is_loaded(start: Start):
    rig = start()
    rig.serve(chat(3))
    rig.settle()
    rig = start()
    rig.disk._readers.is_held = True
    request = rig.generate(chat(4))
    rig.turns(2)
    rig.cancel(request)
    rig.turns(2)
    rig.disk._readers.let_go()
    rig.settle()
    assert rig.depth(rig.serve(chat(4))) == (chat(3).last.end, "hit", "none")


@pytest.mark.parametrize("entries", ENTRIES)
def test_without_room_for_it_a_prompt_is_computed(start: Start, entries: int):
    """A pinned snapshot leaves no room for both."""
    rig = start(blocks=24, entries=entries)
    rig.serve(chat(4, who=1))
    rig.settle()
    rig = start(blocks=24, entries=entries)
    rig.serve(one(3, 40))
    rig.ask("pin", slot=0)
    request = rig.serve(chat(4, who=1))
    assert rig.accepted(request).depth >= 0
    rig.run()


@pytest.mark.parametrize("entries", ENTRIES)
def test_copying_gives_way_to_a_request(start: Start, entries: int, slowly: None):
    """What is being copied holds blocks that a long prompt needs."""
    rig = start(blocks=16, slots=2, entries=entries and 3)
    rig.serve(one(1, 40))
    assert rig.tiers.references[0]
    request = rig.serve(one(2, 56))
    rig.assert_answered(request)
    rig.settle()


def test_a_worker_that_stops_writes_what_is_not_yet_written(start: Start, slowly: None):
    rig = start()
    rig.serve(chat(3))
    assert rig.tiers.pending
    rig.engine.stop()
    rig.engine.run()
    rig = start()
    assert rig.depth(rig.serve(chat(4))) == (chat(3).last.end, "hit", "none")


def test_a_hit_that_was_proved_wrong_is_not_found_on_disk_either(start: Start):
    rig = start(verify_hits=1.0)
    rig.serve(chat(2))
    rig.settle()
    (snapshot,) = (s for s in rig.store.slots.snapshots() if s.node.end == chat(2).last.end)
    rig.scheduler.background._clearing.distrust("", chat(2).ids, chat(2).boundaries)
    rig.settle()
    assert snapshot.leaving
    assert rig.accepted(rig.serve(chat(2))).depth == chat(1).last.end


# The host tier


@pytest.mark.parametrize("entries", ENTRIES)
def test_what_left_the_device_comes_back_from_the_host(start: Start, entries: int):
    rig = start(slots=3, blocks=24, entries=entries and 4, host_bytes=1 << 20)
    rig.serve(chat(3, who=1))
    rig.settle()
    for who in range(2, 6):
        rig.serve(chat(3, who=who))
        rig.settle()
    request = rig.serve(chat(4, who=1))
    assert rig.depth(request) == (chat(3).last.end, "hit", "none")
    rig.assert_answered(request)
    sources = rig.ask("explain", request_id=request).data["sources"]
    assert set(sources) == {"host"}
    assert rig.count("prefixd_cache_tokens_total", source="host") >= sources["host"] > 0
    assert rig.count("prefixd_cache_tokens_total", source="disk") == 0
    tiers = [tier["tier"] for tier in rig.ask("stats").data["tiers"]]
    assert tiers == ["host", "disk"]


def test_what_the_host_has_no_room_for_is_on_disk(start: Start):
    rig = start(slots=2, blocks=24, host_bytes=400)
    for who in range(1, 6):
        rig.serve(chat(3, who=who))
        rig.settle()
    assert rig.host.ledger.evictions > 0
    request = rig.serve(chat(4, who=1))
    assert rig.depth(request) == (chat(3).last.end, "hit", "none")
    assert "disk" in rig.ask("explain", request_id=request).data["sources"]
    rig.assert_answered(request)


def test_what_was_read_from_disk_stays_on_the_host(start: Start):
    rig = start(host_bytes=1 << 20)
    rig.serve(chat(3))
    rig.settle()
    rig = start(host_bytes=1 << 20)
    rig.serve(chat(4))
    rig.settle()
    assert {part.node.end for part in rig.host.ledger.parts} == {b.end for b in chat(4).boundaries}


# Anything at all


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), entries=st.sampled_from([0, 5]), host_bytes=st.sampled_from([0, 500]))
def test_answers_and_accounts_are_right_whatever_happens(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, entries: int, host_bytes: int
):
    """The rig compares every state that is read, kept or loaded with that of its tokens."""
    folder = tmp_path_factory.mktemp("tiers")
    disk_bytes = data.draw(st.sampled_from([8_000, 30_000, 1 << 20]))

    def begin() -> TierRig:
        return TierRig(folder, blocks=40, slots=4, entries=entries, disk_bytes=disk_bytes, host_bytes=host_bytes)

    rig = begin()
    try:
        for _ in range(data.draw(st.integers(4, 12))):
            rig = act(rig, begin, data)
        rig.settle()
    finally:
        rig.close()


def act(rig: TierRig, begin: Callable[[], TierRig], data: st.DataObject) -> TierRig:
    """One of all that may happen to a worker; the one that goes on from there."""

    def begin_again() -> TierRig:
        rig.close()
        return begin()

    files = sorted(rig.disk.folder.glob("*.safetensors"))
    match data.draw(
        st.sampled_from(("ask", "ask", "together", "settle", "kill", "break", "remove", "flush", "evict"))
    ):
        case "ask":
            request = rig.serve(chat(data.draw(st.integers(1, 4)), who=data.draw(st.integers(0, 3))))
            rig.assert_answered(request)
        case "together":
            asked = [rig.generate(chat(data.draw(st.integers(1, 4)), who=who)) for who in range(3)]
            rig.run()
            for request in asked:
                rig.assert_answered(request)
        case "settle":
            rig.settle()
        case "kill":
            rig = begin_again()
            rig.check_disk()
        case "break" if files:
            how = data.draw(st.sampled_from(["flipped", "truncated", "empty", "header"]))
            break_file(data.draw(st.sampled_from(files)), how)
            rig = begin_again()
        case "remove" if files:
            data.draw(st.sampled_from(files)).unlink()
            rig = begin_again()
        case "flush":
            rig.ask("flush")
        case "evict":
            rig.ask("evict", slots=[s.slot for s in rig.store.slots.snapshots()][:1])
    return rig


# From one worker to another


@pytest.mark.parametrize("entries", ENTRIES)
def test_exported_snapshots_hit_elsewhere(start: Start, tmp_path: Path, entries: int):
    rig = start(entries=entries)
    for who in (1, 2):
        rig.serve(chat(3, who=who))
    rig.settle()
    (slot,) = (s.slot for s in rig.store.slots.snapshots() if s.node.end == chat(3).last.end and s.slot == 1)
    away = tmp_path / "away"
    written = rig.ask("export", folder=str(away), slots=[slot]).data
    assert written["files"] == len(list(away.iterdir())) == (5 if entries else 4)
    assert away.stat().st_mode & 0o777 == 0o700
    (away / "broken.kv.safetensors").write_bytes(b"nothing")
    elsewhere = TierRig(tmp_path / "other", entries=entries)
    try:
        taken = elsewhere.ask("import", folder=str(away)).data
        assert (taken["files"], taken["bytes"]) == (written["files"], written["bytes"])
        assert taken["refused"] == {"checksum": 1}
        assert elsewhere.ask("import", folder=str(away)).data["refused"] == {
            "checksum": 1,
            "known": taken["files"],
        }
        elsewhere.settle()
        depths = sorted(elsewhere.accepted(elsewhere.serve(chat(4, who=who))).depth for who in (1, 2))
        assert depths == [17 if not entries else 0, chat(3).last.end]
        elsewhere.settle()
    finally:
        elsewhere.close()


def test_what_does_not_fit_is_not_imported(start: Start, tmp_path: Path):
    rig = start()
    rig.serve(chat(2))
    rig.settle()
    slots = [s.slot for s in rig.store.slots.snapshots()]
    rig.ask("export", folder=str(tmp_path / "away"), slots=slots)
    for identity in (Identity("e" * 32, HERE.numerics), Identity(HERE.fingerprint, "m" * 16)):
        other = TierRig(tmp_path / "other", identity=identity)
        try:
            assert other.ask("import", folder=str(tmp_path / "away")).data["refused"] == {"fingerprint": 3}
            assert not other.disk.ledger.parts
        finally:
            other.close()


def test_what_cannot_be_exported_is_said(start: Start, tmp_path: Path):
    rig = start()
    rig.disk._writer.is_held = True
    rig.serve(chat(2))
    rig.turns(10)
    assert "is not on disk, or not yet" in rig.ask("export", folder=str(tmp_path / "away"), slots=[0]).error
    assert "are being written" in rig.ask("import", folder=str(tmp_path)).error
    rig.disk._writer.let_go()
    rig.settle()
    assert "cannot read" in rig.ask("import", folder=str(tmp_path / "nowhere")).error
    (tmp_path / "file").touch()
    assert "cannot write to" in rig.ask("export", folder=str(tmp_path / "file"), slots=[0]).error
    assert rig.ask("export", folder="here", slots=[0]).error == "folder: must be an absolute path"
    assert rig.ask("export", folder="/", slots=[99]).error == "slot 99 holds no snapshot"
    assert "needs a disk cache" in Rig().ask("import", folder="/").error


def test_without_slots_or_tiers_nothing_is_asked_of_them():
    rig = Rig()
    rig.serve(chat(2))
    assert rig.ask("stats").data["tiers"] == []
