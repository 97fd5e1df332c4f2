"""`dsjax bench serve` against `dsjax serve`, over the fake executor: what one sends and reads, the other takes and tells."""

import asyncio
import functools

from rich.console import Console

from dsjax.bench.serve.benchmark import Benchmark
from dsjax.bench.serve.options import LoadOptions, ReportOptions, ServerOptions, WorkloadOptions
from dsjax.bench.serve.report import point_progress


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
        assert one.body["error_counts"] == {}
        assert one.body["token_sources"] == {"usage": 40}
        assert {record.output_tokens for record in one.records} == {6}
        assert {record.prompt_tokens for record in one.records} == {20}
        assert {record.finish_reason for record in one.records} == {"length"}
