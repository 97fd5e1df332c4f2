"""`dsjax top` against a server whose metrics the test feeds: rates, quantiles, errors, and what the terminal shows."""

import contextlib
import dataclasses
import io
import json
import math
import os
import pty
import select
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner
from watched_server import WatchedServer, experts, load, request, step, token

from dsjax import cli
from dsjax.engine.afd.messages import LinkCounts
from dsjax.engine.elastic.generations import ChangeCounts
from dsjax.engine.experts.eplb import BalanceStats
from dsjax.engine.schedule.parked import ParkedRequests
from dsjax.engine.schedule.request import FinishReason
from dsjax.engine.stats import DraftCounts
from dsjax.engine.tiers.disk_tier import DiskCounts
from dsjax.engine.tiers.page_tiers import TierCounts
from dsjax.options import OptionError
from dsjax.serve.metrics import Metrics
from dsjax.top.reading import Exposition, NoAnswerError, StatusClient, StatusReading
from dsjax.top.screen import Screen
from dsjax.top.view import quantile, view
from sharding import MeshSpec


@pytest.fixture
def server():
    with contextlib.closing(WatchedServer()) as watched:
        yield watched


def reading(server: WatchedServer, at: float) -> StatusReading:
    with contextlib.closing(StatusClient(server.url)) as client:
        return dataclasses.replace(client.read(), time=at)


def feed(server: WatchedServer, name: str) -> None:
    """Two completions on ranks 0 and 3, of one and three tokens, and two steps."""
    one, three = request(f"{name}1", rank=0, prompt=10), request(f"{name}3", rank=3, prompt=30, cached=20)
    server.metrics.on_updates([token(one, FinishReason.LENGTH), token(three)])
    server.metrics.on_updates([token(three)])
    server.metrics.on_updates([token(three, FinishReason.STOP)])
    server.ranks = [load(0, running=1, used=10), load(1), load(2), load(3, running=2, waiting=3, used=30, cached=5)]
    for _ in range(2):
        server.metrics.on_step(step(server.ranks, decode=2, prompt=10, padding=4))


def window(server: WatchedServer, *stats, before: StatusReading | None = None) -> dict:
    before = before or reading(server, 0.0)
    for one in stats:
        server.metrics.on_step(one)
    return view(before, reading(server, 2.0))


def shown(server: WatchedServer, found: dict, height: int = 40, **terminal) -> str:
    console = Console(file=io.StringIO(), width=130, height=height, **terminal)
    console.print(Screen(server.url, found))
    return console.file.getvalue()


def test_a_view_is_what_happened_between_two_readings(server):
    feed(server, "before")
    server.metrics.on_rejected("queued_requests")
    before = reading(server, 10.0)
    feed(server, "after")
    counts = experts([[1, 1, 1, 1, 2, 2, 0, 8]])
    server.metrics.on_step(step(server.ranks, experts=counts))
    found = view(before, reading(server, 14.0))
    assert (found["model"], found["mesh"], found["window_seconds"]) == ("tiny", "dp=4", 4.0)
    assert found["tokens_per_second"] == {"prompt": 10.0, "generation": 1.0}
    assert [rank["tokens_per_second"] for rank in found["ranks"]] == [0.25, 0.0, 0.0, 0.75]
    finished = {"stop": 1, "length": 1, "abort": 0, "error": 0}
    none = dict.fromkeys(("rejected", "preempted", "not_finite"), 0)
    assert found["requests"] == {"running": 3, "waiting": 3, "finished": finished, **none}
    assert found["cache"] == {"usage": 0.1, "hit_share": 0.5, "host": None, "disk": None, "tiers": None}
    assert found["latency"]["inter_token"]["count"] == 2
    assert found["latency"]["step"]["mean"] == pytest.approx(0.01)
    assert found["steps"]["per_second"] == 0.75
    assert found["steps"]["padding_share"] == 8 / (4 + 20 + 8)
    assert found["steps"]["host_seconds"]["device"] == pytest.approx(0.006)
    assert found["steps"]["compilations_after_warm_up"] == 0
    assert found["experts"]["hottest"][0] == {"expert": 7, "ep_rank": 3, "share": 0.5, "times_mean": 4.0}
    assert found["experts"]["balancedness"] == {"sums": 0.5, "layers": 0.5}
    json.dumps(found, allow_nan=False)


