"""What a lookup found, and why it was not more: the words of `Explaining misses` in one place."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from protocol.messages import Boundary, Outcome, Reason
from worker.snapshot_index import Common, Node, Part

_END = attrgetter("end")
MIN_COMMON_TOKENS = 16  # what any two prompts of one template may share


@dataclass(frozen=True, slots=True)
class Lookup:
    """Where a request may start: `slot` at `generation` holds its first `depth` tokens; None and 0 for a miss.

    `deepest_known` is the deepest boundary of this prompt that was ever computed, below its last token or not.
    `diverged_token` is the first token that differs from the closest stored conversation, where one shares clearly
    more than `depth`; `diverged_message` is the index of the client's message it lies in, if it lies in one.
    """

    slot: int | None
    generation: int
    depth: int
    outcome: Outcome
    reason: Reason
    deepest_known: int
    diverged_message: int | None
    diverged_token: int | None


def explain(
    boundaries: Sequence[Boundary],
    total_tokens: int,
    chain: Sequence[Node],
    found: Part | None,
    refused: int,
    common: Common,
    refusal: Reason = "stale",
) -> Lookup:
    """The outcome of a lookup that walked `chain` and may restore `found`.

    `refused` is the deepest boundary that was found and then refused, for the reason `refusal`; 0 if there was none.
    """
    depth = found.tokens if found else 0
    limit = total_tokens - 1  # at least one token must be computed
    reached = bisect_right(chain, depth, key=_END)
    begun = chain[reached - 1].end if reached else 0  # depth itself, but inside a message
    lost = [node for node in chain[reached:] if node.end <= limit]
    reason: Reason
    if refused > depth and (not lost or refused >= lost[-1].end):
        reason = refusal
    elif lost:
        reason = lost[-1].absent_reason
    elif chain and chain[-1].end > depth:
        reason = "longer_than_prompt"
    elif chain and found:
        reason = "none"
    elif not boundaries:
        reason = "no_boundary"
    elif common.tokens < MIN_COMMON_TOKENS:
        reason = "cold"
    else:
        reason = "longer_than_prompt" if common.stored_longer else "diverged"
    if reason == "diverged" or (common.differs and common.tokens >= begun + MIN_COMMON_TOKENS):
        diverged: int | None = common.tokens
    else:
        diverged = None
    return Lookup(
        slot=found.node.slot if found else None,
        generation=found.node.generation if found else 0,
        depth=depth,
        outcome=("hit" if reason == "none" else "partial") if found else "miss",
        reason=reason,
        deepest_known=chain[-1].end if chain else 0,
        diverged_message=None if diverged is None else message_at(boundaries, diverged),
        diverged_token=diverged,
    )


def message_at(boundaries: Sequence[Boundary], token: int) -> int | None:
    """Index of the client's message that `token` lies in; None in tools before any message, or after the last."""
    before = 0
    for boundary in boundaries:
        if boundary.end > token:
            in_tools = boundary.kind == "head" and boundary.messages == 0
            return None if in_tools else before
        before = boundary.messages
    return None
