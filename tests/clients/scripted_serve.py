"""`prefixd serve` with the worker of scripted_worker.py: `python scripted_serve.py ANSWERS FLAGS...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gateway.serve
from gateway.supervisor import Child


def main() -> int:
    answers, *flags = sys.argv[1:]
    entry = [sys.executable, str(Path(__file__).with_name("scripted_worker.py")), answers]

    def child(name: str, command: Sequence[str], *rest: Any, **options: Any) -> Child:
        if name == "worker":
            command = [*entry, *command[command.index("worker") + 1 :]]
        return Child(name, command, *rest, **options)

    gateway.serve.Child = child  # type: ignore[attr-defined,assignment]
    return gateway.serve.main(flags)


if __name__ == "__main__":
    sys.exit(main())
