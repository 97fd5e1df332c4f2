"""Hold a mesh over several processes to the answer of one process: 64 prompts, greedy, on a tiny model.

    python tools/check_many_hosts.py                                    # 4 processes × 8 devices: 3 meshes × 3 dispatches
    python tools/check_many_hosts.py --processes 2 --prompts 8 dp=4     # a small one
    python tools/check_many_hosts.py --model demo --dispatch padded --json found.json

Every run starts its processes anew, each with its share of the emulated devices, as `LLM(coordinator_address=…)` in a script does. It
prints, for each process, the bytes of the checkpoint that it read, the seconds that took, and the most memory it had resident.
The first run is of one process with the same mesh, for comparison of those three; what all are held to is one device.

`--json FILE` writes `{"reference", "runs": [{"mesh", "dispatch", "processes", "equal", "seconds", "by_process": [{"bytes_read",
"load_seconds", "peak_bytes"}]}]}`, anew after each run. Meshes and `--dispatch` divide the whole into parts. Exits 1 if any token differs.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from quick_compilation import QUICK_COMPILATION

os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_COMPILATION))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

MESHES = ("dp=32", "dp=4,tp=8", "dp=16,tp=2,ep=8")
DISPATCHES = ("gather", "padded", "ragged")
SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "prefill_chunk": 16, "page_size": 4, "kernels": "plain"}
_READ = re.compile(r"Read ([\d,]+) of the checkpoint's [\d,]+ bytes in ([\d.]+) s, .* took ([\d,]+) bytes")


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("meshes", nargs="*", metavar="MESH", default=MESHES, help=f"default: {' '.join(MESHES)}")
    parser.add_argument("--dispatch", action="append", choices=DISPATCHES, help="several may be given; default: all")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16, help="made for each prompt")
    parser.add_argument("--model", help="default: a tiny checkpoint that is made for this")
    parser.add_argument("--no-alone", action="store_true", help="leave out the runs of one process on the same mesh")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(**json.loads(args.worker))
        return 0
    with tempfile.TemporaryDirectory(prefix="check-many-hosts-") as folder:
        model = args.model or tiny(Path(folder))
        what = {"model": model, "count": args.prompts, "tokens": args.tokens}
        reference = run(1, mesh="dp=1", dispatch="auto", **what)["tokens"]
        runs = []
        for mesh in args.meshes:
            for dispatch in args.dispatch or DISPATCHES:
                counts = [args.processes] if args.no_alone or runs else [1, args.processes]
                for processes in counts:
                    found = run(processes, mesh=mesh, dispatch=dispatch, **what)
                    found["equal"] = found.pop("tokens") == reference
                    runs.append({"mesh": mesh, "dispatch": dispatch, "processes": processes, **found})
                    show(runs[-1])
                    if args.json:
                        args.json.write_text(json.dumps({"reference": reference, "runs": runs}, indent=1) + "\n")
    return 0 if all(found["equal"] for found in runs) else 1


def tiny(folder: Path) -> str:
    """A checkpoint of a few layers."""
    from layouts import write_checkpoint

    return str(write_checkpoint(folder))


def run(processes: int, **what) -> dict:
    """Start a group, wait for its end; give process 0's tokens, and what each process said of its loading."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = time.monotonic()
    group = []
    for index in range(processes):
        place = {"coordinator_address": f"127.0.0.1:{port}", "num_processes": processes, "process_id": index}
        given = json.dumps({**what, "place": place if processes > 1 else {}})
        command = [sys.executable, __file__, "--worker", given]
        group.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    try:
        outputs = [process.communicate(timeout=1800)[0] for process in group]
    finally:
        for process in group:
            process.kill()
    lines = [line for line in outputs[0].splitlines() if line.startswith("tokens ")]
    if not lines or any(process.returncode for process in group):
        codes = [process.returncode for process in group]
        raise RuntimeError(f"{what}: the processes ended with {codes}:\n" + "\n".join(text[-2000:] for text in outputs))
    by_process = []
    for text in outputs:
        read, seconds, peak = _READ.search(text).groups()
        by_process.append(
            {
                "bytes_read": int(read.replace(",", "")),
                "load_seconds": float(seconds),
                "peak_bytes": int(peak.replace(",", "")),
            }
        )
    tokens = json.loads(lines[0].removeprefix("tokens "))
    return {"tokens": tokens, "seconds": time.monotonic() - started, "by_process": by_process}


def work(model: str, mesh: str, dispatch: str, count: int, tokens: int, place: dict) -> None:
    """One process of a group."""
    import logging

    import numpy as np

    from dsjax import LLM, SamplingParams

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    llm = LLM(model, mesh=mesh, dispatch=dispatch, dtype="float32", **SIZES, **place)
    rng = np.random.default_rng(5)
    lengths = rng.integers(1, 48, size=count)
    prompts = [{"prompt_token_ids": rng.integers(2, llm.config.vocab_size, size=n).tolist()} for n in lengths]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate(prompts, params)
    print("tokens", json.dumps([list(output.outputs[0].token_ids) for output in outputs]), flush=True)
    llm.shutdown()


def show(found: dict) -> None:
    """One run's line."""
    verdict = "equal" if found["equal"] else "DIFFERENT"
    print(f"{found['mesh']} {found['dispatch']}, {found['processes']} processes: {verdict}, {found['seconds']:.1f} s")
    for index, own in enumerate(found["by_process"]):
        print(
            f"  process {index}: read {own['bytes_read']:,} B in {own['load_seconds']:.1f} s, at most {own['peak_bytes'] / 1e6:,.0f} MB",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
