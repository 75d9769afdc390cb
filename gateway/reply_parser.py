"""Takes an answer apart as it comes: reasoning first, then text, and sections of calls in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from gateway.reply import CallEnd, Part, ReasoningDelta, TextDelta
from gateway.reply_calls import MAX_NAME, Calls, Notation
from gateway.reply_scanner import Markers, Scanner, Steps


class Thinking(NamedTuple):
    """The markers around reasoning. `silent` are others that part an answer and are neither text nor reasoning.

    `anywhere`: reasoning may also come behind text. `header`: each part of an answer begins with one, such as
    ` to=NAME<|message|>`; those that are not markers themselves are passed over.
    """

    open: str
    close: str
    silent: tuple[str, ...] = ()
    anywhere: bool = False
    header: tuple[str, str] = ("", "")

    def opened_by(self, opening: str) -> bool:
        """Whether an answer that goes on from this text begins inside reasoning."""
        return opening.rfind(self.open.rstrip()) > opening.rfind(self.close)


class StreamParser:
    """A `ReplyParser`. Holds back what may still become a marker, blanks that a call may follow, and no more.

    Reasoning stands at the start of an answer or behind a call; its opener elsewhere is text. Calls stand in text, or
    in reasoning, which they end. What begins like a call and has no name is text, or reasoning, from its opener on.
    """

    def __init__(
        self,
        thinking: Thinking | None,
        notation: Notation | None,
        calls: Calls,
        *,
        inside: bool,
        one_call: bool,
        end: str = "",
    ) -> None:
        """`inside`: the prompt has opened the reasoning already. `one_call`: what follows a call is not read.

        Behind `end` a call may follow; the answer is over if none does.
        """
        self.done = False
        self._scanner = Scanner()
        self._thinking, self._notation, self._calls = thinking, notation, calls
        self._one_call = one_call
        self._end = end
        self._over = False
        self._blanks = ""  # of the text, held back
        self._fresh = False  # blanks that come next are only there to part text from what stands before it
        self._said = False  # there is text
        self._thought = False
        self._behind_call = False  # nothing but blanks since a call
        self._parts = self._run(inside)

    def feed(self, text: str) -> list[Part]:
        self._scanner.feed(text)
        return self._resume() if text else []

    def finish(self) -> list[Part]:
        self._scanner.ended = True
        return self._resume()

    def _resume(self) -> list[Part]:
        parts: list[Part] = []
        while not self.done:
            part = next(self._parts, None)
            if part is None:
                break
            parts.append(part)
            self.done = self._one_call and isinstance(part, CallEnd)
        return parts

    def _run(self, inside: bool) -> Steps[None]:
        if inside and self._thinking:
            yield from self._scanner.skip()
            yield from self._scanner.take(self._thinking.open)  # some models open it once more
            yield from self._reason()
        yield from self._pass_header()
        while not self._scanner.exhausted and not self._over:
            yield from self._text()
        if not self._calls.made and not self._fresh:
            yield from self._say("", last=True)
        self.done = self._over

    def _text(self) -> Steps[None]:
        """Text up to what is none and that with it; or to the end."""
        scanner, notation = self._scanner, self._notation
        markers = self._markers()
        if notation is not None and notation.bare and not self._said:
            start = scanner.at
            if (yield from scanner.skip()) == "{":
                if (yield from self._section("")):
                    return
                yield from self._pass_over(start, scanner.at + 1)
            else:
                scanner.at = start
        while True:
            at, marker = markers.find(scanner.text, scanner.at)
            ends = scanner.ended and not marker
            if ends and not (self._behind_call and not scanner.text[scanner.at : at].strip()):
                at = len(scanner.text)  # half a marker is one only where a call has just ended
            yield from self._say(scanner.text[scanner.at : at])
            scanner.at = len(scanner.text) if ends else at + len(marker)
            scanner.drop()
            if marker and marker == self._end:
                yield from self._go_on()
                return
            elif self._thinking and marker == self._thinking.open:
                if not self._said or self._thinking.anywhere:
                    yield from self._reason()
                    return
                yield from self._say(marker)
            elif notation is not None and marker in notation.openers:
                if (yield from self._section(marker)):
                    return
                yield from self._say(marker)
                yield from self._pass_over(scanner.at, scanner.at)
            elif notation is not None and marker in notation.closers:
                if not self._behind_call:
                    yield from self._say(marker)
            elif not marker:
                if scanner.ended:
                    return
                yield None
            else:
                yield from self._pass_header()

    def _go_on(self) -> Steps[None]:
        """Read the calls behind the end of a text; the answer is over if there are none."""
        scanner, notation = self._scanner, self._notation
        yield from scanner.skip()
        opener = (yield from scanner.take(*notation.openers)) if notation is not None else ""
        self._over = not opener or not (yield from self._section(opener))

    def _pass_header(self) -> Steps[None]:
        """Read over the header of a part, unless it is a marker."""
        scanner, thinking = self._scanner, self._thinking
        if thinking is None or not thinking.header[0]:
            return
        if (yield from scanner.next_is(*self._markers().markers)):
            return
        start = scanner.at
        if (yield from scanner.take(thinking.header[0])):
            _, marker = yield from scanner.until(Markers((thinking.header[1],)), MAX_NAME)
            scanner.at = scanner.at if marker else start
            scanner.drop()

    def _markers(self) -> Markers:
        """What is no text here. Closers are left over behind calls that ended early."""
        notation = self._notation
        found = [self._thinking.open, *self._thinking.silent] if self._thinking else []
        found.append(self._end)
        if notation is not None:
            found += [*notation.openers, *(notation.closers if self._calls.made else ())]
        return Markers(found)

    def _section(self, opener: str) -> Steps[bool]:
        """A section of calls, or nothing read."""
        scanner, notation = self._scanner, self._notation
        assert notation is not None
        start = scanner.at
        before = self._calls.made
        yield from notation.section(scanner, self._calls, opener)
        if self._calls.made == before:
            scanner.at = start
            return False
        scanner.drop()
        self._fresh, self._behind_call = not self._said, True
        return True

    def _pass_over(self, start: int, end: int) -> Steps[None]:
        """What was no call is text; all of it where the answer has ended, so that nothing is read again and again."""
        scanner = self._scanner
        scanner.at = len(scanner.text) if scanner.ended else end
        yield from self._say(scanner.text[start : scanner.at])
        scanner.drop()

    def _say(self, text: str, *, last: bool = False) -> Iterator[Part]:
        text = self._blanks + text
        self._blanks = ""
        if self._fresh:
            text = text.lstrip()
            if not text:
                return
            self._fresh = False
        if self._notation is not None and not last:
            kept = text.rstrip()
            self._blanks, text = text[len(kept) :], kept
        if text:
            if text.strip():
                self._said, self._behind_call = True, False
            yield TextDelta(text)

    def _reason(self) -> Steps[None]:
        """Reasoning up to its end, without the blanks around it."""
        scanner, thinking, notation = self._scanner, self._thinking, self._notation
        assert thinking is not None
        openers = () if notation is None else notation.openers
        markers = Markers((thinking.close, *openers))
        held = ""  # blanks that may be the last, or what began like a call
        first = True
        self._fresh = not self._said
        while True:
            at, marker = markers.find(scanner.text, scanner.at)
            if scanner.ended and not marker:
                at = len(scanner.text)
            text = held + scanner.text[scanner.at : at]
            text = text.lstrip() if first else text
            kept = text.rstrip()
            held = text[len(kept) :]
            if kept:
                yield ReasoningDelta(("\n\n" if first and self._thought else "") + kept)
                first, self._thought = False, True
            scanner.at = at + len(marker)
            scanner.drop()
            if marker == thinking.close:
                return
            if marker:
                if (yield from self._section(marker)):
                    return
                held += marker
            elif scanner.ended:
                return
            else:
                yield None
