"""What each command of `cachectl` takes, and how ages, sizes and counts are read."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from cachectl.warm import APIS
from protocol.sizes import parse_size

DEFAULT_URL = "http://127.0.0.1:8080"
_ANSWER_ID = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_)([0-9a-f]{24})")
_SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def slot(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("slot", type=int, nargs="?", metavar="SLOT")
    which.add_argument("--digest", metavar="D", help="the one whose digest begins like this, in whichever tier")


def slots(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    # Without a default of its own an empty list counts as given, and the group as satisfied.
    which.add_argument("slots", type=int, nargs="*", metavar="SLOT", default=())
    which.add_argument("--digest", metavar="D", help="the one whose digest begins like this")
    which.add_argument(
        "--older", type=_span, metavar="AGE", help="all not used for so long, such as 90s, 1h or 2d"
    )
    which.add_argument("--tenant", metavar="T", help="all of one tenant")
    which.add_argument("--to", type=_size, metavar="SIZE", help="those used longest ago, until the rest hold SIZE")
    parser.add_argument(
        "--tier",
        choices=("host", "disk"),
        help="from this tier only, on the device or not (default: --to looks at the device, the others everywhere)",
    )
    dry_run(parser)


def folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="on the worker's machine")


def folder_and_slots(parser: argparse.ArgumentParser) -> None:
    folder(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("slots", type=int, nargs="*", metavar="SLOT", default=())
    which.add_argument("--digest", metavar="D", help="the one whose digest begins like this, in whichever tier")
    which.add_argument("--tenant", metavar="T", help="all of one tenant that are on disk")
    which.add_argument("--all", action="store_true", help="all that are on disk")


def dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and leave it")


def wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--wait", action="store_true", help="until none is pending")


def past(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--past", type=_count, default=0, metavar="N", help="begin with the last N (default: %(default)d)"
    )


def request(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "request_id",
        type=request_id,
        metavar="REQUEST_ID",
        help="as in the response header x-request-id, or the id in the answer",
    )


def request_id(text: str) -> str:
    """The name of a request, which is part of the name of its answer."""
    answer = _ANSWER_ID.fullmatch(text)
    return answer.group(1) if answer else text


def two(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(name, metavar=name.upper(), help="a slot, or a request id (digits alone are a slot)")


def prompt(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a request or messages as JSON, or a system text")
    parser.add_argument(
        "--url", default=DEFAULT_URL, metavar="URL", help="where the gateway listens (default: %(default)s)"
    )
    parser.add_argument("--api", choices=APIS, help="of a request (default: what its fields look like)")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="holds the key of the tenant to warm for"
    )


def _span(text: str) -> float:
    """Seconds of `90s`, `1h`; of a bare number too."""
    unit = text[-1:] if text[-1:] in _SPANS else "s"
    seconds = float(text.removesuffix(unit)) * _SPANS[unit]
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError("must be an age, such as 90s, 1h or 2d")
    return seconds


def _count(text: str) -> int:
    count = int(text)
    if count < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return count


def _size(text: str) -> int:
    try:
        size = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    assert isinstance(size, int)
    return size
