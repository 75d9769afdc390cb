"""Verbs of the control socket and the shape of their answers (the `data` of a `Reply`, as plain JSON).

| verb | args | data |
|---|---|---|
| `health` | | `Heartbeat` fields |
| `metrics` | | `{"text": Prometheus exposition of the worker}` |
| `stats` | | `Stats` |
| `list` | `cursor` (0), `limit` (100) | `{"slots": [SlotInfo], "next_cursor": int or null, "total": int}` |
| `stored` | `cursor` (""), `limit` (100), `tier` | `{"stored": [StoredInfo], ...}`, else as `list`; cursors are str |
| `show` | `slot` or `name` | `SlotInfo` or `StoredInfo` |
| `tree` | `stored` (false) | `{"nodes": [TreeNode]}`, each after the one it extends, siblings by length |
| `explain` | `request_id` | `Explanation` |
| `diff` | `a`, `b`: a slot (int) or a request id (str) each | `Difference` |
| `recent` | `limit` (50) | `{"requests": [Explanation]}`, the last ones to arrive or end first |
| `events` | `after` (those to come), `limit` (500) | `EventPage` |
| `evict` | `slots` [int], `generations` ([int], one a slot), `names` [str], `tier`, `dry_run` | `Removed` |
| `flush` | `dry_run` | `Removed`, of all tiers; busy snapshots go when released |
| `verify` | | `Verifications` |
| `pin` | `slot` or `name`, or `request_id` and `head` (false) | `SlotInfo` or `StoredInfo` |
| `unpin` | `slot` or `name` | `SlotInfo` or `StoredInfo` |
| `export` | `folder`, `slots` [int], `names` [str] | `Transferred`; the worker itself writes there |
| `import` | `folder` | `Transferred` |
| `transfer` | | `Transferred`: how it stands with the last `export` or `import` |

A slot is used again for other snapshots, and what was read of it may be out of date. So what is chosen by what was
read goes with the generations it had: `evict` passes over slots that have been written since or are empty. `pin` of a
request finds the deepest boundary it has reached, or the head of its conversation, by itself.

What only slower tiers have is in no slot and goes by its name, which no other boundary ever has. `stored` lists that,
or with `tier` all that this one holds, on the device too or not; `evict` with `tier` removes `names` from there alone.

A refused command (unknown or busy slot, unknown request, bad args) has `error` set and no data.
Reading never touches recency.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from protocol.messages import Outcome, Reason

VERBS = (
    "health",
    "metrics",
    "stats",
    "list",
    "stored",
    "show",
    "tree",
    "explain",
    "diff",
    "recent",
    "events",
    "evict",
    "flush",
    "verify",
    "pin",
    "unpin",
    "export",
    "import",
    "transfer",
)


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """One slot that holds or is getting a snapshot. Ages are in seconds; `blocks` counts shared ones too."""

    slot: int
    state: str
    generation: int
    digest: str  # 8 hex digits: enough to tell apart, too short to be the key
    tenant: str
    kind: str
    tokens: int
    messages: int
    blocks: int
    own_bytes: int  # freed if this snapshot alone goes
    total_bytes: int  # held if it were the only one
    pinned: bool
    busy: int  # requests restoring from it now
    hits: int
    created_age_seconds: float
    used_age_seconds: float
    parent_slot: int | None  # the nearest shallower snapshot of the same conversation
    children: int
    session: str = ""  # as the client's hint has it, see `Hint`
    hold_seconds: float = 0.0  # after its last use, by the client's mark; 0 where there is none
    tiers: list[str] = field(default_factory=list)  # slower ones that have it as well


StoredState = Literal["stored", "incomplete", "foreign"]


@dataclass(frozen=True, slots=True)
class StoredInfo:
    """A boundary that slower tiers keep for its own sake: what nothing there extends, or where models recur, a state.

    `state` is `incomplete` where something on the way to it is missing, and `foreign` where it was computed with other
    numerics and `foreign_numerics` is off: neither can be restored.
    """

    name: str  # of its files on disk, up to the first dot
    state: StoredState
    digest: str  # as in `SlotInfo`
    tenant: str
    kind: str
    tokens: int
    messages: int
    own_bytes: int  # freed if this one alone goes, in all tiers
    total_bytes: int  # of all that it is restored from
    pinned: bool
    busy: int  # 1 while it is being loaded
    hits: int  # since the worker started
    used_age_seconds: float
    tiers: list[str]  # that have what is its own
    exact: bool  # False where any of it was computed with other numerics
    slot: int | None = None  # on the device


@dataclass(frozen=True, slots=True)
class TreeNode:
    """A snapshot in the tree. A flat list of them can be as deep as a conversation is long; nested JSON cannot.

    Each has a slot, or else a `name` as in `StoredInfo`; so has its parent, if it has one.
    """

    slot: int | None
    parent_slot: int | None
    level: int  # forks above it: a chain stays on one level
    digest: str
    kind: str
    tokens: int
    messages: int
    hits: int
    pinned: bool
    busy: int
    name: str = ""
    parent_name: str = ""
    tiers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TierInfo:
    """What one slower tier holds. `snapshots` are counted as `StoredInfo` has them."""

    tier: str  # host or disk
    bytes: int
    limit_bytes: int
    snapshots: int
    evictions: int
    alone: int = 0  # of `snapshots`, those that are not on the device


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the worker started, and what is held now. Bytes held equal bytes counted."""

    epoch: str
    phase: str
    model: str
    uptime_seconds: float
    slots: dict[str, int]  # by state
    snapshots: int
    snapshot_bytes: int
    kv_blocks_total: int
    kv_blocks_free: int
    kv_bytes_total: int
    kv_bytes_used: int
    lookups: dict[str, int]  # "outcome/reason" -> count
    cache_tokens: dict[str, int]  # source -> tokens
    commits: int
    aborts: dict[str, int]
    evictions: dict[str, int]
    stale_drops: dict[str, int]
    requests_running: int
    requests_waiting: int
    requests: dict[str, int]  # finished, cancelled, failed
    states_total: int = 0  # recurrent states that sequences and snapshots can have; 0 where the model has none
    states_free: int = 0
    state_bytes: int = 0  # of one
    tiers: list[TierInfo] = field(default_factory=list)  # slower than the device, the fastest first
    tier_pending: int = 0  # snapshots that are still to be copied there
    tier_failures: dict[str, int] = field(default_factory=dict)  # by cause


