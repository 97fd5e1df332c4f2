"""`dsjax accept` against dsjax's own servers: what their metrics and their admin endpoints let it test beyond any other."""

import json

import pytest
from commands import run
from live_server import LiveServer
from watched_server import experts, load, step

from dsjax.engine.experts.eplb import BalanceStats
from dsjax.serve.metrics import Metrics

CRITERIA = """
name = "own"
description = "Promises of a small server"

[measurements.load]
kind = "load"
title = "Four sessions"
sessions = 4
seconds = 1.5
input_tokens = 12
output_tokens = 6
windows = 3

[measurements.balance]
kind = "balance"
title = "Balance"
sessions = 4
seconds = 1.0
input_tokens = 12
output_tokens = 6

[[criteria]]
id = "memory"
measurement = "load"
value = "memory_share"
below = 0.9
source = "§1"

[[criteria]]
id = "restarts"
measurement = "load"
value = "restarts"
at_most = 0
source = "§1"

[[criteria]]
id = "errors"
measurement = "load"
value = "error_share"
at_most = 0
source = "§1"

[[criteria]]
id = "even"
measurement = "balance"
value = "rank_variation"
below = 0.2
source = "§1"
"""


@pytest.fixture
def accept(tmp_path):
    """Runs the command; its exit status and report."""

    def invoke(url, *options):
        (tmp_path / "criteria.toml").write_text(CRITERIA)
        arguments = [
            "--base-url",
            url,
            "--criteria",
            str(tmp_path / "criteria.toml"),
            "--results",
            str(tmp_path / "out"),
        ]
        ended = run("dsjax", "accept", *arguments, "--ignore-eos", *options)
        assert ended.returncode != 2, ended.stderr
        return ended.returncode, json.loads((tmp_path / "out" / "report.json").read_text())

    return invoke


def found(body):
    return {one["id"]: (one["verdict"], one["value"]) for one in body["criteria"]}


@pytest.mark.parametrize(("used", "status", "verdict"), [(60, 0, "met"), (95, 3, "missed")])
def test_memory_restarts_and_errors_are_tested_by_the_server_s_own_metrics(accept, used, status, verdict):
    metrics = Metrics("tiny", 4, 128, device_memory=lambda: [("0", used, 100), ("1", 10, 100)])
    server = LiveServer(num_ranks=4, max_rows_decode=8, max_chunk=16, pages_per_rank=257, metrics=metrics)
    try:
        code, body = accept(server.url, "--only", "load", "--vocab-size", "200")
        assert code == status
        assert found(body) == {"memory": (verdict, used / 100), "restarts": ("met", 0), "errors": ("met", 0)}
        values = body["measurements"]["load"]["values"]
        assert values["output_tokens_per_s"] > 0
    finally:
        server.signal()
        server.join()


def test_experts_loads_are_those_that_the_balancer_s_window_shows(accept):
    metrics = Metrics("tiny", 4, 128, experts_per_device=2)
    server = LiveServer(num_ranks=4, max_rows_decode=8, max_chunk=16, pages_per_rank=257, metrics=metrics)
    try:
        code, body = accept(server.url, "--only", "even", "--vocab-size", "200")
        assert code == 4
        assert "the experts' load is not recorded" in body["criteria"][0]["reason"]
        metrics.on_step(step([load(0)], balance=BalanceStats(windows=1, rank_tokens=(3, 5))))
        code, body = accept(server.url, "--only", "even", "--vocab-size", "200", "--fresh")
        assert (code, found(body)["even"]) == (3, ("missed", 0.25))
        metrics.on_step(step([load(0)], experts=experts([[5] * 8])))
        code, body = accept(server.url, "--only", "even", "--vocab-size", "200", "--fresh")
        assert (code, found(body)["even"]) == (0, ("met", 0.0)), "a record outweighs the window"
    finally:
        server.signal()
        server.join()


@pytest.mark.slow
def test_a_served_engine_with_balancing_is_tested_in_all_but_faults_and_links(accept):
    """The demo on four emulated devices, as a user serves it: TTFT, load, memory, balance, rebalances, a mesh that is scaled."""
    from test_mesh_server import DEMO, Command

    if not any(DEMO.glob("*.safetensors")):
        pytest.skip("the demo model's weights are not here")
    eplb = '{"num_redundant_experts": 8, "window_size": 5, "step_interval": 10, "payback": 0}'
    sizes = ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--cache-tokens", "512", "--max-model-len", "128"]
    server = Command("--mesh", "dp=4", "--admin-api-key", "admin", "--enable-eplb", "--eplb-config", eplb, *sizes)
    try:
        code, body = accept(server.url, "--admin-api-key", "admin", "--only", "load,balance")
        assert found(body)["errors"] == ("met", 0)
        assert found(body)["restarts"] == ("met", 0)
        assert 0 < found(body)["memory"][1] < 1
        assert found(body)["even"][0] in ("met", "missed")
        balance = body["measurements"]["balance"]
        assert set(balance["values"]) >= {"rank_variation", "expert_variation", "balancedness", "steps"}
        assert 0 < balance["values"]["balancedness"] <= 1
        assert code in (0, 3)
    finally:
        assert server.stop() == 0, server.output
