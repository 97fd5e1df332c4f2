"""A step on four hosts, measured against the bandwidth and the latency between them, beside what the planner says of the same cluster.

    sudo python tools/network_lab.py                                        # 4 hosts: rates, latencies and a congesting flow; 5 minutes
    sudo python tools/network_lab.py --hosts 2 --mbit 1000 100 --latency-us 0 1000 --steps 10       # a small one
    sudo python tools/network_lab.py --json found.json --picture docs/network-lab.png
    sudo python tools/network_lab.py --mbit 100 --latency-us --congestion 10 25 50 75 90     # other traffic between all hosts, in percent
    sudo python tools/network_lab.py --devices 4 --dispatch hierarchical --mbit 100 --latency-us      # beside --dispatch padded
    sudo python tools/check_host_loss.py --signal CUT           # one link cut while its process lives, under load

Linux, as root, with iproute2: each host is a network namespace with one emulated device, or so many (`--devices`); their links are the
kernel's (`tbf` limits their rate), or, for latencies where the kernel has no `netem`, a switch in this process. One group of processes
serves a small model (`--hidden-size`) in each of the two networks, so that all points of a sweep are of the same programs; a point is
the median of decode steps. Bytes are counted on process 0's link: what it sends in a step, its commands to the others among it.

The planner's figure is the step's time without a limit plus what its formula for a collective of XLA's (`dsjax/plan/network.py`: share of a
link 0.6) says of the collectives that the dry run finds in the same step; its fixed part of 30 µs is in the first point already.
With `--congestion` every host sends that share of its link's rate to the others, in equal parts, at the middle of the rates, while the
steps run; the planner's figure is that of a link with the rest of the rate.
`--json FILE` writes `{"hosts", "netem", "collectives", "points": [{"network", "mbit", "latency_us", "congested", "congestion",
"step_seconds", "low", "high", "bytes_per_step", "planner_seconds"}]}`, after each point; `congestion` is in percent.
"""

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]
from network_namespaces import CannotBeError, Namespaces, has_netem
from quick_compilation import QUICK_COMPILATION

