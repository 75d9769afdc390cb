"""`make install-system`, into a root of the test's own."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make here")


def install(root, *variables):
    words = ["make", "-s", "-C", str(ROOT), "install-system", f"DESTDIR={root}", *variables]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


@pytest.fixture
def installed(tmp_path):
    return install(tmp_path)


def test_everything_is_where_the_system_looks_for_it(installed, tmp_path):
    assert {
        "etc/prefixd/prefixd.toml",
        "usr/local/lib/systemd/system/prefixd-gateway.service",
        "usr/local/lib/systemd/system/prefixd-gateway@.service",
        "usr/local/lib/systemd/system/prefixd-worker.service",
        "usr/local/lib/sysusers.d/prefixd.conf",
        "usr/local/lib/tmpfiles.d/prefixd.conf",
        "usr/local/share/man/man1/cachectl.1",
        "usr/local/share/bash-completion/completions/cachectl",
        "usr/local/share/zsh/site-functions/_cachectl",
        "usr/local/share/prefixd/nginx/prefixd.conf",
    } <= installed
    for folder in ("grafana/dashboards", "prometheus"):
        shipped = {path.name for path in (ROOT / "deploy" / folder).iterdir()}
        assert {path.name for path in (tmp_path / "usr/local/share/prefixd" / folder).iterdir()} == shipped
    for name in ("prefixd", "cachectl"):
        assert (tmp_path / "usr/local/bin" / name).readlink() == Path("/opt/prefixd/.venv/bin", name)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_mode & 0o022]


def test_settings_that_are_there_stay(installed, tmp_path):
    settings = tmp_path / "etc/prefixd/prefixd.toml"
    settings.write_text("port = 9000\n")
    install(tmp_path)
    assert settings.read_text() == "port = 9000\n"


def test_a_package_with_places_of_its_own(tmp_path):
    install(tmp_path, "PREFIX=/usr", "APP=/usr/lib/prefixd")
    [command] = re.findall(
        r"^ExecStart=(\S+)", (tmp_path / "usr/lib/systemd/system/prefixd-worker.service").read_text(), re.MULTILINE
    )
    assert command == "/usr/lib/prefixd/.venv/bin/prefixd"
    assert (tmp_path / "usr/bin/prefixd").readlink() == Path(command)
    provider = tmp_path / "usr/share/prefixd/grafana/provisioning/dashboards/prefixd.yml"
    [dashboards] = re.findall(r"path: /(\S+)", provider.read_text())
    assert (tmp_path / dashboards / "prefixd-cache.json").is_file()


@pytest.mark.skipif(
    shutil.which("systemd-sysusers") is None, reason="no systemd-sysusers here (Debian package systemd)"
)
def test_the_user_is_made(installed, tmp_path):
    conf = tmp_path / "usr/local/lib/sysusers.d/prefixd.conf"
    done = subprocess.run(
        ["systemd-sysusers", f"--root={tmp_path}", "--dry-run", str(conf)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Creating user 'prefixd'" in done.stdout + done.stderr


def test_a_python_that_the_units_cannot_see_is_refused(tmp_path):
    """They see no home directories, where pyenv and uv keep theirs."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nmkdir -p "$3/bin"\nln -s /home/somebody/.pyenv/bin/python "$3/bin/python"\n')
    python.chmod(0o755)
    words = ["make", "-s", "-C", str(ROOT), "install-app", f"APP={tmp_path}/app", f"PYTHON={python}"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert f"{python} lies in a home" in done.stderr
