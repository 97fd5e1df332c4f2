"""`dsjax bench serve` and `dsjax bench soak` against `dsjax serve`, over the fake executor: one sends what the other takes."""

import asyncio
import functools

from rich.console import Console

from dsjax.bench.serve.benchmark import Benchmark
from dsjax.bench.serve.options import LoadOptions, ReportOptions, ServerOptions, WorkloadOptions
from dsjax.bench.serve.report import point_progress
from dsjax.bench.soak import SoakOptions, measure
from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions


def test_every_request_is_answered_to_its_full_length_and_counted_by_the_server(server):
    points = []
    benchmark = Benchmark(
        ServerOptions(base_url=server.url, vocab_size=200, ignore_eos=True),
        WorkloadOptions(num_prompts=40, random_input_len=20, random_output_len=6),
        LoadOptions(sweep_concurrency="1,16", num_warmups=2),
        ReportOptions(),
        say=print,
        progress=functools.partial(point_progress, Console(), False),
        stop=asyncio.Event(),
    )
    asyncio.run(benchmark.run(lambda facts: None, points.append))
    assert len(points) == 2
    for one in points:
        assert (one.body["error_counts"], one.body["token_sources"]) == ({}, {"usage": 40})
        read = {(record.prompt_tokens, record.output_tokens, record.finish_reason) for record in one.records}
        assert read == {(20, 6, "length")}


def test_a_soak_ends_requests_on_purpose_and_finds_nothing_left(start_server):
    keyed, metrics = ServeOptions(admin_api_key="admin"), Metrics("tiny", 2, 128)
    live = start_server(num_ranks=2, max_chunk=16, step_seconds=0.002, options=keyed, metrics=metrics)
    options = SoakOptions(
        base_url=live.url, admin_api_key="admin", duration=3.0, max_concurrency=12, disconnect_share=0.3, abort_share=0.3,
        input_len=20, output_len=60, vocab_size=200, memory_growth=9.0,
    )  # fmt: skip
    found = asyncio.run(measure(options))
    assert [one for one in found["claims"] if not one["holds"]] == []
    assert min(found[name] for name in ("completed", "disconnected", "aborted")) > 0
