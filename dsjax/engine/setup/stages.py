"""`OwnStages`: the stages of `--mesh pp=…` on this process's devices. Joins their executors into one."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dsjax.config import ModelConfig
from dsjax.engine.pipeline.pipeline_executor import ExpertsOfStages, PipelineExecutor
from dsjax.engine.pipeline.process_links import ProcessLinks
from dsjax.engine.pipeline.stage_executor import StageExecutor
from dsjax.engine.pipeline.stages_of_process import StagesOfProcess
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.facts import EngineFacts, StageFacts
from dsjax.engine.tiers.divided_pages import DividedPages
from dsjax.engine.tiers.page_tiers import PageReporter
from dsjax.errors import UserError
from dsjax.hosts.group import HostGroup
from dsjax.model.stage import Stage, stages_of
from dsjax.model.step import ModelStep
from sharding import MeshError, MeshSpec
from sharding.layer_placement import LayerPlacements


@dataclass(frozen=True)
class OwnStages:
    """The stages on this process's devices, and their meshes."""

    spec: MeshSpec  # the mesh of all stages
    config: ModelConfig
    group: HostGroup | None
    balanced: bool  # whether EPLB is on
    owners: list[int]  # the process of each stage, for all stages
    stages: list[Stage]
    meshes: list[Mesh]

    @classmethod
    def of(cls, args: EngineArgs, config: ModelConfig, group: HostGroup | None) -> OwnStages:
        """Divide the layers among stages, and arrange the devices.

        Raises:
            UserError, MeshError: the model, the mesh and the processes do not go together.
        """
        spec = MeshSpec.parse(args.mesh)
        stages = stages_of(config, spec.pp_size, given=args.pp_layer_partition, mtp=args.speculation is not None)
        meshes = spec.build_stages()
        owners = [owner_of(stage, mesh) for stage, mesh in zip(stages, meshes, strict=True)]
        if group is not None:
            check_shares(spec, owners, group)
            own_stages = [number for number, owner in enumerate(owners) if owner == group.options.process_id]
            stages, meshes = [stages[number] for number in own_stages], [meshes[number] for number in own_stages]
        return cls(spec, config, group, args.eplb is not None, owners, stages, meshes)

    @property
    def is_divided(self) -> bool:
        """Whether other processes have stages too."""
        return self.group is not None and len(self.group.present) > 1

    def join(
        self, executors: Sequence[StageExecutor], pages: DividedPages | None, opened: contextlib.ExitStack
    ) -> PipelineExecutor:
        """Join the stages' executors into one. pages: disk cache of all stages. opened: closes the connections if the start fails."""
        if pages is not None:
            pages.reporters = [executor.extension(PageReporter) for executor in executors]
        if not self.is_divided:
            experts = ExpertsOfStages(executors, self.config) if self.balanced else None
            return PipelineExecutor(executors, experts, [] if pages is None else [pages])
        links = ProcessLinks(self.group, list(dict.fromkeys(self.owners)))
        opened.callback(links.close)
        return StagesOfProcess(executors, links)

    def describe(self, facts: Sequence[EngineFacts], steps: Sequence[ModelStep]) -> EngineFacts:
        """Join the descriptions of all processes' stages. Bytes are per device, of the stage with the most weights."""
        stage_facts = [_of_stage(one, step) for one, step in zip(facts, steps, strict=True)]
        by_process = self.group.agreement.all_gather("facts", stage_facts) if self.is_divided else [stage_facts]
        stages = sorted(itertools.chain.from_iterable(by_process), key=lambda stage: stage["layers"])
        fullest = max(stages, key=lambda stage: sum(stage["weight_bytes"].values()))
        moe = next((stage for stage in stages if stage["physical_experts_per_device"]), fullest)
        return replace(
            facts[0],
            parameters=sum(stage["parameters"] for stage in stages),
            mesh=str(self.spec),
            mesh_shape={"pp": self.spec.pp_size, **facts[0].mesh_shape},
            num_devices=self.spec.num_devices,
            num_processes=len(by_process),
            stages=[
                StageFacts(tuple(stage["layers"]), sum(stage["weight_bytes"].values()), stage["cache_bytes"])
                for stage in stages
            ],
            **{name: fullest[name] for name in _OF_FULLEST},
            **{name: moe[name] for name in _OF_EXPERTS},
        )


def owner_of(stage: Stage, mesh: Mesh) -> int:
    """Return the process that has a stage's devices. Raises a `MeshError` if several processes have them."""
    owners = sorted({device.process_index for device in mesh.devices.flat})
    if len(owners) > 1:
        raise MeshError(
            f"the devices of {stage} are of processes {', '.join(map(str, owners))}, expected one: a stage's own exchanges are inside a "
            "process; give each process whole stages"
        )
    return owners[0]


def check_shares(spec: MeshSpec, sharing: Collection[int], group: HostGroup) -> None:
    """Raise if a process of the group has nothing to compute in the mesh. sharing: ids of the processes with a device or a stage."""
    idle = [member for member in group.members if member.process_id not in sharing]
    if idle:
        has = f"takes {spec.num_devices} of the group's {jax.device_count()} devices"
        more = "a larger mesh"
        if spec.pp_size > 1:
            has = f"has {spec.pp_size} stages"
            more = "more stages"
        raise UserError(
            f"mesh {spec} {has}, none of them of {idle[0].name}; start {len(set(sharing))} processes, or use {more}"
        )


def placement_of_all(config: ModelConfig, step: ModelStep, placement: LayerPlacements) -> LayerPlacements:
    """Extend a stage's placement to all layers of the model. The rows of other stages repeat its first row and are never read."""
    rows = np.tile(placement.physical_to_logical[:1], (config.num_moe_layers + config.num_nextn_predict_layers, 1))
    first = step.stage.first_row(config)
    rows[first : first + placement.n_layers] = placement.physical_to_logical
    return LayerPlacements(rows, placement.n_logical)


_OF_FULLEST = ("weight_bytes", "cache_bytes")
_OF_EXPERTS = ("physical_experts_per_device", "dispatch")


def _of_stage(facts: EngineFacts, step: ModelStep) -> dict[str, Any]:
    """Return the facts of a stage that `describe` needs. An embedding that a later stage has too counts once."""
    again = None if step.is_first_stage else step.table.infos.get("embed.weight")
    return {name: getattr(facts, name) for name in (*_OF_FULLEST, *_OF_EXPERTS)} | {
        "layers": (step.stage.first, step.stage.first + step.stage.layers - 1),
        "parameters": facts.parameters - (again.count if again else 0),
    }
