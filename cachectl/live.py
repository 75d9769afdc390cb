"""The commands that go on until interrupted: `watch`, a line a second, and `top`, a full screen."""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from cachectl import render, screen
from cachectl.asking import Asked, all_slots, ask
from protocol.control import SlotInfo, Stats
from protocol.control_client import CommandRefused, ControlClient
from protocol.errors import SettingsError, WorkerUnavailable

PERIOD_SECONDS = 1.0
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the other screen, without a cursor; and back
_HOME, _END_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"


def watch(client: ControlClient, asked: Asked) -> bool:
    """One line a second until interrupted; counts are those of that second."""
    before: Stats | None = None
    while True:
        now = ask(client, Stats, "stats")
        if asked.json:
            print(json.dumps(asdict(now)), flush=True)
        else:
            if before is None:
                print(render.WATCH_HEADER)
            print(render.watch_line(now, before or now), flush=True)
        before = now
        time.sleep(PERIOD_SECONDS)


def top(client: ControlClient, asked: Asked) -> bool:
    """A screen that is drawn again every second, until `q` or an interrupt. It outlives the worker it looks at.

    As JSON it is what `watch` is. Raises `SettingsError` where there is no terminal.
    """
    if asked.json:
        return watch(client, asked)
    if not sys.stdout.isatty():
        raise SettingsError("top draws on a terminal, and this is none; watch prints lines")
    with _full_screen():
        before: Stats | None = None
        while True:
            now, lines = _frame(client, before)
            before = now or before
            _draw(lines)
            if _quit_asked(PERIOD_SECONDS):
                return True


def _frame(client: ControlClient, before: Stats | None) -> tuple[Stats | None, list[str]]:
    """What is to be seen now, and the figures that the next one compares with."""
    size = shutil.get_terminal_size()
    bars = screen.bars_for(sys.stdout.encoding)
    try:
        now = ask(client, Stats, "stats")
        slots: Sequence[SlotInfo] = list(all_slots(client))
    except (WorkerUnavailable, CommandRefused) as error:
        return None, [screen.cut(str(error), size.columns)]
    return now, screen.lines(now, before, slots, size.columns, size.lines, bars)


def _draw(lines: Sequence[str]) -> None:
    sys.stdout.write(_HOME + "\n".join(line + _END_OF_LINE for line in lines) + _REST)
    sys.stdout.flush()


@contextmanager
def _full_screen() -> Iterator[None]:
    """The terminal's other screen, keys unechoed and one by one; all as before at the end."""
    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
    mode = None if keyboard is None else termios.tcgetattr(keyboard)
    sys.stdout.write(_ENTER)
    try:
        if keyboard is not None:
            tty.setcbreak(keyboard)
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if keyboard is not None and mode is not None:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, mode)


def _quit_asked(seconds: float) -> bool:
    """Wait so long for a key; whether it was `q`, or nothing more can come."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    if not ready:
        return False
    keys = os.read(sys.stdin.fileno(), 64)
    return not keys or b"q" in keys
