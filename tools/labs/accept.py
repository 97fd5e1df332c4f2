"""The faults of an acceptance list, made for real on a small cluster: `dsjax accept` with hooks that cut links, slow them and kill a host.

    sudo python tools/lab.py accept --results found           # all faults of h20-32, the short list; 20 minutes on two cores
    sudo python tools/lab.py accept --only host-lost,bandwidth-5g --results found

Linux, as root, with iproute2: four hosts are network namespaces with one emulated device each, on which a tiny model is served as one
group. A link has `--mbit` each way, which stands for the plan's 25 Gbit/s: `bandwidth` of 5 is a fifth of it. `congestion` is other traffic
between all hosts; `delay` is `netem`'s or, where the kernel has none, a switch's in this process, for which the group is served a second
time; `link-lost` cuts the last host's link while its process lives; `host-lost` kills its process, and starts it again. The hooks are
this command with `--tell`, over a socket.

It shows that the list is measured, not how a cluster of GPUs behaves. The report is in `--results`; exits as `dsjax accept` does.
"""

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from processes import Group
from worded_checkpoint import write_worded_checkpoint

from tools.labs.namespaces import Namespaces, has_netem
from tools.labs.network import traffic
from tools.labs.servers import group_serving_on, serving, tiny_server

ROOT = Path(__file__).parents[2]
_HOSTS, _LAST = 4, 3
_PLANS_GBIT = 25
_HOOKS = ("host-lost", "link-lost", "delay", "bandwidth", "congestion")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The lab's options."""
    parser.add_argument("--only", default="host-lost,link-lost,bandwidth-*,congestion-*,delay-*")
    parser.add_argument("--criteria", default="h20-32")
    parser.add_argument("--results", type=Path, default=Path("accept-lab"))
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--tell", nargs=3, metavar=("SOCKET", "HOOK", "VALUE"), help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Run the lab."""
    if args.tell:
        return tell(*args.tell)
    late = [word for word in args.only.split(",") if word.startswith("delay")]
    others = [word for word in args.only.split(",") if word not in late]
    # The switch cannot limit rates, and only it has latencies where the kernel has no netem.
    rounds = [(others + late, False)] if has_netem() else [(others, False), (late, True)]
    status = 0
    for words, delayed in rounds:
        if words:  # the last round's report includes the first round's measurements
            status = accept(args, args.only if delayed else ",".join(words), delayed)
    return status


def accept(args: argparse.Namespace, only: str, delayed: bool) -> int:
    """Serve, and run the command against the server; its exit status."""
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(Namespaces(_HOSTS, delayed=delayed))
        if not delayed:
            network.limit(args.mbit)
        group, url = stack.enter_context(serving(lambda folder: start(network, folder)))
        args.results.mkdir(parents=True, exist_ok=True)
        faults = stack.enter_context(Faults(args.mbit, network, group, str(args.results.resolve() / "hooks")))
        me = f"{sys.executable} {ROOT / 'tools' / 'lab.py'} accept --tell {faults.path}"
        hooks = [f"--hook={name}{end}={me} {name}{end} '{{value}}'" for name in _HOOKS for end in ("", "-end")]
        command = [sys.executable, "-m", "dsjax", "accept", "--base-url", url, "--criteria", args.criteria, "--quick"]
        command += ["--only", only, "--results", str(args.results), "--no-progress", "--ignore-eos", *hooks]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode


def start(network: Namespaces, folder: Path) -> Group:
    """Start the group over all hosts."""
    model = write_worded_checkpoint(folder, max_position_embeddings=512)
    sizes = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 64,
        "prefill_chunk": 64,
        "page_size": 16,
        "max_model_len": 512,
    }
    more = {"mesh": f"dp={_HOSTS}", "cache_tokens": 16384, "kernels": "plain", "heartbeat_timeout": 5}
    return group_serving_on(network, tiny_server(model, port=8000, **sizes, **more))


class Faults:
    """Makes and ends faults when a hook asks for them, in a thread. path: of the socket."""

    def __init__(self, mbit: float, network: Namespaces, group: Group, path: str):
        self._mbit, self._network, self._group, self.path = mbit, network, group, path
        self._traffic = contextlib.ExitStack()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        threading.Thread(target=self._listen, daemon=True).start()

    def __enter__(self) -> "Faults":
        return self

    def __exit__(self, *_) -> None:
        self._listener.close()
        Path(self.path).unlink(missing_ok=True)
        self._traffic.close()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                hook, _, value = connection.recv(1000).decode().partition(" ")
                try:
                    self._make(hook, value)
                    connection.sendall(b"done")
                except Exception as error:  # the hook fails with it
                    connection.sendall(f"{type(error).__name__}: {error}"[:900].encode())

    def _make(self, hook: str, value: str) -> None:
        """Do what a hook is for."""
        match hook:
            case "host-lost":
                self._group.processes[_LAST].kill()
            case "host-lost-end":
                self._group.start_again(_LAST)
                self._wait_until_whole()
            case "link-lost":
                self._network.cut(_LAST)
            case "link-lost-end":
                self._network.mend(_LAST)
                if self._group.processes[_LAST].poll() is not None:  # the others went on without it, and it ended
                    self._group.start_again(_LAST)
                self._wait_until_whole()
            case "delay" | "delay-end":
                self._network.delay(0.0 if hook == "delay-end" else float(value) * 1e-3)
            case "bandwidth" | "bandwidth-end":
                self._network.limit(self._mbit * (1.0 if hook == "bandwidth-end" else float(value) / _PLANS_GBIT))
            case "congestion":
                self._traffic.enter_context(traffic(self._network, self._mbit, float(value)))
            case "congestion-end":
                self._traffic.close()
            case _:
                raise ValueError(f"no hook {hook!r}")

    def _wait_until_whole(self) -> None:
        """Wait until the mesh has all hosts again."""
        whole = f"with dp={_HOSTS} on processes"
        self._group.wait_for(0, whole, 300, times=1 + self._group.output[0].count(whole))


def tell(path: str, hook: str, value: str) -> int:
    """The command of a hook: ask the lab for a fault, and wait for it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(f"{hook} {value}".encode())
        said = connection.recv(1000).decode()
    if said != "done":
        print(said)
    return said != "done"
