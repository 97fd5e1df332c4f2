"""Scripted steps on a clock that tests turn: what the registry then holds, to the observation."""

import contextlib
from collections import Counter
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.exposition import generate_latest as text_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families as read_text
from watched_server import WatchedServer, experts, load, request, step, token

from dsjax.engine.afd.messages import LinkCounts
from dsjax.engine.contract.executor import ErrorKind, RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.elastic.generations import ChangeCounts
from dsjax.engine.experts.eplb import BalanceStats
from dsjax.engine.schedule.parked import ParkedRequests
from dsjax.engine.schedule.request import FinishReason
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import DraftCounts
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.tiers.page_tiers import TierCounts
from dsjax.engine.transfer.remote_prefill import TransferCounts
from dsjax.hosts.interfaces import Interface
from dsjax.hosts.links import LinkState
from dsjax.serve.metrics import Metrics
from dsjax.serve.metrics_families import one_two_five
from sharding import MeshSpec

LABELS = {"model_name": "tiny"}
OPENMETRICS, TEXT = "application/openmetrics-text;version=1.0.0", "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(now=100.0)


@pytest.fixture
def metrics(clock) -> Metrics:
    return Metrics("tiny", 4, 4096, experts_per_device=2, clock=lambda: clock.now)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {**LABELS, **labels})


def histogram(metrics: Metrics, name: str, rank: int = 0) -> tuple[float, float]:
    """(count, sum)."""
    labels = {"engine": str(rank)}
    return value(metrics, f"vllm:{name}_count", **labels), pytest.approx(value(metrics, f"vllm:{name}_sum", **labels))


def test_latencies_are_those_of_the_scripted_times(metrics, clock):
    metrics.on_updates([token(request("one token", rank=1), FinishReason.STOP)])
    assert value(metrics, "vllm:request_time_per_output_token_seconds_count", engine="1") is None
    assert histogram(metrics, "request_decode_time_seconds", 1) == (1, 0.0)
    # Arrives at 100, scheduled at 101, tokens at 103, 104, 106 and 110, the last one ends it.
    one = request("a", arrival=100.0, scheduled=101.0, prompt=30, cached=16)
    for now, reason in ((103.0, None), (104.0, None), (106.0, None), (110.0, FinishReason.LENGTH)):
        clock.now = now
        metrics.on_updates([token(one, reason)])
    once = {
        "time_to_first_token_seconds": 3.0, "request_time_per_output_token_seconds": (110 - 103) / 3,
        "request_queue_time_seconds": 1.0, "request_prefill_time_seconds": 2.0, "request_decode_time_seconds": 7.0,
        "request_inference_time_seconds": 9.0, "e2e_request_latency_seconds": 10.0, "request_prompt_tokens": 30,
        "request_prefill_kv_computed_tokens": 14, "request_generation_tokens": 4, "request_params_max_tokens": 16,
    }  # fmt: skip
    assert {name: histogram(metrics, name) for name in once} == {name: (1, total) for name, total in once.items()}
    assert histogram(metrics, "inter_token_latency_seconds") == (3, 1.0 + 2.0 + 4.0)
    totals = {"prompt_tokens": 30, "prefix_cache_queries": 30, "prefix_cache_hits": 16, "generation_tokens": 4}
    assert {name: value(metrics, f"vllm:{name}_total", engine="0") for name in totals} == totals
    assert value(metrics, "vllm:request_success_total", engine="0", finished_reason="length") == 1


def test_requests_that_waited_differently_are_each_entered_with_their_own_gap(metrics, clock):
    old, new, elsewhere = request("old"), request("new"), request("elsewhere", rank=3)
    metrics.on_updates([token(old), token(elsewhere)])
    clock.now += 0.02
    metrics.on_updates([token(old), token(new)])  # `new` makes its first token: no gap; `elsewhere` stands still
    clock.now += 0.2
    metrics.on_updates([token(old), token(new), token(elsewhere)])
    assert histogram(metrics, "inter_token_latency_seconds", 0) == (3, 0.02 + 0.2 + 0.2)
    assert histogram(metrics, "inter_token_latency_seconds", 3) == (1, 0.22)
    assert [value(metrics, "vllm:generation_tokens_total", engine=rank) for rank in "03"] == [5, 2]


