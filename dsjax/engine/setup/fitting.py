"""Check that a mesh divides a model. Does not import JAX, so that `dsjax info` starts fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsjax.config import ModelConfig
from dsjax.config.weights import WEIGHT_FORMATS
from dsjax.errors import UserError
from sharding import MeshSpec

if TYPE_CHECKING:
    from dsjax.model.parameters import Weights


def check_layout(
    config: ModelConfig,
    spec: MeshSpec,
    redundant: int,
    weights: Weights,
    expert_side: MeshSpec | None = None,
    dense_tp: int | None = None,
) -> None:
    """Check that the mesh divides this model; see ``MeshSpec.check_fits``.

    redundant: redundant experts. expert_side: the experts' mesh, if they have their own. dense_tp: ``--moe-dense-tp-size``.

    Raises:
        MeshError: sizes do not fit; the message names each. UserError: an option does not fit the model or the mesh.
    """
    if redundant and not config.is_moe:
        raise UserError(f"--redundant-experts is {redundant}, but this model has no experts; leave it out")
    if dense_tp not in (None, 1, spec.tp_size):
        raise UserError(
            f"--moe-dense-tp-size is {dense_tp}: dense MLPs are whole on each device (1) or shared by all devices of a DP rank "
            f"(tp={spec.tp_size}); give 1 or leave it out"
        )
    if config.head_groups < config.num_attention_heads and config.head_groups % spec.tp_size:
        raise UserError(
            f"mesh {spec}: tp={spec.tp_size} does not divide the {config.head_groups} groups of the output projection; choose another tp"
        )
    weight_format = WEIGHT_FORMATS[weights]
    if weight_format.packed is not None and config.is_moe:
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, name) % weight_format.expert_block:
                raise UserError(
                    f"--weights {weights} keeps experts in blocks of {weight_format.expert_block}, and this model's {name} is "
                    f"{getattr(config, name)}, which they do not divide; choose other --weights"
                )
    widths = config.widths_over_tp(weight_format.keeps_fp8)
    if dense_tp == 1:
        widths.pop("dense MLP width", None)
    experts = {
        "experts": config.n_routed_experts,
        "redundant": redundant,
        "expert_width": config.moe_intermediate_size,
        "expert_block": weight_format.expert_block,
    }
    if expert_side is not None:
        if not config.is_moe:
            raise UserError("--expert-mesh is given, but this model has no experts; give --mesh alone")
        expert_side.check_fits(heads=expert_side.tp_size, **experts)  # no heads on this mesh; tp_size always fits
        experts = {}  # checked on their own mesh
    spec.check_fits(heads=config.num_attention_heads, dense_widths=widths, block=weight_format.block, **experts)
