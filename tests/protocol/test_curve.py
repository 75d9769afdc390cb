"""Files of CURVE keys, and TCP addresses that are refused without them."""

import pytest
import zmq

from protocol.curve import make_curve_keys, read_curve_keys
from protocol.endpoints import control_endpoint, work_endpoint
from protocol.errors import SettingsError
from protocol.settings import ProcessSettings, load_settings, to_flags


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / name for name in ("worker.key", "one.key", "two.key")]
    make_curve_keys(paths)
    return paths


def test_a_worker_knows_its_peers_and_they_know_it_alone(files):
    worker, one, two = map(read_curve_keys, files)
    assert worker.peers == {one.public, two.public}
    assert one.peers == two.peers == {worker.public}
    assert len({worker.public, one.public, two.public}) == 3
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)


def test_one_file_alone_is_for_both_sides(tmp_path):
    make_curve_keys([tmp_path / "both.key"])
    keys = read_curve_keys(tmp_path / "both.key")
    assert keys.peers == {keys.public}


def test_no_file_is_written_over_and_none_is_left_half_done(tmp_path):
    (tmp_path / "b").write_text("mine")
    with pytest.raises(SettingsError, match="cannot make"):
        make_curve_keys([tmp_path / "a", tmp_path / "b"])
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert (tmp_path / "b").read_text() == "mine"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_is_open_to_others_is_refused(files, mode):
    files[0].chmod(mode)
    with pytest.raises(SettingsError, match=f"curve_key: .* open to others .mode {mode:04o}."):
        read_curve_keys(files[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda text, other: "public",
        lambda text, other: text.replace("peers", "pears"),
        lambda text, other: text.split("peers")[0] + "peers = []",
        lambda text, other: text.split("peers")[0] + "peers = [1]",
        lambda text, other: text.replace('secret = "', 'secret = "x'),
        lambda text, other: text.replace(text.split('"')[1], other.split('"')[1], 1),
    ],
)
def test_a_file_that_makes_no_sense_is_refused_and_not_cited(files, change):
    text = files[0].read_text()
    secret = text.split('"')[3]
    files[0].write_text(change(text, files[1].read_text()))
    with pytest.raises(SettingsError, match="curve_key: ") as refused:
        read_curve_keys(files[0])
    assert secret not in str(refused.value)


def test_who_connects_has_one_peer(files):
    refused = pytest.raises(SettingsError, match="one peer, the worker, and not 2")
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket, refused:
        read_curve_keys(files[0]).show(socket)


def test_a_judgement_is_of_the_key_that_was_proved(files):
    worker, one, _ = map(read_curve_keys, files)
    raw, stranger = (zmq.utils.z85.decode(key) for key in (one.public, worker.public))

    def status(*, domain=b"prefixd", mechanism=b"CURVE", key=raw):
        return worker.judgement([b"1.0", b"7", domain, b"::1", b"", mechanism, key])[:3]

    assert status() == [b"1.0", b"7", b"200"]
    for wrong in ({"domain": b""}, {"mechanism": b"NULL"}, {"key": b""}, {"key": stranger}, {"key": raw[:-1]}):
        assert status(**wrong) == [b"1.0", b"7", b"400"]
    assert worker.judgement([b"1.0"])[2] == b"400"


@pytest.mark.parametrize("name", ["worker_endpoint", "control_endpoint"])
def test_tcp_without_keys_is_refused_at_start_by_name(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        load_settings(ProcessSettings, [f"--{name.replace('_', '-')}", "tcp://127.0.0.1:1"], "test", "test")
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith(f"test: error: {name}: goes over TCP and needs curve_key")


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "ipc:///tmp/x", "tcp://host", "tcp://host:0", "tcp://host:70000"]
)
def test_what_is_no_tcp_address_is_refused(address, tmp_path, capsys):
    flags = ["--curve-key", str(tmp_path / "key"), "--worker-endpoint", address]
    with pytest.raises(SystemExit):
        load_settings(ProcessSettings, flags, "test", "test")
    assert "worker_endpoint: must be like tcp://HOST:PORT" in capsys.readouterr().err


def test_endpoints_are_in_the_run_directory_unless_they_are_told(files, tmp_path):
    flags = ["--run-dir", str(tmp_path), "--curve-key", str(files[0]), "--worker-endpoint", "tcp://[::1]:5000"]
    settings = load_settings(ProcessSettings, flags, "test", "test")
    assert settings.work_at.address == "tcp://[::1]:5000"
    assert settings.work_at.keys == read_curve_keys(files[0])
    assert settings.control_at == control_endpoint(tmp_path)
    assert settings.control_at.file == tmp_path / "control.sock"
    assert load_settings(ProcessSettings, to_flags(settings, ProcessSettings), "test", "test") == settings


def test_a_command_over_tcp_needs_keys_too(tmp_path):
    for endpoint in (work_endpoint, control_endpoint):
        with pytest.raises(SettingsError, match="curve_key: tcp://x:1 is TCP"):
            endpoint(tmp_path, "tcp://x:1")
