"""The `prefixd` command: finds a subcommand by its entry point and loads nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import entry_points, version

from protocol.errors import SettingsError

SUMMARIES = {
    "serve": "gateway and worker together, restarted when they die",
    "gateway": "the HTTP process alone",
    "worker": "the model process alone",
    "keygen": "API keys for tenants, and keys for what goes over TCP",
    "fetch": "put the embedded model into the cache",
    "check-template": "boundaries of a conversation, and whether turns extend one another",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Exit codes: 2 for wrong usage and refused settings, else what the subcommand returns."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = {entry.name: entry for entry in entry_points(group="prefixd.commands")}
    match arguments:
        case ["-h" | "--help"]:
            print(_help(commands))
            return 0
        case ["-V" | "--version"]:
            print(f"prefixd {version('prefixd')}")
            return 0
        case [name, *rest] if name in commands:
            try:
                code: int = commands[name].load()(rest)
            except SettingsError as error:
                print(f"prefixd {name}: error: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                return 130
            return code
        case [name, *_]:
            print(f"prefixd: error: no command {name!r}, there are: {', '.join(commands)}", file=sys.stderr)
        case _:
            print(_help(commands), file=sys.stderr)
    return 2


def _help(commands: Iterable[str]) -> str:
    lines = ["usage: prefixd [--help] [--version] COMMAND ...", "", "commands:"]
    lines += [f"  {name:<16}{SUMMARIES.get(name, '')}" for name in commands]
    return "\n".join([*lines, "", "prefixd COMMAND --help shows all settings of a command."])


if __name__ == "__main__":
    sys.exit(main())