def test_a_value_equal_to_a_bound_lies_in_its_bucket(metrics, clock):
    for index, seconds in enumerate((0.001, 0.0011, 0.25, 3000.0)):
        clock.now = 100.0 + seconds
        metrics.on_updates([token(request(str(index), arrival=100.0))])
    # 100.001 − 100 is 0.00100000000000477: float64 keeps 14 digits after such a subtraction, so it lies just above.
    expected = {"0.001": 0, "0.005": 2, "0.1": 2, "0.25": 3, "2560.0": 3, "+Inf": 4}
    name = "vllm:time_to_first_token_seconds_bucket"
    assert {bound: value(metrics, name, engine="0", le=bound) for bound in expected} == expected


def ended(metrics: Metrics, rank: int = 0) -> dict[str, float]:
    """Requests by the reason of their end."""
    reasons = [reason.value for reason in FinishReason]
    return {one: value(metrics, "vllm:request_success_total", engine=str(rank), finished_reason=one) for one in reasons}


def test_ends_of_every_kind_are_counted_once(metrics, clock):
    stopped, left, failed, never = (request(name) for name in ("stopped", "left", "failed", "never"))
    metrics.on_updates([token(stopped), token(left), token(failed)])
    clock.now += 1
    metrics.on_ended([stopped], FinishReason.STOP)  # a stop string, found after the step
    metrics.on_updates([token(failed, FinishReason.ERROR, finite=False)])
    never.rank, never.first_scheduled_time = -1, None
    metrics.on_ended([left, never], FinishReason.ABORT)  # clients that went away, one before its request had a rank
    assert ended(metrics) == {"stop": 1, "length": 0, "abort": 2, "error": 1}
    assert value(metrics, "vllm:corrupted_requests_total", engine="0") == 1
    assert value(metrics, "dsjax_requests_failed_total", engine="0", error="non_finite_values") == 1
    assert value(metrics, "vllm:generation_tokens_total", engine="0") == 3, "a token that is not finite is none"
    assert histogram(metrics, "e2e_request_latency_seconds")[0] == 1, "aborts and failures are not latencies"


def test_an_error_that_is_not_the_models_values_is_no_corruption_and_no_token(metrics, clock):
    grammar, bans = request("a", rank=2), request("b", rank=2)
    grammar.params = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    for each in (grammar, bans):
        metrics.on_updates([Update(each, RowResult(error="no legal token"), FinishReason.ERROR)])
    kinds = [kind.value for kind in ErrorKind]
    failed = {kind: value(metrics, "dsjax_requests_failed_total", engine="2", error=kind) for kind in kinds}
    assert failed == dict.fromkeys(kinds, 0) | {"structured_output_failed": 1, "no_token_allowed": 1}
    assert ended(metrics, 2)["error"] == 2
    assert value(metrics, "vllm:corrupted_requests_total", engine="2") == 0
    assert value(metrics, "vllm:generation_tokens_total", engine="2") == 0


def test_parts_of_a_prompts_logprobs_are_not_tokens(metrics, clock):
    one = request("a", arrival=100.0)
    clock.now = 101.0
    metrics.on_updates([Update(one, RowResult(prompt_scores=[(1, -1.0, 1, [])]), None)])
    assert value(metrics, "vllm:time_to_first_token_seconds_count", engine="0") is None
    clock.now = 103.0
    metrics.on_updates([token(one)])
    assert histogram(metrics, "time_to_first_token_seconds") == (1, 3.0)
    assert value(metrics, "vllm:generation_tokens_total", engine="0") == 1


