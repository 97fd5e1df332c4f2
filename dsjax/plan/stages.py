"""Stages: what a model whose layers are spread over groups of devices takes (`--mesh pp=2,…`, docs/pipeline.md).

As many steps are under way as there are stages, each of other requests. That is as many engines as stages, taking turns on all devices:
each has the time of a step of the whole model on one stage's devices, its own requests, and its part of the cache. So a DP rank counts as
often as there are stages, with the requests of one such batch. What stages add to a step is here.
"""

from __future__ import annotations

from dsjax.config import ModelConfig
from dsjax.model.stage import layer_work, stages_of
from dsjax.plan.cluster import Cluster
from dsjax.plan.figure import assumption
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.moves import connection
from dsjax.plan.network import network_latency
from dsjax.plan.precision import BF16
from sharding.mesh import MeshSpec


def fullest_stage(config: ModelConfig, stages: int, mtp: bool = False) -> float:
    """Work of the stage that has most ÷ the mean: all others wait for it."""
    work, behind = layer_work(config, mtp)
    each = [
        sum(work[stage.first : stage.first + stage.layers]) + (behind if stage.ends else 0)
        for stage in stages_of(config, stages, mtp=mtp)
    ]
    return max(each) * stages / sum(each)


def cut_stage(layout: InstanceLayout, per_host: int) -> str | None:
    """Why dsjax cannot run a layout with stages on hosts of so many devices; None where it can. A stage is of one process of one host."""
    mesh = layout.mesh
    if mesh.pp_size == 1 or mesh.num_devices <= per_host or per_host % mesh.stage_devices == 0:
        return None
    return f"{mesh}: a stage of {mesh.stage_devices} devices is on several hosts of {per_host}, and dsjax has each stage in one process"


def hand_over(cluster: Cluster, mesh: MeshSpec, tokens: float, width: int, own: bool = False) -> float:
    """Seconds in which a step's hidden states go from the first stage to the last: each device sends its DP rank's to one of the next.

    own: as dsjax has it, whose processes, one a host, send those of all DP ranks over one connection.
    """
    size, hops, between, crossing = tokens * width * BF16, mesh.pp_size - 1, 0, 0.0
    share = assumption("copies between stages, share of a link")
    fixed = assumption("a copy between stages, fixed part")
    if own:
        between = -(-mesh.num_devices // cluster.devices_per_host) - 1
        rate, message = connection(cluster, cluster)
        crossing = size * mesh.dp_size / rate + message
    elif mesh.num_devices > cluster.domain:
        far = cluster.between(mesh.num_devices)
        crossing = size / (share * far.network_bandwidth) + network_latency(far) + fixed
        # Whole stages lie beside each other in a domain, or each is as wide as one.
        between = hops if cluster.domain % mesh.stage_devices else cluster.domains_of(mesh.num_devices) - 1
    inside = size / (share * cluster.hardware.scale_up_bandwidth) + fixed
    return inside * (hops - between) + crossing * between
