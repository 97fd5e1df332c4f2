"""What prefill apart from decode costs and is worth: bytes a second, the share of a step, and the time between tokens while prompts come.

    python tools/bench_transfer.py
    python tools/bench_transfer.py --part bytes --backends jax,nixl --rounds 9
    python tools/bench_transfer.py --part load --prompt-tokens 1500 --prompts 24

Part `bytes`: a chunk is pulled from device to device in one process, and from another process by each of `--backends`, in turns, so
that what else runs here meets all of them; beside it the programs that take pages off the cache and place them, and a decode step.
Part `load`: requests decode all the time while prompts come one after another, on `dp=2`, and on `dp=1` for prompts and `dp=1` for
decodes: time to the first token (TTFT) of the prompts and time between tokens (ITL) of the others. All must make the same tokens.
Both meshes share this machine's cores.
"""

import argparse
import itertools
import json
import queue
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
REPEATS = 60


def seconds(run, repeats=REPEATS):
    """The median of so many runs."""
    run()
    found = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def serve_chunks(options: dict) -> None:
    """In a process of its own: publish the same chunk again and again, under the number of each line, when the last one was pulled."""
    import jax
    import numpy as np

    from dsjax.engine.transfer.transport import open_transport

    transport = open_transport(options["backend"], jax.devices()[0], "127.0.0.1")
    chunk = {name: jax.device_put(np.zeros(shape, dtype)) for name, (shape, dtype) in options["shapes"].items()}
    print(transport.address, flush=True)
    for line in sys.stdin:
        number = int(line)
        if number > 1:
            transport.withdraw(number - 1, chunk, pulled=True)
        print(transport.publish(number, chunk).hex(), flush=True)


class OtherProcess:
    """A process from which chunks are pulled by a transport."""

    def __init__(self, backend: str, shapes, device):
        from dsjax.engine.transfer.transport import open_transport

        plain = {name: (shape, str(dtype)) for name, (shape, dtype) in shapes.items()}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", json.dumps({"shapes": plain, "backend": backend})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._address = self._process.stdout.readline().strip()
        self._transport, self._numbers = open_transport(backend, device, "127.0.0.1"), itertools.count(1)
        self._shapes, self._device = shapes, device

    def pull(self):
        """Have a chunk published, and pull it."""
        number = next(self._numbers)
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        ticket = bytes.fromhex(self._process.stdout.readline())
        self._transport.pull(self._address, number, ticket, self._shapes, self._device)

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait()


def between_processes(args, shapes, device) -> dict[str, float]:
    """Seconds in which a chunk is asked for, published and pulled, by transport."""
    others = {backend: OtherProcess(backend, shapes, device) for backend in args.backends.split(",")}
    rounds = {backend: [] for backend in others}
    for _ in range(args.rounds):
        for backend, other in others.items():
            rounds[backend].append(seconds(other.pull))
    for other in others.values():
        other.close()
    return {backend: statistics.median(took) for backend, took in rounds.items()}


