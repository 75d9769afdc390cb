"""`prefixd keygen`: what it makes is what the gateway reads."""

import os

import pytest

from gateway.api_keys import ApiKeys
from gateway.cli import main
from gateway.keygen import add_tenant
from protocol.curve import read_curve_keys
from protocol.errors import SettingsError


def tenant(file, key):
    return ApiKeys(file).tenant({"x-api-key": key})


def test_a_new_file_gets_a_secret_and_holds_no_key(tmp_path, capsys):
    file = tmp_path / "keys.toml"
    assert main(["keygen", "api", str(file), "amy"]) == 0
    key = capsys.readouterr().out.strip()
    assert tenant(file, key).name == "amy"
    assert file.stat().st_mode & 0o777 == 0o600
    assert key not in file.read_text()


def test_another_tenant_is_added_and_all_else_stays(tmp_path):
    file = tmp_path / "keys.toml"
    first = add_tenant(file, "amy")
    file.chmod(0o640)
    before = tenant(file, first)
    second = add_tenant(file, "ben")
    assert tenant(file, first) == before
    assert tenant(file, second).name == "ben"
    assert file.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["keys.toml"]


def test_a_tenant_that_is_there_is_not_touched(tmp_path):
    file = tmp_path / "keys.toml"
    add_tenant(file, "amy")
    text = file.read_text()
    with pytest.raises(SettingsError, match=r'amy is in .*: add "sha256:'):
        add_tenant(file, "amy")
    assert file.read_text() == text


@pytest.mark.parametrize("name", ["", "a b", "a.b", "x" * 65, 'a"]\nkeys = 1'])
def test_a_name_must_be_one(tmp_path, name):
    with pytest.raises(SettingsError, match="tenant: "):
        add_tenant(tmp_path / "keys.toml", name)
    assert not os.listdir(tmp_path)


def test_a_file_of_something_else_is_left_alone(tmp_path, capsys):
    file = tmp_path / "keys.toml"
    file.write_text("mine")
    file.chmod(0o600)
    assert main(["keygen", "api", str(file), "amy"]) == 2
    assert "is not TOML" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_keys_for_tcp(tmp_path):
    worker, gateway = tmp_path / "worker.key", tmp_path / "gateway.key"
    assert main(["keygen", "curve", str(worker), str(gateway)]) == 0
    assert read_curve_keys(gateway).peers == {read_curve_keys(worker).public}
