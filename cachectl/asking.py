"""What the commands have in common: the command line, questions to the worker, and how answers are shown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from protocol.control import SlotInfo, StoredInfo
from protocol.control_client import ControlClient
from protocol.errors import WorkerUnavailable

PAGE_SLOTS = 500

Answer = TypeVar("Answer")


class Asked(argparse.Namespace):
    """The command line. From `slot` on, which are set depends on the command."""

    run_dir: Path
    endpoint: str | None
    curve_key: Path | None
    json: bool
    timeout: float
    command: str
    slot: int | None
    slots: list[int]
    digest: str | None
    older: float | None
    tenant: str | None
    to: int | None
    tier: str | None
    request_id: str
    a: str
    b: str
    dry_run: bool
    wait: bool
    past: int
    file: Path
    url: str
    api: str | None
    api_key_file: Path | None
    folder: Path
    all: bool


def ask(client: ControlClient, kind: type[Answer], verb: str, **args: object) -> Answer:
    """The worker's answer as what it should be. Raises `WorkerUnavailable` where it is something else."""
    return parsed(kind, verb, client.ask(verb, **args))


def parsed(kind: type[Answer], verb: str, data: object) -> Answer:
    try:
        answer: Answer = TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise WorkerUnavailable(
            f"the worker's answer to {verb} is not understood: is it another version?"
        ) from error
    return answer


def all_slots(client: ControlClient) -> Iterator[SlotInfo]:
    """Every slot in use, page by page, so that the worker never has to answer in one long breath."""
    cursor: int | None = 0
    while cursor is not None:
        page = client.ask("list", cursor=cursor, limit=PAGE_SLOTS)
        if not isinstance(page, dict):
            raise WorkerUnavailable("the worker's answer to list is not understood: is it another version?")
        yield from parsed(list[SlotInfo], "list", page.get("slots"))
        following = page.get("next_cursor")
        cursor = following if isinstance(following, int) else None


def all_stored(client: ControlClient, tier: str | None = None) -> Iterator[StoredInfo]:
    """What only slower tiers have, or all that one of them has, page by page."""
    cursor: str | None = ""
    while cursor is not None:
        page = client.ask("stored", cursor=cursor, limit=PAGE_SLOTS, **({} if tier is None else {"tier": tier}))
        if not isinstance(page, dict):
            raise WorkerUnavailable("the worker's answer to stored is not understood: is it another version?")
        yield from parsed(list[StoredInfo], "stored", page.get("stored"))
        following = page.get("next_cursor")
        cursor = following if isinstance(following, str) else None


def show(asked: Asked, data: Any, text: Callable[[], str]) -> None:
    """Print the data as JSON where that was asked for, else the text."""
    print(json.dumps(data, indent=2) if asked.json else text())