def measure_bytes(args, console: Console) -> None:
    import jax
    import numpy as np

    from dsjax import LLM, SamplingParams
    from dsjax.engine.contract.commands import FetchPages, PlacePages, PullPages, SendPages, int32s
    from dsjax.engine.setup.args import EngineArgs
    from dsjax.engine.setup.loading import load_model
    from dsjax.engine.transfer.messages import CHUNK_PAGES, ChunkPort
    from dsjax.engine.transfer.page_chunks import move_chunk

    llm = LLM(args.model, prefill_mesh="dp=1", decode_mesh="dp=1", max_num_seqs=8, max_model_len=2048)
    executor = llm.executor
    shapes = executor.extension(ChunkPort).chunk_shapes
    size = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes.values())
    devices = jax.devices()
    chunk = {name: jax.device_put(np.zeros(*own), devices[1]) for name, own in shapes.items()}
    table = Table("what", "ms", "GB/s", title=f"a chunk of {CHUNK_PAGES} pages, {size / 1e6:.2f} MB ({args.model})")

    def row(what, took, size=size):
        table.add_row(what, f"{1e3 * took:.3f}", f"{size / took / 1e9:.2f}")

    row("from device to device", seconds(lambda: move_chunk(chunk, devices[0])))
    large = {"latent": ((1, CHUNK_PAGES, round(args.chunk_mb * 1e6) // CHUNK_PAGES), np.dtype(np.uint8))}
    for own in (shapes, large):
        mb = sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in own.values()) / 1e6
        for backend, took in between_processes(args, own, devices[0]).items():
            row(f"from another process by {backend}, {mb:.2f} MB", took, 1e6 * mb)

    pages = range(1, 1 + CHUNK_PAGES)
    kept = []
    options = {"mesh": "dp=1", "max_num_seqs": 8, "max_model_len": 2048, "disaggregation_mode": "prefill"}
    apart = load_model(
        EngineArgs.from_options(model=args.model, **options)
    ).executor  # no engine sends or pulls with it
    apart.extension(ChunkPort).send_chunks(lambda number, taken: kept.append(taken))
    gather = SendPages([int32s(value for page in pages for value in (1, page))])

    def take():
        pending = apart.launch(gather)
        while not kept:
            time.sleep(0)
        kept.clear()
        apart.wait(pending) if not pending.done else None

    row("taken off the cache, until it can be offered", seconds(take))
    come = queue.SimpleQueue()
    apart.extension(ChunkPort).pull_chunks(lambda source, number, device: move_chunk(chunk, device), come.put)
    counter = iter(range(1, 10**6))

    def land():
        quadruples = int32s(value for place in range(CHUNK_PAGES) for value in (0, 1, place, place))
        apart.launch(PullPages([quadruples], [(0, "")]))
        come.get()

    def place():
        number = next(counter)
        apart.launch(FetchPages([int32s(range(CHUNK_PAGES))], number))
        apart.launch(PlacePages([int32s(pages)], number))
        jax.block_until_ready(apart.state.start)

    placed = []
    for _ in range(REPEATS):
        land()
        began = time.perf_counter()
        place()
        placed.append(time.perf_counter() - began)
    row("staged and written to the cache", statistics.median(placed))
    for running in (1, 8):
        llm.generate(
            [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(running)],
            SamplingParams(temperature=0, max_tokens=100, ignore_eos=True),
        )
        began, steps = time.perf_counter(), 100
        llm.generate(
            [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(running)],
            SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True),
        )
        table.add_row(
            f"for comparison: a decode step of {running}", f"{1e3 * (time.perf_counter() - began) / steps:.3f}", ""
        )
    console.print(table)
    apart.shutdown()
    llm.shutdown()


def measure_load(args, console: Console) -> None:
    from dsjax import LLM

    table = Table("engine", "TTFT, median ms", "P99", "ITL of others, median ms", "P99", "prompt tokens/s")
    made = []
    for name, options in {
        "dp=2 for both": {"mesh": "dp=2"},
        "dp=1 for prompts, dp=1 for decodes": {"prefill_mesh": "dp=1", "decode_mesh": "dp=1"},
    }.items():
        llm = LLM(args.model, max_num_seqs=8, max_model_len=2048, prefill_chunk=256, **options)
        run_load(llm, args, 3)  # compiles what is missing
        llm.engine.flush_prefix_cache()
        tokens, first, between, rate = run_load(llm, args, args.prompts)
        made.append(tokens)
        shares = [f"{1e3 * quantile(values, q):.1f}" for values in (first, between) for q in (0.5, 0.99)]
        table.add_row(name, *shares, f"{rate:,.0f}")
        llm.shutdown()
    console.print(table)
    if made[0] != made[1]:
        raise SystemExit("the engines have made different tokens")


def run_load(llm, args, prompts):
    """Tokens of the prompts, their TTFT, the ITL of the others, and prompt tokens a second."""
    from dsjax import SamplingParams
    from dsjax.engine.contract.sampling_params import OutputKind

    choose = random.Random(1)
    waiting = [[choose.randrange(5, 250) for _ in range(args.prompt_tokens)] for _ in range(prompts)]
    delta = {"temperature": 0, "ignore_eos": True, "output_kind": OutputKind.DELTA}
    found, first, between, last, asked = {}, [], [], {}, None
    began, number, watched = time.perf_counter(), 0, 0
    while number < prompts or asked is not None:
        while sum(name.startswith("watch") for name in last) < args.decoding:
            watched += 1
            last[f"watch-{watched}"] = None
            llm.engine.add_request(
                f"watch-{watched}", {"prompt_token_ids": [7, watched % 200]}, SamplingParams(max_tokens=400, **delta)
            )
        if asked is None:
            asked = time.perf_counter()
            llm.engine.add_request(
                f"ask-{number}", {"prompt_token_ids": waiting[number]}, SamplingParams(max_tokens=4, **delta)
            )
            number += 1
        for output in llm.engine.step():
            now, name = time.perf_counter(), output.request_id
            if name.startswith("ask"):
                if name not in found:
                    first.append(now - asked)
                found.setdefault(name, []).extend(output.outputs[0].token_ids)
                asked = None if output.finished else asked
                continue
            if last.get(name) is not None:
                between.append(now - last[name])
            last[name] = now
            if output.finished:
                del last[name]
    took = time.perf_counter() - began
    for name in list(last):
        llm.engine.abort(name)
    while llm.engine.has_unfinished():
        llm.engine.step()
    return found, first, between, prompts * args.prompt_tokens / took


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--part", choices=("bytes", "load", "both"), default="both")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--decoding", type=int, default=4, help="requests that decode all the time")
    parser.add_argument("--backends", default="jax", help="transports between processes, with commas between: jax,nixl")
    parser.add_argument(
        "--rounds", type=int, default=5, help="times that each transport has its turn; the median is shown"
    )
    parser.add_argument("--chunk-mb", type=float, default=18.3, help="size of a second chunk; default: V3's")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve_chunks(json.loads(args.serve))
        return
    from sharding.emulation import emulate_devices

    emulate_devices(2)
    console = Console(width=140)
    if args.part != "load":
        measure_bytes(args, console)
    if args.part != "bytes":
        measure_load(args, console)


if __name__ == "__main__":
    main()
