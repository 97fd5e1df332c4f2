"""A decode step over hosts, measured against the bandwidth and the latency between them, and against other traffic.

    sudo python tools/lab.py network                                        # 4 hosts: rates and latencies; 5 minutes
    sudo python tools/lab.py network --hosts 2 --mbit 1000 100 --latency-us 0 1000 --steps 10       # a small one
    sudo python tools/lab.py network --mbit 100 --latency-us --congestion 10 25 50 75 90     # other traffic between all hosts, in percent
    sudo python tools/lab.py network --devices 4 --dispatch hierarchical --mbit 100 --latency-us      # beside --dispatch padded
    sudo python tools/lab.py hosts --signal CUT                             # one link cut while its process lives, under load

Linux, as root, with iproute2: each host is a network namespace with one emulated device, or so many (`--devices`); their links are the
kernel's (`tbf` limits their rate), or, for latencies where the kernel has no `netem`, a switch in this process. One group of processes
runs a small model (`--hidden-size`) in each of the two networks, so that all points of a sweep are of the same programs; a point is the
median of decode steps, between its 10th and 90th percentile. Bytes are counted on process 0's link: what it sends in a step, its
commands to the others included. With `--congestion` every host sends that share of its link's rate to the others, in equal parts, at the
middle of the rates, while the steps run.

`--json FILE` writes `{"hosts", "netem", "points": [{"network", "mbit", "latency_us", "congestion", "step_seconds", "low", "high",
"bytes_per_step"}]}`, after each point; `congestion` is in percent.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from layouts import write_checkpoint

from tools.labs.namespaces import Namespaces, has_netem
from tools.labs.servers import SIZES, Workers

_PORT = 5002
_TRAFFIC = """
import socket, sys, threading, time
if sys.argv[1] == "take":
    listener = socket.create_server(("", PORT))
    def drain(taken):
        while taken.recv(1 << 20):
            pass
    while True:
        threading.Thread(target=drain, args=listener.accept()[:1], daemon=True).start()
else:
    rate, size = float(sys.argv[2]), 1 << 14
    others = [socket.create_connection((address, PORT)) for address in sys.argv[3:]]
    begun, sent = time.monotonic(), 0
    while True:
        for other in others:
            other.sendall(bytes(size))
            sent += size
            ahead = sent / rate - (time.monotonic() - begun)
            if ahead > 0:
                time.sleep(ahead)
            elif ahead < -1:  # the link gives less: no burst afterwards
                begun = time.monotonic() - sent / rate
""".replace("PORT", str(_PORT))
"""Takes what comes; or sends to addresses in turn, so many bytes a second in all."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The lab's options."""
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1, help="of a host")
    parser.add_argument("--mbit", type=float, nargs="*", default=[3000, 1000, 300, 100, 30], help="rates of a link")
    parser.add_argument("--latency-us", type=float, nargs="*", default=[0, 500, 2000, 10000], help="one way")
    parser.add_argument(
        "--congestion", type=float, nargs="*", default=[], help="other traffic, in percent of each link"
    )
    parser.add_argument("--rows", type=int, default=16, help="decodes of a DP rank")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=24, help="of a point")
    parser.add_argument("--dispatch", default="padded", choices=("gather", "padded", "ragged", "hierarchical"))
    parser.add_argument("--json", type=Path)


def run(args: argparse.Namespace) -> int:
    """Run the lab."""
    with tempfile.TemporaryDirectory(prefix="lab-network-") as folder:
        lab = Lab(args, str(write_checkpoint(Path(folder), hidden_size=args.hidden_size)))
        lab.sweep_rates()
        if args.latency_us:
            lab.sweep_latencies()
    return 0


