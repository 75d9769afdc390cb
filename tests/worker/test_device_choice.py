"""Which device a worker takes, and what it says where that cannot be had."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact_rig import Worker
from tiny_models import save_tiny

from protocol.errors import SettingsError


def test_a_card_that_is_not_there_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match="device: cuda was asked for, but torch finds no CUDA device"):
        Worker(tmp_path, device="cuda")


def test_without_a_card_the_processor_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    save_tiny(tmp_path, "llama")
    worker = Worker(tmp_path, device="auto")
    assert worker.model.device == "cpu"


def test_weights_in_four_bits_are_for_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    save_tiny(tmp_path, "llama")
    with pytest.raises(SettingsError, match="dtype: int4 runs on a CPU only"):
        Worker(tmp_path, device="cuda", dtype="int4")
