"""Bodies that came lately, so that one that begins in the same bytes is parsed from where they end.

An agent's body is that of its turn before with something added to the list of its messages. Comparing bytes costs
nothing next to parsing them, and what equal bytes say is equal: the items of the list are then the very objects of
the turn before, by which other memories know them too.
"""

from __future__ import annotations

import re
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Any, NamedTuple

import orjson

from gateway.body import check_object, parse_object

_LISTS = ("messages", "input")
_HELD_BYTES = 64 << 20
_HELD_BODIES = 64
_LEAST = 4096  # bytes of a body that is worth it
_ENDS = 6  # items, from the last one back, behind which a body may go on: clients change the end of what they said
_PROBE = 32  # bytes before such a place by which bodies are told apart before they are compared
_LITTLE = 4096  # bytes: where no more are new, no body is looked for that leaves fewer
_SIZE = 4  # times its bytes that what was parsed of a body takes, about
_KNOWN = secrets.token_hex(8)  # stands for what is known of a list: no client can say it
# What structure is made of; a string is one of these, with whatever is in it.
_STRUCTURE = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


class _Body(NamedTuple):
    """`head` are the fields before the list, `items` its items, `ends` the places behind the last few of them."""

    owner: str
    data: bytes
    name: str
    head: dict[str, Any]
    items: list[Any]
    ends: list[tuple[int, int]]  # (number of items, place)


class BodyMemory:
    """Safe to use from several threads. What is found was kept under the same `owner`: time must tell nothing."""

    def __init__(self, max_bytes: int = _HELD_BYTES) -> None:
        self.held_bytes = 0
        self._max_bytes = max_bytes
        self._bodies: deque[_Body] = deque()
        self._glanced: tuple[str, bytes, dict[str, Any]] | None = None
        self._lock = Lock()

    def glance(self, owner: str, body: bytes, most: int) -> dict[str, Any] | None:
        """As `parse`, which then has it, if no more than `most` bytes are new; else None."""
        found = self._find(owner, body) if len(body) >= _LEAST else None
        if len(body) - (found[2] if found is not None else 0) > most:
            return None
        value = self._parse(owner, body, found)
        self._glanced = owner, body, value
        return value

    def parse(self, owner: str, body: bytes) -> dict[str, Any]:
        """As `parse_object` does. Raises `RequestError`. Nobody may change what comes out."""
        glanced = self._glanced
        if glanced is not None and glanced[0] == owner and glanced[1] is body:
            self._glanced = None
            return glanced[2]
        return self._parse(owner, body, self._find(owner, body) if len(body) >= _LEAST else None)

    def _parse(self, owner: str, body: bytes, found: tuple[_Body, int, int] | None) -> dict[str, Any]:
        if len(body) < _LEAST:
            return parse_object(body)
        value = _parse_rest(body, *found) if found is not None else None
        if value is None:
            found, value = None, parse_object(body)
        self._keep(owner, body, value, found)
        return value

    def _find(self, owner: str, body: bytes) -> tuple[_Body, int, int] | None:
        """The longest known beginning: whose it is, how many items it has, and where it ends.

        The latest bodies are looked at first, and the others only where those leave much to be read.
        """
        with self._lock:
            bodies = [known for known in reversed(self._bodies) if known.owner == owner]
        found: tuple[_Body, int, int] | None = None
        reached = 0
        for known in bodies:
            for count, place in reversed(known.ends):
                if place <= reached:
                    break
                if body[place - _PROBE : place] == known.data[place - _PROBE : place] and body.startswith(
                    known.data[:place]
                ):
                    found, reached = (known, count, place), place
                    break
            if found is not None and len(body) - reached <= _LITTLE:
                break
        return found

    def _keep(self, owner: str, body: bytes, value: dict[str, Any], found: tuple[_Body, int, int] | None) -> None:
        kept = _grown(body, value, *found) if found is not None else _read(owner, body, value)
        if kept is None or _SIZE * len(body) > self._max_bytes:
            return
        with self._lock:
            self._bodies.append(kept)
            self.held_bytes += _SIZE * len(body)
            while self.held_bytes > self._max_bytes or len(self._bodies) > _HELD_BODIES:
                dropped = self._bodies.popleft()
                self.held_bytes -= _SIZE * len(dropped.data)


def _parse_rest(body: bytes, known: _Body, count: int, place: int) -> dict[str, Any] | None:
    """A body of which the first `place` bytes, and so the first `count` items, are known."""
    rest = _behind(body, known.name, place)
    if rest is None:
        return None
    check_object(rest, known.name, count)
    return known.head | rest | {known.name: known.items[:count] + rest[known.name]}


def _behind(body: bytes, name: str, place: int) -> dict[str, Any] | None:
    """What a body says behind an item of its list, as an object of its own; None where it has to be parsed whole."""
    try:
        rest: dict[str, Any] = orjson.loads(b'{"%s":["%s"%s' % (name.encode(), _KNOWN.encode(), body[place:]))
    except orjson.JSONDecodeError:
        return None  # the whole body tells what is wrong, and where
    items = rest.get(name)
    if not isinstance(items, list) or items[:1] != [_KNOWN]:
        return None  # a second list of this name is what counts
    rest[name] = items[1:]
    return rest


def _read(owner: str, body: bytes, value: dict[str, Any]) -> _Body | None:
    """What is to be known of a body that was parsed whole; None where its list is not where it can be found."""
    name = next((each for each in _LISTS if isinstance(value.get(each), list)), None)
    if name is None:
        return None
    key = b'"%s"' % name.encode()
    depth, begun, before = 0, 0, b""
    for match in _STRUCTURE.finditer(body):
        token = match.group() if match.end() - match.start() <= len(key) else b""
        if token in (b"[", b"{"):
            depth += 1
            if depth == 2 and token == b"[" and before == key:
                begun = match.end()
                break
        elif token in (b"]", b"}"):
            depth -= 1
        before = token
    if not begun:
        return None
    ends = [begun + end for end in _item_ends(body[begun:])]
    items = value[name]
    if not ends or len(ends) != len(items) or _behind(body, name, ends[-1]) is None:
        return None  # some are no objects, or a second list of this name comes later
    try:
        head = orjson.loads(body[:begun] + b"]}")
    except orjson.JSONDecodeError:
        return None  # it was mended
    del head[name]
    return _Body(owner, body, name, head, items, [*enumerate(ends, 1)][-_ENDS:])


def _grown(body: bytes, value: dict[str, Any], known: _Body, count: int, place: int) -> _Body | None:
    """The same for one that begins as a known one does."""
    items = value[known.name]
    added = [place + end for end in _item_ends(body[place:])]
    if count + len(added) != len(items):
        return None
    ends = [each for each in known.ends if each[0] <= count] + [*enumerate(added, count + 1)]
    return known._replace(data=body, items=items, ends=ends[-_ENDS:])


def _item_ends(data: bytes) -> Iterator[int]:
    """Where the objects of a list end, from a place between two of them on."""
    depth = 0
    for match in _STRUCTURE.finditer(data):
        first = data[match.start()]
        if first == _QUOTE:
            continue
        if first in _OPENING:
            depth += 1
            continue
        depth -= 1
        if depth < 0:
            return  # the list has ended
        if depth == 0:
            yield match.end()


_QUOTE = ord('"')
_OPENING: Sequence[int] = b"[{"
