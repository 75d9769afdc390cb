"""The fingerprint follows what is computed with, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_models import make_tiny, save_tiny, write_gguf

import worker.fingerprint
from worker.gguf_file import GgufFile
from worker.model_error import ModelError
from worker.safetensors_weights import tensor_spans
from worker.weights import fingerprint


@pytest.fixture(params=["whole", "sampled"], autouse=True)
def size_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test for small models and, as if these were large, for sampled ones."""
    if request.param == "sampled":
        monkeypatch.setattr(worker.fingerprint, "_WHOLE_BYTES", 0)
        monkeypatch.setattr(worker.fingerprint, "_PAGE_BYTES", 64)


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_time_and_place_do_not_count(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    write_gguf(tmp_path / "model.gguf", model)
    directory, file = fingerprint(tmp_path / "hf"), fingerprint(tmp_path / "model.gguf")
    assert directory != file
    (tmp_path / "hf").rename(tmp_path / "moved")
    (tmp_path / "model.gguf").rename(tmp_path / "moved.gguf")
    os.utime(tmp_path / "moved.gguf", (0, 0))
    os.utime(tmp_path / "moved" / "model.safetensors", (0, 0))
    assert (fingerprint(tmp_path / "moved"), fingerprint(tmp_path / "moved.gguf")) == (directory, file)


def test_other_weights_of_the_same_shape_have_another(tmp_path: Path) -> None:
    found = set()
    for seed in range(3):
        write_gguf(tmp_path / "model.gguf", make_tiny("llama", seed=seed))
        found.add(fingerprint(tmp_path / "model.gguf"))
    assert len(found) == 3


def test_each_tensor_counts_at_both_ends(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama", shard_size="40KB")
    write_gguf(tmp_path / "model.gguf", model)
    places = [(tmp_path / "model.gguf", tmp_path / "model.gguf", at) for at in _ends_gguf(tmp_path / "model.gguf")]
    for shard in sorted((tmp_path / "hf").glob("*.safetensors")):
        places += [
            (tmp_path / "hf", shard, at) for span in tensor_spans(shard)[1] for at in (span[0], span[1] - 1)
        ]
    assert len(places) == 2 * 2 * len(model.state_dict())
    for path, file, at in places:
        before = fingerprint(path)
        flip(file, at)
        assert fingerprint(path) != before, f"{file.name} at {at}"


def _ends_gguf(path: Path) -> list[int]:
    return [at for tensor in GgufFile(path).tensors.values() for at in (tensor.start, tensor.end - 1)]


def test_config_and_metadata_count(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "hf", "llama")
    before = fingerprint(tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(config.read_text().replace("1e-05", "1e-06"))
    assert fingerprint(tmp_path / "hf") != before

    write_gguf(tmp_path / "a.gguf", model)
    write_gguf(tmp_path / "b.gguf", model, metadata={"llama.rope.freq_base": 20_000.0})
    assert fingerprint(tmp_path / "a.gguf") != fingerprint(tmp_path / "b.gguf")


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent"):
        fingerprint(tmp_path / "absent.gguf")
    with pytest.raises(ModelError, match="neither"):
        fingerprint(tmp_path)
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(ModelError, match="empty"):
        fingerprint(tmp_path / "empty.gguf")
