"""Makes the dashboards in dashboards/ of dashboards.toml, beside this file. `make dashboards` runs it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_METRIC = re.compile(r"\b(prefixd_\w+)(?:\{([^}]*)\})?")
_RANGE = re.compile(r"\b(rate|increase)\((prefixd_\w+\{[^}]*\})\)")


def main() -> None:
    for name, text in dashboards().items():
        (HERE / "dashboards" / name).write_text(text, encoding="utf-8")


def dashboards() -> dict[str, str]:
    """The text of each dashboard by the name of its file."""
    source = tomllib.loads((HERE / "dashboards.toml").read_text(encoding="utf-8"))
    return {
        f"{given['uid']}.json": json.dumps(_dashboard(given), indent=2) + "\n" for given in source["dashboards"]
    }


def expanded(expression: str, kind: str) -> str:
    """The expression with the instance in every metric and the interval in every rate() and increase().

    A single number shows the increase over all of the time shown.
    """
    intervals = {"rate": "$__rate_interval", "increase": "$__range" if kind == "stat" else "$__rate_interval"}

    def select(match: re.Match[str]) -> str:
        matchers = ['instance=~"$instance"', *filter(None, [match[2]])]
        return f"{match[1]}{{{', '.join(matchers)}}}"

    def over(match: re.Match[str]) -> str:
        return f"{match[1]}({match[2]}[{intervals[match[1]]}])"

    return _RANGE.sub(over, _METRIC.sub(select, expression))


def _dashboard(given: dict[str, Any]) -> dict[str, Any]:
    instance = {
        "name": "instance",
        "type": "query",
        "label": "Instance",
        "datasource": DATASOURCE,
        "query": "label_values(prefixd_worker_up, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "title": given["title"],
        "uid": given["uid"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["prefixd"],
        "links": [{"type": "dashboards", "tags": ["prefixd"], "title": "prefixd", "asDropdown": True}],
        "templating": {"list": [source, instance]},
        "panels": _panels(given["panels"]),
    }


def _panels(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Placed from left to right, a new row where one does not fit."""
    panels, x, y, row_height = [], 0, 0, 0
    for number, panel in enumerate(given, start=1):
        width, height = panel.get("width", 12), panel.get("height", 8)
        if x + width > COLUMNS:
            x, y, row_height = 0, y + row_height, 0
        panels.append(_panel(number, panel, {"x": x, "y": y, "w": width, "h": height}))
        x, row_height = x + width, max(row_height, height)
    return panels


def _panel(number: int, given: dict[str, Any], position: dict[str, int]) -> dict[str, Any]:
    kind = given.get("kind", "timeseries")
    defaults: dict[str, Any] = {"unit": given.get("unit", "short"), "min": 0}
    if "max" in given:
        defaults["max"] = given["max"]
    options: dict[str, Any] = {}
    if kind == "timeseries":
        stack = given.get("stack", False)
        mode = "normal" if stack else "none"
        defaults["custom"] = {"fillOpacity": 20 if stack else 0, "stacking": {"mode": mode}}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": kind,
        "title": given["title"],
        "description": given.get("help", ""),
        "datasource": DATASOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(_queries(given, kind).items())
        ],
    }


def _queries(given: dict[str, Any], kind: str) -> dict[str, str]:
    """PromQL by legend."""
    if "queries" in given:
        return {legend: expanded(expression, kind) for legend, expression in given["queries"].items()}
    by = given.get("by")
    labels = f"le, {by}" if by else "le"
    buckets = expanded(f"sum by ({labels}) (rate({given['quantiles']}_bucket))", kind)
    return {
        f"{name} {{{{{by}}}}}" if by else name: f"histogram_quantile({quantile}, {buckets})"
        for name, quantile in QUANTILES.items()
    }


if __name__ == "__main__":
    main()
