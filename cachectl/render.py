"""Answers of the worker as aligned text. Numbers stand right, sizes in binary units, ages in one unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from protocol.control import (
    Difference,
    Explanation,
    Removed,
    SlotInfo,
    Stats,
    StoredInfo,
    Transferred,
    TreeNode,
    Verifications,
)
from protocol.sizes import format_size

_DEEPEST = 20  # steps that a tree goes to the right
_STORED = {
    "stored": "can be loaded",
    "incomplete": "of no use: something that it extends is missing",
    "foreign": "of no use: computed with other numerics, and foreign_numerics is off",
}
WATCH_HEADER = (
    f"{'snapshots':>9} {'bytes':>9} {'kv free':>9} {'running':>7} {'waiting':>7} "
    f"{'hit':>6} {'partial':>7} {'miss':>6} {'reused':>8} {'computed':>8} {'evicted':>7} {'stale':>5}"
)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; those that hold numbers, sizes or ages only are set right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [list(columns), *cells]) for i in range(len(columns))]
    right = [all(row[i][:1].isdigit() or row[i] == "-" for row in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in [list(columns), *cells]
    ]
    return "\n".join(lines)


def fields(pairs: Mapping[str, object]) -> str:
    """Names and values, one pair a line."""
    width = max(map(len, pairs), default=0)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in pairs.items())


def age(seconds: float) -> str:
    """A time span in the largest unit that it fills."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds / size:.1f}{unit}"
    return f"{seconds:.1f}s"


def counts(values: Mapping[str, int]) -> str:
    """Counters that are not zero."""
    return ", ".join(f"{name} {count}" for name, count in values.items() if count) or "none"


def stats(answer: Stats) -> str:
    return fields(
        {
            "model": answer.model,
            "phase": answer.phase,
            "uptime": age(answer.uptime_seconds),
            "epoch": answer.epoch,
            "snapshots": f"{answer.snapshots} ({format_size(answer.snapshot_bytes)})",
            "slots": counts(answer.slots),
            "kv memory": f"{format_size(answer.kv_bytes_used)} of {format_size(answer.kv_bytes_total)} used",
            "kv blocks": f"{answer.kv_blocks_free} of {answer.kv_blocks_total} free",
            **_states(answer),
            **_tiers(answer),
            "requests": f"{answer.requests_running} running, {answer.requests_waiting} waiting",
            "ended": counts(answer.requests),
            "lookups": counts(answer.lookups),
            "prompt tokens": counts(answer.cache_tokens),
            "commits": answer.commits,
            "aborts": counts(answer.aborts),
            "evictions": counts(answer.evictions),
            "stale drops": counts(answer.stale_drops),
        }
    )


def _states(answer: Stats) -> dict[str, str]:
    if not answer.states_total:
        return {}
    size = format_size(answer.state_bytes)
    return {"recurrent states": f"{answer.states_free} of {answer.states_total} free, {size} each"}


def _tiers(answer: Stats) -> dict[str, str]:
    shown = {
        each.tier: f"{each.snapshots} snapshots ({each.alone} not on the device), {format_size(each.bytes)} of "
        f"{format_size(each.limit_bytes)}, {each.evictions} parts evicted"
        for each in answer.tiers
    }
    if shown:
        shown["to be copied"] = f"{answer.tier_pending} snapshots"
        shown["copies failed"] = counts(answer.tier_failures)
    return shown


def slots(rows: Iterable[SlotInfo | StoredInfo]) -> str:
    """One line each; tenants are told where there are any. What only slower tiers have is in no slot."""
    rows = list(rows)
    with_tenants = any(row.tenant for row in rows)
    columns = [
        "SLOT",
        "DIGEST",
        "KIND",
        "STATE",
        "TOKENS",
        "MSGS",
        "OWN",
        "TOTAL",
        "HITS",
        "USED",
        "PARENT",
        *(["TENANT"] if with_tenants else []),
        "FLAGS",
    ]
    return table(
        columns,
        [
            [
                _or_dash(row.slot),
                row.digest[:8],
                row.kind,
                row.state,
                row.tokens,
                row.messages,
                format_size(row.own_bytes),
                format_size(row.total_bytes),
                row.hits,
                age(row.used_age_seconds),
                _or_dash(row.parent_slot if isinstance(row, SlotInfo) else None),
                *([row.tenant or "-"] if with_tenants else []),
                _flags(row),
            ]
            for row in rows
        ],
    )


