"""Join an engine's group of processes: values that must be equal in all of them, and devices per process."""

from __future__ import annotations

import os
from typing import Any

from dsjax.engine.contract.commands import VERSION
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.combinations import SEVERAL_PROCESSES, check_against
from dsjax.errors import UserError
from dsjax.hosts import HostOptions
from dsjax.versions import installed_version
from sharding.emulation import emulate_devices
from sharding.scheduler_flags import start_exchanges_early

LOOPBACK = "127.0.0.1"
"""Default address on which a single process listens."""
_OWN = ("model", "revision", "kernel_cache")
"""Options that may differ between hosts, such as the model's path: the fingerprint identifies the checkpoint."""


def host_options(args: EngineArgs) -> HostOptions | None:
    """Return this process's group and its place in it; None if it is alone.

    Raises:
        UserError: options do not go together, or an address is missing; or a launcher started several processes, and they allow only one.
    """
    options = HostOptions.find(args, args.link_monitor_interval)
    if options is not None:
        check_against(args, SEVERAL_PROCESSES)
    return options


def join_group(args: EngineArgs, options: HostOptions | None):
    """Emulate the CPU's devices, and join the group. Return None if this process is alone. JAX must not have started.

    Raises:
        UserError, GroupError: a process is missing or has other options, or the model cannot be found. Raised in all processes.
    """
    devices = args.num_devices
    if args.enable_dbo:
        start_exchanges_early()
    if args.is_side:  # report invalid credentials before a model is loaded
        args.credentials(args.transfer_host or (options.address if options else LOOPBACK))
    if options is None:
        emulate_devices(devices)
        return None
    emulate_devices(-(-devices // options.num_processes))
    _bound_collectives(options.heartbeat_timeout)
    from dsjax.hosts.group import HostGroup

    return HostGroup.start(options, lambda: _alike(args, devices, options))


def _bound_collectives(seconds: int) -> None:
    """Make a collective on CPU fail if another process does not reach it within ``seconds``, because that process hangs.

    No process compiles between two collectives (see `Programs`). If a process was only late, all continue in a new mesh epoch.
    """
    flag = "--xla_cpu_collective_timeout_seconds"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={seconds}".strip()


def _alike(args: EngineArgs, devices: int, options: HostOptions) -> dict[str, Any]:
    """Return the values that must be equal in all processes, by their names in messages."""
    from dsjax.checkpoint.fingerprint import fingerprint
    from dsjax.checkpoint.hub import resolve
    from dsjax.config import load_config

    if devices < options.num_processes:
        raise UserError(
            f"--mesh {args.mesh} has {devices} devices, fewer than the {options.num_processes} processes; start {devices}"
        )
    values = {name: value for name, value in args.executor_options.items() if name not in _OWN}
    checkpoint = resolve(args.model, revision=args.revision)
    values |= {"page_size": args.page_size_of(load_config(checkpoint)), "prefill_chunk": args.chunk_tokens}
    values["heartbeat_timeout"] = options.heartbeat_timeout
    for name in ("encrypt_bulk", "afd_address", "disaggregation_mode", "disaggregation_transfer_backend"):
        values[name] = getattr(args, name)
    return {
        **versions(),
        "the version of dsjax's commands": VERSION,
        **{f"--{name.replace('_', '-')}": value for name, value in values.items()},
        "the checkpoint fingerprint": fingerprint(checkpoint),
    }


def versions() -> dict[str, str]:
    """Return the versions of packages that must be equal in all processes, by their names in messages."""
    return {f"the version of {name}": installed_version(name) for name in ("dsjax", "jax", "jaxlib")}
