"""Where a model's files are found, and what is said when they are not."""

import pytest

from protocol.errors import SettingsError
from protocol.model_path import EMBEDDED_BYTES, EMBEDDED_FILE, EMBEDDED_MODEL, embedded_model_file, resolve_model


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_directory_with_a_config_is_a_model(tmp_path):
    (tmp_path / "config.json").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_a_model(tmp_path, monkeypatch):
    (tmp_path / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize("model", ["nowhere", "empty", "model.bin"])
def test_anything_else_is_refused_by_the_settings_name(tmp_path, monkeypatch, model):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model.bin").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match=r"^model: "):
        resolve_model(model)


def test_the_embedded_model_comes_from_the_cache(tmp_path):
    with pytest.raises(SettingsError, match="run prefixd fetch"):
        resolve_model(EMBEDDED_MODEL)
    path = embedded_model_file()
    assert path == tmp_path / "cache" / "prefixd" / "models" / EMBEDDED_FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"cut short")
    with pytest.raises(SettingsError, match="9 bytes instead of"):
        resolve_model(EMBEDDED_MODEL)
    with open(path, "wb") as file:
        file.truncate(EMBEDDED_BYTES)
    assert resolve_model(EMBEDDED_MODEL) == path


def test_without_xdg_the_cache_is_in_the_home_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert embedded_model_file().is_relative_to(tmp_path / ".cache")
