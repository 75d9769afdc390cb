"""What `top` shows: how full things are as bars, what just happened as rates, and the snapshots used last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cachectl import render
from protocol.control import SlotInfo, Stats
from protocol.sizes import format_size

_LABEL = 12
_WIDEST_BAR = 40
_OUTCOMES = ("hit", "partial", "miss")


class Bars(NamedTuple):
    """What a bar is made of: its first part, its second part, and what is left."""

    first: str
    second: str
    rest: str


def bars_for(encoding: str) -> Bars:
    """Blocks where the terminal has them."""
    try:
        "█▒░".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return Bars("#", "=", ".")
    return Bars("█", "▒", "░")


def lines(
    now: Stats, before: Stats | None, slots: Sequence[SlotInfo], columns: int, rows: int, bars: Bars
) -> list[str]:
    """At most `rows` lines of at most `columns` characters. Rates need figures of the same worker from `before`."""
    if before is None or before.epoch != now.epoch:
        before = now
    head = [
        f"prefixd  {now.model}  {now.phase}, up {render.age(now.uptime_seconds)}",
        "",
        *_fill(now, columns, bars),
        *_rates(now, before, columns, bars),
        "",
    ]
    latest = sorted((row for row in slots if row.digest), key=lambda row: row.used_age_seconds)
    shown = [*head, *render.slots(latest[: max(rows - len(head) - 1, 0)]).splitlines()]
    return [cut(line, columns) for line in shown[:rows]]


def cut(line: str, columns: int) -> str:
    """As much of a line as fits: a longer one would push all others down."""
    return line[:columns]


def bar(first: float, second: float, width: int, bars: Bars) -> str:
    """Two shares of 1 side by side. A share that is not 0 is seen, and one of 1 alone fills the bar."""
    ones = min(round(first * width) or bool(first), width)
    twos = min(round(second * width) or bool(second), width - ones)
    return bars.first * ones + bars.second * twos + bars.rest * (width - ones - twos)


def _fill(now: Stats, columns: int, bars: Bars) -> list[str]:
    """How full memory and tables are. Of KV memory, first what snapshots hold, then what only requests do."""
    ready, total = now.slots.get("ready", 0), sum(now.slots.values())
    kept = now.snapshot_bytes - now.snapshots * now.state_bytes
    shown = [
        _bar_line(
            "kv memory",
            _share(kept, now.kv_bytes_total),
            _share(now.kv_bytes_used - kept, now.kv_bytes_total),
            f"{format_size(now.kv_bytes_used)} of {format_size(now.kv_bytes_total)}",
            columns,
            bars,
        ),
        _bar_line(
            "slots", _share(ready, total), _share(_taken(now.slots), total), f"{ready} of {total}", columns, bars
        ),
    ]
    if now.states_total:
        used = now.states_total - now.states_free
        share = _share(used, now.states_total)
        shown.append(_bar_line("states", share, 0, f"{used} of {now.states_total}", columns, bars))
    for tier in now.tiers:
        text = f"{format_size(tier.bytes)} of {format_size(tier.limit_bytes)}, {tier.snapshots} snapshots"
        shown.append(_bar_line(tier.tier, _share(tier.bytes, tier.limit_bytes), 0, text, columns, bars))
    shown.append(f"{'requests':<{_LABEL}}{now.requests_running} running, {now.requests_waiting} waiting")
    return shown


def _rates(now: Stats, before: Stats, columns: int, bars: Bars) -> list[str]:
    """What was counted since `before`, a second."""
    seconds = max(now.uptime_seconds - before.uptime_seconds, 1e-9)

    def rate(name: Mapping[str, int], old: Mapping[str, int], key: str = "") -> float:
        return sum(count - old.get(each, 0) for each, count in name.items() if each.startswith(key)) / seconds

    lookups = {outcome: rate(now.lookups, before.lookups, f"{outcome}/") for outcome in _OUTCOMES}
    computed = rate(now.cache_tokens, before.cache_tokens, "computed")
    reused = rate(now.cache_tokens, before.cache_tokens) - computed
    requests = sum(lookups.values())
    published = (now.commits - before.commits) / seconds
    since_start = sum(now.cache_tokens.values())
    overall = _share(since_start - now.cache_tokens.get("computed", 0), since_start)
    return [
        _bar_line(
            "lookups/s",
            _share(lookups["hit"], requests),
            _share(lookups["partial"], requests),
            "  ".join(f"{outcome} {lookups[outcome]:.1f}" for outcome in _OUTCOMES),
            columns,
            bars,
        ),
        _bar_line(
            "tokens/s",
            _share(reused, reused + computed),
            0,
            f"reused {reused:.0f}  computed {computed:.0f}",
            columns,
            bars,
        ),
        f"{'snapshots/s':<{_LABEL}}published {published:.1f}, removed {rate(now.evictions, before.evictions):.1f}",
        f"{'since start':<{_LABEL}}{overall:.0%} of prompt tokens reused, requests: {render.counts(now.requests)}, "
        f"stale drops: {render.counts(now.stale_drops)}",
    ]


def _taken(slots: Mapping[str, int]) -> int:
    """Slots that are neither free nor ready: on their way from one to the other."""
    return sum(count for state, count in slots.items() if state not in ("free", "ready"))


def _bar_line(label: str, first: float, second: float, text: str, columns: int, bars: Bars) -> str:
    width = max(min(columns - _LABEL - len(text) - 2, _WIDEST_BAR), 0)
    return f"{label:<{_LABEL}}{bar(first, second, width, bars)}  {text}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
