"""The faults of an acceptance list, made for real on a small cluster: `dsjax accept` with hooks that cut links, slow them and kill a host.

    sudo python tools/accept_lab.py --results found           # all faults of h20-32, the short list; 20 minutes on two cores
    sudo python tools/accept_lab.py --only host-lost,bandwidth-5g --results found

Linux, as root, with iproute2: four hosts are network namespaces with one emulated device each, on which a tiny model is served as one
group. A link has `--mbit` each way, which stands for the plan's 25 Gbit/s: `bandwidth` of 5 is a fifth of it. `congestion` is other traffic
between all hosts; `delay` is `netem`'s or, where the kernel has none, a switch's in this process, for which the group is served a second
time; `link-lost` cuts the last host's link while its process lives; `host-lost` kills its process, and starts it again. The hooks are
this file with `--tell`, over a socket.

What it shows is that the list is measured, not how a cluster of GPUs does. The report is in `--results`; exits as `dsjax accept` does.
"""

import argparse
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [
    str(ROOT),
    str(ROOT / "tools"),
    *(str(ROOT / "tests" / part) for part in ("", "dsjax/hosts", "dsjax/engine")),
]
from network_lab import traffic
from network_namespaces import CannotBeError, Namespaces, has_netem
from processes import Group
from worded_checkpoint import write_worded_checkpoint

_HOSTS = 4
_PLANS_GBIT = 25
_HOOKS = ("host-lost", "link-lost", "delay", "bandwidth", "congestion")


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="host-lost,link-lost,bandwidth-*,congestion-*,delay-*")
    parser.add_argument("--criteria", default="h20-32")
    parser.add_argument("--results", type=Path, default=Path("accept-lab"))
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--tell", nargs=3, metavar=("SOCKET", "HOOK", "VALUE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tell:
        return tell(*args.tell)
    os.environ.setdefault("DSJAX_CLUSTER_KEY", secrets.token_hex(32))  # hosts, and what runs on them, share it
    late = [word for word in args.only.split(",") if word.startswith("delay")]
    others = [word for word in args.only.split(",") if word not in late]
    status = 0
    # A switch of this process cannot limit rates, and only it has latencies where the kernel has no netem.
    rounds = [(others + late, False)] if has_netem() else [(others, False), (late, True)]
    try:
        for words, delayed in rounds:
            if words:  # the last round's report has what the first one measured, too
                status = accept(args, args.only if delayed else ",".join(words), delayed)
        return status
    except CannotBeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def accept(args: argparse.Namespace, only: str, delayed: bool) -> int:
    """Serve, and run the command against the server; its exit status."""
    with contextlib.ExitStack() as stack:
        network = Namespaces(_HOSTS, delayed=delayed)
        stack.callback(network.close)
        if not delayed:
            network.limit(args.mbit)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="accept-lab-"))
        group = serve(network, Path(folder))
        stack.callback(group.end)
        url = re.search(r"serving tiny at (http://[\d.:]+)", group.output[0]).group(1)
        args.results.mkdir(parents=True, exist_ok=True)
        faults = Faults(args, network, group, str(args.results.resolve() / "hooks"))
        stack.callback(faults.close)
        me = f"{sys.executable} {Path(__file__).resolve()} --tell {faults.path}"
        hooks = [f"--hook={name}{end}={me} {name}{end} '{{value}}'" for name in _HOOKS for end in ("", "-end")]
        command = [sys.executable, "-m", "dsjax", "accept", "--base-url", url, "--criteria", args.criteria, "--quick"]
        command += ["--only", only, "--results", str(args.results), "--no-progress", "--ignore-eos", *hooks]
        return subprocess.run(command, cwd=Path.cwd(), env=os.environ | {"PYTHONPATH": str(ROOT)}).returncode


def serve(network: Namespaces, folder: Path) -> Group:
    """A group over all hosts that serves."""
    sizes = {
        "max-num-seqs": 32,
        "max-num-batched-tokens": 64,
        "prefill-chunk": 64,
        "page-size": 16,
        "max-model-len": 512,
        "cache-tokens": 16384,
        "kernels": "plain",
        "heartbeat-timeout": 5,
        "start-timeout": 600,
    }
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    model = [
        "--model",
        str(write_worded_checkpoint(folder, max_position_embeddings=512)),
        "--served-model-name",
        "tiny",
    ]
    command = ["-m", "dsjax.serve", *model, "--port", "8000", "--mesh", f"dp={_HOSTS}", "--allow-unauthenticated"]
    options = {host: [*flags, "--host", network.address(host)] for host in range(_HOSTS)}
    group = Group(command, _HOSTS, options=options, stuck=600, address=network.address(0), before=network.inside)
    try:
        group.wait_for(0, "serving tiny at", 900)
    except BaseException:
        group.end()
        raise
    return group


class Faults:
    """Makes and ends faults when a hook says so, in a thread."""

    def __init__(self, args: argparse.Namespace, network: Namespaces, group: Group, path: str):
        self.args, self.network, self.group, self.path = args, network, group, path
        self._traffic = contextlib.ExitStack()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen()
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        """End what is still under way."""
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
                    self.make(hook, value)
                    connection.sendall(b"done")
                except Exception as error:  # said to the hook, which fails with it
                    connection.sendall(f"{type(error).__name__}: {error}"[:900].encode())

    def make(self, hook: str, value: str) -> None:
        """Do what a hook is for."""
        last, mbit = _HOSTS - 1, self.args.mbit
        if hook == "host-lost":
            os.kill(self._pid(last), signal.SIGKILL)
        elif hook == "host-lost-end":
            self.group.start_again(last)
            self._wait_until_whole()
        elif hook == "link-lost":
            self.network.cut(last)
        elif hook == "link-lost-end":
            self.network.mend(last)
            if self.group.processes[last].poll() is not None:  # the others went on without it, and it ended
                self.group.start_again(last)
            self._wait_until_whole()
        elif hook == "delay":
            self.network.delay(float(value) * 1e-3)
        elif hook == "delay-end":
            self.network.delay(0.0)
        elif hook == "bandwidth":
            self.network.limit(mbit * float(value) / _PLANS_GBIT)
        elif hook == "bandwidth-end":
            self.network.limit(mbit)
        elif hook == "congestion":
            self._traffic.enter_context(traffic(self.network, mbit, float(value)))
        elif hook == "congestion-end":
            self._traffic.close()
        else:
            raise ValueError(f"no hook {hook!r}")

    def _pid(self, host: int) -> int:
        """The number of the server's own process, since `ip netns exec` has become it."""
        return self.group.processes[host].pid

    def _wait_until_whole(self) -> None:
        """Wait until the mesh has all hosts again."""
        changes = self.group.output[0].count(f"with dp={_HOSTS} on processes")
        deadline = time.monotonic() + 300
        while self.group.output[0].count(f"with dp={_HOSTS} on processes") == changes:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the host is not back within 300 s: {self.group.output[_HOSTS - 1][-300:]}")
            time.sleep(0.1)


def tell(path: str, hook: str, value: str) -> int:
    """What a hook's command does: have the lab do it, and wait for it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(f"{hook} {value}".encode())
        said = connection.recv(1000).decode()
    if said != "done":
        print(said)
    return said != "done"


if __name__ == "__main__":
    sys.exit(main())
