"""The files in deploy/ are well-formed and speak of metrics, commands and settings that exist."""

import configparser
import json
import re
from pathlib import Path

import pytest
import yaml

from protocol.settings import process_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
METRICS = set(re.findall(r"^\| `(prefixd_\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))


def expressions():
    """Every PromQL expression in the dashboard and the alert rules."""
    for panel in json.loads((DEPLOY / "grafana" / "prefixd.json").read_text())["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for group in yaml.safe_load((DEPLOY / "prometheus" / "prefixd-alerts.yml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


def test_dashboards_and_alerts_use_metrics_that_exist():
    used = {
        name.removesuffix("_bucket")
        for expression in expressions()
        for name in re.findall(r"\bprefixd_\w+", expression)
    }
    assert used
    assert used <= METRICS


def test_the_scrape_configuration_names_the_rules_beside_it():
    scrape = yaml.safe_load((DEPLOY / "prometheus" / "scrape.yml").read_text())
    assert all((DEPLOY / "prometheus" / name).exists() for name in scrape["rule_files"])


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_one_process_with_settings_that_exist(path):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    unit.read(path)
    process = path.stem.removeprefix("prefixd-")
    assert re.search(rf"/prefixd {process} ", unit["Service"]["ExecStart"])
    for name in re.findall(r"PREFIXD_(\w+)=", unit["Service"]["Environment"]):
        assert name.lower() in process_settings()[process].model_fields


def test_there_is_a_unit_for_each_process():
    assert {path.stem.removeprefix("prefixd-") for path in UNITS} == set(process_settings())
