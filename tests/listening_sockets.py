"""The addresses at which a process listens."""

import psutil


def listening_addresses(pid: int) -> dict[int, str]:
    """By port, the address of each TCP socket at which a process listens."""
    connections = psutil.Process(pid).net_connections(kind="tcp")
    return {one.laddr.port: one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


def all_loopback(addresses: dict[int, str]) -> bool:
    """Whether nobody outside of this host reaches any of them."""
    return all(address.startswith("127.") or address in ("::1", "::ffff:127.0.0.1") for address in addresses.values())