def test_steps_fill_gauges_and_sums(metrics):
    ranks = [load(0, running=3, waiting=1, used=30, cached=20), load(1), load(2, running=1, used=100), load(3)]
    metrics.on_step(step(ranks, decode=4, prompt=28, padding=8, num_preemptions=2))
    metrics.on_step(step(ranks, decode=4, padding=4, compilations_after_warm_up=1))
    assert [value(metrics, "vllm:num_requests_running", engine=str(rank)) for rank in range(4)] == [3, 0, 1, 0]
    assert value(metrics, "vllm:num_requests_waiting", engine="0") == 1
    assert [value(metrics, "vllm:kv_cache_usage_perc", engine=rank) for rank in "02"] == [0.3, 1.0]
    assert value(metrics, "dsjax_rank_pages_cached", engine="0") == 20
    assert value(metrics, "dsjax_rank_cost", engine="0") == 64
    assert value(metrics, "vllm:num_preemptions_total") == 2
    assert value(metrics, "dsjax_compilations_after_warm_up_total") == 1
    tokens = {"decode": 8, "prompt": 28, "padding": 12}
    assert {kind: value(metrics, "dsjax_step_tokens_total", kind=kind) for kind in tokens} == tokens
    assert value(metrics, "vllm:iteration_tokens_total_count") == 2
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 36
    assert value(metrics, "vllm:iteration_tokens_total_bucket", le="8.0") == 1
    assert value(metrics, "dsjax_host_seconds_total", part="device") == pytest.approx(0.012)


def test_experts_are_shown_by_place_rejections_by_reason_and_answers_by_route(metrics):
    assert value(metrics, "dsjax_expert_tokens_total", expert="0", ep_rank="0") is None, "nothing was recorded"
    # Two layers, 8 experts, 2 a device. Layer 0 loads device 0 alone, layer 1 device 3 alone.
    metrics.on_step(step([], experts=experts([[6, 2, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, 8]])))
    metrics.on_step(step([]))  # recording ended: the last sums stay
    assert value(metrics, "dsjax_expert_tokens_total", expert="0", ep_rank="0") == 6
    assert value(metrics, "dsjax_expert_tokens_total", expert="7", ep_rank="3") == 8
    # Each layer has 8 on one of 4: (2 + 2) / (8 + 8).
    assert [value(metrics, "dsjax_expert_balancedness", of=of) for of in ("sums", "layers")] == [0.25, 0.25]
    assert value(metrics, "dsjax_dispatch_rows_total", device="2") == 7
    assert value(metrics, "dsjax_dispatch_bytes_total") == 4096
    assert value(metrics, "dsjax_dispatch_padding_share") == 0.25
    for reason in ("queued_requests", "queued_tokens", "queued_requests"):
        metrics.on_rejected(reason)
    metrics.on_response("/v1/completions", "POST", 429)
    assert value(metrics, "dsjax_requests_rejected_total", reason="queued_requests") == 2
    labels = {"handler": "/v1/completions", "method": "POST", "status": "4xx"}
    assert metrics.registry.get_sample_value("http_requests_total", labels) == 1


def test_bounds_of_tokens_go_as_far_as_the_model(metrics):
    metrics.on_updates([token(request("a"), FinishReason.STOP)])
    families = {family.name: family.samples for family in read_text(metrics.render().decode())}
    bounds = [float(each.labels["le"]) for each in families["vllm:request_prompt_tokens"] if "le" in each.labels]
    assert bounds[:-1] == one_two_five(4096) == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]
    assert one_two_five(100)[-1] == 100