_PORT = 8476
_SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
"""Holds the bytes that have left the host on which it is read."""
_CLUSTER = """name = "lab"
description = "network namespaces; what is between the devices of a host is not used"
hardware = "h20"
hosts = {hosts}
devices_per_host = {devices}
scale_up_devices = {devices}
network = "veth"
network_gbps = {gbps}
nics_per_host = 1
latency_us = {latency}
latency_us_range = [{latency}, {latency}]
[sources]
network_gbps = "tools/network_lab.py --mbit"
latency_us = "tools/network_lab.py --latency-us"
nics_per_host = "one link a host"
"""
_TRAFFIC = """
import socket, sys, threading, time
if sys.argv[1] == "take":
    listener = socket.create_server(("", 5002))
    def drain(taken):
        while taken.recv(1 << 20):
            pass
    while True:
        threading.Thread(target=drain, args=listener.accept()[:1], daemon=True).start()
else:
    rate, size = float(sys.argv[2]), 1 << 14
    others = [socket.create_connection((address, 5002)) for address in sys.argv[3:]]
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
"""
"""Takes what comes; or sends to addresses in turn, so many bytes a second in all."""
_FLOOD = """
import socket, sys
if sys.argv[1] == "take":
    listener = socket.create_server(("", 5001))
    taken, _ = listener.accept()
    while taken.recv(1 << 20):
        pass
else:
    sender = socket.create_connection((sys.argv[2], 5001))
    while True:
        sender.sendall(bytes(1 << 16))
"""


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--devices", type=int, default=1, help="of a host")
    parser.add_argument("--mbit", type=float, nargs="*", default=[3000, 1000, 300, 100, 30], help="rates of a link")
    parser.add_argument("--latency-us", type=float, nargs="*", default=[0, 500, 2000, 10000], help="one way")
    parser.add_argument(
        "--congestion", type=float, nargs="*", default=[], help="percent of each link that other traffic takes"
    )
    parser.add_argument("--rows", type=int, default=16, help="decodes of a DP rank")
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=24, help="of a point")
    parser.add_argument("--dispatch", default="padded", choices=("gather", "padded", "ragged", "hierarchical"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(**json.loads(args.worker))
        return 0
    try:
        with tempfile.TemporaryDirectory(prefix="network-lab-") as folder:
            from layouts import write_checkpoint

            Lab(args, str(write_checkpoint(Path(folder), hidden_size=args.hidden_size))).run()
    except CannotBeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


class Lab:
    """All points, in the two networks."""

    def __init__(self, args: argparse.Namespace, model: str):
        self.args, self.model = args, model
        self.sizes = {
            "max_num_seqs": args.rows,
            "max_num_batched_tokens": max(args.rows, 16),
            "prefill_chunk": 16,
            "page_size": 4,
            "max_model_len": 96,
            "kernels": "plain",
            "dispatch": args.dispatch,
            "devices_per_host": args.devices,
        }
        self.netem = has_netem()
        self.points: list[dict] = []
        self.collectives = self._collectives()
        self.base: dict[str, float] = {}

    def run(self) -> None:
        """Measure, print, write."""
        sent, away = (sum(found[name] for found in self.collectives) for name in ("sent", "between"))
        print(
            f"a step has {len(self.collectives)} collectives, in which a device sends {sent:,.0f} B, {away:,.0f} of them to other hosts "
            "(dsjax dryrun)"
        )
        print(
            f"{'network':8} {'Mbit/s':>8} {'latency µs':>10} {'flow':>5} {'step ms':>8} {'planner ms':>10} {'B a step':>12}"
        )
        with self._network(delayed=False) as network, self._group(network) as group:
            self._point(network, group, None, 0)
            for mbit in self.args.mbit:
                network.limit(mbit)
                self._point(network, group, mbit, 0)
            middle = sorted(self.args.mbit)[len(self.args.mbit) // 2] if self.args.mbit else None
            for percent in sorted(self.args.congestion) if middle else ():
                network.limit(middle)
                with traffic(network, middle, percent):
                    self._point(network, group, middle, 0, percent)
            if len(self.args.mbit) > 1:
                network.limit(middle)
                with self._flow(network):
                    self._point(network, group, middle, 0, congested=True)
        if self.args.latency_us:
            with self._network(delayed=not self.netem) as network, self._group(network) as group:
                for latency in sorted(self.args.latency_us):
                    network.delay(latency * 1e-6)
                    self._point(network, group, None, latency)
        if self.args.picture:
            draw(self.points, self.args.picture, self.args.hosts)

    def _point(
        self,
        network: Namespaces,
        group: "Workers",
        mbit: float | None,
        latency: float,
        percent: float = 0.0,
        *,
        congested: bool = False,
    ) -> None:
        name = "switch" if network.delayed else "bridge"
        found = group.measure(self.args.steps)
        seconds = median(found["steps"])
        base = self.base.setdefault(name, seconds)
        steps = sorted(found["steps"])
        point = {
            "network": name,
            "mbit": mbit,
            "latency_us": latency,
            "congested": congested,
            "congestion": percent,
            "step_seconds": seconds,
            "low": steps[len(steps) // 10],
            "high": steps[-1 - len(steps) // 10],
            "bytes_per_step": found["bytes"],
            "planner_seconds": None
            if congested
            else base + self._planned(mbit and mbit * (1 - percent / 100), latency),
        }
        self.points.append(point)
        planned = "" if congested else f"{point['planner_seconds'] * 1e3:.1f}"
        rate = "" if mbit is None else f"{mbit:g}"
        flow = "yes" if congested else f"{percent:g} %" if percent else ""
        print(
            f"{name:8} {rate:>8} {latency:>10g} {flow:>5} {seconds * 1e3:>8.1f} {planned:>10} "
            f"{point['bytes_per_step']:>12,.0f}",
            flush=True,
        )
        if self.args.json:
            found = {"hosts": self.args.hosts, "netem": self.netem, "collectives": self.collectives}
            self.args.json.write_text(json.dumps(found | {"points": self.points}, indent=1) + "\n")

    def _planned(self, mbit: float | None, latency: float) -> float:
        """Seconds that the planner adds for a network like this; the fixed part of a collective is in the step without limits."""
        from dsjax.plan.cluster import load_cluster
        from dsjax.plan.figure import exact
        from dsjax.plan.network import xla_collective

        def seconds(gbps: float, latency: float) -> float:
            with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
                file.write(
                    _CLUSTER.format(hosts=self.args.hosts, devices=self.args.devices, gbps=gbps, latency=latency)
                )
                file.flush()
                cluster = load_cluster(file.name)
            ranks = self.args.hosts * self.args.devices
            return sum(
                xla_collective(
                    cluster, each["ranks"], exact(each["sent"] / (each["ranks"] - 1)), near=each["near"], of=ranks
                ).value
                for each in self.collectives
                if each["between"]
            )

        return seconds(1e6 if mbit is None else mbit / 1000, max(latency, 1e-3)) - seconds(1e6, 1e-3)

    def _collectives(self) -> list[dict]:
        """Those of a decode step, each time they run, with the bytes that leave a device."""
        flags = [text for name, value in self.sizes.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        command = [sys.executable, "-m", "dsjax.dryrun", "--model", self.model, "--mesh", self.mesh]
        found = subprocess.run(
            [*command, "--step", "decode", *flags, "--json", "-"], capture_output=True, text=True, cwd=ROOT
        )
        if found.returncode:
            raise RuntimeError(found.stderr)
        all_of_them = []
        for each in json.loads(found.stdout)["collectives"]:
            inside, between = each["bytes_inside"], each["bytes_between"]
            near = 1 + round(inside / (inside + between) * (each["ranks"] - 1))
            one = {
                "kind": each["kind"],
                "ranks": each["ranks"],
                "near": near,
                "sent": inside + between,
                "between": between,
            }
            all_of_them += [one] * round(each["times"])
        return all_of_them

    @property
    def mesh(self) -> str:
        """All devices of all hosts."""
        return f"dp={self.args.hosts * self.args.devices}"

    @contextlib.contextmanager
    def _network(self, *, delayed: bool):
        network = Namespaces(self.args.hosts, delayed=delayed)
        try:
            yield network
        finally:
            network.close()

    @contextlib.contextmanager
    def _group(self, network: Namespaces):
        group = Workers(network, {"model": self.model, "mesh": self.mesh, "sizes": self.sizes})
        try:
            yield group
        finally:
            group.end()

    @contextlib.contextmanager
    def _flow(self, network: Namespaces):
        """Somebody else's traffic, from the last host to the one before, as fast as the link lets it."""
        last = self.args.hosts - 1
        taking = subprocess.Popen([*network.inside(last - 1), sys.executable, "-c", _FLOOD, "take"])
        time.sleep(1)
        address = network.address(last - 1)
        sending = subprocess.Popen([*network.inside(last), sys.executable, "-c", _FLOOD, "send", address])
        try:
            yield
        finally:
            for process in (sending, taking):
                process.kill()
                process.wait()


@contextlib.contextmanager
def traffic(network: Namespaces, mbit: float, percent: float):
    """Somebody else's traffic between all hosts, that takes a share of each link."""
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


class Workers:
    """A process on each host; process 0 measures when it is asked to."""

    def __init__(self, network: Namespaces, what: dict):
        environment = {
            **os.environ,
            "XLA_FLAGS": " ".join(QUICK_COMPILATION),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "DSJAX_CLUSTER_KEY": secrets.token_hex(32),
        }
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._processes = []
        for host in range(network.count):
            place = {
                "coordinator_address": f"{network.address(0)}:{_PORT}",
                "num_processes": network.count,
                "process_id": host,
            }
            given = json.dumps({**what, "place": place})
            command = [*network.inside(host), sys.executable, __file__, "--worker", given]
            pipes = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE if host == 0 else self._log,
                "stderr": self._log,
            }
            self._processes.append(subprocess.Popen(command, env=environment, cwd=ROOT, text=True, **pipes))
        self._answer()

    def measure(self, steps: int) -> dict:
        """Seconds of so many decode steps, and the bytes that process 0's host sends in one."""
        self._processes[0].stdin.write(f"{steps}\n")
        self._processes[0].stdin.flush()
        return self._answer()

    def end(self) -> None:
        """End all."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _answer(self) -> dict:
        for line in self._processes[0].stdout:
            if line.startswith("found "):
                return json.loads(line.removeprefix("found "))
        self._log.seek(0)
        raise RuntimeError(f"process 0 has ended:\n{self._log.read()[-3000:]}")


def work(model: str, mesh: str, sizes: dict, place: dict) -> None:
    """A process of the group; process 0 reads numbers of steps, and answers."""
    from dsjax import LLM, SamplingParams

    llm = LLM(model, mesh=mesh, dtype="float32", heartbeat_timeout=60, compile_ahead=0, **sizes, **place)
    rows = sizes["max_num_seqs"] * llm.facts.dp_ranks

    def measure(count: int) -> dict:
        params = SamplingParams(temperature=0, max_tokens=count + 5, ignore_eos=True, detokenize=False)
        for row in range(rows):
            llm.engine.add_request(str(row), {"prompt_token_ids": [2 + row % 90, 3, 4]}, params)
        steps, sent = [], []
        while llm.engine.has_unfinished():
            began = time.perf_counter()
            llm.engine.step()
            steps.append(time.perf_counter() - began)
            sent.append(int(_SENT.read_text()))
        # Without the prompts, and without the end.
        return {"steps": steps[3:-2], "bytes": (sent[-3] - sent[2]) / (len(steps) - 5)}

    measure(4)
    print("found", json.dumps({}), flush=True)
    for line in sys.stdin:
        print("found", json.dumps(measure(int(line))), flush=True)


def draw(points: list[dict], file: Path, hosts: int) -> None:
    """Measured and planned, against bandwidth and against latency."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name, title in zip(
        figure.subplots(1, 2), ("mbit", "latency_us"), ("link, Mbit/s each way", "latency, µs one way"), strict=True
    ):
        own = [
            p
            for p in points
            if not (p["congested"] or p["congestion"])
            and (p["mbit"] is not None if name == "mbit" else p in _late(points))
        ]
        for key, label, style in (("step_seconds", "measured", "o-"), ("planner_seconds", "planner", "s--")):
            axes.plot([p[name] for p in own], [1e3 * p[key] for p in own], style, label=label)
        if name == "mbit":
            flows = [p for p in points if p["congested"]]
            axes.plot(
                [p[name] for p in flows], [1e3 * p["step_seconds"] for p in flows], "x", label="with another's flow"
            )
            axes.set_xscale("log")
            axes.set_yscale("log")
        axes.set_xlabel(title)
        axes.set_ylabel("step, ms")
        axes.legend(frameon=False)
    figure.suptitle(f"A decode step over {hosts} hosts in network namespaces")
    figure.savefig(file, dpi=120)


def _late(points: list[dict]) -> list[dict]:
    """The points of the sweep over latency: they come after those over bandwidth."""
    first = max((i for i, p in enumerate(points) if p["mbit"] is not None), default=-1)
    return points[first + 1 :]


if __name__ == "__main__":
    sys.exit(main())