class Lab:
    """The points of both sweeps."""

    def __init__(self, args: argparse.Namespace, model: str):
        self.args, self.netem, self.points = args, has_netem(), []
        self.options = {
            "model": model,
            "mesh": f"dp={args.hosts * args.devices}",
            "dtype": "float32",
            "compile_ahead": 0,
            "max_num_seqs": args.rows,
            "max_num_batched_tokens": max(args.rows, 16),
            **SIZES,
            "kernels": "plain",
            "dispatch": args.dispatch,
            "devices_per_host": args.devices,
        }
        print(
            f"{'network':8} {'Mbit/s':>8} {'latency µs':>10} {'traffic':>7} {'step ms':>8} {'B a step':>12}", flush=True
        )

    def sweep_rates(self) -> None:
        """Measure without a limit, at each rate, and with other traffic."""
        rates = self.args.mbit
        with self._workers(delayed=False) as (network, workers):
            self._measure(network, workers)
            for mbit in rates:
                network.limit(mbit)
                self._measure(network, workers, mbit=mbit)
            middle = sorted(rates)[len(rates) // 2] if rates else None
            for percent in sorted(self.args.congestion) if middle else ():
                network.limit(middle)
                with traffic(network, middle, percent):
                    self._measure(network, workers, mbit=middle, percent=percent)

    def sweep_latencies(self) -> None:
        """Measure at each latency."""
        with self._workers(delayed=not self.netem) as (network, workers):
            for latency in sorted(self.args.latency_us):
                network.delay(latency * 1e-6)
                self._measure(network, workers, latency=latency)

    @contextlib.contextmanager
    def _workers(self, *, delayed: bool) -> Iterator[tuple[Namespaces, Workers]]:
        with Namespaces(self.args.hosts, delayed=delayed) as network:
            workers = Workers(self.options, network.count, network)
            try:
                self._steps(workers, 4)
                yield network, workers
            finally:
                workers.end()

    def _steps(self, workers: Workers, count: int) -> dict:
        rows = self.args.rows * self.args.hosts * self.args.devices
        return workers.generate([[2 + row % 90, 3, 4] for row in range(rows)], count + 5)

    def _measure(
        self,
        network: Namespaces,
        workers: Workers,
        *,
        mbit: float | None = None,
        latency: float = 0.0,
        percent: float = 0.0,
    ) -> None:
        found = self._steps(workers, self.args.steps)
        # The first steps have prompts, and the last ones end requests.
        seconds, sent = sorted(found["seconds"][3:-2]), found["sent"]
        tenth = len(seconds) // 10
        point = {
            "network": "switch" if network.delayed else "bridge",
            "mbit": mbit,
            "latency_us": latency,
            "congestion": percent,
            "step_seconds": median(seconds),
            "low": seconds[tenth],
            "high": seconds[-1 - tenth],
            "bytes_per_step": (sent[-3] - sent[2]) / len(seconds),
        }
        self.points.append(point)
        rate, other = "" if mbit is None else f"{mbit:g}", f"{percent:g} %" if percent else ""
        print(
            f"{point['network']:8} {rate:>8} {latency:>10g} {other:>7} {point['step_seconds'] * 1e3:>8.1f} "
            f"{point['bytes_per_step']:>12,.0f}",
            flush=True,
        )
        if self.args.json:
            head = {"hosts": self.args.hosts, "netem": self.netem}
            self.args.json.write_text(json.dumps(head | {"points": self.points}, indent=1) + "\n")


@contextlib.contextmanager
def traffic(network: Namespaces, mbit: float, percent: float) -> Iterator[None]:
    """Traffic between all hosts that takes a share of each link."""
    hosts = range(network.count)
    processes = [subprocess.Popen([*network.inside(host), sys.executable, "-c", _TRAFFIC, "take"]) for host in hosts]
    try:
        time.sleep(1)
        for host in hosts:
            rate = str(mbit * 1e6 / 8 * percent / 100)
            others = [network.address(other) for other in hosts if other != host]
            sender = [*network.inside(host), sys.executable, "-c", _TRAFFIC, "send", rate, *others]
            processes.append(subprocess.Popen(sender))
        time.sleep(2)
        yield
    finally:
        for process in reversed(processes):
            process.kill()
            process.wait()