def test_a_window_in_which_nothing_happened_has_rates_of_zero_no_quantiles_and_no_lines_of_what_is_off(server):
    feed(server, "only")
    found = window(server)
    assert found["tokens_per_second"] == {"prompt": 0.0, "generation": 0.0}
    assert found["latency"]["time_to_first_token"] == {"count": 0, "mean": None, "p50": None, "p90": None, "p99": None}
    assert found["cache"]["hit_share"] is None
    assert (found["experts"], found["drafts"], found["expert_processes"], found["generation"]) == (None, None, [], None)
    text = shown(server, found)
    assert not [word for word in ("drafts", "processes with experts") if word in text]


def test_pages_in_host_memory_are_shown_where_there_are_any(server):
    below = [TierCounts(10, 40, 12, 4, 2), TierCounts(30, 40, 40, 8, 10)]
    ranks = [load._replace(tiers={"host": counts}) for load, counts in zip(server.ranks, (*below, *below), strict=True)]
    server.metrics.on_step(step([*ranks]))
    ranks[1] = ranks[1]._replace(tiers={"host": TierCounts(35, 40, 50, 9, 15)})
    found = window(server, step(ranks))
    assert found["cache"]["host"] == {"usage": 85 / 160, "stored": 10.0, "fetched": 1.0}
    assert found["cache"]["disk"] is None
    assert "host memory: pages 53% used, 10 stored, 1 fetched" in shown(server, found)


def test_hits_and_waits_are_shown_by_tier_with_a_disk(server):
    ranks, disk = list(server.ranks), DiskCounts(5, 20, 10, 3, 0)
    server.metrics.on_step(step([*ranks], disk=disk))
    ranks[0] = ranks[0]._replace(hits={"device": 20, "host": 0, "disk": 10}, queried=100)
    disk = disk._replace(used_pages=10, stored=15, fetched=4, failed_reads=2)
    found = window(server, step(ranks, disk=disk, page_waits=[("disk", 0.015)]))
    tiers = found["cache"]["tiers"]
    assert found["cache"]["disk"] == {"usage": 0.5, "stored": 5.0, "fetched": 1.0, "failed": 2.0}
    assert {tier: one["hit_share"] for tier, one in tiers.items()} == {"device": 0.2, "host": 0.0, "disk": 0.1}
    assert (tiers["disk"]["wait"]["count"], tiers["host"]["wait"]["count"]) == (1, 0)
    text = shown(server, found)
    assert "prefix hits by tier: device 20%, host 0%, disk 10%   waited for disk 15.0 ms" in text
    assert "disk: pages 50% used, 5 stored, 1 fetched, 2 FAILED" in text


def test_acceptance_is_shown_where_the_server_drafts(server):
    server.metrics.on_step(step(server.ranks, drafts=DraftCounts(10, 20, 20, (10, 10))))
    found = window(server, step(server.ranks, drafts=DraftCounts(10, 20, 12, (8, 4))))
    length = pytest.approx(2.2)
    assert found["drafts"] == {"per_second": 10.0, "acceptance": 0.6, "length": length, "per_position": [0.8, 0.4]}
    assert "drafts 10/s, accepted 60% (by position 80%, 40%)   2.20 tokens a row" in shown(server, found)
    idle = window(server)["drafts"]
    assert (idle["per_second"], idle["acceptance"], idle["per_position"]) == (0.0, None, [None, None])


def test_balancing_is_shown_where_experts_follow_the_load(server):
    server.metrics.on_step(step(server.ranks, balance=BalanceStats(rebalances=1, exchange_seconds=1.0)))
    now = BalanceStats(3, 0.75, 0.5, (10, 20), 2, 0, 5, 40, 4_000_000, 9, 1.25, 1.5, 4)
    found = window(server, step(server.ranks, balance=now))
    assert found["balancing"] == {
        "balancedness": {"sums": 0.75, "layers": 0.5}, "layers_left": 4, "rebalances": 1, "experts_moved": 40,
        "moved_bytes": 4_000_000, "exchanges": 9, "exchange_seconds": 0.25,
    }  # fmt: skip
    line = "experts balanced 0.75 (sums), 0.50 (layers)   1 rebalances, 40 moved (4.0 MB) in 250 ms, 4 layers left"
    assert line in shown(server, found)


