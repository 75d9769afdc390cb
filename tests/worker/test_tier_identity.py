"""Files of another model are left alone, those of other numerics are used only where that is asked for."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from tier_rig import HERE, Start, chat

from worker.tiers.part_file import Identity


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


def test_files_of_other_numerics_are_used_only_if_asked_for(start: Start, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "worker.journal")
    elsewhere = Identity(HERE.fingerprint, "m" * 16)
    rig = start(identity=elsewhere)
    rig.serve(chat(2))
    rig.settle()
    rig = start(foreign_numerics=True)
    request = rig.serve(chat(3))
    assert rig.depth(request) == (chat(2).last.end, "hit", "none")
    explained = rig.ask("explain", request_id=request).data
    assert not explained["exact"]
    assert not rig.accepted(request).exact
    assert not rig.end(request).exact
    assert " exact=no " in caplog.messages[-1]
    assert rig.count("prefixd_inexact_hits_total") == 1
    rig.settle()
    assert all(part.foreign for part in rig.disk.ledger.parts), "what is built on it is not passed on"
    after = rig.serve(chat(4))
    assert not rig.ask("explain", request_id=after).data["exact"]
    computed = rig.serve(chat(4), cache=False)
    assert rig.accepted(computed).exact
    assert "exact" not in caplog.messages[-1]
    assert rig.count("prefixd_inexact_hits_total") == 2
    rig = start()
    request = rig.serve(chat(3))
    assert rig.depth(request) == (0, "miss", "fingerprint")
    assert rig.store.stale_drops["fingerprint"] == 3
    assert rig.ask("explain", request_id=request).data["exact"]
    rig.settle()
    assert not any(part.foreign for part in rig.disk.ledger.parts), "they were replaced"
    rig = start()
    assert rig.depth(rig.serve(chat(4))) == (chat(3).last.end, "hit", "none")


def test_a_hit_that_is_not_exact_is_not_verified(start: Start):
    """Nobody has said that a cold run gives the same; what was computed here is verified as ever."""
    rig = start(identity=Identity(HERE.fingerprint, "m" * 16))
    rig.serve(chat(2))
    rig.settle()
    rig = start(foreign_numerics=True, verify_hits=1.0)
    rig.runner.logits = lambda state: torch.rand(64)  # as other bits would be
    rig.serve(chat(3))
    rig.settle()
    background = rig.scheduler.background
    assert (background.verified, background.mismatched, background.skipped) == (0, 0, 1)
    assert rig.kept()
