"""Prometheus' rules: each is tested by promtool, and speaks of metrics that exist."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES_TEST = Path(__file__).with_name("rules_test.yml")
METRICS = set(re.findall(r"^\| `(prefixd_\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool here (Debian package prometheus)"
)


def rules():
    for path in ("recording.yml", "alerts.yml"):
        for group in yaml.safe_load((PROMETHEUS / path).read_text())["groups"]:
            yield from group["rules"]


def promtool(*words):
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_the_configuration_is_valid():
    promtool("check", "config", PROMETHEUS / "prometheus.yml")


@needs_promtool
def test_rules_do_what_they_are_for():
    promtool("test", "rules", RULES_TEST)


def test_every_rule_has_a_test():
    tested = yaml.safe_load(RULES_TEST.read_text())["tests"]
    alerts = {
        test["alertname"] for case in tested for test in case.get("alert_rule_test", ()) if test["exp_alerts"]
    }
    queries = " ".join(test["expr"] for case in tested for test in case.get("promql_expr_test", ()))
    for rule in rules():
        assert rule["record"] in queries if "record" in rule else rule["alert"] in alerts


def test_rules_use_metrics_that_exist():
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        for name in re.findall(r"[\w:]*prefixd_[\w:]+", rule["expr"]):
            assert name.removesuffix("_bucket") in METRICS | recorded


def test_every_alert_says_how_bad_it_is_and_what_it_means():
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert rule["annotations"]["summary"]