def test_processes_with_experts_are_shown_and_who_is_gone_is_named(server):
    counts = [LinkCounts(True, 1, 2.0, 40, 4_000_000, 8_000_000), LinkCounts(True, 0, 0, 9, 0, 0)]
    links = SimpleNamespace(counts=counts)
    server.metrics = Metrics("tiny", 4, 4096, expert_links=lambda: links)
    before = reading(server, 0.0)
    links.counts = [LinkCounts(True, 1, 2.0, 80, 9_000_000, 18_000_000), LinkCounts(False, 3, 4.0, 9, 1_000_000, 0)]
    found = view(before, reading(server, 2.0))
    assert found["expert_processes"] == [
        {"process": 0, "connected": True, "losses": 0, "last_gap_seconds": 2.0, "sent": 2.5e6, "received": 5e6},
        {"process": 1, "connected": False, "losses": 3, "last_gap_seconds": 4.0, "sent": 5e5, "received": 0},
    ]
    line = "processes with experts: 1 of 2 connected   3.0 MB/s there, 5.0 MB/s back   longest last gap 4.00 s, 3 lost, GONE: 1"
    assert line in shown(server, found)


def test_the_mesh_has_a_line_while_it_is_not_the_one_that_was_asked_for(server):
    mesh = SimpleNamespace(number=0, busy=False, ahead=None, spec=MeshSpec(dp_size=4), wanted=MeshSpec(dp_size=4))
    mesh.facts, mesh.counts = SimpleNamespace(num_processes=1), ChangeCounts()
    parked = ParkedRequests()
    server.metrics = Metrics("tiny", 4, 4096, generations=mesh, parked=parked)
    assert "mesh 0" not in shown(server, window(server))
    mesh.number, mesh.spec = 1, MeshSpec(dp_size=3)
    parked |= {"a": None, "b": None}
    found = window(server)
    expected = {"number": 1, "devices": 3, "devices_wanted": 4, "changing": False, "requests_waiting": 2}
    assert found["generation"] == expected
    assert "mesh 1: 3 of 4 devices, 2 requests wait for a larger one" in shown(server, found)


def test_a_server_that_was_restarted_is_counted_from_its_start(server):
    feed(server, "a")
    feed(server, "b")
    before = reading(server, 0.0)
    server.metrics = Metrics("tiny", 4, 4096, experts_per_device=2)
    feed(server, "c")
    found = window(server, before=before)
    assert found["tokens_per_second"]["generation"] == 2.0
    assert found["latency"]["inter_token"]["count"] == 2


def test_quantiles_are_linear_within_a_bucket_as_in_promql():
    buckets = {0.1: 0.0, 0.2: 10.0, 0.4: 20.0, math.inf: 20.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.2)
    assert quantile(buckets, 0.25) == pytest.approx(0.15)
    assert quantile(buckets, 0.75) == pytest.approx(0.3)
    assert quantile({0.1: 1.0, math.inf: 4.0}, 0.9) == 0.1, "beyond the last bound: that bound"
    assert quantile({}, 0.5) is None
    assert quantile({0.1: 0.0, math.inf: 0.0}, 0.5) is None


def test_label_values_with_quotes_are_read_and_a_value_that_is_not_finite_is_passed_over():
    found = Exposition('a_total{of="x\\"y\\\\z\\nw"} 2\na_total{of="b"} 3\n')
    assert found.by("a_total", "of") == {('x"y\\z\nw',): 2.0, ("b",): 3.0}
    assert found.total("a_total") == 5.0
    metrics = Exposition("vllm:generation_tokens_total NaN\nvllm:prompt_tokens_total +Inf\n")
    found = view(*(StatusReading(at, metrics, {}, []) for at in (0.0, 1.0)))
    assert found["tokens_per_second"] == {"prompt": 0.0, "generation": 0.0}


@pytest.mark.parametrize("height", [24, 60])
def test_the_screen_shows_ranks_latencies_and_experts(server, height):
    before = reading(server, 0.0)
    feed(server, "a")
    counts = experts([[1, 1, 1, 1, 2, 2, 0, 8]])
    found = window(server, step(server.ranks, experts=counts, compilations_after_warm_up=2), before=before)
    text = shown(server, found, height)
    for one in ("tiny on dp=4, 4 devices", "3 running, 3 waiting", "2 tokens/s made", "first token", "hottest experts"):
        assert one in text
    for one in ("compiled after warm-up 2", "30%", "4.00"):  # the hottest expert has four times the mean
        assert one in text


def test_more_ranks_than_lines_are_said_to_be_there(server):
    server.ranks = [load(rank) for rank in range(72)]
    found = window(server)
    assert "… 50 more ranks" in shown(server, found, force_terminal=True)
    assert "more ranks" not in shown(server, found, height=30), "a pipe has no height"


def run(*arguments: str):
    return CliRunner().invoke(cli.app, ["top", *arguments])