def slot(row: SlotInfo) -> str:
    return fields(
        {
            "slot": row.slot,
            "digest": row.digest,
            "state": row.state,
            "generation": row.generation,
            "kind": row.kind,
            "tokens": row.tokens,
            "messages": row.messages,
            "tenant": row.tenant or "-",
            "blocks": row.blocks,
            "own bytes": f"{format_size(row.own_bytes)} (freed if this snapshot alone goes)",
            "total bytes": format_size(row.total_bytes),
            "tiers": ", ".join(["device", *row.tiers]),
            "pinned": "yes" if row.pinned else "no",
            "busy": f"{row.busy} requests" if row.busy else "no",
            "hits": row.hits,
            "created": f"{age(row.created_age_seconds)} ago",
            "used": f"{age(row.used_age_seconds)} ago",
            "session": row.session or "-",
            "held by a mark": f"for {age(row.hold_seconds)} after its last use" if row.hold_seconds else "no",
            "parent slot": _or_dash(row.parent_slot),
            "children": row.children,
        }
    )


def stored(row: StoredInfo) -> str:
    """What only slower tiers have."""
    return fields(
        {
            "digest": row.digest,
            "state": _STORED[row.state],
            "kind": row.kind,
            "tokens": row.tokens,
            "messages": row.messages,
            "tenant": row.tenant or "-",
            "own bytes": f"{format_size(row.own_bytes)} (freed if this snapshot alone goes)",
            "total bytes": format_size(row.total_bytes),
            "tiers": ", ".join(row.tiers),
            "files": f"{row.name}.*",
            "exact": "yes" if row.exact else "no: computed with other numerics",
            "pinned": "yes" if row.pinned else "no",
            "busy": "is being loaded" if row.busy else "no",
            "hits": row.hits,
            "used": f"{age(row.used_age_seconds)} ago",
        }
    )


def tree(nodes: Iterable[TreeNode]) -> str:
    """Each snapshot under the one that it extends, whose tokens it begins with; very deep ones are told by PARENT."""
    depth: dict[str | int | None, int] = {None: -1}
    rows: list[tuple[int, TreeNode]] = []
    for node in nodes:
        at = depth.get(node.parent_name or node.parent_slot, -1) + 1
        depth[node.name or node.slot] = at
        rows.append((at, node))
    return table(
        ["SNAPSHOT", "PARENT", "TOKENS", "MSGS", "KIND", "HITS", "FLAGS"],
        [
            [
                _branch(at) + (node.digest[:8] if node.slot is None else f"slot {node.slot} {node.digest[:8]}"),
                _or_dash(node.parent_slot),
                node.tokens,
                node.messages,
                node.kind,
                node.hits,
                _flags(node),
            ]
            for at, node in rows
        ],
    )


def _branch(depth: int) -> str:
    return "  " * min(depth - 1, _DEEPEST) + "└ " if depth > 0 else ""


def explanation(answer: Explanation) -> str:
    pairs: dict[str, object] = {
        "request": answer.request_id,
        "state": f"{answer.state}, arrived {age(answer.age_seconds)} ago",
        "outcome": answer.outcome if answer.reason == "none" else f"{answer.outcome} ({answer.reason})",
        "restored": f"{answer.depth} of {answer.prompt_tokens} prompt tokens{_sources(answer)}",
        "from slot": _or_dash(answer.slot),
        "deepest known": answer.deepest_known,
        "boundaries": answer.boundaries,
    }
    if answer.diverged_token is not None:
        message = "" if answer.diverged_message is None else f"message {answer.diverged_message}, "
        pairs["diverged"] = f"{message}token {answer.diverged_token}"
    pairs |= {
        "committed at": ", ".join(map(str, answer.committed)) or "-",
        "answer": f"{answer.completion_tokens} tokens",
        "queue": f"{answer.queue_seconds * 1000:.1f} ms",
        "prefill": f"{answer.prefill_seconds * 1000:.1f} ms",
        "decode": f"{answer.decode_seconds * 1000:.1f} ms",
    }
    return fields(pairs)