@dataclass(frozen=True, slots=True)
class Removed:
    """What `evict` or `flush` did, or would do."""

    removed: list[int]
    busy: list[int]  # in use or pinned: left alone (evict) or going when released (flush, not pinned)
    freed_bytes: int
    dry_run: bool
    tier_bytes: int = 0  # freed in slower tiers
    tier_snapshots: int = 0  # that went and were in no slot
    names: list[str] = field(default_factory=list)  # by which those were asked for
    kept: list[str] = field(default_factory=list)  # names of what is pinned or being loaded: left alone


@dataclass(frozen=True, slots=True)
class Transferred:
    """What `export` wrote, or `import` took in. A snapshot is several files, which it may share with others."""

    files: int
    bytes: int
    refused: dict[str, int]  # files that were left, by cause; `known` ones are there already
    pending: bool = False  # it is still under way: `transfer` tells the rest


@dataclass(frozen=True, slots=True)
class Verifications:
    """Hits that were computed again (`--verify-hits`): with equal bits, with other bits, not at all, and to come."""

    verified: int
    mismatched: int
    skipped: int
    pending: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why one request started where it did. Times in seconds; `age_seconds` since it arrived."""

    request_id: str
    age_seconds: float
    outcome: Outcome
    reason: Reason
    depth: int
    prompt_tokens: int
    boundaries: int
    slot: int | None  # restored from
    deepest_known: int  # deepest boundary of this prompt that was ever computed
    diverged_message: int | None
    diverged_token: int | None
    committed: list[int]  # positions kept by this request
    state: str  # queued, prefill, decode, finished, cancelled, failed
    completion_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    sources: dict[str, int] = field(default_factory=dict)  # of `depth` tokens, those that slower tiers had
    exact: bool = True  # False if it started from what was computed with other numerics


@dataclass(frozen=True, slots=True)
class Side:
    """One of two stored conversations, up to the deepest boundary known of it, and what follows the common part."""

    slot: int | None  # that holds this very boundary
    tenant: str
    tokens: int
    messages: int
    tokens_after: int
    boundaries_after: list[int]


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two stored conversations part: the first token that differs is `common_tokens`, if there is one.

    `message` is the index of the client's message in which they part; None in tools or where neither goes on.
    """

    common_tokens: int
    common_boundary: int  # the deepest one that both have
    message: int | None
    a: Side
    b: Side


# Those of the second row happen in slower tiers: to parts of snapshots, but for a `load`, which makes one.
EventKind = Literal[
    "commit", "evict", "stale", "hit", "partial", "miss",
    "write", "load", "drop", "fail",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One thing that happened to the cache. `number` rises by one from each to the next of one epoch.

    `cause` is that of an eviction, a drop, a failure or a stale drop, and the reason of a lookup that was no hit.
    `tokens` is the length of the snapshot; of a lookup, the depth restored. `tier` is where it happened; of an eviction
    the fastest tier that still has the snapshot, or "" where it is gone for good.
    """

    number: int
    time: float  # seconds since 1970
    kind: EventKind
    cause: str
    slot: int | None
    digest: str  # 8 hex digits
    tokens: int
    request_id: str  # of a lookup
    tier: str = ""
    part: str = ""  # kv or state


@dataclass(frozen=True, slots=True)
class EventPage:
    """The events after a number, oldest first. `last` is what to ask after next.

    `missed` events between the two have been forgotten by now. Numbers mean nothing in another epoch.
    """

    epoch: str
    events: list[CacheEvent]
    last: int
    missed: int
