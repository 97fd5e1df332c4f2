"""What metrics cost: counting a step, against prometheus_client's own histogram, and writing a scrape.

python tools/bench_metrics.py --requests 1024 --ranks 32
"""

import argparse
import statistics
import time

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from dsjax.engine.contract.executor import RowResult
from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.schedule.request import FinishReason, Request
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import RankLoad, StepStats
from dsjax.serve.metrics import BETWEEN_TOKENS_SECONDS, Metrics

STEPS = 30


def decodes(requests: int, ranks: int) -> list[Update]:
    """A step in which every request makes a token."""
    updates = []
    for index in range(requests):
        request = Request(str(index), [1] * 64, 64, SamplingParams(), 200, 0, arrival_time=time.monotonic())
        request.rank, request.first_scheduled_time = index % ranks, time.monotonic()
        updates.append(Update(request, RowResult((5,)), None))
    return updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=32)
    arguments = parser.parse_args()
    metrics = Metrics("demo", arguments.ranks, 4096)
    updates = decodes(arguments.requests, arguments.ranks)
    loads = [RankLoad(rank, 32, 0, 0, 3, 4, 100, 1.0) for rank in range(arguments.ranks)]
    host = {"plan": 0.1, "launch": 0.1, "device": 0.1, "enter": 0.1}
    stats = StepStats(0.0, 0.01, host, arguments.requests, 0, 0, 0, 0, 0, 0, 0, loads)

    def ours() -> None:
        metrics.on_step(stats)
        metrics.on_updates(updates)

    children = Histogram("itl", "-", ["engine"], buckets=BETWEEN_TOKENS_SECONDS, registry=CollectorRegistry())
    by_rank = [children.labels(str(rank)) for rank in range(arguments.ranks)]

    def theirs() -> None:
        for request, _, _ in updates:
            by_rank[request.rank].observe(0.02)

    def their_scrape() -> bytes:
        return generate_latest(metrics.registry)

    print(f"milliseconds, median of {STEPS}")
    print(f"count a step of {arguments.requests} tokens on {arguments.ranks} ranks: {median(ours):.2f}")
    print(f"the same inter-token latencies alone in prometheus_client's histogram: {median(theirs):.2f}")
    metrics.on_updates([each._replace(finish_reason=FinishReason.LENGTH) for each in updates])
    lines = sum(not line.startswith(b"#") for line in metrics.render().splitlines())
    print(f"write a scrape of all {lines:,} samples: {median(metrics.render):.0f}")
    print(f"the same with prometheus_client's encoder: {median(their_scrape):.0f}")


def median(function) -> float:
    spent = []
    for _ in range(STEPS):
        before = time.perf_counter()
        function()
        spent.append(time.perf_counter() - before)
    return statistics.median(spent) * 1e3


if __name__ == "__main__":
    main()
