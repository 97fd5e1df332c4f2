"""What an administrator can do, and whoever names a DP rank by its number, on a server of four. `test_routing.py` spreads requests."""

import json
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from live_server import LiveServer, wait_until
from request_bodies import ADMIN, CHAT, COMPLETIONS, MESSAGES
from scripted_executor import scripted

from dsjax.engine.experts.eplb import EplbConfig, RebalanceUnderWayError
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from dsjax.engine.setup.expert_location import ExpertLocation
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions
from dsjax.serve.profiler import sum_of

pytestmark = pytest.mark.usefixtures("at_full_speed")

LONG = {"prompt": list(range(20, 60)), "max_tokens": 200, "temperature": 0}
SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(profiles):
    options = ServeOptions(admin_api_key="root", profile_dir=str(profiles))
    model = scripted(num_ranks=4) | {"eos": ()}
    with LiveServer(**model, options=options, metrics=Metrics("tiny", 4, 512)) as live:
        yield live


def admin(server, path: str, body=None):
    return server.post(path, body, headers=ADMIN)


def test_a_flush_empties_every_rank_and_a_prompt_hits_nothing(server):
    def cached() -> int:
        usage = server.post(COMPLETIONS, {**LONG, "max_tokens": 1}, headers={"X-Session-Affinity": "a"}).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert (cached(), cached() > 0) == (0, True)
    for rank in range(4):
        server.post(COMPLETIONS, {**SHORT, "prompt": [60] * 30}, headers={"X-Data-Parallel-Rank": f"{rank}"})
    assert any(samples(server, "dsjax_rank_pages_cached").values())
    assert admin(server, "/flush_cache").json() == {"status": "flushed"}
    assert samples(server, "dsjax_rank_pages_cached") == {str(rank): 0 for rank in range(4)}
    assert cached() == 0


def samples(server, name: str) -> dict[str, float]:
    return {labels["engine"]: value for labels, value in server.samples(name)}


@pytest.mark.parametrize("rank", ["3", "1", "2"])
def test_a_router_outside_names_the_rank_by_its_number(server, rank):
    before = samples(server, "vllm:generation_tokens_total")
    headers = {"X-Data-Parallel-Rank": rank, "X-Session-Affinity": "one"}
    assert server.post(COMPLETIONS, {**SHORT, "prompt": [99, int(rank)]}, headers=headers).status_code == 200
    after = samples(server, "vllm:generation_tokens_total")
    assert {name for name in after if after[name] != before[name]} == {rank}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [1]}),
        (CHAT, {"messages": MESSAGES}),
        ("/v1/responses", {"model": "tiny", "input": "a"}),
    ],
)
def test_a_rank_that_is_not_there_is_refused(server, path, body):
    refused = server.post(path, body, headers={"X-Data-Parallel-Rank": "4"})
    assert refused.status_code == 400
    assert "expected 0 to 3" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "stream"), [({"request_id": "mine"}, True), ({"request_id": "cmpl-mine"}, False), ({"abort_all": True}, True)]
)  # fmt: skip
def test_a_request_can_be_aborted_by_either_of_its_ids(server, body, stream):
    server.executor.step_seconds, before = 0.05, server.executor.steps
    asked = server.post_later(COMPLETIONS, {**LONG, "stream": stream, "request_id": "mine"})
    wait_until(lambda: server.pages_in_use > 0)
    assert admin(server, "/abort_request", {"request_id": "other"}).json() == {"aborted": 0}
    assert admin(server, "/abort_request", body).json() == {"aborted": 1}
    answer = asked.result(60)
    assert '"code":"aborted"' in answer.text
    assert answer.status_code == (200 if stream else 503)
    wait_until(lambda: server.pages_in_use == 0)
    assert server.executor.steps < before + 150


def test_all_requests_are_aborted_wherever_they_are(server):
    server.executor.step_seconds = 0.05
    bodies = [{**LONG, "prompt": [i] * 9, "request_id": "mine"} for i in range(4)]
    answers = [server.post_later(COMPLETIONS, body) for body in bodies]
    wait_until(lambda: all(rank.running for rank in server.parts.core.scheduler.ranks))
    wait_until(lambda: server.engine.num_unfinished == 4)
    assert admin(server, "/abort_request", {"request_id": "mine"}).json() == {"aborted": 4}
    assert [answer.result(60).status_code for answer in answers] == [503] * 4
    wait_until(lambda: server.pages_in_use == 0)