def test_bytes_hits_and_waits_are_told_by_tier():
    metrics = Metrics("tiny", 2, 100, page_bytes=100)
    tiers, hits = {"host": TierCounts(4, 5, 0, 0, 0)}, {"host": 20, "disk": 10}
    loads = [load(0, used=2, cached=3, usable=10), load(1, used=1, usable=10)]
    loads = [one._replace(tiers=tiers, hits={"device": 30 + i, **hits}, queried=80) for i, one in enumerate(loads)]
    disk = DiskCounts(used_pages=7, usable_pages=9, failed_reads=1, late=2, page_bytes=128)
    waits = [("disk", 0.3), ("disk", 0.1), ("host", 0.002), ("prefill", 0.4)]
    transfers = TransferCounts(asked=9, completed=5, given_up=1, pages=70, under_way=3)
    metrics.on_step(step(loads, disk=disk, page_waits=waits, transfers=transfers))

    def of(name: str, **labels: str) -> float:
        return value(metrics, name, **labels)

    names = ("device", "host", "disk")
    assert [of("dsjax_cache_tier_bytes", tier=tier) for tier in names] == [600, 800, 896]
    assert [of("dsjax_cache_tier_limit_bytes", tier=tier) for tier in names] == [2000, 1000, 1152]
    assert of("dsjax_prefix_cache_hits_total", tier="device", engine="1") == 31
    assert of("vllm:external_prefix_cache_queries_total", engine="1") == 80 - 31
    assert of("vllm:external_prefix_cache_hits_total", engine="1") == 30
    seconds = [of("dsjax_cache_fetch_seconds_sum", tier=tier) for tier in ("disk", "prefill")]
    assert seconds == pytest.approx([0.4, 0.4])
    assert of("dsjax_cache_fetch_seconds_count", tier="host") == 1
    assert [of("dsjax_transfers_total", outcome=what) for what in ("completed", "given_up", "refused")] == [5, 1, 0]
    assert (of("dsjax_transfer_pages_total"), of("dsjax_transfers_under_way")) == (70, 3)
    assert [of("dsjax_disk_failures_total", operation=what) for what in ("read", "write", "late")] == [1, 0, 2]


def filled() -> Metrics:
    """Every family has samples, some with odd labels and numbers."""
    smaller = SimpleNamespace(
        number=1, busy=False, ahead=None, spec=MeshSpec(dp_size=3), wanted=MeshSpec(dp_size=4),
        facts=SimpleNamespace(num_processes=3), counts=ChangeCounts(weight_bytes=Counter(kept=5)),
    )  # fmt: skip
    sources = {
        "device_memory": lambda: [("0", 90, 100)],
        "links": lambda: {1: LinkState(50e-6, 90e-6, 9, 0, 99, 1)},
        "interfaces": lambda: [Interface("eth0", 3, 4, 3e9)],
        "expert_links": lambda: SimpleNamespace(counts=[LinkCounts(True, 2, 3.5, 40, 4000, 5000)]),
        "generations": smaller,
        "parked": ParkedRequests(),
    }
    metrics = Metrics('a "model"\\n\nof lines', 2, 100, experts_per_device=2, max_drafts=2, **sources)
    one = request("a", rank=1)
    for reason in (None, FinishReason.STOP):
        metrics.on_updates([token(one, reason)])
    tiers = {"tiers": {"host": TierCounts(1, 4, 3, 1, 2)}, "hits": {"device": 7, "host": 4, "disk": 2}}
    others = {
        "balance": BalanceStats(windows=1, rank_tokens=(3, 4)), "disk": DiskCounts(*range(11)), "draft_choice": 2,
        "drafts": DraftCounts(3, 6, 4, (3, 1)), "transfers": TransferCounts(9),
        "page_waits": [("host", 0.003), ("disk", 0.2)],
    }  # fmt: skip
    loads = [load(0), load(1, used=1, usable=3)._replace(**tiers, queried=20)]
    metrics.on_step(step(loads, decode=1, experts=experts([[1, 2, 3, 4]]), **others))
    metrics.on_rejected("x")
    metrics.on_response("/v1/{name}", "GET", 200)
    metrics.set_exchange_share(0.25)
    return metrics


