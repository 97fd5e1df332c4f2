"""Hold requests whose pages travel to the bits of one device, on every layout: through tiers, between meshes, between processes.

    python tools/check_pages.py
    python tools/check_pages.py --model v3.2 dp=8 tp=8               # pages that hold index keys, too
    python tools/check_pages.py dp=32 tp=8 --ways tiers              # these layouts only, in this way only
    python tools/check_pages.py --slice 3/37                         # each 37th run, from the third on: CI does one
    python tools/check_pages.py pp=3,dp=2 --ways tiers --speculative --kv-cache-dtype fp8    # with drafts, and with an FP8 cache

A tiny model answers prompts with few beginnings, greedily and drawn with seeds, twice, and the second time in the opposite order. Tokens
and log-probabilities must be those of one device:

- tiers: the layout's caches hold a part of it. What leaves them goes to host memory with room for 5 % of it, and to a disk, from which
  another engine of the layout answers the prompts once more.
- separated: prompts are computed on another layout beside (the list's opposite one) in the same process; between the two rounds both
  sides forget what they have cached, and a request is aborted.
- processes: the same as separated, with the prompts in another process.

Layouts with stages (pp) go through tiers alone: their pages are not handed over. Each way is held to have been used: pages have come
from host memory and from the disk, and to the second engine from the disk; or every prompt from the other side. Takes about twenty
minutes on one core. Exits 1 if a run differs. The tests run a part of this.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
sys.path[:0] = [str(ROOT), str(TESTS), str(TESTS / "dsjax" / "hosts")]
from quick_compilation import QUICK_COMPILATION

os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_COMPILATION))

import numpy as np
from layouts import MODELS, TINY, write_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.cli.exact import MESHES, parse_slice
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.schedule.request import RequestOptions
from sharding.emulation import emulate_devices
from sharding.mesh import MeshSpec
from tools.labs.servers import SideProcess

WAYS = ("tiers", "separated", "processes")
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "prefill_chunk": 16, "page_size": 4}
OPTIONS = {"dtype": "float32"}
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
APART = {"local_prefill_tokens": 1, "transfer_timeout": 600}
REQUESTS, NEW_TOKENS = 16, 12
CACHE_TOKENS = 160
HOST_SHARE = 0.05
ABORTED = "aborted"


def draw_requests():
    """(prompt, parameters)."""
    rng = np.random.default_rng(11)
    tokens = lambda count: rng.integers(2, TINY["vocab_size"], count).tolist()  # noqa: E731
    heads, found = [tokens(n) for n in (21, 32, 47)], []
    for index in range(REQUESTS):
        drawn = {"temperature": 0.8, "seed": index} if index % 2 else {"temperature": 0}
        params = SamplingParams(**drawn, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
        found.append((heads[index % len(heads)] + tokens(int(rng.integers(3, 40))), params))
    return found


def few_programs(executor) -> None:
    """Three of them instead of a dozen: this is about pages, not buckets."""
    speculation = executor.buckets.speculation
    executor.buckets = Buckets(decode=(4,), prefill=(Rectangle(2, 16),), mixed=False, speculation=speculation)


def play(llm, requests, order, prefill=lambda tokens: None) -> list[list[tuple[int, float]]]:
    """Tokens of each request with their log-probabilities. They run on the first and the last DP rank, so that the caches are short of
    room on any mesh.
    """
    found, ranks = {}, (0, llm.parts.num_ranks - 1)
    for place in order:
        tokens, params = requests[place]
        options = RequestOptions(dp_rank=ranks[place % 2], prefill=prefill(tokens))
        llm.engine.add_request(f"{place}", {"prompt_token_ids": tokens}, params, options)
    while llm.engine.has_unfinished():
        for output in llm.engine.step():
            if output.finished and output.request_id != ABORTED:
                (made,) = output.outputs
                entries = zip(made.token_ids, made.logprobs, strict=True)
                found[int(output.request_id)] = [(token, entry[token].logprob) for token, entry in entries]
    return [found[place] for place in range(len(requests))]


def through_tiers(directory: str, layout: str, requests, folder: str, page_bytes: int, options):
    """What each round gave, and what has come from where, and whether that is enough."""
    ranks = MeshSpec.parse(layout).dp_size
    pages = sum(len(tokens) + NEW_TOKENS for tokens, _ in requests) // SIZES["page_size"] // min(2, ranks)
    room = max(1, round(HOST_SHARE * pages)) * ranks * page_bytes
    tiers = {"host_cache_bytes": room, "disk_cache": folder, "disk_cache_bytes": 1 << 28}
    forward, made, found = range(len(requests)), [], []
    for orders in ((forward, forward[::-1]), (forward,)):  # of an engine, and of another one after it
        llm = LLM(directory, mesh=layout, cache_tokens=CACHE_TOKENS, **tiers, **SIZES, **OPTIONS, **options)
        few_programs(llm.executor)
        try:
            made += [play(llm, requests, order) for order in orders]
            loads = llm.engine.core.loads()
            hits = [sum(load.hits.get(tier, 0) for load in loads) for tier in ("host", "disk")]
            found.append((*hits, sum(rank.num_preemptions for rank in llm.engine.core.scheduler.ranks)))
        finally:
            llm.shutdown()
    (host, disk, preempted), (_, again, _) = found
    said = f"{host} tokens from host memory, {disk} from the disk, {again} after a restart, {preempted} preemptions"
    return made, said, all((host, disk, again))


def twice_apart(llm, requests, prefill=lambda tokens: None):
    """What both rounds gave, with an aborted request and empty caches between; what was transferred, and whether it was all."""
    try:
        forward = range(len(requests))
        first = play(llm, requests, forward, prefill)
        llm.engine.flush_prefix_cache()
        tokens, params = requests[0]
        llm.engine.add_request(ABORTED, {"prompt_token_ids": tokens}, params, RequestOptions(prefill=prefill(tokens)))
        for _ in range(3):
            llm.engine.step()
        llm.engine.abort(ABORTED)
        second = play(llm, requests, forward[::-1], prefill)
        counts = llm.engine.core.statistics()["transfers"]
    finally:
        llm.shutdown()
    # Requests of one beginning on one rank share what is transferred, but none has nothing to be transferred.
    used = counts.pages > 4 * REQUESTS and not counts.given_up
    return [first, second], f"{counts.pages} pages transferred", used


def separated(directory: str, layout: str, requests, other: str):
    """As `through_tiers`."""
    llm = LLM(directory, decode_mesh=layout, prefill_mesh=other, **APART, **SIZES, **OPTIONS)
    few_programs(llm.executor)
    [prefill] = llm.parts.prefill_engines
    few_programs(prefill.core.executor)
    return twice_apart(llm, requests)


def between_processes(directory: str, layout: str, requests, other: str):
    """As `through_tiers`."""
    own = {"model": directory, "transfer_host": "127.0.0.1", **APART, **SIZES, **OPTIONS}
    prefill = SideProcess(*QUICK_COMPILATION, mesh=other, disaggregation_mode="prefill", **own)
    try:
        llm = LLM(mesh=layout, disaggregation_mode="decode", **own)
        few_programs(llm.executor)
        prefill.wait()
        return twice_apart(llm, requests, lambda tokens: prefill.ask(tokens=tokens))
    finally:
        prefill.end()


def main() -> int:
    """Run the sweep, and print what each run found."""
    layouts = [mesh for mesh in MESHES if "+" not in mesh]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", metavar="LAYOUT", help=f"meshes; default: {' '.join(layouts)}")
    parser.add_argument("--model", choices=MODELS, default="v3", help="of which tiny model; v3.2 has sparse attention")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="that pages travel; default: all three")
    parser.add_argument("--speculative", action="store_true", help="tiers: with drafts of the MTP module")
    parser.add_argument("--kv-cache-dtype", default="auto", help="tiers: as of dsjax serve, of one device too")
    parser.add_argument("--slice", type=parse_slice, default="1/1", metavar="K/N", help="each N-th run, from K on")
    args = parser.parse_args()
    chosen = args.layouts or layouts
    one_part = [layout for layout in layouts if MeshSpec.parse(layout).pp_size == 1]
    opposite = dict(zip(one_part, one_part[::-1], strict=True))
    sizes = {layout: MeshSpec.parse(layout).num_devices for layout in (*one_part, *chosen)}
    emulate_devices(max(sizes[layout] + sizes[opposite.get(layout, "tp=8")] for layout in chosen))
    # A mesh with stages has a part of each page at each of them, and hands none over.
    runs = [
        (way, layout) for way in args.ways for layout in chosen if way == "tiers" or MeshSpec.parse(layout).pp_size == 1
    ]
    of, runs = len(runs), runs[args.slice]
    print(f"{len(runs)} of {of} runs", flush=True)
    requests, wrong = draw_requests(), 0
    kept = {"kv_cache_dtype": args.kv_cache_dtype}
    with tempfile.TemporaryDirectory(prefix="check-pages-") as folder:
        directory = str(write_checkpoint(Path(folder), mtp=args.speculative, **MODELS[args.model]))
        one = LLM(directory, mesh="dp=1", **SIZES, **OPTIONS, **kept)
        few_programs(one.executor)
        expected = play(one, requests, range(len(requests)))
        page_bytes = one.facts.page_bytes
        one.shutdown()
        for number, (way, layout) in enumerate(runs, 1):
            began, other = time.monotonic(), opposite.get(layout, "tp=8")
            if way == "tiers":
                with tempfile.TemporaryDirectory(prefix="check-pages-") as below:
                    rounds, said, used = through_tiers(
                        directory, layout, requests, below, page_bytes, kept | (DRAFTS if args.speculative else {})
                    )
            else:
                run = between_processes if way == "processes" else separated
                rounds, said, used = run(directory, layout, requests, other)
            places = [(r, p) for r, made in enumerate(rounds, 1) for p, e in enumerate(expected) if made[p] != e]
            found = "equal" if not places else f"(round, request) {places} DIFFER"
            found += "" if used else "; NOT ALL WENT THAT WAY"
            wrong += bool(places) or not used
            name = layout if way == "tiers" else f"{other} for {layout}"
            print(f"{number}/{len(runs)} {way}, {name}: {found}, {said} ({time.monotonic() - began:.1f} s)", flush=True)
    print(f"{len(runs) - wrong} of {len(runs)} equal to one device")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
