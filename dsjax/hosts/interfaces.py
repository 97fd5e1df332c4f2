"""Traffic counters and speeds of a host's network cards, from Linux's `/sys/class`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_WORD = 4
"""InfiniBand and RoCE cards count in words of four bytes."""


class Interface(NamedTuple):
    """A port of a network card: bytes sent and received since boot, and speed in bytes per second (in each direction)."""

    name: str
    sent: int
    received: int
    speed: float


def read_interfaces(root: Path = Path("/sys/class")) -> Iterator[Interface]:
    """Yield the ports with a known speed: Ethernet, and InfiniBand or RoCE, whose RDMA traffic the Ethernet counters do not include.

    Yield nothing on other systems, or if the system does not expose a card.
    """
    for device in sorted(root.glob("net/*")):
        # In 10^6 bits per second; -1 or an error without a link or a card.
        megabits = _number(device / "speed")
        sent, received = (_number(device / "statistics" / f"{way}_bytes") for way in ("tx", "rx"))
        if megabits and megabits > 0 and sent is not None and received is not None:
            yield Interface(device.name, sent, received, megabits * 1e6 / 8)
    for port in sorted(root.glob("infiniband/*/ports/*")):
        gigabits = _number(port / "rate")  # as in "200 Gb/sec (4X HDR)"
        sent, received = (_number(port / "counters" / f"port_{way}_data") for way in ("xmit", "rcv"))
        if gigabits and sent is not None and received is not None:
            name = f"{port.parents[1].name}/{port.name}"
            yield Interface(name, sent * _WORD, received * _WORD, gigabits * 1e9 / 8)


def _number(path: Path) -> int | None:
    try:
        return int(float(path.read_text().split()[0]))
    except (OSError, ValueError, IndexError):
        return None
