"""The host tier, between the device and the disk."""

from __future__ import annotations

import pytest
from tier_rig import ENTRIES, Start, chat


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
