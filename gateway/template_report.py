"""What a model's template makes of a conversation: its boundaries, and whether each turn extends the one before."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from gateway.conversation import Conversation
from gateway.prompts import PromptMaker, Trace
from gateway.text_memory import common_prefix
from protocol.errors import RequestError
from protocol.messages import BoundaryKind


@dataclass(frozen=True, slots=True)
class BoundaryLine:
    """One boundary, kept at a token position or dropped (None) for a reason. `message` is None for cuts of no message.

    `exact`: whether the tokens before it are those of a render of so many messages; None where that render is no
    prefix of the prompt, or refused.
    """

    position: int | None
    message: int | None
    kind: BoundaryKind
    reason: str | None = None
    exact: bool | None = None


@dataclass(frozen=True, slots=True)
class TurnLine:
    """A request of `messages` messages. `stable`: the next one starts with it up to its last boundary, and keeps that.

    `whole`: it starts with all of it, the start of the answer included. None for the last turn.
    """

    messages: int
    tokens: int
    boundary: int | None
    stable: bool | None = None
    whole: bool | None = None
    differs_at: int | None = None  # token position
    differs_in: int | None = None  # message index


@dataclass(frozen=True, slots=True)
class Report:
    """One conversation. `refused` is the template's reason where it takes none of it."""

    name: str
    roles: tuple[str, ...]
    tokens: int = 0
    boundaries: tuple[BoundaryLine, ...] = ()
    turns: tuple[TurnLine, ...] = ()
    refused: str | None = None

    @property
    def unstable(self) -> TurnLine | None:
        """The first turn that the next one does not extend."""
        return next((turn for turn in self.turns if turn.stable is False), None)

    @property
    def wrong(self) -> BoundaryLine | None:
        """The first boundary that is not where it says; there must be none."""
        return next((line for line in self.boundaries if line.exact is False), None)


def report(maker: PromptMaker, name: str, conversation: Conversation) -> Report:
    """Look at a conversation and at every turn in it."""
    roles = tuple(message.role for message in conversation.messages)
    try:
        trace = maker.trace(conversation)
        turns = [(count, maker.trace(_first(conversation, count))) for count in _turns(roles)]
    except RequestError as error:
        return Report(name, roles, refused=str(error))
    lines = sorted(_boundaries(maker, conversation, trace), key=_order)
    following = [trace for _, trace in turns[1:]] + ([trace] if turns and turns[-1][0] < len(roles) else [])
    pairs = zip(turns, [*following, None], strict=False)
    return Report(
        name,
        roles,
        len(trace.token_ids),
        tuple(lines),
        tuple(_turn(count, trace, after) for (count, trace), after in pairs),
    )


def _first(conversation: Conversation, count: int) -> Conversation:
    return replace(conversation, messages=conversation.messages[:count])


def _turns(roles: tuple[str, ...]) -> Iterator[int]:
    """Message counts at which an answer was asked for: before each answer, and at the end."""
    for count in range(1, len(roles) + 1):
        if roles[count - 1] != "assistant" and (count == len(roles) or roles[count] == "assistant"):
            yield count


def _boundaries(maker: PromptMaker, conversation: Conversation, trace: Trace) -> Iterator[BoundaryLine]:
    kinds = {cut.end: cut.kind for cut in trace.cuts}
    for index, end in enumerate(trace.ends):
        if isinstance(end, str):
            yield BoundaryLine(None, index, "message", end)
        else:
            yield BoundaryLine(end, index, kinds[end], None, _exact(maker, conversation, index, end, trace))
    owned = set(trace.ends)
    for cut in trace.cuts:
        if cut.end not in owned:
            yield BoundaryLine(cut.end, None, cut.kind)


def _exact(maker: PromptMaker, conversation: Conversation, index: int, end: int, trace: Trace) -> bool | None:
    try:
        text, ids = maker.history(_first(conversation, index + 1))
    except RequestError:
        return None
    if not (trace.text + trace.suffix).startswith(text):
        return None
    return len(ids) == end and trace.token_ids[:end] == ids


def _order(line: BoundaryLine) -> tuple[int, int]:
    """By message; a cut of none stands before the message it lies in or before."""
    return (line.message if line.message is not None else -1, line.position or 0)


def _turn(count: int, trace: Trace, after: Trace | None) -> TurnLine:
    last = trace.cuts[-1].end if trace.cuts else None
    line = TurnLine(count, len(trace.token_ids), last)
    if after is None:
        return line
    following = after.text + after.suffix
    same = common_prefix(trace.text, following)
    kept = same == len(trace.text) and trace.cuts == after.cuts[: len(trace.cuts)]
    line = replace(line, stable=kept, whole=kept and following.startswith(trace.text + trace.suffix))
    if kept:
        return line
    inside = next((cut.messages for cut in reversed(trace.text_cuts) if cut.end <= same), 0)
    common = _common(trace.token_ids, after.token_ids)
    return replace(line, differs_at=common, differs_in=min(inside, count - 1))


def _common(one: array[int], other: array[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def verdict(reports: Iterable[Report]) -> tuple[int, str]:
    """Exit code and one line: 0 usable and prefix-stable, 1 usable but rewrites history, 2 unusable."""
    taken: list[Report] = []
    refused: list[Report] = []
    for each in reports:
        (taken if each.refused is None else refused).append(each)
    if not taken:
        return 2, f"unusable: {refused[0].refused}" if refused else "unusable"
    for each in taken:
        if (line := each.wrong) is not None:
            return 2, f"unusable: in {each.name!r} the boundary of message {line.message} is not where it ends"
    for each in taken:
        if (turn := each.unstable) is not None:
            return 1, f"usable, but rewrites history: {where(each, turn)}"
    note = f" (refuses: {', '.join(each.name for each in refused)})" if refused else ""
    return 0, f"usable and prefix-stable{note}"


def where(each: Report, turn: TurnLine) -> str:
    """Which turn is not extended by the next one, and the first difference."""
    return (
        f"in {each.name!r} the prompt of {turn.messages} messages is no prefix of the next turn's; "
        f"first difference at token {turn.differs_at}, in message {turn.differs_in}"
    )
