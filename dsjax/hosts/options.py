"""This process's place in a group: `GroupOptions` are the user's options, `HostOptions` the resolved ones."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from dsjax.addresses import join_address, split_address
from dsjax.errors import UserError
from dsjax.messaging.cluster_key import Credentials, local_credentials, read_credentials
from dsjax.options import Checked, Group, advanced, option

_log = logging.getLogger(__name__)

COORDINATOR_PORT = 8476
"""Port of the coordinator if only its host is known, as with LeaderWorkerSet."""


@dataclass(frozen=True, kw_only=True)
class GroupOptions(Checked):
    """Many hosts: the same command on each.

    `HostOptions.find` detects the options that are None.
    """

    coordinator_address: str | None = option(
        None, "HOST:PORT of process 0. Default: detected from Slurm, Open MPI, GKE or LeaderWorkerSet.", Group.HOSTS
    )
    num_processes: int | None = option(None, "Number of processes in the group.", Group.HOSTS, least=1)
    process_id: int | None = option(None, "Index of this process; 0 is the leader.", Group.HOSTS, least=0)
    host_address: str | None = advanced(
        None, "Address at which others reach this host. Default: from the route to process 0.", Group.HOSTS
    )
    start_timeout: int = advanced(300, "Seconds to wait for all processes at startup.", Group.HOSTS, least=1)
    heartbeat_timeout: int = advanced(
        10, "Seconds without a heartbeat after which a process is lost.", Group.HOSTS, least=1
    )
    cluster_key_file: str | None = option(
        None,
        "Path to the shared secret, unless DSJAX_CLUSTER_KEY is set. Default: per user, for loopback only.",
        Group.HOSTS,
    )
    encrypt_bulk: bool = advanced(
        False, "Encrypt hidden states and expert rows in addition to control messages.", Group.HOSTS
    )

    def credentials(self, *hosts: str) -> Credentials:
        """Read the credentials for listening on or connecting to these hosts. For errors see `read_credentials`."""
        return read_credentials(self.cluster_key_file, *hosts, encrypt_bulk=self.encrypt_bulk)


@dataclass(frozen=True)
class HostOptions:
    """A process's place in its group. Times are in seconds."""

    coordinator: tuple[str, int]  # host name or address, and port, of process 0
    num_processes: int
    process_id: int
    address: str  # IP address of this host on which this process listens; empty until the coordinator's name resolves
    start_timeout: int = 300  # for all processes to join
    heartbeat_timeout: int = 10  # after which a silent process counts as lost
    link_monitor_interval: int = 0  # between two probes of the links to the other processes; 0: no probes
    # of the deployment; default: this user's, for the loopback interface only
    credentials: Credentials = field(default_factory=local_credentials, compare=False)

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0, which runs the coordinator, the scheduler and the HTTP server."""
        return self.process_id == 0

    @property
    def coordinator_text(self) -> str:
        """`HOST:PORT`, as given by the user."""
        return join_address(*self.coordinator)

    @classmethod
    def find(cls, options: GroupOptions, link_monitor_interval: int = 0) -> HostOptions | None:
        """Resolve the options, with missing ones from LeaderWorkerSet's variables or JAX's cluster detection. None: a single process.

        Raises:
            UserError: values are missing, contradictory or not addresses; or addresses are not loopback and there is no cluster key.
        """
        settings = (options.coordinator_address, options.num_processes, options.process_id)
        if None in settings:
            detected = _from_leader_worker_set(os.environ) or _from_jax(options.start_timeout)
            settings = tuple(
                setting if setting is not None else detected_setting
                for setting, detected_setting in zip(settings, detected, strict=True)
            )
        coordinator_address, num_processes, process_id = settings
        if all(value is None for value in settings) or (num_processes == 1 and not process_id):
            if options.host_address is not None and num_processes is None:
                raise UserError("--host-address is for a group of processes; give --coordinator-address too")
            return None
        names = ("--coordinator-address", "--num-processes", "--process-id")
        missing = [name for name, value in zip(names, settings, strict=True) if value is None]
        if missing:
            raise UserError(
                f"{' and '.join(missing)} missing: a group of processes needs {', '.join(names[:2])} and {names[2]}, "
                "unless Slurm, Open MPI, GKE or LeaderWorkerSet started them"
            )
        if num_processes < 1 or not 0 <= process_id < num_processes:
            raise UserError(
                f"--process-id is {process_id} and --num-processes {num_processes}; expected an id from 0 to "
                f"{max(num_processes - 1, 0)}, another for each process"
            )
        coordinator = split_address(coordinator_address, "--coordinator-address")
        address = own_address(coordinator, process_id, options.host_address)
        return cls(
            coordinator,
            num_processes,
            process_id,
            address,
            options.start_timeout,
            options.heartbeat_timeout,
            link_monitor_interval,
            options.credentials(coordinator[0], address),
        )


def _from_leader_worker_set(variables: Mapping[str, str]) -> tuple[str, int, int] | None:
    """Return leader address, group size and own index, which Kubernetes' LeaderWorkerSet sets in each pod."""
    names = ("LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
    values = [variables.get(name) for name in names]
    if any(value is None for value in values):
        return None
    leader, size, index = values
    if not size.isdecimal() or not index.isdecimal():
        raise UserError(f"LWS_GROUP_SIZE is {size!r} and LWS_WORKER_INDEX {index!r}; expected integers")
    return join_address(leader, COORDINATOR_PORT), int(size), int(index)


def _from_jax(timeout: int) -> tuple[str | None, int | None, int | None]:
    """Return JAX's cluster detection for Slurm, Open MPI, GKE and TPU slices."""
    from sharding.jax_internals import detect_cluster

    with warnings.catch_warnings():
        # In Kubernetes without LeaderWorkerSet, JAX warns about a missing package.
        warnings.simplefilter("ignore")
        try:
            return detect_cluster(timeout)
        except Exception as error:  # from a cluster's API, which a single process in a container may be unable to reach
            _log.warning(
                "JAX could not ask what started this process (%s); without --coordinator-address it is taken to be alone.",
                error,
            )
            return None, None, None


def own_address(coordinator: tuple[str, int], process_id: int, given: str | None) -> str:
    """Return the address on which this process listens: `given`, or that of the interface that routes to the coordinator.

    Raises:
        UserError: it is not an address of this host, or the group's other processes cannot reach it.
    """
    host, port = coordinator
    on_loopback = means_loopback(host)
    if given is not None:
        return address_of_this_host("--host-address", given, on_loopback=on_loopback)
    if process_id == 0:
        flag, advice = "--coordinator-address", "process 0 must run there"
        return address_of_this_host(flag, host, port=port, on_loopback=on_loopback, advice=advice)
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(resolved)  # sends nothing; only selects the route
            address = probe.getsockname()[0]
    except UnicodeError as error:
        raise UserError(f"--coordinator-address: {host!r} can be no name of a host ({error})") from error
    except OSError:
        return ""  # the name may become resolvable while the rendezvous waits
    if reason := _why_unreachable(address, on_loopback):
        raise UserError(
            f"--coordinator-address: this host is at {address} on the way to {host!r}, and {reason}; "
            "give --host-address an address of this host at which the others reach it"
        )
    return address


def address_of_this_host(
    flag: str, address: str, *, on_loopback: bool, port: int = 0, advice: str = "give an address of this host"
) -> str:
    """Resolve a name or address of this host; raise `UserError` if others cannot reach it. on_loopback: all others are on this host."""
    try:
        family, _, _, _, resolved = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        raise UserError(f"{flag}: {address!r} is no name or address that this host knows ({error})") from error
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((resolved[0], 0, *resolved[2:]))
        except OSError as error:
            raise UserError(f"{flag}: {address!r} is no address of this host ({error.strerror}); {advice}") from error
    if reason := _why_unreachable(resolved[0], on_loopback):
        known_as = "" if resolved[0] == address else f"{resolved[0]} on this host, "
        raise UserError(
            f"{flag} is {address!r}, {known_as}which others cannot reach: {reason}; give one address of this host in the network that "
            "they share"
        )
    return resolved[0]


def means_loopback(host: str) -> bool:
    """Whether a host is given as a loopback address or `localhost`.

    The host's own name does not count, although many systems resolve it to 127.0.1.1, because other hosts resolve it to another address.
    """
    try:
        return _plain(host).is_loopback
    except ValueError:
        return host.partition(".")[0] in ("localhost", "ip6-localhost")


def _why_unreachable(address: str, on_loopback: bool) -> str | None:
    ip = _plain(address)
    if ip.is_unspecified:
        return "it stands for all addresses of this host"
    if ip.is_link_local:
        return "a link-local address holds on one link, and names no host"
    if ip.is_loopback and not on_loopback:
        return "it is the loopback interface's, and not all processes were named as this host's (as 127.0.0.1 does)"
    return None


def _plain(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address without its zone, and an IPv4-mapped IPv6 address as IPv4."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip
