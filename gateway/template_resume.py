"""Renders that go on from one of before, where they have the same beginning.

An agent sends its whole history each turn, and most templates write each message in a round of one loop. What such a
round may depend on is known (`template_reads`): its own message and its neighbours, the variables at the loop's
start, and what rounds before it wrote into namespaces. A render that comes to its loop with all of that as it was in
a render of before takes that one's text and goes on behind the last message they share. Nothing is guessed: where
anything differs, the rounds are rendered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jinja2.environment import Environment
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.utils import Namespace

from gateway.recent import Recent
from gateway.template_reads import CALLABLE, Limit, Reads

_HELD_BYTES = 32 << 20
_TRIED = 8  # messages, from the last one back, behind which a render may go on
_KEYS = 4  # messages, from the last one back, by which a render can be found
_LEAST = 2  # messages that are worth it
_ITEM_BYTES = 400  # of what is kept of a message besides its text, about
_SCALARS = (str, int, bool, type(None))
_GONE = object()
_ORDER: dict[str, Callable[[Any, Any], Any]] = {
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "eq": operator.eq,
    "ne": operator.ne,
}

Spans = list[tuple[int, int]]  # (owner, length)
_Key = tuple[bool, int, int]
_Field = tuple[str, str]


class Rest(list[Any]):
    """The items of a loop from the `skipped`th on; `before` is the one before them."""

    def __init__(self, items: Sequence[Any], skipped: int) -> None:
        super().__init__(items[skipped:])
        self.skipped = skipped
        self.before = items[skipped - 1]


def loop_context(items: Any, *arguments: Any) -> LoopContext:
    """What templates know as `loop`. Behind what was skipped it counts on from there."""
    loop = LoopContext(items, *arguments)
    if type(items) is Rest:
        loop.index0 = items.skipped - 1
        loop._current = items.before
    return loop


class _Round(NamedTuple):
    """Where a round began: in the text, in the spans (how many, and how long the last one was), and with what."""

    at: int
    spans: int
    last: int
    written: dict[_Field, Any]


class _Look(NamedTuple):
    """Something that a round looked up."""

    round: int
    name: str
    index: Any
    found: Any


class _Record(NamedTuple):
    """A render of before, from its loop's first round on. `values` are the variables it came with."""

    items: list[Any]
    owners: list[int]
    values: dict[str, Any]
    rounds: list[_Round]
    looks: list[_Look]
    spans: Spans
    text: str


class Written(NamedTuple):
    """What a render takes over: all text so far, and its spans; `text` is what it has not written itself."""

    text: str
    spans: Spans


class ResumableLoop:
    """The loop of one template, and its renders of late. Safe to use from several threads."""

    def __init__(self, reads: Reads, number: int, environment: Environment) -> None:
        """`number` is the loop's among all of the template."""
        self.reads = reads
        self.number = number
        self.environment = environment
        self._recent: Recent[_Key, _Record] = Recent(_HELD_BYTES)

    def find(self, reply: bool, items: Sequence[Any]) -> _Record | None:
        """A render with the same message at the same place, near the end."""
        for count in range(len(items), max(len(items) - _TRIED, _LEAST), -1):
            record = self._recent.get((reply, count, id(items[count - 1])))
            if record is not None:
                return record
        return None

    def keep(self, reply: bool, record: _Record) -> None:
        count = len(record.items)
        keys = [(reply, at, id(record.items[at - 1])) for at in range(max(count - _KEYS, 0) + 1, count + 1)]
        self._recent.keep(record, keys, 4 * len(record.text) + _ITEM_BYTES * count)