def test_once_writes_one_json_object_of_a_server_that_wants_a_key(server):
    feed(server, "a")
    server.api_key = "secret"
    result = run("--url", server.url + "/v1", "--once", "--interval", "0.1", "--json", "-", "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["ranks"][3]["waiting"] == 3


def test_lines_of_json_go_on_when_a_server_that_went_away_is_back(server, monkeypatch, tmp_path):
    answers = iter([503, 200])

    def sleep(seconds):
        server.status = next(answers, None)
        if server.status is None:
            raise KeyboardInterrupt

    monkeypatch.setattr("dsjax.top.command.time", SimpleNamespace(sleep=sleep))
    result = run("--url", server.url, "--json", str(tmp_path / "lines"))
    assert result.exit_code == 0, result.exception
    assert len((tmp_path / "lines").read_text().splitlines()) == 1


def test_nobody_there_is_an_error_that_names_the_address():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        result = run("--url", url, "--once")
    assert isinstance(result.exception, NoAnswerError)
    assert str(result.exception).startswith(f"no server answers at {url}: ")
    assert "start one with dsjax serve" in str(result.exception)


@pytest.mark.parametrize(
    ("status", "key", "message"),
    [(503, None, "not ready yet"), (404, None, "is it dsjax serve"), (200, "secret", "give it with --api-key")],
)
def test_a_server_that_cannot_be_read_is_an_error_that_says_what_to_do(server, status, key, message):
    server.status, server.api_key = status, key
    result = run("--url", server.url, "--once")
    assert isinstance(result.exception, NoAnswerError)
    assert message in str(result.exception)


def test_an_address_that_no_server_can_have_and_a_key_that_no_header_takes_are_refused():
    """`test_bench_client.py` has the other reasons."""
    result = run("--url", "http://", "--once")
    assert isinstance(result.exception, OptionError)
    assert str(result.exception) == "--url is 'http://': it has no host; expected an address such as http://HOST:PORT"
    with pytest.raises(NoAnswerError, match="--api-key has characters outside ASCII"):
        StatusClient("http://127.0.0.1:8000", "schlüssel☃")


def read_until(descriptor: int, wanted: bytes | None) -> bytes:
    """Read until these bytes have come, or, of None, to the end."""
    seen, chunk = b"", b"any"
    while chunk and (wanted is None or wanted not in seen):
        assert select.select([descriptor], [], [], 60)[0], seen.decode()
        chunk = b""
        with contextlib.suppress(OSError):  # a terminal whose other end is closed
            chunk = os.read(descriptor, 4096)
        seen += chunk
    assert wanted is None or wanted in seen, seen.decode()
    return seen


@pytest.mark.parametrize("terminal", [True, False])
def test_ctrl_c_ends_it_cleanly_and_a_server_that_goes_away_is_waited_for(server, terminal):
    command = [sys.executable, "-m", "dsjax", "top", "--url", server.url, "--interval", "0.1"]
    environment = {**os.environ, "COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
    reading_end, writing_end = pty.openpty() if terminal else os.pipe()
    pipes = {"stdout": writing_end, "stderr": writing_end}
    process = subprocess.Popen(command, env=environment, **pipes)
    os.close(writing_end)
    read_until(reading_end, b"tiny")
    server.status = 503
    read_until(reading_end, b"not ready yet")
    process.send_signal(signal.SIGINT)
    assert b"Traceback" not in read_until(reading_end, None)
    assert process.wait(240) == 0
    os.close(reading_end)


@pytest.mark.parametrize(
    ("metrics", "loads"),
    [
        ('vllm:e2e_request_latency_seconds_bucket{le="abc"} 3\n', []),
        ('dsjax_expert_tokens_total{expert="x",ep_rank="y"} 3\n', []),
        ("", [1]),
        ("", [{}]),
        ("", [{"rank": 0, "running": "many", "waiting": 0, "used_pages": 0, "usable_pages": 1}]),
        ("", [{"rank": 0, "running": math.nan, "waiting": 0, "used_pages": 0, "usable_pages": 1}]),
    ],
)
def test_fields_that_are_not_dsjax_s_are_an_error_that_says_what_to_do(metrics, loads):
    message = r"is not dsjax serve's of this version .*; give the address of one as --url"
    with pytest.raises(NoAnswerError, match=message):
        view(*(StatusReading(at, Exposition(metrics), {}, loads) for at in (0.0, 1.0)))


@pytest.mark.parametrize("interval", ["inf", "1e20", "nan", "0"])
def test_an_interval_that_nobody_can_wait_for_is_refused(interval):
    ended = run("--interval", interval)
    assert ended.exit_code == 2
    assert "Invalid value for '--interval'" in ended.output
