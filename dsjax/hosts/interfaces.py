"""What a host's network cards have sent and received, and how fast they are, from Linux's `/sys/class`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_WORD = 4
"""InfiniBand and RoCE cards count in words of four bytes."""


class Interface(NamedTuple):
    """A network card's port: bytes since the system began, and bytes a second that it can send (and receive, too)."""

    name: str
    sent: int
    received: int
    speed: float


def read_interfaces(root: Path = Path("/sys/class")) -> Iterator[Interface]:
    """Read the cards whose speed is known: Ethernet's, and InfiniBand's or RoCE's, whose RDMA the former do not count.

    Nothing on another system, or where the system does not show a card.
    """
    for device in sorted(root.glob("net/*")):
        # In 10^6 bits a second; -1, or an error, where there is no link or no card.
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
