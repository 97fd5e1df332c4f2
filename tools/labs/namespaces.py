"""Hosts of a small cluster, emulated: a network namespace each, joined by links whose rate, latency and life can be changed.

Linux, as root, with iproute2. A link is a veth pair into a bridge; `tbf` limits its rate both ways. Latency is `netem`'s where the
kernel has it. Where it has not, the links are taps into a switch of our own, which holds each frame back: it takes some of a core, so
that its figures are to be compared with its own at latency 0.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import secrets
import select
import shutil
import struct
import subprocess
import threading
import time

_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
_MTU = 9000
_SUBNET = "10.213.77"
_BURST_SECONDS = 0.002


class CannotBeError(RuntimeError):
    """This machine does not let namespaces be made."""


class Namespaces:
    """So many hosts; leaving the context, or `close`, takes them away again.

    Addresses are `address(0)` and so on; the machine itself is one more, with 254.

    delayed: whether links go through the switch that can hold frames back; else through the kernel's bridge.
    """

    def __init__(self, count: int, *, delayed: bool = False):
        os.environ.setdefault("DSJAX_CLUSTER_KEY", secrets.token_hex(32))  # what runs on several hosts shares it
        if os.geteuid() != 0:
            raise CannotBeError("network namespaces need root; start this as root, on Linux")
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise CannotBeError("`ip` and `tc` are not installed; install iproute2")
        self.delayed, self.count, self._tag = delayed, count, f"d{os.getpid() % 100_000}"
        self._switch: _Switch | None = None
        try:
            for host in range(count):
                self._run("ip", "netns", "add", self.name(host))
            if delayed:
                self._join_by_switch()
            else:
                self._join_by_bridge()
            for host in range(count):
                own = ("ip", "-n", self.name(host))
                self._run(*own, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
                for link in ("lo", "eth0"):
                    self._run(*own, "link", "set", link, "up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Namespaces":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def name(self, host: int) -> str:
        """Name a host's namespace."""
        return f"{self._tag}-{host}"

    def address(self, host: int) -> str:
        """A host's address."""
        return f"{_SUBNET}.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What stands before a command that is to run on a host."""
        return ["ip", "netns", "exec", self.name(host)]

    def limit(self, mbit: float | None) -> None:
        """Give all links this rate, each way, in 10^6 bits a second; None: no limit."""
        for host in range(self.count):
            for place, device in ((["-n", self.name(host)], "eth0"), ([], self._outer(host))):
                with contextlib.suppress(CannotBeError):  # there was none
                    self._run("tc", *place, "qdisc", "del", "dev", device, "root")
                if mbit is not None:
                    burst = max(2 * _MTU, int(mbit * 1e6 / 8 * _BURST_SECONDS))
                    rate = ("rate", f"{int(mbit * 1000)}kbit", "burst", str(burst), "latency", "400ms")
                    self._run("tc", *place, "qdisc", "add", "dev", device, "root", "tbf", *rate)

    def delay(self, seconds: float) -> None:
        """Have each frame arrive so much later. Only where links are `delayed`."""
        if self._switch is not None:
            self._switch.delay = seconds
            return
        for host in range(self.count):
            how = ("netem", "delay", f"{seconds * 1e6:.0f}us", "limit", "100000")
            self._run("tc", "qdisc", "replace", "dev", self._outer(host), "root", *how)

    def cut(self, host: int) -> None:
        """Cut a host's link; whatever runs there lives on."""
        self._run("ip", "link", "set", self._outer(host), "down")

    def mend(self, host: int) -> None:
        """Undo `cut`."""
        self._run("ip", "link", "set", self._outer(host), "up")

    def cut_between(self, one: int, other: int) -> None:
        """Have nothing that one host sends to the other arrive, both ways; both reach all others."""
        for host, peer in ((one, other), (other, one)):
            nobody = ("lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
            self._run("ip", "-n", self.name(host), "neigh", "replace", self.address(peer), *nobody)

    def mend_between(self, one: int, other: int) -> None:
        """Undo `cut_between`."""
        for host, peer in ((one, other), (other, one)):
            self._run("ip", "-n", self.name(host), "neigh", "del", self.address(peer), "dev", "eth0")

    def close(self) -> None:
        """Take all of it away."""
        if self._switch is not None:
            self._switch.close()
        for host in range(self.count):
            with contextlib.suppress(CannotBeError):
                self._run("ip", "netns", "del", self.name(host))
        for device in (f"{self._tag}br", f"{self._tag}me"):
            with contextlib.suppress(CannotBeError):
                self._run("ip", "link", "del", device)

    def _outer(self, host: int) -> str:
        """The end of a host's link that is not in its namespace."""
        return f"{self._tag}v{host}"

    def _join_by_bridge(self) -> None:
        bridge = f"{self._tag}br"
        self._run("ip", "link", "add", bridge, "type", "bridge")
        self._run("ip", "link", "set", bridge, "mtu", str(_MTU), "up")
        self._run("ip", "addr", "add", f"{_SUBNET}.254/24", "dev", bridge)
        for host in range(self.count):
            peer = ("peer", "name", "eth0", "netns", self.name(host), "mtu", str(_MTU))
            self._run("ip", "link", "add", self._outer(host), "mtu", str(_MTU), "type", "veth", *peer)
            self._run("ip", "link", "set", self._outer(host), "master", bridge, "up")

    def _join_by_switch(self) -> None:
        taps = [self._tap(f"{self._tag}t{host}", self.name(host)) for host in range(self.count)]
        taps.append(self._tap(f"{self._tag}me", None))
        self._run("ip", "addr", "add", f"{_SUBNET}.254/24", "dev", f"{self._tag}me")
        self._run("ip", "link", "set", f"{self._tag}me", "up")
        self._switch = _Switch(taps)

    def _tap(self, name: str, namespace: str | None) -> int:
        tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
        self._run("ip", "link", "set", name, "mtu", str(_MTU))
        if namespace is not None:
            self._run("ip", "link", "set", name, "netns", namespace, "name", "eth0")
        return tap

    def _run(self, *command: str) -> str:
        found = subprocess.run(command, capture_output=True, text=True)
        if found.returncode:
            raise CannotBeError(f"{' '.join(command)}: {found.stderr.strip()}")
        return found.stdout


class _Switch:
    """Ethernet frames from each tap to those that they are for, each held back for `delay` seconds."""

    def __init__(self, taps: list[int]):
        self.delay = 0.0
        self._taps, self._port_of = taps, {}
        self._held: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._going = True
        self._thread = threading.Thread(target=self._run, name="switch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._going = False
        self._thread.join(2)
        for tap in self._taps:
            os.close(tap)

    def _run(self) -> None:
        ports, poll = {tap: port for port, tap in enumerate(self._taps)}, select.epoll()
        for tap in self._taps:
            poll.register(tap, select.EPOLLIN)
        while self._going:
            wait = max(0.0, min(0.2, self._held[0][0] - time.monotonic())) if self._held else 0.2
            for tap, _ in poll.poll(wait):
                with contextlib.suppress(BlockingIOError, OSError):
                    for _ in range(64):
                        self._hold(os.read(tap, 65536), ports[tap])
            now = time.monotonic()
            while self._held and self._held[0][0] <= now:
                _, _, port, frame = heapq.heappop(self._held)
                with contextlib.suppress(OSError):  # a link that is down
                    os.write(self._taps[port], frame)

    def _hold(self, frame: bytes, port: int) -> None:
        self._port_of[frame[6:12]] = port
        known = None if frame[0] & 1 else self._port_of.get(frame[:6])
        due = time.monotonic() + self.delay
        for other in range(len(self._taps)) if known is None else (known,):
            if other != port:
                heapq.heappush(self._held, (due, next(self._numbers), other, frame))


def has_netem() -> bool:
    """Whether the kernel can hold frames back by itself."""
    found = subprocess.run(
        ["tc", "qdisc", "replace", "dev", "lo", "root", "netem", "delay", "0ms"], capture_output=True, text=True
    )
    if found.returncode == 0:
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True)
    return found.returncode == 0
