"""Host time of a step: what the scheduler costs while every request decodes, without any device.

python tools/bench_host.py --requests 1024
"""

import argparse
import statistics
import time

from dsjax.engine.plan import RowResult
from dsjax.engine.request import Request
from dsjax.engine.sampling_params import SamplingParams
from dsjax.engine.scheduler import Scheduler, SchedulerConfig

PROMPT, OUTPUT, PAGE = 64, 200, 16


def measure(requests: int, ranks: int) -> tuple[float, float]:
    """Median seconds of `schedule` and of `update` over the steps in which all requests decode."""
    rows = -(-requests // ranks)
    config = SchedulerConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=rows * PROMPT,
        prefill_chunk=PROMPT,
        max_prefill_rows=rows,
        page_size=PAGE,
        pages_per_rank=2 + rows * (1 + (PROMPT + OUTPUT) // PAGE) * 102 // 100,
        max_model_len=PROMPT + OUTPUT,
    )
    scheduler = Scheduler(config, ranks)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0)
    for index in range(requests):
        scheduler.add(Request(str(index), [1] * PROMPT, PROMPT, params, OUTPUT, 0, frozenset([2])))
    schedule, update = [], []
    while scheduler.num_unfinished == requests:
        before = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        results = {row.request.request_id: RowResult(5) for rank in plan.ranks for rows in rank for row in rows}
        computed = time.perf_counter()
        scheduler.update(plan, results)
        if all(not rank.prefills for rank in plan.ranks):
            schedule.append(planned - before)
            update.append(time.perf_counter() - computed)
    return statistics.median(schedule), statistics.median(update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 32])
    arguments = parser.parse_args()
    print(f"{arguments.requests} running requests, milliseconds a step (median)")
    for ranks in arguments.ranks:
        schedule, update = (seconds * 1e3 for seconds in measure(arguments.requests, ranks))
        print(f"{ranks:>3} ranks: schedule {schedule:.2f}, update {update:.2f}, together {schedule + update:.2f}")


if __name__ == "__main__":
    main()
