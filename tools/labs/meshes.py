"""Hold meshes over several processes to the tokens of one device: 64 prompts, greedy, on a tiny model.

    python tools/lab.py meshes                                    # 4 processes × 8 devices: 3 meshes × 3 dispatches
    python tools/lab.py meshes --processes 2 --prompts 8 dp=4     # a small one
    python tools/lab.py meshes --model demo --dispatch padded --json found.json

Every run starts its processes anew, each with its share of the emulated devices. It prints, for each process, the bytes of the checkpoint
that it read, the seconds that took, and the most memory it had resident; the first run is of one process with the same mesh, for
comparison. `--json FILE` writes `{"reference", "runs": [{"mesh", "dispatch", "processes", "equal", "seconds", "by_process":
[{"bytes_read", "load_seconds", "peak_bytes"}]}]}`, anew after each run. Exits with 1 if any token differs.
"""

import argparse
import json
import random
import re
import tempfile
import time
from pathlib import Path

from layouts import TINY, write_checkpoint

from tools.labs.servers import Workers

MESHES = ("dp=32", "dp=4,tp=8", "dp=16,tp=2,ep=8")
DISPATCHES = ("gather", "padded", "ragged")
_SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "kernels": "plain"}
_READ = re.compile(r"Read ([\d,]+) of the checkpoint's [\d,]+ bytes in ([\d.]+) s, .* took ([\d,]+) bytes")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The lab's options."""
    parser.add_argument("meshes", nargs="*", metavar="MESH", default=MESHES, help=f"default: {' '.join(MESHES)}")
    parser.add_argument("--dispatch", action="append", choices=DISPATCHES, help="several may be given; default: all")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16, help="made for each prompt")
    parser.add_argument("--model", help="default: a tiny checkpoint that is made for this")
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Run the lab."""
    rng, runs = random.Random(5), []
    prompts = [rng.choices(range(2, TINY["vocab_size"]), k=rng.randint(1, 47)) for _ in range(args.prompts)]
    with tempfile.TemporaryDirectory(prefix="lab-meshes-") as folder:
        model = args.model or str(write_checkpoint(Path(folder)))

        def generate(mesh: str, dispatch: str, processes: int) -> tuple[list, dict]:
            options = {"model": model, "mesh": mesh, "dispatch": dispatch, "dtype": "float32", **_SIZES}
            began = time.monotonic()
            workers = Workers(options, processes)
            try:
                tokens = workers.generate(prompts, args.tokens)["tokens"]
                workers.finish()
            finally:
                workers.end()
            found = {"mesh": mesh, "dispatch": dispatch, "processes": processes, "seconds": time.monotonic() - began}
            return tokens, found | {"by_process": [loading(text) for text in workers.processes.output]}

        reference, _ = generate("dp=1", "auto", 1)
        for mesh in args.meshes:
            for dispatch in args.dispatch or DISPATCHES:
                for processes in [args.processes] if runs else [1, args.processes]:
                    tokens, found = generate(mesh, dispatch, processes)
                    runs.append(found | {"equal": tokens == reference})
                    show(runs[-1])
                    if args.json:
                        args.json.write_text(json.dumps({"reference": reference, "runs": runs}, indent=1) + "\n")
    return 0 if all(found["equal"] for found in runs) else 1


def loading(output: str) -> dict:
    """What a process says of reading the checkpoint."""
    read, seconds, peak = _READ.search(output).groups()
    return {
        "bytes_read": int(read.replace(",", "")),
        "load_seconds": float(seconds),
        "peak_bytes": int(peak.replace(",", "")),
    }


def show(found: dict) -> None:
    """Print a run."""
    verdict = "equal" if found["equal"] else "DIFFERENT"
    print(f"{found['mesh']} {found['dispatch']}, {found['processes']} processes: {verdict}, {found['seconds']:.1f} s")
    for index, own in enumerate(found["by_process"]):
        print(
            f"  process {index}: read {own['bytes_read']:,} B in {own['load_seconds']:.1f} s, at most {own['peak_bytes'] / 1e6:,.0f} MB",
            flush=True,
        )
