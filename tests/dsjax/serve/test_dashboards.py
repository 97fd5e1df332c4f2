"""Every name and label in the dashboard and the alerts is one that a real server shows; promtool agrees with the rest."""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import yaml
from live_server import wait_until
from prometheus_client.parser import text_string_to_metric_families
from watched_server import experts, load, step

from dsjax.engine.afd.link_counts import LinkCounts
from dsjax.engine.elastic.generations import ChangeCounts
from dsjax.engine.experts.eplb import BalanceStats
from dsjax.engine.schedule.parked import ParkedRequests
from dsjax.engine.stats import DraftCounts
from dsjax.engine.transfer.remote_prefill import TransferCounts
from dsjax.hosts.interfaces import Interface
from dsjax.hosts.link_monitor import LinkState
from dsjax.serve.headless import HeadlessExperts
from dsjax.serve.metrics import Metrics
from dsjax.serve.metrics_families import exposition
from dsjax.serve.options import ServeOptions
from sharding import MeshSpec

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "observability"
RULES = ("alerts.yml", "alerts-h20-32.yml")
ADDED_BY_PROMETHEUS = {"instance", "job", "le"}
WORDS = {"by", "without", "on", "ignoring", "and", "or", "unless", "bool", "scalar"}


@pytest.fixture(scope="module")
def exposed():
    """Sample name to its label names, of a server that has answered, refused and recorded."""
    from live_server import LiveServer

    link = LinkState(50e-6, 90e-6, 1e9, 9, 0, 99, 1)
    smaller = SimpleNamespace(
        number=1,
        busy=False,
        ahead=None,
        spec=MeshSpec(dp_size=3),
        wanted=MeshSpec(dp_size=4),
        facts=SimpleNamespace(num_processes=3),
        counts=ChangeCounts(weight_bytes=Counter(kept=5)),
    )
    to_experts = SimpleNamespace(counts=[LinkCounts(True, 2, 3.5, 40, 4000, 5000)])
    metrics = Metrics(
        "tiny",
        4,
        128,
        experts_per_device=2,
        device_memory=lambda: [("0", 90, 100)],
        links=lambda: {1: link},
        interfaces=lambda: [Interface("eth0", 3, 4, 3e9)],
        generations=smaller,
        parked=ParkedRequests(),
        expert_links=lambda: to_experts,
    )
    server = LiveServer(
        num_ranks=4,
        max_rows_decode=8,
        max_chunk=16,
        pages_per_rank=257,
        host_pages_per_rank=8,
        disk_pages=9,
        metrics=metrics,
    )
    body = {"prompt": "ab", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": True}
    assert server.post("/v1/completions", body).text.endswith("[DONE]\n\n")
    server.serving.metrics.on_rejected("queue_full")
    server.serving.metrics.show_exchange_share(0.3)
    drafts = DraftCounts(3, 6, 4, (3, 1))
    balance = BalanceStats(windows=1, rank_tokens=(3, 4))
    others = {"drafts": drafts, "balance": balance, "page_waits": [("host", 0.01)], "transfers": TransferCounts(3)}
    server.serving.metrics.on_step(step([load(0)], experts=experts([[1] * 8]), **others))
    labels: dict[str, set[str]] = {}
    own = exposition(HeadlessExperts(ServeOptions()).registry.families, openmetrics=False).decode()
    with_experts = [
        family for family in text_string_to_metric_families(own) if family.name.startswith("dsjax_experts_")
    ]
    for family in [*text_string_to_metric_families(server.get("/metrics").text), *with_experts]:
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    server.signal()
    server.join()
    return {**labels, "up": {"job"}}


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
    grouped = {
        label.strip()
        for labels in re.findall(r"\b(?:by|without|on) \(([^)]*)\)", expression)
        for label in labels.split(",")
    }
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


def test_the_little_parser_sees_names_matchers_and_groups():
    parsed = names_and_labels(
        'histogram_quantile(0.9, sum by (le, a) (rate(x:y_bucket{b="1",c!~"{z"}[5m]))) / scalar(q_sum) > 1e-3'
    )
    assert parsed == ({"x:y_bucket", "q_sum"}, [("x:y_bucket", "b"), ("x:y_bucket", "c")], {"le", "a"})


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


def test_the_dashboard_is_what_its_table_makes():
    made = subprocess.run(
        [sys.executable, "-c", "import json, make_dashboard; print(json.dumps(make_dashboard.dashboard()))"],
        cwd=ROOT / "tools",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(made.stdout) == json.loads((FOLDER / "grafana-dashboard.json").read_text())


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


def test_the_h20_plan_s_alerts_have_both_thresholds_of_each_of_its_metrics():
    """Section 4.6.4: a warning up to the severe threshold, and beyond that a page."""
    (group,) = yaml.safe_load((FOLDER / "alerts-h20-32.yml").read_text())["groups"]
    found = {
        rule["alert"]: (
            rule["labels"]["severity"],
            [float(one) for one in re.findall(r"[<>]=? ([0-9.e-]+)", rule["expr"])],
        )
        for rule in group["rules"]
    }
    assert found == {
        "PlanLinkSlow": ("ticket", [10e-6, 20e-6]),
        "PlanLinkVerySlow": ("page", [20e-6]),
        "PlanNetworkBusy": ("ticket", [0.7, 0.85]),
        "PlanNetworkVeryBusy": ("page", [0.85]),
        "PlanLinkLosesPackets": ("ticket", [0.0001, 0.001]),
        "PlanLinkLosesManyPackets": ("page", [0.001]),
    }


@promtool
def test_alerts_fire_for_their_cause_alone(tmp_path):
    files = ", ".join(str(FOLDER / file) for file in RULES)
    text = Path(__file__).with_name("alerts_test.yml").read_text().replace("ALERTS", files)
    (tmp_path / "alerts_test.yml").write_text(text)
    run_promtool("test", "rules", str(tmp_path / "alerts_test.yml"))


@promtool
def test_promtool_finds_no_fault_in_the_exposition():
    metrics = Metrics("tiny", 2, 128, experts_per_device=2, device_memory=lambda: [("0", 90, 100)])
    metrics.on_step(step([load(0), load(1)], experts=experts([[1, 2, 3, 4]])))
    result = subprocess.run(["promtool", "check", "metrics"], input=metrics.render(), capture_output=True)
    said = (result.stdout + result.stderr).decode().splitlines()
    # vLLM's names, kept for its dashboards: colons are for recording rules, and `_total` for counters.
    ours = [line for line in said if "vllm:" not in line and not line.startswith("error while linting")]
    assert ours == []


def test_an_aborted_last_request_is_no_longer_shown_as_running(start_server):
    server = start_server(step_seconds=0.02, metrics=Metrics("tiny", 1, 128))
    body = {"prompt": "ab", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        assert 'vllm:num_requests_running{model_name="tiny",engine="0"} 1\n' in server.get("/metrics").text
    wait_until(lambda: server.pages_in_use == 0)
    text = server.get("/metrics").text
    assert 'vllm:num_requests_running{model_name="tiny",engine="0"} 0\n' in text
    assert 'vllm:request_success_total{model_name="tiny",engine="0",finished_reason="abort"} 1\n' in text
