"""The `cachectl` command: look at what a running worker has cached, and remove or pin it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cachectl.asking import Asked
from cachectl.commands import COMMANDS
from protocol.control_client import CommandRefused, ControlClient
from protocol.endpoints import check_tcp, control_endpoint
from protocol.errors import SettingsError, WorkerUnavailable
from protocol.rundir import default_run_dir

DONE, REFUSED, USAGE, UNREACHABLE = 0, 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 refused, 2 wrong usage, 3 worker not reachable."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (it may have been closed: nobody wants to know)
    asked = _parser().parse_args(argv, namespace=Asked())
    try:
        with ControlClient(
            control_endpoint(asked.run_dir, asked.endpoint, asked.curve_key), asked.timeout
        ) as client:
            is_done = COMMANDS[asked.command].run(client, asked)
            sys.stdout.flush()
            return DONE if is_done else REFUSED
    except CommandRefused as error:
        return _complain(str(error), REFUSED)
    except SettingsError as error:
        return _complain(str(error), USAGE)
    except WorkerUnavailable as error:
        return _complain(str(error), UNREACHABLE)
    except KeyboardInterrupt:
        return DONE  # how `watch`, `events` and `top` end
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is not tried again
        if isinstance(error, BrokenPipeError):
            return DONE  # the reader left: nothing more to say
        return _complain(f"cannot write: {error.strerror}", REFUSED)


def _complain(message: str, code: int) -> int:
    print(f"cachectl: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cachectl", description="Look into the cache of a running prefixd worker.", allow_abbrev=False
    )
    run_dir = Path(os.environ.get("PREFIXD_RUN_DIR") or default_run_dir()).expanduser()
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=run_dir,
        metavar="DIR",
        help="run directory of the daemon (default: %(default)s)",
    )
    parser.add_argument(
        "--endpoint",
        type=_tcp,
        metavar="tcp://HOST:PORT",
        default=os.environ.get("PREFIXD_CONTROL_ENDPOINT") or None,
        help="where the worker takes commands over TCP, instead of in a run directory; needs --curve-key",
    )
    parser.add_argument(
        "--curve-key",
        type=Path,
        metavar="FILE",
        default=os.environ.get("PREFIXD_CURVE_KEY") or None,
        help="file of CURVE keys, made by prefixd keygen",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=5.0,
        metavar="S",
        help="seconds to wait for an answer (default: %(default)g)",
    )
    anywhere = argparse.ArgumentParser(add_help=False)
    anywhere.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        sub = commands.add_parser(name, help=command.summary, description=command.summary, parents=[anywhere])
        command.add_arguments(sub)
    return parser


def _tcp(text: str) -> str:
    try:
        return check_tcp(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number of seconds")
    return value


if __name__ == "__main__":
    sys.exit(main())
