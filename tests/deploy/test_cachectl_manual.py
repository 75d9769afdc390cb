"""The manual page and the completion of cachectl know every command and every option that there is."""

import argparse
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cachectl.commands import COMMANDS
from cachectl.main import _parser

CACHECTL = Path(__file__).parents[2] / "deploy" / "cachectl"


def subcommands():
    [action] = [each for each in _parser()._actions if isinstance(each, argparse._SubParsersAction)]
    return action.choices


def options(parser):
    """Long options, but for one that is not shown in help there."""
    return {word for action in parser._actions for word in action.option_strings if word.startswith("--")}


def completed(typed, path=None):
    """What bash offers after these words, the last of which is under way."""
    words = typed.split(" ")
    program = (
        f"source {CACHECTL / 'completion.bash'}; COMP_WORDS=({' '.join(map(repr, words))}); "
        f"COMP_CWORD={len(words) - 1}; _cachectl; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    environ = {"PATH": f"{path}:/usr/bin:/bin"} if path else None
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True, env=environ)
    return set(done.stdout.split())


def test_the_manual_names_every_command_and_option():
    text = (CACHECTL / "cachectl.1").read_text().replace("\\-", "-")
    for name, parser in subcommands().items():
        assert re.search(rf'^\.(?:B|BI|BR) "?{name}\b', text, re.MULTILINE), name
        for option in options(parser):
            assert option in text, f"{name} {option}"
    assert all(option in text for option in options(_parser()))


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff here (Debian package groff)")
def test_the_manual_is_well_formed():
    done = subprocess.run(
        ["groff", "-man", "-ww", "-z", str(CACHECTL / "cachectl.1")], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""


def test_bash_completes_commands_and_options():
    assert completed("cachectl ") >= {*COMMANDS, *options(_parser())}
    assert completed("cachectl --json e") == {"explain", "evict", "events", "export"}
    assert completed("cachectl --run-dir /run/x --timeout 3 st") == {"stats"}
    for name, parser in subcommands().items():
        assert completed(f"cachectl {name} -") >= options(parser), name
    assert completed("cachectl warm p --api m") == {"messages"}


def test_bash_completes_slots_and_files(tmp_path):
    stub = tmp_path / "cachectl"
    stub.write_text(
        '#!/bin/sh\ntest "$*" = "--run-dir /r --timeout 1 --json list" || exit 3\n'
        """printf '[\\n  {\\n    "slot": 7,\\n    "parent_slot": 3\\n  },\\n  {\\n    "slot": 71,\\n  }\\n]\\n'\n"""
    )
    stub.chmod(0o755)
    assert completed("cachectl --run-dir /r show ", tmp_path) == {"7", "71"}
    assert completed("cachectl --run-dir /r evict 3 7", tmp_path) == {"7", "71"}
    assert completed("cachectl show ", tmp_path) == set(), "no worker"
    (tmp_path / "prompt.json").touch()
    assert completed(f"cachectl warm {tmp_path}/pr") == {f"{tmp_path}/prompt.json"}


def test_zsh_knows_the_same():
    text = (CACHECTL / "completion.zsh").read_text()
    for name, command in COMMANDS.items():
        assert f"'{name}:{command.summary}'" in text
    for parser in (_parser(), *subcommands().values()):
        assert all(option in text for option in options(parser))
