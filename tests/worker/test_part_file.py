"""Files of the disk tier: what was written comes back to the bit, and nothing else ever does."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from protocol.messages import Boundary
from worker.tiers.part_file import (
    BadFile,
    Identity,
    Label,
    file_name,
    part_size,
    read_header,
    read_tensors,
    write_cause,
    write_file,
)

IDENTITY = Identity("ab" * 16, "cd" * 8)
IDS = torch.arange(5, 12, dtype=torch.int32).numpy().tobytes()
LABEL = Label("kv", "a tenant", b"p" * 16, 20, Boundary(27, b"d" * 16, "message", 3), IDS)


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "kv.0": torch.randn(2, 2, 1, 7, 4),
        "kv.1": torch.randn(1, 2, 1, 7, 8).to(torch.bfloat16),
    }


def room() -> dict[str, torch.Tensor]:
    return {name: torch.full_like(tensor, 7.0) for name, tensor in tensors().items()}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts") / file_name(LABEL.tenant, LABEL.boundary.digest, "kv")
    write_file(path, LABEL, IDENTITY, tensors())
    return path


def test_what_was_written_comes_back(file: Path):
    found = read_header(file)
    assert (found.label, found.identity) == (LABEL, IDENTITY)
    assert found.size == file.stat().st_size == part_size(LABEL, IDENTITY, tensors())
    read_tensors(file, found.seal, back := room())
    for name, tensor in tensors().items():
        assert back[name].view(torch.uint8).equal(tensor.view(torch.uint8))


def test_it_is_safetensors_as_others_read_it(file: Path):
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "prefixd-part-1"
        assert opened.get_tensor("kv.1").equal(tensors()["kv.1"])
        assert opened.get_tensor("ids").tolist() == list(range(5, 12))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_mutation_gives_other_values_or_another_error(file: Path, data: st.DataObject):
    """S6-3, K-SE3: flipped, cut, grown, spliced: it is refused, or what comes back is what was written."""
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(len(content) - 1, 0)))
        match data.draw(st.sampled_from(("flip", "set", "cut", "insert", "move", "digits"))):
            case "flip" if content:
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "set" if content:
                content[at] = data.draw(st.integers(0, 255))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 400))]
            case "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=20))
            case "move" if content:
                content = content[at:] + content[:at]
            case "digits":  # in the header: lengths, offsets and shapes that are numbers still
                content[8:900] = content[8:900].replace(
                    b"7", data.draw(st.sampled_from((b"8", b"-7", b"1e9", b"99"))), 1
                )
    path = file.with_name("mutated")
    path.write_bytes(content)
    seal = read_header(file).seal
    back = room()
    try:
        read_header(path)
        read_tensors(path, seal, back)
    except BadFile:
        return
    for name, tensor in tensors().items():
        assert back[name].view(torch.uint8).equal(tensor.view(torch.uint8))


@pytest.mark.parametrize("how", ["missing", "folder", "link", "fifo"])
def test_what_is_no_file_is_unreadable(tmp_path: Path, file: Path, how: str):
    path = tmp_path / "part"
    match how:
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(file)
        case "fifo":
            os.mkfifo(path)
    with pytest.raises(BadFile) as caught:
        read_header(path)
    assert caught.value.cause == "unreadable"


def test_a_file_of_other_shapes_does_not_fit(file: Path):
    seal = read_header(file).seal
    for other in ({"kv.0": room()["kv.0"]}, {**room(), "kv.1": torch.zeros(1, 2, 1, 7, 8)}):
        with pytest.raises(BadFile) as caught:
            read_tensors(file, seal, other)
        assert caught.value.cause == "fingerprint"


def test_another_file_in_its_place_is_refused(file: Path, tmp_path: Path):
    seal = read_header(file).seal
    other = tmp_path / "other"
    write_file(other, LABEL, IDENTITY, {name: tensor + 1 for name, tensor in tensors().items()})
    with pytest.raises(BadFile, match="another file than before"):
        read_tensors(other, seal, room())


@pytest.mark.parametrize(("number", "cause"), [(errno.ENOSPC, "disk_full"), (errno.EROFS, "unwritable")])
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cause: str
):
    def fail(*_args: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr("worker.tiers.part_file.os.replace", fail)
    with pytest.raises(OSError, match="no") as caught:
        write_file(tmp_path / "part", LABEL, IDENTITY, tensors())
    assert write_cause(caught.value) == cause
    assert not list(tmp_path.iterdir())


def test_names_tell_tenants_and_parts_apart():
    names = {
        file_name(tenant, digest, kind)
        for tenant in ("", "a")
        for digest in (b"x", b"y")
        for kind in ("kv", "state")
    }
    assert len(names) == 8
