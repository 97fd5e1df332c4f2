"""What a change of mesh costs with weights of several GB: bytes read and moved, memory, seconds; for `/scale`, a loss and a return.

    python tools/bench_recovery.py --layers 9 --experts 32 --width 1024 --against REVISION

Two processes of two emulated devices each serve a random checkpoint. `/scale` takes the mesh from four devices to two and back; then the
second process is killed, and started again. With --against the same is done with the code of another commit, in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.random_checkpoint import write_random_checkpoint

ROOT = Path(__file__).parents[1]
_OPTIONS = {
    "max-num-seqs": 1,
    "max-num-batched-tokens": 8,
    "prefill-chunk": 8,
    "max-model-len": 64,
    "cache-tokens": 128,
    "heartbeat-timeout": 10,
    "start-timeout": 120,
    "compile-ahead": 1,
}
_KEY = "recovery"


class Group:
    """Two processes that serve, what they print, and the most memory that each had since it was last asked."""

    def __init__(self, root: Path, checkpoint: Path):
        with socket.socket() as probe, socket.socket() as other:
            probe.bind(("127.0.0.1", 0))
            other.bind(("127.0.0.1", 0))
            coordinator, self._port = probe.getsockname()[1], other.getsockname()[1]
        self._root, self._checkpoint, self._coordinator = root, checkpoint, coordinator
        self.output, self.processes = ["", ""], [self._start(0), self._start(1)]
        self.peaks = [0, 0]
        self._ended = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _start(self, index: int) -> subprocess.Popen:
        flags = [item for name, value in _OPTIONS.items() for item in (f"--{name}", str(value))]
        port = self._port if index == 0 else 0
        command = [sys.executable, "-m", "dsjax.serve", "--model", str(self._checkpoint), "--mesh", "dp=4", *flags]
        command += ["--port", str(port), "--admin-api-key", _KEY, "--num-processes", "2", "--process-id", str(index)]
        command += ["--coordinator-address", f"127.0.0.1:{self._coordinator}"]
        environment = os.environ | {"PYTHONPATH": str(self._root), "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            command, cwd=self._root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._read, args=(index, process), daemon=True).start()
        return process

    def _read(self, index: int, process: subprocess.Popen) -> None:
        for line in process.stdout:
            self.output[index] += line

    def _watch(self) -> None:
        while not self._ended.wait(0.02):
            for index, process in enumerate(self.processes):
                self.peaks[index] = max(self.peaks[index], resident_bytes(process.pid))

    def resident(self) -> list[int]:
        """The memory that each process has resident now, without files' pages."""
        return [resident_bytes(process.pid) for process in self.processes]

    def ask(self, path: str, body: dict | None = None) -> str:
        """Ask process 0."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {_KEY}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            return answer.read().decode()

    def wait_for(self, text: str, count: int = 1, seconds: float = 400) -> None:
        """Wait until process 0 has printed something so often."""
        deadline = time.monotonic() + seconds
        while self.output[0].count(text) < count:
            if self.processes[0].poll() is not None or time.monotonic() > deadline:
                raise SystemExit("\n".join(text[-3000:] for text in self.output))
            time.sleep(0.05)

    def restart(self) -> None:
        """Start the second process again."""
        self.processes[1].wait()
        self.processes[1] = self._start(1)

    def end(self) -> None:
        """End both."""
        self._ended.set()
        for process in self.processes:
            process.kill()
            process.wait()


def resident_bytes(pid: int) -> int:
    """Bytes of a process that are resident and no file's; 0 where it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return sum(int(kib) * 1024 for kib in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", text, re.MULTILINE))


def measure(root: Path, checkpoint: Path) -> list[dict]:
    """Make each change once with the code in a folder."""
    group, rows = Group(root, checkpoint), []
    try:
        group.wait_for("serving ")

        def change(name: str, act) -> None:
            before = [len(text) for text in group.output]
            generation = len(re.findall(r"Generation \d+ has", group.output[0]))
            group.peaks, resident = [0, 0], group.resident()
            act()
            deadline = time.monotonic() + 300
            while len(re.findall(r"Generation \d+ has", group.output[0])) == generation:
                if time.monotonic() > deadline:
                    raise SystemExit("\n".join(text[-3000:] for text in group.output))
                time.sleep(0.02)
            time.sleep(0.5)
            news = [
                text[length:] if len(text) >= length else text
                for text, length in zip(group.output, before, strict=True)
            ]
            [line] = re.findall(r"Generation \d+ has .*", news[0])
            read = [
                int(n.replace(",", "")) for text in news for n in re.findall(r"Read ([\d,]+) of the checkpoint's", text)
            ]
            moved = {
                word: int(number.replace(",", ""))
                for number, word in re.findall(r"([\d,]+) (?:bytes of weights )?(kept|moved)", line)
            }
            seconds = dict(re.findall(r"(\w+) ([\d.]+) s", line.partition("computed for")[2]))
            rows.append(
                {
                    "change": name,
                    "bytes_read": sum(read),
                    **moved,
                    "seconds_weights": max(
                        map(float, re.findall(r"checkpoint's [\d,]+ bytes in ([\d.]+) s", "".join(news)))
                    ),
                    "seconds_loading": float(seconds.get("loading", 0)),
                    "seconds_releasing": float(seconds.get("releasing", 0)),
                    "resident_before": resident,
                    "resident_most": list(group.peaks),
                }
            )
            print(json.dumps(rows[-1]), flush=True)

        change("scale to dp=2", lambda: group.ask("/scale", {"mesh": "dp=2"}))
        change("scale to dp=4", lambda: group.ask("/scale", {"mesh": "dp=4"}))
        change("loss", lambda: group.processes[1].kill())
        group.output[1] = ""
        change("return", group.restart)
    finally:
        group.end()
    return rows


def main() -> None:
    """Read the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("layers", 9), ("experts", 32), ("width", 1024)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--against", metavar="REVISION", help="a commit whose code is measured as well")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        total = write_random_checkpoint(checkpoint, layers=args.layers, experts=args.experts, width=args.width)
        print(f"{total:,} bytes of tensors", flush=True)
        results = {"here": measure(ROOT, checkpoint)}
        if args.against:
            other = Path(folder) / "against"
            subprocess.run(["git", "worktree", "add", "--detach", other, args.against], cwd=ROOT, check=True)
            try:
                results[args.against] = measure(other, checkpoint)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    print_table(results, total)
    if args.json:
        Path(args.json).write_text(json.dumps({"tensor_bytes": total, "rows": results}, indent=1))


def print_table(results: dict[str, list[dict]], total: int) -> None:
    """Print the rows as Markdown, in GB."""
    print("| code | change | read | kept | moved | weights, s | loading, s | resident before | at most |")
    print("|---|---|---|---|---|---|---|---|---|")
    for code, rows in results.items():
        for row in rows:
            parts = [f"{row[name] / 1e9:.2f}" if name in row else "–" for name in ("bytes_read", "kept", "moved")]
            resident = [
                " + ".join(f"{n / 1e9:.2f}" for n in row[name]) for name in ("resident_before", "resident_most")
            ]
            print(
                f"| {code} | {row['change']} | {' | '.join(parts)} | {row['seconds_weights']:.1f} | {row['seconds_loading']:.1f} | "
                f"{' | '.join(resident)} |"
            )


if __name__ == "__main__":
    main()
