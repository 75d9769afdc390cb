"""The `prefixd` command: loads only the subcommand asked for."""

import subprocess
import sys

import pytest

from gateway import cli
from protocol.errors import SettingsError


def test_help_names_every_command(capsys):
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in cli.SUMMARIES:
        assert f"  {name} " in shown


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("prefixd ")


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["--nonsense"]])
def test_wrong_usage_is_2(capsys, argv):
    assert cli.main(argv) == 2
    assert "serve" in capsys.readouterr().err


def test_every_command_has_a_summary_and_the_other_way_round():
    assert {entry.name for entry in cli.entry_points(group="prefixd.commands")} == set(cli.SUMMARIES)


class Command:
    """An entry point whose command does what it is told."""

    def __init__(self, run):
        self.name = "serve"
        self.load = lambda: run


def test_arguments_and_exit_code_pass_through(monkeypatch):
    monkeypatch.setattr(cli, "entry_points", lambda group: [Command(lambda argv: len(argv))])
    assert cli.main(["serve", "--a", "b"]) == 2
    assert cli.main(["serve"]) == 0


def test_refused_settings_are_one_line_and_2(monkeypatch, capsys):
    def refuse(argv):
        raise SettingsError("slots: too many")

    monkeypatch.setattr(cli, "entry_points", lambda group: [Command(refuse)])
    assert cli.main(["serve"]) == 2
    assert capsys.readouterr().err == "prefixd serve: error: slots: too many\n"


@pytest.mark.parametrize("command", ["gateway", "serve", "fetch"])
def test_help_loads_no_torch(command):
    program = (
        "import sys\nfrom gateway import cli\n"
        "try:\n    cli.main(sys.argv[1:])\nexcept SystemExit as stopped:\n    assert not stopped.code\n"
        "assert 'torch' not in sys.modules, 'torch was loaded'"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: prefixd" in done.stdout
