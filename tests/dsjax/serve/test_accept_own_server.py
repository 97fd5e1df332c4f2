"""`dsjax accept` against dsjax's own servers: what their metrics and their admin endpoints let it test beyond any other."""

import json

import pytest
from commands import run
from watched_server import experts, load, step

from dsjax.engine.experts.eplb import BalanceStats
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions

pytestmark = pytest.mark.slow


def criterion(name: str, measurement: str, value: str, bound: str) -> str:
    return f'[[criteria]]\nid = "{name}"\nmeasurement = "{measurement}"\nvalue = "{value}"\n{bound}\nsource = "§1"\n'


def measurement(kind: str, more: str = "") -> str:
    return (
        f'[measurements.{kind}]\nkind = "{kind}"\ntitle = "Four sessions"\nsessions = 4\nseconds = 0.8\n'
        f"input_tokens = 12\noutput_tokens = 6\n{more}\n"
    )


ROWS = (
    ("memory", "load", "memory_share", "below = 0.9"),
    ("restarts", "load", "restarts", "at_most = 0"),
    ("errors", "load", "error_share", "at_most = 0"),
    ("even", "balance", "rank_variation", "below = 0.2"),
)
HEAD = 'name = "own"\ndescription = "Promises of a small server"\n'
CRITERIA = "\n".join(
    (HEAD, measurement("load", "windows = 3"), measurement("balance"), *(criterion(*row) for row in ROWS))
)


@pytest.fixture
def accept(tmp_path):

    def invoke(url, *options):
        criteria = tmp_path / "criteria.toml"
        criteria.write_text(CRITERIA)
        arguments = ["--base-url", url, "--criteria", str(criteria), "--results", str(tmp_path / "out")]
        ended = run("dsjax", "accept", *arguments, "--ignore-eos", *options)
        assert ended.returncode != 2, ended.stderr
        return ended.returncode, json.loads((tmp_path / "out" / "report.json").read_text())

    return invoke


def found(body):
    return {one["id"]: (one["verdict"], one["value"]) for one in body["criteria"]}


@pytest.fixture
def served(start_server):
    """Starts a server of four ranks with metrics of its own, whose steps take 10 ms: a load at full speed would keep a core busy."""
    sizes = {"num_ranks": 4, "max_chunk": 16, "pages_per_rank": 257, "step_seconds": 0.01}
    options = ServeOptions(admin_api_key="root")
    return lambda metrics: start_server(metrics=metrics, options=options, **sizes)


@pytest.mark.parametrize(("used", "status", "verdict"), [(60, 0, "met"), (95, 3, "missed")])
def test_memory_restarts_and_errors_are_tested_by_the_server_s_own_metrics(accept, served, used, status, verdict):
    server = served(Metrics("tiny", 4, 128, device_memory=lambda: [("0", used, 100), ("1", 10, 100)]))
    code, body = accept(server.url, "--only", "load", "--vocab-size", "200")
    assert code == status
    assert found(body) == {"memory": (verdict, used / 100), "restarts": ("met", 0), "errors": ("met", 0)}
    assert body["measurements"]["load"]["values"]["output_tokens_per_s"] > 0


def test_experts_loads_are_those_that_the_balancer_s_window_shows(accept, served, monkeypatch):
    metrics, recordings = Metrics("tiny", 4, 128, experts_per_device=2), []
    server = served(metrics)
    monkeypatch.setattr(server.executor, "set_recording", recordings.append)
    even = (server.url, "--only", "even", "--vocab-size", "200", "--fresh")
    code, body = accept(*even)
    assert code == 4
    assert "the experts' load is not recorded" in body["criteria"][0]["reason"]
    metrics.on_step(step([load(0)], balance=BalanceStats(windows=1, rank_tokens=(3, 5))))
    code, body = accept(*even)
    assert (code, found(body)["even"]) == (3, ("missed", 0.25))
    metrics.on_step(step([load(0)], experts=experts([[5] * 8])))
    assert recordings == []
    code, body = accept(*even, "--admin-api-key", "root")
    assert (code, found(body)["even"]) == (0, ("met", 0.0)), "a record outweighs the window"
    assert recordings == [True, False]
