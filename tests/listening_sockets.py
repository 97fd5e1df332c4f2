"""The addresses at which a process listens, as Linux knows them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

_LISTENS = "0A"


def listening_addresses(pid: int) -> dict[int, str]:
    """By port, the address of each TCP socket at which a process listens; skips the test where Linux's `/proc` is not there."""
    if not Path("/proc/net/tcp").exists():
        pytest.skip("only Linux says in /proc at which addresses a process listens")
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except OSError:  # it was closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    addresses = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, state, inode = (line.split()[column] for column in (1, 3, 9))
            if state == _LISTENS and inode in inodes:
                text, port = local.split(":")
                # Linux writes an address as 32-bit words in this machine's order.
                words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
                packed = b"".join(word.to_bytes(4, "little") for word in words)
                addresses[int(port, 16)] = socket.inet_ntop(family, packed)
    return addresses


def all_loopback(addresses: dict[int, str]) -> bool:
    """Whether nobody outside of this host reaches any of them."""
    return all(address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1") for address in addresses.values())
