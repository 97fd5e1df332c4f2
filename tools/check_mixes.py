"""Draw engines and batches for as long as one gives it, and hold what each request gets to the bits that it gets alone on one device.

    python tools/check_mixes.py --minutes 15
    python tools/check_mixes.py --seed 7 --minutes 60
    python tools/check_mixes.py --seed 7 --slice 13/13 --engines 1     # the 13th engine of that seed again, with its batches
    python tools/check_mixes.py --seed 0 --slice 7/1000 --engines 3     # three of its engines; CI has the commit's hash choose

A mix is an engine and a batch (`tests/mixes.py`). Drawn are, of an engine: the model (V3's or V3.2's structure, tiny), the mesh or the two
meshes of attention and experts, dispatch, the MLA forms, drafts, asynchronous steps, the prefix cache, host memory below it, experts that
move and redundant ones, steps in two halves, chunks of dispatch, an FP8 cache, and the shapes that are compiled; of a batch: prompts, which
begin alike, greedy and seeded sampling, penalties, when each request arrives, which are aborted, DP ranks and priorities, the sizes of
chunks and steps, and a cache so small that requests are preempted. Tokens, log-probabilities and those of prompts must be equal.

Where prompts and decodes have two forms, a request may differ if it shares cached pages with a request for which the same tokens are an
answer (docs/exactness.md). Such requests are counted, and do not fail the run.

Without `--seed` each run draws other mixes. Options that do not go together are drawn again, and counted. A mix that differs is printed
with the command that repeats it, and the run goes on; it exits with 1 in the end. An engine takes 10 to 60 s on two busy cores.
"""

import argparse
import dataclasses
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from quick_compilation import QUICK_COMPILATION, SERVING_FLAG, keep_programs

os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_COMPILATION))

from layouts import MODELS, write_checkpoint
from mixes import Alone, differences, draw_batch, draw_engine, play, reads_an_answer

from dsjax.cli.exact import parse_slice
from dsjax.errors import UserError
from sharding import MeshError
from sharding.emulation import emulate_devices

PRINTED = 3
"""Requests of a batch whose difference is printed."""


def main() -> int:
    """Draw, run and compare until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=None, help="of all that is drawn; default: another in each run")
    parser.add_argument("--minutes", type=float, default=15.0, help="after which no further engine is begun")
    parser.add_argument("--engines", type=int, default=None, help="most engines; default: as many as the time allows")
    parser.add_argument("--slice", type=parse_slice, default="1/1", metavar="K/N", help="each N-th engine, from K on")
    parser.add_argument("--batches", type=int, default=8, help="of each engine")
    parser.add_argument(SERVING_FLAG, action="store_true", help="compile as dsjax serve does, instead of quickly")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    emulate_devices(32)
    keep_programs("check-mixes-")
    print(f"seed {seed}", flush=True)
    counts, began = Counter(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="check-mixes-") as folder:
        directories = {}
        for model, changed in MODELS.items():
            directories[model] = Path(folder) / model
            directories[model].mkdir()
            write_checkpoint(directories[model], mtp=True, **changed)
        alone = Alone(directories)
        for number in range(sys.maxsize)[args.slice][: args.engines]:
            if time.monotonic() - began >= 60 * args.minutes:
                break
            counts.update(check(seed, number, args.batches, directories, alone))
        alone.close()
    print(
        f"{counts['equal']} of {counts['mixes']} mixes equal, of {counts['engines']} engines: {counts['requests']} requests, "
        f"{counts['tokens']} tokens; {counts['preemptions']} preemptions, {counts['cached']} tokens from prefix caches, "
        f"{counts['accepted']} drafts accepted, {counts['rebalances']} rebalances, {counts['aborted']} requests aborted, "
        f"{counts['answers_read']} that may have read another's answer; "
        f"{counts['refused']} engines refused, as their options do not go together"
    )
    return 0 if counts["equal"] == counts["mixes"] > 0 else 1


def check(seed: int, number: int, batches: int, directories: dict[str, Path], alone: Alone) -> Counter:
    """Run the batches of one engine, print what came of them, and count it."""
    rng, counts, began = random.Random(f"{seed} {number}"), Counter(), time.monotonic()
    while True:
        try:
            engine = draw_engine(rng)
            llm = engine.load(directories[engine.model])
            break
        except (UserError, MeshError) as error:
            counts["refused"] += 1
            if counts["refused"] == 100:
                raise RuntimeError("a hundred engines in a row were refused, the last one as above") from error
    counts["engines"] += 1
    heads = [[rng.randrange(2, 96) for _ in range(47)] for _ in range(3)]
    expected, requests = partial(alone.answer, engine), []
    try:
        for index in range(batches):
            batch = draw_batch(rng, engine, heads, llm.parts.num_ranks)
            played = play(llm, batch)
            requests += batch.requests
            wrong = differences(batch, played.given, expected)
            if wrong and engine.options["mla_prefill"] != engine.options["mla_decode"]:
                others = [(other, expected(other)) for other in requests]
                found = [one for one in wrong if not reads_an_answer(batch.requests[one[0]], one[2], others)]
                counts["answers_read"] += len(wrong) - len(found)
                wrong = found
            counts.update({"mixes": 1, "equal": not wrong, "accepted": played.accepted})
            counts.update(count_requests(played.given))
            if wrong:
                tell(seed, number, index, batches, engine, batch, wrong)
        balance = llm.engine.core.statistics().get("balance")
        counts["rebalances"] += balance.rebalances if balance else 0
    finally:
        llm.shutdown()
    options = " ".join(f"{name}={json.dumps(value)}" for name, value in engine.options.items())
    print(
        f"{number}: {engine.model} {engine.layout} {options}: {counts['equal']} of {counts['mixes']} equal "
        f"({time.monotonic() - began:.1f} s)",
        flush=True,
    )
    return counts


def count_requests(given: list) -> Counter:
    """Count what requests got; None is one that was aborted."""
    whole = [got for got in given if got is not None]
    return Counter(
        requests=len(given),
        aborted=len(given) - len(whole),
        tokens=sum(len(got.tokens) for got in whole),
        preemptions=sum(got.preemptions for got in whole),
        cached=sum(got.of_cache for got in whole),
    )


def tell(seed: int, number: int, index: int, batches: int, engine, batch, wrong: list) -> None:
    """Print a mix that differs: how it is repeated, what it is, and the first of its requests that got something else."""
    one = f"--slice {number + 1}/{number + 1} --engines 1"
    print(f"DIFFERENT, batch {index} of python tools/check_mixes.py --seed {seed} {one} --batches {batches}")
    print(json.dumps({"engine": dataclasses.asdict(engine), "batch": batch._asdict()}, default=dataclasses.asdict))
    for request, got, expected in wrong[:PRINTED]:
        for name in ("tokens", "logprobs", "prompt_logprobs"):
            ours, theirs = getattr(got, name), getattr(expected, name)
            places = [place for place, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]]
            if places:
                at = places[0]
                print(f"  request {request}: {name} differ at {places}; at {at} {ours[at]!r} instead of {theirs[at]!r}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