class Course:
    """One render on its way through the loop."""

    def __init__(self, loop: ResumableLoop, reply: bool) -> None:
        self.loop = loop
        self._reply = reply
        self._items: list[Any] | None = None
        self._owners: list[int] = []
        self._values: dict[str, Any] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._rounds: list[_Round] = []
        self._looks: list[_Look] = []
        self._skipped = 0

    def arrive(
        self, items: object, owners: dict[int, int], variables: dict[str, Any], pieces: list[str], spans: Spans
    ) -> Written | None:
        """The render comes to the loop, with `pieces` of text written: what it can take over."""
        if not isinstance(items, list) or not items:
            return None
        self._items = items
        self._owners = [owners.get(id(item), -1) for item in items]
        reads = self.loop.reads
        self._namespaces = {name: value for name, value in variables.items() if type(value) is Namespace}
        of_spaces = {
            (name, field)
            for name, field in (*reads.fields, *reads.written, *((each.name, each.field) for each in reads.limits))
            if name in self._namespaces
        }
        self._values = {name: value for name, value in variables.items() if name not in self._namespaces}
        self._values |= {
            f"{name}.{field}": _field(self._namespaces[name], field) for name, field in sorted(of_spaces)
        }
        # A namespace that is read in another way than by its fields can change unseen.
        if any(name in self._namespaces for name in (*reads.names, *reads.indexed)):
            self._items = None
            return None
        record = self.loop.find(self._reply, items)
        if record is None or record.spans[: len(spans)] != spans:
            return None
        return self._resumed(record, "".join(pieces), len(spans))

    def _resumed(self, record: _Record, before: str, spans: int) -> Written | None:
        items = self._items
        assert items is not None
        start = record.rounds[0]
        if (start.at, start.spans) != (len(before), spans) or not record.text.startswith(before):
            return None
        count = self._shared(record, items)
        if count < _LEAST:
            return None
        end = record.rounds[count]
        for (name, field), value in end.written.items():
            _set(self._namespaces[name], field, value)
        self._rounds = record.rounds[:count]
        self._looks = [look for look in record.looks if look.round < count]
        self._skipped = count
        taken = record.spans[: end.spans]
        if taken:
            taken[-1] = taken[-1][0], end.last
        return Written(record.text[start.at : end.at], taken)

    def _shared(self, record: _Record, items: list[Any]) -> int:
        """How many rounds would do again what they did."""
        reads = self.loop.reads
        count = 0
        for one, other in zip(record.items, items, strict=False):
            if one is not other:
                break
            count += 1
        # Whether a message is the last one is seen by whoever looks ahead.
        count = min(count - reads.ahead, len(record.rounds) - 1)
        if count < _LEAST or record.owners[:count] != self._owners[:count]:
            return 0
        if record.values.keys() != self._values.keys() or not self._same_values(record):
            return 0
        for limit in reads.limits:
            count = min(count, self._until(limit, record, count))
        for look in record.looks:
            if look.round < count and not self._finds(look):
                count = look.round
        return count

    def _same_values(self, record: _Record) -> bool:
        reads = self.loop.reads
        compared = reads.fields | reads.written
        limited = {f"{each.name}.{each.field}" for each in reads.limits if (each.name, each.field) not in compared}
        for name, value in self._values.items():
            if name in limited or (name in reads.indexed and name not in reads.names):
                continue
            if not _same(name, record.values[name], value):
                return False
        return True

    def _until(self, limit: Limit, record: _Record, count: int) -> int:
        """The number of the first round that a limit decides otherwise now."""
        name = f"{limit.name}.{limit.field}"
        if name not in self._values:  # it is no namespace: compared as a whole
            return count
        then, now = record.values[name], self._values[name]
        if _same(name, then, now):
            return count
        if type(then) is not int or type(now) is not int:
            return 0
        decides = _ORDER[limit.operator]
        rounds = range(limit.first, count + limit.first)
        return next((at - limit.first for at in rounds if decides(at, then) != decides(at, now)), count)

    def _finds(self, look: _Look) -> bool:
        value = self._values[look.name]
        if not isinstance(value, list | tuple | dict):
            return False
        found = self.loop.environment.getitem(value, look.index)
        return found is look.found or (isinstance(found, Undefined) and isinstance(look.found, Undefined))

    def rest(self, items: Any) -> Any:
        """What is left of the loop."""
        return Rest(self._items, self._skipped) if self._items is items and self._skipped else items

    def look_up(self, name: str, value: Any, index: Any) -> Any:
        found = self.loop.environment.getitem(value, index)
        self._looks.append(_Look(len(self._rounds) - 1, name, index, found))
        return found

    def begin_round(self, at: int, spans: Spans) -> None:
        """A round begins, `at` so many characters of text."""
        if self._items is None:
            return
        reads = self.loop.reads
        written = {
            (name, field): _field(self._namespaces[name], field)
            for name, field in reads.written
            if name in self._namespaces
        }
        if not all(type(value) in _SCALARS or value is _GONE for value in written.values()):
            self._items = None  # it is not known to stay as it is
            return
        self._rounds.append(_Round(at, len(spans), spans[-1][1] if spans else 0, written))

    def end(self, text: str, spans: Spans) -> None:
        """The render is done: later ones may go on from it."""
        if self._items is not None and len(self._rounds) > _LEAST:
            kept = _Record(self._items, self._owners, self._values, self._rounds, self._looks, spans, text)
            self.loop.keep(self._reply, kept)


def _field(namespace: Namespace, field: str) -> Any:
    try:
        return getattr(namespace, field)
    except AttributeError:
        return _GONE


def _set(namespace: Namespace, field: str, value: Any) -> None:
    if value is not _GONE:
        namespace[field] = value


def _same(name: str, one: Any, other: Any) -> bool:
    """Whether two values of a variable are the same to whatever a template does with them."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in _SCALARS:
        return bool(one == other)
    if isinstance(one, Undefined):
        return True
    if kind is Macro:
        return bool(one.name == other.name)
    if kind in (list, tuple):
        return len(one) == len(other) and all(_same(name, *pair) for pair in zip(one, other, strict=True))
    if callable(one) and name not in CALLABLE:
        return False  # what it gives may depend on the time
    return one is other
