"""Time `LLM.generate` for some users at once on a mesh, by the clock and by the processor, here and in other checkouts by turns.

    python tools/bench_users.py dp=1:1:96 dp=1:256:24 dp=8:64:32             # MESH:USERS:TOKENS
    python tools/bench_users.py dp=8:64:32 --against ../before               # this checkout and another one
    python tools/bench_users.py dp=1:8:32 --options '{}' '{"kernels": "plain"}' # with each of these options of `LLM` by turns
    taskset -c 1 python tools/bench_users.py dp=1:32:48                      # on one core, where other work takes the rest

Each user sends a prompt of 128 random tokens of the demo model (or of the `model` among the options) and gets TOKENS tokens. Of each run
three repetitions follow a warm-up; the fastest counts. A line says the checkout, the run, its seconds by the clock and of the processor,
and tokens a second by the clock.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
PROMPT = 128


def main() -> int:
    """Run all, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="MESH:USERS:TOKENS")
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="other checkouts of dsjax")
    parser.add_argument(
        "--options", nargs="+", default=["{}"], metavar="JSON", help="options of `LLM`; each set of them takes its turn"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how often all checkouts take their turn")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        mesh, users, tokens = args.runs[0].rsplit(":", 2)
        wall, processor = measure(mesh, int(users), int(tokens), json.loads(args.options[0]))
        print(f"{wall:.3f} s, processor {processor:.3f} s, {int(users) * int(tokens) / wall:.0f} tokens a second")
        return 0
    for run in args.runs:
        for _ in range(args.rounds):
            for checkout, options in itertools.product((HERE, *args.against), args.options):
                command = [sys.executable, __file__, "--one", run, "--options", options]
                environment = os.environ | {"PYTHONPATH": str(checkout)}
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                name = f"{checkout.name} {run}" + (f" {options}" if json.loads(options) else "")
                print(f"{name}: {(done.stdout or done.stderr).strip().splitlines()[-1]}", flush=True)
                if done.returncode:
                    return 1
    return 0


def measure(mesh: str, users: int, tokens: int, options: dict) -> tuple[float, float]:
    """Seconds of the fastest of three repetitions, by the clock and of the processor. options: of `LLM`, the model among them."""
    from sharding.emulation import emulate_devices
    from sharding.mesh import MeshSpec

    spec = MeshSpec.parse(mesh)
    emulate_devices(spec.num_devices)
    import numpy as np

    from dsjax import LLM, SamplingParams

    sizes = {"max_model_len": 512, "max_num_seqs": max(1, -(-users // spec.dp_size))}
    llm = LLM(**{"model": "demo", "mesh": mesh, "dtype": "float32"} | sizes | options)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    seconds = []
    for _ in range(4):
        prompts = [{"prompt_token_ids": rng.integers(10, 4000, PROMPT).tolist()} for _ in range(users)]
        clock, processor = time.perf_counter(), time.process_time()
        llm.generate(prompts, params)
        seconds.append((time.perf_counter() - clock, time.process_time() - processor))
    llm.shutdown()
    return tuple(min(found) for found in zip(*seconds[1:], strict=True))


if __name__ == "__main__":
    sys.exit(main())
