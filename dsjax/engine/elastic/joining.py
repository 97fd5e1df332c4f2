"""From an engine's options to its group of processes: what must be alike in all of them, and how many devices each brings."""

from __future__ import annotations

import os
from typing import Any

from dsjax.engine.contract.commands import VERSION
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.combinations import check_group
from dsjax.errors import UserError
from dsjax.hosts import HostOptions
from dsjax.versions import installed_version
from sharding.emulation import emulate_devices
from sharding.scheduler_flags import start_exchanges_early

LOOPBACK = "127.0.0.1"
"""Where a process that is alone and was given no address listens for others."""
_OWN = ("model", "revision", "kernel_cache")
"""Options that may differ from host to host: where the model lies, for the fingerprint tells checkpoints apart."""


def host_options(args: EngineArgs) -> HostOptions | None:
    """Find out which process of which group this is; None: it is alone.

    Raises:
        UserError: options that do not go together, or no address; or what started this process has several, and its options are of one.
    """
    options = HostOptions.find(args, args.link_monitor_interval)
    if options is not None:
        check_group(args)
    return options


def join_group(args: EngineArgs, options: HostOptions | None):
    """Have the CPU's devices emulated, and join the group; None where this process is alone. JAX must not have started.

    Raises:
        UserError, GroupError: somebody is missing or was started otherwise, or the model cannot be found: in all processes.
    """
    devices = args.num_devices
    if args.enable_dbo:
        start_exchanges_early()
    if args.is_side:  # what is wrong with it is said before a model is loaded
        args.credentials(args.transfer_host or (options.address if options else LOOPBACK))
    if options is None:
        emulate_devices(devices)
        return None
    emulate_devices(-(-devices // options.num_processes))
    _bound_collectives(options.heartbeat_timeout)
    from dsjax.hosts.group import HostGroup

    return HostGroup.start(options, lambda: _alike(args, devices, options))


def _bound_collectives(seconds: int) -> None:
    """Have a collective of the CPU platform fail when another process has not come to it for so long: it hangs.

    Nobody compiles between two collectives (`Programs`). Where a process was only late, all go on in a new generation.
    """
    flag = "--xla_cpu_collective_timeout_seconds"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={seconds}".strip()


def _alike(args: EngineArgs, devices: int, options: HostOptions) -> dict[str, Any]:
    """List what must be the same in all processes, by name as messages have it."""
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
    """Give the versions of the packages that every process must have alike, by name as messages have it."""
    return {f"the version of {name}": installed_version(name) for name in ("dsjax", "jax", "jaxlib")}
