"""Every name and label in the dashboard and the alerts is one that a server shows; promtool agrees with the rest.
docs/metrics.csv lists all metrics:

PYTHONPATH=tests python tests/dsjax/serve/test_dashboards.py > docs/metrics.csv
"""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from test_metrics import filled

from dsjax.serve.headless import Headless, HeadlessExperts
from dsjax.serve.metrics_families import Registry, exposition
from dsjax.serve.metrics_parts import add_prefill_metrics
from dsjax.serve.options import ServeOptions

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "observability"
COLUMNS = ("metric", "type", "labels", "meaning")
RULES = ("alerts.yml", "alerts-h20-32.yml")
ADDED_BY_PROMETHEUS = {"instance", "job", "le"}
WORDS = {"by", "without", "on", "ignoring", "and", "or", "unless", "bool", "scalar"}


@pytest.fixture(scope="module")
def exposed():
    """Sample name to its label names, of a server and of a process with experts."""
    labels: dict[str, set[str]] = {"up": {"job"}}
    own = exposition(HeadlessExperts(ServeOptions()).registry.families, openmetrics=False).decode()
    experts = [family for family in text_string_to_metric_families(own) if family.name.startswith("dsjax_experts_")]
    for family in [*text_string_to_metric_families(filled().render().decode()), *experts]:
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def metrics() -> list[dict[str, str]]:
    """The rows of docs/metrics.csv: each metric of a server, a follower and a process with experts, once."""
    follower = Headless(SimpleNamespace(process_id=1), ServeOptions())
    add_prefill_metrics(prefill := Registry(model_name=""), ())
    rows: dict[str, dict[str, str]] = {}
    for registry in (filled().registry, prefill, follower.registry, HeadlessExperts(ServeOptions()).registry):
        for family in registry.families:
            name = f"{family.name}_total" if family.kind == "counter" else family.name
            values = (name, family.kind, ", ".join(family.labelnames), family.documentation)
            rows.setdefault(name, dict(zip(COLUMNS, values, strict=True)))
    return list(rows.values())


def test_the_table_in_the_docs_has_every_metric():
    with (ROOT / "docs" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == metrics(), __doc__


def expressions() -> list[str]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for file in RULES:
        rules = yaml.safe_load((FOLDER / file).read_text())
        expressions += [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len(expressions) > 50
    return expressions


def names_and_labels(expression: str) -> tuple[set[str], list[tuple[str, str]], set[str]]:
    """(metric names, (name, label) of each matcher, labels that are grouped by) of a PromQL expression."""
    lists = re.findall(r"\b(?:by|without|on) \(([^)]*)\)", expression)
    grouped = {label.strip() for labels in lists for label in labels.split(",")}
    bare = re.sub(r"\b(?:by|without|on) \([^)]*\)", " ", expression)
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    matchers = [
        (name, label)
        for name, inside in re.findall(r"([A-Za-z_:][\w:]*)\{([^}]*)\}", bare)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)
    ]
    bare = re.sub(r"\{[^}]*\}", "", bare)
    names = set(re.findall(r"(?<![\w:.])[A-Za-z_:][\w:]*(?![\w:]*\s*\()", bare)) - WORDS
    return names, matchers, grouped


@pytest.mark.parametrize("expression", expressions())
def test_every_query_asks_for_what_a_real_server_shows(exposed, expression):
    names, matchers, grouped = names_and_labels(expression)
    assert names, "a query without a metric"
    assert names <= exposed.keys()
    for name, label in matchers:
        assert label in exposed[name] | ADDED_BY_PROMETHEUS, f"{name} has no label {label}"
    for labels, name in re.findall(r"\bby \(([^)]*)\) \((?:\w+ ?\()*([A-Za-z_:][\w:]*)", expression):
        assert set(labels.split(", ")) <= exposed[name] | ADDED_BY_PROMETHEUS, f"{name} has not all of {labels}"
    assert grouped <= set().union(*(exposed[name] for name in names)) | ADDED_BY_PROMETHEUS
    for name in names:
        assert "le" not in grouped or "le" in exposed[name]


def test_the_dashboard_shows_every_metric_that_there_is(exposed):
    shown = {name for expression in expressions() for name in names_and_labels(expression)[0]}
    stem = lambda name: re.sub(r"_(bucket|sum|count)$", "", name)  # noqa: E731
    missing = {stem(name) for name in exposed} - {stem(name) for name in shown}
    # Of these two the sums over other names say the same.
    assert missing == {"vllm:prompt_tokens_cached_total", "vllm:request_inference_time_seconds"}


def test_panels_do_not_overlap():
    panels = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def run_promtool(*arguments: str) -> None:
    result = subprocess.run(["promtool", *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@promtool
def test_promtool_accepts_the_configuration_and_every_query(tmp_path):
    run_promtool("check", "config", str(FOLDER / "prometheus.yml"))
    run_promtool("check", "rules", *(str(FOLDER / file) for file in RULES))
    queries = [each.replace("$__rate_interval", "1m").replace("$model_name", "m") for each in expressions()]
    rules = [{"record": f"query:{index}", "expr": each} for index, each in enumerate(queries)]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    run_promtool("check", "rules", str(path))


@promtool
def test_alerts_fire_for_their_cause_alone(tmp_path):
    files = ", ".join(str(FOLDER / file) for file in RULES)
    text = Path(__file__).with_name("alerts_test.yml").read_text().replace("ALERTS", files)
    (tmp_path / "alerts_test.yml").write_text(text)
    run_promtool("test", "rules", str(tmp_path / "alerts_test.yml"))


@promtool
def test_promtool_finds_no_fault_in_the_exposition():
    result = subprocess.run(["promtool", "check", "metrics"], input=filled().render(), capture_output=True)
    said = (result.stdout + result.stderr).decode().splitlines()
    # vLLM's names, kept for its dashboards: colons are for recording rules, and `_total` for counters.
    ours = [line for line in said if "vllm:" not in line and not line.startswith("error while linting")]
    assert ours == []


if __name__ == "__main__":
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(metrics())
