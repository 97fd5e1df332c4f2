"""Host time of a step: what the scheduler costs while every request decodes, without any device.

python tools/bench_host.py --requests 1024

`schedule` and `update` lie between two steps of the device; `prepare` (hashing and allocating the next pages) runs while it
computes. Python's garbage collector runs as in the server. Prompts differ in length, so that in each step some requests fill a
page. Times are the thread's own, so that what else runs on the machine counts little; given is the least over the repeats of the
mean over steps.
"""

import argparse
import statistics
import time

from dsjax.engine.plan import RowResult
from dsjax.engine.request import Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import Scheduler, SchedulerConfig
from dsjax.serve.server import settle_collector

PROMPT, OUTPUT, PAGE = 64, 200, 16


def measure(requests: int, ranks: int, prefix_caching: bool) -> tuple[float, float, float]:
    """Mean seconds of `schedule`, `update` and `prepare` over the steps in which all requests decode."""
    rows = -(-requests // ranks)
    config = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=rows * (PROMPT + PAGE),
        prefill_chunk=PROMPT + PAGE,
        max_prefill_rows=rows,
        page_size=PAGE,
        pages_per_rank=2 + rows * (2 + (PROMPT + OUTPUT) // PAGE) * 102 // 100,
        max_model_len=PROMPT + PAGE + OUTPUT,
        prefix_caching=prefix_caching,
    )
    scheduler = Scheduler(config, ranks)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0)
    for index in range(requests):
        prompt = [index] * (PROMPT + index % PAGE)
        scheduler.add(Request(str(index), prompt, len(prompt), params, OUTPUT, 0, frozenset([2])))
    seconds = []
    while scheduler.num_unfinished == requests:
        began = time.thread_time()
        plan = scheduler.schedule()
        planned = time.thread_time()
        scheduler.prepare(plan)
        prepared = time.thread_time()
        results = {row.request.request_id: RowResult(5) for rank in plan.ranks for rows in rank for row in rows}
        computed = time.thread_time()
        scheduler.update(plan, results)
        entered = time.thread_time()
        if all(not rank.prefills for rank in plan.ranks):
            seconds.append((planned - began, entered - computed, prepared - planned))
    return tuple(statistics.mean(column) for column in zip(*seconds, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    settle_collector()
    print(f"{arguments.requests} running requests, milliseconds a step")
    for ranks in arguments.ranks:
        for prefix_caching in (True, False):
            found = [measure(arguments.requests, ranks, prefix_caching) for _ in range(arguments.repeats)]
            schedule, update, prepare = (seconds * 1e3 for seconds in min(found, key=lambda each: sum(each[:2])))
            print(
                f"{ranks:>3} ranks, prefix cache {'on ' if prefix_caching else 'off'}: schedule {schedule:.2f}, "
                f"update {update:.2f}, together {schedule + update:.2f}; while the device computes: {prepare:.2f}"
            )


if __name__ == "__main__":
    main()
