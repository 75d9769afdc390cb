"""Debian's Prometheus scrapes a real gateway: every query of the dashboards and every rule finds what it asks for."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import metrics, until
from http_client import Client, user
from services import Services

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
SCRAPES = 4

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus here (Debian package prometheus)"
)


def expressions(path: Path) -> list[str]:
    return [target["expr"] for panel in json.loads(path.read_text())["panels"] for target in panel["targets"]]


@pytest.fixture(scope="module")
def asked(_services: Services) -> Services:
    """Requests of each outcome have been served, and a stream."""
    _services.release()
    for content in ("First", "Second", "First"):
        assert _services.client.chat([user(content)], max_tokens=4).status == 200
    with _services.client.stream([user("Third")], max_tokens=4) as stream:
        assert list(stream)
    return _services


@pytest.fixture(scope="module")
def prometheus(asked: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """One that has scraped the gateway some times, with our configuration at a quicker pace."""
    folder = tmp_path_factory.mktemp("prometheus")
    for path in (DEPLOY / "prometheus").iterdir():
        shutil.copyfile(path, folder / path.name)
    config = folder / "prometheus.yml"
    gateway = asked.client.url.removeprefix("http://")
    config.write_text(config.read_text().replace("15s", "250ms").replace("127.0.0.1:8080", gateway))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
    log = (folder / "log").open("wb+")
    process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    client = Client(f"http://{address}")

    def scraped() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            counts = query(client, 'count_over_time(up{job="prefixd"}[1m])')
        except OSError:
            return False
        return any(float(result["value"][1]) >= SCRAPES for result in counts)

    try:
        until(scraped, "Prometheus has scraped the gateway")
        yield client
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def query(client: Client, expression: str) -> list[dict]:
    answer = client.get("/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
    assert answer.status in (200, 503), answer.raw
    return answer.body["data"]["result"] if answer.status == 200 else []


def test_every_metric_of_the_dashboards_is_there(asked: Services):
    names = {name.split("{")[0] for name in metrics(asked.client)}
    for path in DASHBOARDS:
        for expression in expressions(path):
            assert set(re.findall(r"\bprefixd_\w+", expression)) <= names
    assert not [name for name in names if name.endswith("_created")], "when a series began is told by none"


@needs_prometheus
@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_finds_something(prometheus: Client, path: Path):
    for expression in expressions(path):
        ours = expression.replace("$instance", ".*").replace("$__rate_interval", "1m").replace("$__range", "1m")
        assert "$" not in ours
        assert query(prometheus, ours), expression


@needs_prometheus
def test_what_is_counted_is_what_the_worker_counts(asked: Services, prometheus: Client):
    [reused] = query(prometheus, 'sum(prefixd_cache_tokens_total{source="device"})')
    assert float(reused["value"][1]) == asked.stats()["cache_tokens"]["device"] > 0


@needs_prometheus
def test_rules_are_evaluated_and_nothing_is_amiss(prometheus: Client):
    def rules() -> list[dict]:
        groups = prometheus.get("/api/v1/rules").body["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), "every rule has been evaluated")
    assert {rule["name"]: rule["health"] for rule in rules() if rule["health"] != "ok"} == {}
    for rule in rules():
        if rule["type"] == "recording":
            until(lambda name=rule["name"]: query(prometheus, name), f"{rule['name']} is recorded", 20)
        else:
            assert rule["state"] != "firing", rule["name"]
