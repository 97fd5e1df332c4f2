"""Time a start of `dsjax serve` from the command to its first answer: with nothing kept from before, and again with what that start kept.

    python tools/bench_start.py                              # README's first command, on an idle machine
    python tools/bench_start.py --against ../before          # by turns with another checkout
    python tools/bench_start.py --rounds 3 -- --mesh dp=8    # with other options of `dsjax serve`

Each start has a folder of its own for compiled programs and native kernels, empty at first. A line says the checkout, whether the
folder was empty, seconds by the clock until the server was ready and until it had answered with 16 tokens, processor seconds until
then, with those of compilers, and what the folder holds.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
_URL = re.compile(r"serving \S+ at (http://\S+)/v1")


def main() -> int:
    """Start the servers one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, nargs="*", default=[], help="other checkouts of dsjax")
    parser.add_argument("--rounds", type=int, default=1, help="how often all checkouts take their turn")
    parser.add_argument("options", nargs="*", default=["--mesh", "dp=32"], help="of dsjax serve, after --")
    args = parser.parse_args()
    for _ in range(args.rounds):
        for checkout in (HERE, *args.against):
            with tempfile.TemporaryDirectory(prefix="dsjax-start-") as folder:
                for state in ("empty", "kept"):
                    print(f"{checkout.name}, {state} folder: {start(checkout, Path(folder), args.options)}", flush=True)
    return 0


def start(checkout: Path, folder: Path, options: list[str]) -> str:
    """Start a server, ask it once, and end it; what that took, as text."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_COMPILATION_CACHE_DIR": str(folder), "COLUMNS": "300"}
    # As the user's own folder has it (`enable_compile_cache`).
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    command = [sys.executable, "-m", "dsjax.serve", "--port", "0", *options]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        url = next((found.group(1) for line in process.stdout if (found := _URL.search(line))), None)
        if url is None:
            raise RuntimeError(f"the server ended with code {process.wait()} before it was ready")
        ready = time.monotonic() - began
        body = json.dumps({"prompt": "def main(", "max_tokens": 16, "temperature": 0}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            response.read()
        answered, processor = time.monotonic() - began, processor_seconds(process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return (
        f"ready in {ready:.1f} s, answered in {answered:.1f} s, processor {processor:.1f} s, "
        f"{len(files)} files of {size / 1e6:.1f} MB"
    )


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process and of those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
