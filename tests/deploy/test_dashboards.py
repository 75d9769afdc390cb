"""The dashboards are those of their source, and speak of metrics that exist."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "deploy" / "grafana"
METRICS = set(re.findall(r"^\| `(prefixd_\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE))
SUFFIXES = ("_bucket", "_count", "_sum")


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("generate_dashboards", GRAFANA / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def panels():
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            yield pytest.param(panel, id=f"{path.stem}-{panel['id']}")


PANELS = list(panels())


def test_the_files_are_up_to_date(generate):
    made = {path.name: path.read_text(encoding="utf-8") for path in (GRAFANA / "dashboards").iterdir()}
    assert made == generate.dashboards(), "run `make dashboards`"


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_asks_for_metrics_that_exist_on_the_chosen_instance(panel):
    assert panel["targets"]
    for target in panel["targets"]:
        expression = target["expr"]
        names = re.findall(r"\bprefixd_\w+", expression)
        assert names
        for name in names:
            plain = next((name.removesuffix(suffix) for suffix in SUFFIXES if name.endswith(suffix)), name)
            assert plain in METRICS
        assert expression.count('{instance=~"$instance"') == len(names)
        assert len(re.findall(r"\b(?:rate|increase)\(", expression)) == len(re.findall(r"\[\$__\w+\]", expression))


@pytest.mark.parametrize("panel", PANELS)
def test_a_legend_names_labels_that_the_query_keeps(panel):
    for target in panel["targets"]:
        labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        kept = {name for group in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for name in group.split(", ")}
        assert set(labels) <= kept
        assert labels or not kept - {"le"}, "several series of one name"


def test_panels_of_a_dashboard_do_not_overlap():
    for path in (GRAFANA / "dashboards").iterdir():
        places = set()
        for panel in json.loads(path.read_text())["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            assert not places & cells
            assert at["x"] + at["w"] <= 24
            places |= cells


def test_provisioning_names_what_is_installed():
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/prefixd.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/usr/local/share/prefixd/grafana/dashboards"
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prefixd.yml").read_text())["datasources"]
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == scrape["global"]["scrape_interval"]
