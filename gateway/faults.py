"""How faults of our own are logged: where they happened, and not what they say, which may cite a client's words."""

from __future__ import annotations

import logging
import traceback

_log = logging.getLogger("prefixd.gateway")


def log_fault(error: BaseException, what: str, *args: object) -> None:
    """Log an error with the lines of code that it came through; with its words only at level debug."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.error(what, *args, exc_info=error)
        return
    lines = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    _log.error(f"{what}: %s\n%s", *args, type(error).__name__, lines)
