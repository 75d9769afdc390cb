"""The README lists every metric of both processes with one sentence."""

import ast
import re
from pathlib import Path

from gateway.metrics import GatewayMetrics
from worker.metrics import WorkerMetrics

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| `(prefixd_\w+)(?:\{[\w,]+\})?` \| \S.*\|$", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
)


def registered(run_dir):
    """Names of the metrics in both registries."""
    gateway = GatewayMetrics(run_dir)
    for registry in (gateway.registry, WorkerMetrics().registry):
        yield from (family.name for family in registry.collect())
    gateway.close()


def read_at_scrape_time():
    """Names of the worker's metrics that are no objects but read from elsewhere: literals in its source."""
    for path in (ROOT / "worker").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and re.fullmatch(r"prefixd_[a-z_]*[a-z]", str(node.value)):
                yield node.value.removesuffix("_total")


def test_every_metric_is_in_the_readme_once(tmp_path):
    listed = [name.removesuffix("_total") for name in ROWS]
    assert sorted(listed) == sorted({*registered(tmp_path), *read_at_scrape_time()})