def test_the_exposition_is_prometheus_clients_in_both_formats():
    metrics = filled()
    for ours, theirs, read in (
        (metrics.render(), text_encoder(metrics.registry, ALLOWUTF8), read_text),
        (metrics.render(openmetrics=True), openmetrics_encoder(metrics.registry, ALLOWUTF8), read_openmetrics),
    ):
        families, expected = list(read(ours.decode())), list(read(theirs.decode()))
        assert len(families) > 40
        assert all(family.samples for family in families)
        for one, other in zip(families, expected, strict=True):
            assert (one.name, one.type, one.documentation) == (other.name, other.type, other.documentation)
        assert samples(families) == samples(expected)
        assert len(ours.splitlines()) == len(theirs.splitlines())


def samples(families) -> set[tuple]:
    return {(s.name, tuple(sorted(s.labels.items())), s.value) for family in families for s in family.samples}


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(WatchedServer()) as watched:
        yield watched


def test_metrics_come_as_text_or_as_openmetrics_and_by_name(server):
    server.metrics.on_step(step([load(0, running=1)], decode=1))
    text = httpx.get(server.url + "/metrics")
    assert text.headers["content-type"].startswith("text/plain; version=")
    assert "vllm:num_requests_running" in {family.name for family in read_text(text.text)}
    prometheus_2_and_3 = (f"{OPENMETRICS},{TEXT}", f"{OPENMETRICS};escaping=underscores;q=0.6,{TEXT}")
    for accept in ("application/openmetrics-text; version=1.0.0", *prometheus_2_and_3):
        other = httpx.get(server.url + "/metrics", headers={"Accept": accept})
        assert other.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert other.text.endswith("# EOF\n")
        assert samples(read_openmetrics(other.text)) == samples(read_text(text.text)), "no name is escaped"
    names = [("name[]", "vllm:num_requests_running"), ("name[]", "dsjax_step_tokens_total"), ("name[]", "nothing")]
    few = httpx.get(server.url + "/metrics", params=names)
    assert {family.name for family in read_text(few.text)} == {"vllm:num_requests_running", "dsjax_step_tokens"}


def test_the_history_has_the_last_minutes_and_none_of_an_idle_time(metrics, clock):
    def points(*names: str) -> list[tuple]:
        return [tuple(point[name] for name in names) for point in metrics.history.to_json()["points"]]

    made = request("a", arrival=100.0)
    for _ in range(10):  # five seconds of steps, two each second
        metrics.on_step(step([load(0, running=2, waiting=1), load(1, running=1)]))
        metrics.on_updates([token(made)])
        clock.now += 0.5
    clock.now += 30  # nothing happens
    metrics.on_step(step([load(0, running=1)]))
    metrics.on_updates([token(made)])
    told = points("age", "generation_tokens", "running", "waiting")
    assert told == [(35, 0, 0, 0), (33, 4, 3, 1), (31, 8, 3, 1), (0, 11, 1, 0)], (
        "what is now stands in for what just was"
    )
    assert points("prompt_tokens")[0] == (0,)
    clock.now += 1.5
    # The step after the idle time has a point before it, so that its token makes no rate over all of that time.
    assert points("age", "generation_tokens")[-2:] == [(1.5, 10), (0, 11)]
    clock.now += 68.5
    metrics.on_updates([token(made)])
    history = metrics.history.to_json()
    assert history["points"][-1] == {"age": 0, "prompt_tokens": 8, "generation_tokens": 12, "running": 1, "waiting": 0}
    buckets = history["buckets_a_minute_ago"]
    first, between = (buckets[f"vllm:{name}_seconds"] for name in ("time_to_first_token", "inter_token_latency"))
    assert (first["+Inf"], between["+Inf"], between["0.5"]) == (1, 9, 9)
    clock.now += 300
    assert points("age") == [(300,), (0,)], "five minutes are kept"