@pytest.mark.parametrize(("path", "body", "said"), [
    ("/abort_request", {}, "request_id"),
    ("/abort_request", {"request_id": "a", "abort_all": True}, "request_id"),
    ("/scale", {}, "expected mesh, expert_mesh or afd_address"),
    ("/scale", {"afd_address": "127.0.0.1:1"}, "was given its executor"),
    ("/rebalance_experts", None, "no_eplb"),
    ("/dump_expert_distribution_record", None, "nothing was recorded"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused_with_the_reason(server, path, body, said):
    answer = admin(server, path, body)
    assert answer.status_code == 400
    assert said in answer.text


def test_a_rebalance_is_begun_once_and_refused_in_its_middle(server, monkeypatch):
    moves = {"layers": 1, "experts": 2, "bytes": 3, "exchanges": 1, "balancedness": {"before": 0.5, "after": 0.9}}
    refusal = RebalanceUnderWayError("a rebalance is under way, with 3 layers left; ask again when it is done")
    core, balancer = server.serving.engine.core, ExpertBalancer(EplbConfig())
    balancer.start(core.executor, core.scheduler.config)
    monkeypatch.setattr(core, "attachments", [balancer])
    monkeypatch.setattr(balancer, "rebalance_now", Mock(side_effect=[moves, refusal]))
    assert admin(server, "/rebalance_experts").json() == moves
    answer = admin(server, "/rebalance_experts")
    assert answer.status_code == 409
    assert "3 layers left" in answer.json()["error"]["message"]


def test_experts_are_recorded_between_start_and_stop(server, tmp_path):
    assert admin(server, "/start_expert_distribution_record").json() == {"status": "recording"}
    dumped = admin(server, "/dump_expert_distribution_record").json()
    assert dumped["tokens_per_expert"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    path = tmp_path / "location.json"
    path.write_text(json.dumps(dumped))
    location = ExpertLocation.read(path)
    assert location.logical_load.tolist() == [[3, 1, 2], [6, 12, 4]]
    assert location.physical_to_logical.tolist() == [[0, 1, 2, 0], [2, 1, 0, 1]]
    assert admin(server, "/stop_expert_distribution_record").json() == {"status": "stopped"}
    assert admin(server, "/dump_expert_distribution_record").json() == dumped, "the last record stays"
    assert server.get("/server_info").json()["experts"] == dumped


def test_the_share_of_exchanges_is_of_operations_each_counted_once():
    around, outside, others = ("while.3", 10.0), (None, 100.0), [("fusion.1", 2.0), ("gather.4", 1.0)]
    whole = [("all-to-all.7", 1.0), ("ragged-all-to-all.1", 1.0), ("reduce_scatter.5", 0.25), ("psum.6", 0.25)]
    halves = [("all-gather-start.2", 0.25), ("all-gather-done.2", 0.25)]
    spent = sum_of([around, *others, *whole, *halves, outside])
    assert spent == (3.0, 6.0), "a gather reads rows of an array on its own device"
    assert spent.exchange_share == 0.5
    assert sum_of([(None, 1.0)]).exchange_share is None


def test_a_profile_is_written_where_the_server_was_told_and_metrics_show_its_share_of_exchanges(server, profiles):
    """A program with a collective on eight devices runs while the server profiles."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    summed = jax.jit(jax.shard_map(lambda x: jax.lax.psum(jnp.sin(x), "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
    summed(jnp.ones((64, 64))).block_until_ready()
    assert "dsjax_exchange_time_share" not in server.get("/metrics?name[]=dsjax_exchange_time_share").text
    assert admin(server, "/stop_profile").status_code == 400
    assert admin(server, "/start_profile").json() == {"status": "profiling"}
    assert admin(server, "/start_profile").status_code == 400
    for _ in range(5):
        summed(jnp.ones((64, 64))).block_until_ready()
    share = admin(server, "/stop_profile").json()["exchange_share"]
    assert 0 < share < 1
    metrics = server.serving.metrics
    assert metrics.registry.get_sample_value("dsjax_exchange_time_share", {"model_name": "tiny"}) == share
    assert list(profiles.rglob("*.xplane.pb"))


def test_without_a_directory_nothing_is_profiled(start_server):
    closed = start_server(options=ServeOptions(admin_api_key="root"))
    assert admin(closed, "/start_profile").json()["error"]["code"] == "no_profile_dir"
