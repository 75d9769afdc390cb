"""From who wrote which text to positions where messages end.

```
| head: tools, system |  message  |  message  | ... |  last message  | generation suffix |
                      ^           ^           ^                      ^  boundaries; never one behind the last
```
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from gateway.template import Span
from protocol.messages import BoundaryKind

INTERIOR_TOKENS = 8192  # a longer message gets a boundary each so many tokens; a multiple of 64
COMPLETION_TOKENS = 512  # the same for plain prompts, which have no messages


class Cut(NamedTuple):
    """A boundary before its digest is known. `end` counts characters, or tokens once the text is encoded."""

    end: int
    kind: BoundaryKind
    messages: int


def message_ends(spans: Sequence[Span], count: int) -> list[int | None]:
    """For each of `count` messages the text position where it ends; text that nobody wrote may follow.

    None where there is no such position: text of this or an earlier message comes after text of a later one, or
    no message wrote anything. A message that wrote nothing ends where the one before it does.
    """
    first = [-1] * (count + 1)  # first[i]: start of the first text of message i or a later one
    for span in reversed(spans):
        if span.owner >= 0:
            first[span.owner] = span.start
    last_end = 0
    for span in spans:
        if span.owner >= 0:
            last_end = span.end
    if not last_end:
        return [None] * count
    first[count] = last_end
    for at in range(count - 1, -1, -1):
        first[at] = first[at + 1] if first[at] < 0 else min(first[at], first[at + 1])
    ends: list[int | None] = []
    latest = [0] * count  # end of the last text of each message
    for span in spans:
        if span.owner >= 0:
            latest[span.owner] = span.end
    written = 0
    for at in range(count):
        written = max(written, latest[at])
        end = written or first[at + 1]  # what is written for all before the first one is theirs
        ends.append(end if end <= first[at + 1] else None)
    return ends


def merge(cuts: Iterable[Cut]) -> list[Cut]:
    """Cuts in rising order, one a position. The one that stands keeps the largest count, and is head if any was."""
    cuts = list(cuts)
    if all(one.end < other.end for one, other in pairwise(cuts)):
        return cuts
    merged: list[Cut] = []
    for cut in sorted(cuts, key=lambda cut: (cut.end, cut.messages)):
        if merged and merged[-1].end == cut.end:
            before = merged.pop()
            kind: BoundaryKind = "head" if "head" in (before.kind, cut.kind) else "message"
            cut = Cut(cut.end, kind, max(before.messages, cut.messages))
        merged.append(cut)
    return merged


def with_interior(cuts: Sequence[Cut], every: int = INTERIOR_TOKENS) -> list[Cut]:
    """Add a cut each `every` tokens, counted from the start of each message longer than that."""
    filled: list[Cut] = []
    start, messages = 0, 0
    for cut in cuts:
        if cut.end - start > every:
            filled += [Cut(at, "interior", messages) for at in range(start + every, cut.end, every)]
        filled.append(cut)
        start, messages = cut.end, cut.messages
    return filled


def completion_cuts(tokens: int) -> list[Cut]:
    """The cuts of a plain prompt: one every 512 tokens and one at its end."""
    return with_interior([Cut(tokens, "message", 1)], COMPLETION_TOKENS) if tokens else []
