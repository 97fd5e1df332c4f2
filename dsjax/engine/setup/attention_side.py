"""Connect a process of the attention side (`--afd-role attention`) to its other processes and to the routed experts' processes."""

import contextlib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from dsjax.addresses import split_address
from dsjax.engine.afd.attention_processes import AttentionProcesses
from dsjax.engine.afd.expert_link import LinkClosedError
from dsjax.engine.afd.options import afd_addresses, expert_spec
from dsjax.engine.afd.remote_experts import RemoteExperts, RemoteExpertsPart
from dsjax.engine.contract.commands import ConnectExperts
from dsjax.engine.device.access import DeviceAccess
from dsjax.engine.device.mesh_executor import PartMaker
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import experts_apart
from dsjax.engine.setup.spaces import expert_space
from dsjax.hosts.group import HostGroup
from dsjax.messaging import Endpoint
from dsjax.model.step import ModelStep


def connect_experts(
    args: EngineArgs,
    step: ModelStep,
    directory: Path,
    group: HostGroup | None,
    name: bytes,
    opened: contextlib.ExitStack,
    *,
    known: bool,
) -> RemoteExperts:
    """Connect to the processes at `--afd-address` and to the other attention processes. All attention processes call this.

    directory: the checkpoint's folder. name: name of the attention side. opened: closes the connections. known: whether this process was
    connected to the experts before; if so, it waits for lost expert processes.
    """
    attention = _attention_processes(args, name, group)
    opened.callback(attention.close)
    side = _remote_experts(args, step, directory, attention, step.placement.physical_to_logical)
    connect = partial(side.connect, known=known)
    if group is None:
        connect()
        return side
    # Do this before any wait, so that the loss of a process ends the waits of all others.
    group.collectives.cut_with(group.epoch, attention.abandon)
    try:
        group.agreement.run("experts", connect)
    except LinkClosedError as error:
        group.check(error)
        raise
    attention.connect()
    return side


def remote_part(args: EngineArgs, directory: Path) -> PartMaker:
    """Return a maker of the executor plugin for experts in other processes. directory: the checkpoint's folder."""

    def another(
        command: ConnectExperts, device: DeviceAccess, before: RemoteExperts
    ) -> tuple[ModelStep, RemoteExperts]:
        changed = replace(args, expert_mesh=command.expert_mesh, afd_address=command.afd_address)
        model = replace(device.model, apart=experts_apart(changed, device.model.apart.infos))
        placement = device.placements.physical_to_logical.copy()
        return model, _remote_experts(changed, model, directory, before.attention, placement, before.change + 1)

    return lambda device, _: RemoteExpertsPart(device, another)


def _attention_processes(args: EngineArgs, name: bytes, group: HostGroup | None) -> AttentionProcesses:
    if group is not None:
        return AttentionProcesses(group.endpoint, name, group)
    credentials = args.credentials(*(split_address(address)[0] for address in afd_addresses(args)))
    endpoint = Endpoint("127.0.0.1", credentials, silence=args.heartbeat_timeout)
    return AttentionProcesses(endpoint, name)


def _remote_experts(
    args: EngineArgs,
    step: ModelStep,
    directory: Path,
    attention: AttentionProcesses,
    placement: np.ndarray,
    change: int = 0,
) -> RemoteExperts:
    """Return the backend for a step's experts at `--afd-address`; its `connect` connects it. placement, change: see `RemoteExperts`."""
    return RemoteExperts(
        expert_spec(args),
        afd_addresses(args),
        attention,
        expert_space(args, step, directory),
        placement,
        waits=step.mesh.devices.flat[0].platform == "cpu",
        patience=args.start_timeout,
        change=change,
    )
