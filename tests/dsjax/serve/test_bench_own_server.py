"""`dsjax bench serve` against `dsjax serve`, over the fake executor: what one sends and reads, the other takes and tells."""

import asyncio
import functools

from rich.console import Console

from dsjax.bench.serve.benchmark import Benchmark
from dsjax.bench.serve.options import LoadOptions, ReportOptions, ServerOptions, WorkloadOptions
from dsjax.bench.serve.report import point_progress


def measure(url, workload: WorkloadOptions, **load):
    points = []
    benchmark = Benchmark(
        ServerOptions(base_url=url, vocab_size=200, ignore_eos=True),
        workload,
        LoadOptions(**load),
        ReportOptions(),
        say=print,
        progress=functools.partial(point_progress, Console(), False),
    )
    asyncio.run(benchmark.run(asyncio.Event(), lambda facts: None, points.append))
    return points


def test_every_request_is_answered_to_its_full_length_and_counted_by_the_server(server):
    workload = WorkloadOptions(num_prompts=40, random_input_len=20, random_output_len=6)
    points = measure(server.url, workload, sweep_concurrency="1,16", num_warmups=2)
    assert len(points) == 2
    for one in points:
        assert one.statistics.errors == []
        assert one.statistics.token_sources == {"usage": 40}
        assert {record.output_tokens for record in one.result.records} == {6}
        assert {record.prompt_tokens for record in one.result.records} == {20}
        assert {record.finish_reason for record in one.result.records} == {"length"}


def test_shared_prefixes_come_out_of_the_cache_up_to_the_workload_s_bound(server):
    workload = WorkloadOptions(
        dataset_name="prefix-repetition",
        num_prompts=24,
        prefix_repetition_prefix_len=64,
        prefix_repetition_suffix_len=4,
        prefix_repetition_num_prefixes=2,
        prefix_repetition_output_len=2,
    )
    (one,) = measure(server.url, workload, max_concurrency=1)
    assert 0 < one.statistics.cached_share <= one.point.cached_share_bound
