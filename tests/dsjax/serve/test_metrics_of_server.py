"""What a real server's engine makes of the metrics: answers in one piece, stop strings, failures, clients that leave."""

from pathlib import Path

import pytest
import yaml
from live_server import wait_until
from request_bodies import COMPLETIONS

from dsjax.engine.device.process import device_memory
from dsjax.serve.metrics import Metrics

BODY = {"prompt": [[5, 6, 7], [8, 9]], "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def server(start_server):
    return start_server(num_ranks=4, metrics=Metrics("tiny", 4, 128))


def ends(server) -> dict[str, float]:
    reasons = ("stop", "length", "abort", "error")
    return {reason: server.total("vllm:request_success_total", finished_reason=reason) for reason in reasons}


def measured(server) -> float:
    """Requests whose latency was measured."""
    return server.total("vllm:e2e_request_latency_seconds_count")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_streamed_or_not_every_token_is_measured(server, stream):
    answer = server.post(COMPLETIONS, {**BODY, "n": 2, "stream": stream})
    assert answer.status_code == 200
    wait_until(lambda: ends(server)["length"] == 4)
    counts = {"generation_tokens_total": 24, "prompt_tokens_total": 10, "time_to_first_token_seconds_count": 4}
    counts |= {"inter_token_latency_seconds_count": 20, "request_time_per_output_token_seconds_count": 4}
    assert {name: server.total(f"vllm:{name}") for name in counts} == counts
    parts = [server.total(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(server.total("vllm:e2e_request_latency_seconds_sum"), rel=1e-6)
    assert not server.serving.metrics._completions._unfinished, "nothing is followed any more"


def test_a_stop_string_is_a_stop_and_what_the_core_does_after_it_is_not_counted(server):
    body = {**BODY, "prompt": [5, 6, 7], "max_tokens": 40}
    text = server.post(COMPLETIONS, body).json()["choices"][0]["text"]
    made = server.total("vllm:generation_tokens_total")
    stopped = server.post(COMPLETIONS, {**body, "stop": text[4:6]}).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    wait_until(lambda: server.pages_in_use == 0)
    assert ends(server) == {"stop": 1, "length": 1, "abort": 0, "error": 0}
    assert server.total("vllm:generation_tokens_total") - made == stopped["usage"]["completion_tokens"]


def test_a_client_that_leaves_is_neither_shown_as_running_nor_measured(server):
    server.executor.step_seconds, before = 0.1, {**ends(server), "measured": measured(server)}
    with server.stream(COMPLETIONS, {**BODY, "max_tokens": 100, "stream": True}) as answer:
        lines = answer.iter_lines()  # kept, since its end closes the connection
        next(lines)
        wait_until(lambda: server.total("vllm:num_requests_running") == 2)
    wait_until(lambda: server.pages_in_use == 0 and server.engine.num_unfinished == 0)
    assert server.total("vllm:num_requests_running") == 0
    assert {**ends(server), "measured": measured(server)} == before | {"abort": before["abort"] + 2}
    assert not server.serving.metrics._completions._unfinished


def test_emulated_devices_are_told_of_as_the_host_that_they_share():
    ((device, used, limit),) = device_memory()
    assert device == "host"
    assert 10_000_000 < used < limit


def test_the_provisioned_files_name_the_source_and_the_dashboard():
    folder = Path(__file__).parents[3] / "configs" / "observability"
    (source,) = yaml.safe_load((folder / "grafana/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    (provider,) = yaml.safe_load((folder / "grafana/dashboards/dsjax.yml").read_text())["providers"]
    assert (folder.parents[1] / provider["options"]["path"] / "grafana-dashboard.json").is_file()
    jobs = [job["job_name"] for job in yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]]
    assert jobs == ["dsjax", "dcgm"]
