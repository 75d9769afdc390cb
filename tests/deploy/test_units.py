"""The systemd units: they are sound, shut tight, and leave the worker what a GPU needs."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gateway.config import GatewaySettings
from protocol.settings import load_settings, process_settings

SYSTEMD = Path(__file__).parents[2] / "deploy" / "systemd"
NAMES = ("prefixd-gateway.service", "prefixd-worker.service")
# The worst exposure level that systemd-analyze may find, of 10.
EXPOSURE = {"prefixd-gateway.service": 1.5, "prefixd-worker.service": 1.0}
RESTART_STEPS = ("RestartSteps", "RestartMaxDelaySec")  # systemd before 254 says that it ignores them

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="no systemd-analyze here (Debian package systemd)"
)


def directives(name):
    """All values of each directive of a unit's service, in order."""
    found = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", (SYSTEMD / name).read_text(), re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def analyze(*words):
    done = subprocess.run(["systemd-analyze", *words], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_there_is_a_unit_for_each_process():
    assert {path.name for path in SYSTEMD.glob("*.service")} == {
        f"prefixd-{name}.service" for name in process_settings().keys() - {"serve"}
    }


@needs_systemd
@pytest.mark.parametrize("name", NAMES)
def test_the_exposure_that_systemd_finds(name):
    report = analyze("security", "--offline=true", str(SYSTEMD / name))
    [level] = re.findall(r"Overall exposure level for \S+: ([\d.]+)", report)
    assert float(level) <= EXPOSURE[name], report


@needs_systemd
def test_systemd_has_nothing_to_say_against_the_units(tmp_path):
    """In a root of its own, with the stock targets and a command that can be executed. A further gateway too."""
    units, stock = tmp_path / "etc/systemd/system", tmp_path / "usr/lib/systemd/system"
    shutil.copytree(SYSTEMD, units)
    shutil.copyfile(SYSTEMD / "prefixd-gateway.service", units / "prefixd-gateway@.service")
    stock.mkdir(parents=True)
    for path in Path("/usr/lib/systemd/system").iterdir():
        if path.suffix in (".target", ".slice", ".mount", ".socket") and path.is_file():
            shutil.copyfile(path, stock / path.name)
    command = tmp_path / "opt/prefixd/.venv/bin/prefixd"
    command.parent.mkdir(parents=True)
    command.touch(mode=0o755)
    said = analyze(
        "verify", f"--root={tmp_path}", "--man=no", "--recursive-errors=no", *NAMES, "prefixd-gateway@2.service"
    )
    assert [line for line in said.splitlines() if not any(name in line for name in RESTART_STEPS)] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_unit_starts_its_process_with_settings_that_exist(name):
    process = name.removeprefix("prefixd-").removesuffix(".service")
    unit = directives(name)
    [command] = unit["ExecStart"]
    assert re.search(rf"/prefixd {process} ", command)
    variables = re.findall(r"\bPREFIXD_(\w+)=", " ".join(unit["Environment"]))
    assert variables
    assert {variable.lower() for variable in variables} <= set(process_settings()[process].model_fields)


@pytest.mark.parametrize("name", NAMES)
def test_systemd_is_told_of_readiness_and_of_life(name):
    unit = directives(name)
    assert unit["Type"] == ["notify"]
    assert int(unit["WatchdogSec"][0]) > 0
    assert unit["Restart"] == ["always"]
    assert unit["RestartPreventExitStatus"] == ["2"]
    assert unit["StartLimitIntervalSec"] == ["0"]


def test_the_gateway_may_take_its_grace_period_to_stop():
    grace = GatewaySettings().grace_seconds
    assert int(directives("prefixd-gateway.service")["TimeoutStopSec"][0]) > grace


def test_the_worker_keeps_what_a_gpu_needs():
    """Device files of the driver, compiled code in memory, a cache that it may write, /proc of the driver."""
    unit = directives("prefixd-worker.service")
    assert {"char-nvidia rw", "char-nvidia-uvm rw", "char-nvidia-caps rw"} <= set(unit["DeviceAllow"])
    assert unit["DevicePolicy"] == ["closed"]
    assert "PrivateDevices" not in unit
    assert unit["MemoryDenyWriteExecute"] == ["no"]
    assert "ProcSubset" not in unit
    assert "~@resources" not in " ".join(unit["SystemCallFilter"]).split()
    [cache] = unit["CacheDirectory"]
    variables = dict(pair.split("=", 1) for pair in " ".join(unit["Environment"]).split())
    for kernels in ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert variables[kernels].startswith(f"/var/cache/{cache}/")
    assert variables["XDG_CACHE_HOME"] == "/var/cache", "numba's kernels lie in the folder prefixd below it"


def test_the_worker_reaches_no_network():
    unit = directives("prefixd-worker.service")
    assert unit["PrivateNetwork"] == ["yes"]
    assert unit["RestrictAddressFamilies"] == ["AF_UNIX"]


@pytest.mark.parametrize("name", NAMES)
def test_both_write_to_one_run_directory_that_is_theirs_alone(name):
    unit = directives(name)
    assert "PREFIXD_RUN_DIR=/run/prefixd" in " ".join(unit["Environment"]).split()
    assert (unit["RuntimeDirectory"], unit["RuntimeDirectoryMode"]) == (["prefixd"], ["0700"])
    assert unit["RuntimeDirectoryPreserve"] == ["yes"], "the other one may go on"
    assert "ReadWritePaths" not in unit, "one that somebody removed is no obstacle"
    assert re.search(rf"^u {unit['User'][0]} ", (SYSTEMD / "sysusers.conf").read_text(), re.MULTILINE)


def test_snapshots_on_disk_lie_where_the_worker_may_write_and_nobody_else_may_look(tmp_path):
    unit = directives("prefixd-worker.service")
    example = (SYSTEMD / "prefixd.toml").read_text()
    shown = re.findall(r"^# ((?:disk|host)_\w+ = .*)$", example, re.MULTILINE)
    (tmp_path / "all.toml").write_text("\n".join(shown))
    kind = process_settings()["worker"]
    settings = load_settings(kind, ["--config", str(tmp_path / "all.toml")], "test", "test")
    assert settings.disk_cache.parent == Path("/var/cache") / unit["CacheDirectory"][0]
    assert settings.disk_memory == kind().disk_memory
    assert settings.host_memory > 0
    assert unit["CacheDirectoryMode"] == ["0700"]
    assert unit["UMask"] == ["0077"]


@pytest.mark.parametrize("process", sorted(process_settings()))
def test_the_example_settings_are_accepted(process):
    settings = load_settings(
        process_settings()[process], ["--config", str(SYSTEMD / "prefixd.toml")], "test", "test"
    )
    assert settings.model == process_settings()[process]().model