def _sources(answer: Explanation) -> str:
    parts = [f"{tokens} from {tier}" for tier, tokens in answer.sources.items()]
    parts += [] if answer.exact else ["not exact: computed with other numerics"]
    return f" ({', '.join(parts)})" if parts else ""


def difference(answer: Difference, name_a: str, name_b: str) -> str:
    message = "" if answer.message is None else f" in message {answer.message}"
    parted = bool(answer.a.tokens_after and answer.b.tokens_after)
    ends = "they part" if parted else "one ends" if answer.a.tokens != answer.b.tokens else "both end"
    sides = [(name_a, answer.a), (name_b, answer.b)]
    rows = [
        [
            name,
            _or_dash(side.slot),
            side.tokens,
            side.messages,
            side.tokens_after,
            ", ".join(map(str, side.boundaries_after)) or "-",
        ]
        for name, side in sides
    ]
    return "\n".join(
        [
            f"equal up to token {answer.common_tokens}{message}, where {ends}; "
            f"the last boundary of both is at {answer.common_boundary}",
            table(["CONVERSATION", "SLOT", "TOKENS", "MSGS", "AFTER", "BOUNDARIES AFTER"], rows),
        ]
    )


def evicted(answer: Removed) -> str:
    verb = "would evict" if answer.dry_run else "evicted"
    went = ", ".join(map(str, answer.removed)) or ("none in slots" if answer.tier_snapshots else "nothing")
    lines = [f"{verb} {went}: {format_size(answer.freed_bytes)} back{_from_tiers(answer)}"]
    if answer.kept:
        lines.append(f"pinned or being loaded, left alone: {len(answer.kept)} of slower tiers")
    if answer.busy:
        lines.append(f"busy or pinned, left alone: {', '.join(map(str, answer.busy))}")
    return "\n".join(lines)


def flushed(answer: Removed) -> str:
    verb = "would flush" if answer.dry_run else "flushed"
    back = f"{format_size(answer.freed_bytes)} back{_from_tiers(answer)}"
    return f"{verb} {len(answer.removed)}, busy {len(answer.busy)}: {back}"


def _from_tiers(answer: Removed) -> str:
    """Told where there was anything."""
    if not (answer.tier_snapshots or answer.tier_bytes):
        return ""
    more = f"{answer.tier_snapshots} more snapshots, " if answer.tier_snapshots else ""
    return f"; in slower tiers {more}{format_size(answer.tier_bytes)} back"


def transferred(answer: Transferred, verb: str) -> str:
    lines = [f"{verb} {answer.files} files, {format_size(answer.bytes)}"]
    if answer.refused:
        lines.append(f"left out: {counts(answer.refused)}")
    return "\n".join(lines)


def verifications(answer: Verifications) -> str:
    return (
        f"verified {answer.verified}, mismatched {answer.mismatched}, "
        f"skipped {answer.skipped}, pending {answer.pending}"
    )


def watch_line(now: Stats, before: Stats) -> str:
    """The state now, and what was counted since `before`."""
    asked = {outcome: _outcome(now, outcome) - _outcome(before, outcome) for outcome in ("hit", "partial", "miss")}
    computed = now.cache_tokens.get("computed", 0) - before.cache_tokens.get("computed", 0)
    reused = sum(now.cache_tokens.values()) - sum(before.cache_tokens.values()) - computed
    free_bytes = now.kv_bytes_total - now.kv_bytes_used
    return (
        f"{now.snapshots:>9} {format_size(now.snapshot_bytes):>9} {format_size(free_bytes):>9} "
        f"{now.requests_running:>7} {now.requests_waiting:>7} "
        f"{asked['hit']:>6} {asked['partial']:>7} {asked['miss']:>6} {reused:>8} {computed:>8} "
        f"{sum(now.evictions.values()) - sum(before.evictions.values()):>7} "
        f"{sum(now.stale_drops.values()) - sum(before.stale_drops.values()):>5}"
    )


def _outcome(answer: Stats, outcome: str) -> int:
    return sum(count for key, count in answer.lookups.items() if key.split("/")[0] == outcome)


def _flags(row: SlotInfo | StoredInfo | TreeNode) -> str:
    names = [name for name, is_set in (("pinned", row.pinned), ("busy", bool(row.busy))) if is_set]
    return " ".join([*names, *row.tiers])


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
