"""A notation for answers that needs no model: a line, a part."""

from __future__ import annotations

from gateway.reply import CallArguments, CallEnd, CallStart, Part, ReasoningDelta, TextDelta


class LineParser:
    """Reads each line as one part: `think ...`, `call NAME ARGUMENTS`, or text."""

    done = False

    def __init__(self) -> None:
        self._held = ""
        self._calls = 0

    def feed(self, text: str) -> list[Part]:
        *lines, self._held = (self._held + text).split("\n")
        return [part for line in lines for part in self._line(line)]

    def finish(self) -> list[Part]:
        return self._line(self._held)

    def _line(self, line: str) -> list[Part]:
        kind, _, rest = line.partition(" ")
        if kind == "think":
            return [ReasoningDelta(rest)]
        if kind != "call":
            return [TextDelta(line)] if line else []
        name, _, arguments = rest.partition(" ")
        at, self._calls = self._calls, self._calls + 1
        pieces = [CallArguments(at, arguments[i : i + 3]) for i in range(0, len(arguments), 3)]
        return [CallStart(at, f"call_{at}", name), *pieces, CallEnd(at)]
