"""What lies in a device's memory: weights to the byte, the latent cache, and what is set aside."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from dsjax.config import ModelConfig
from dsjax.model.mla_costs import index_key_bytes
from dsjax.model.parameter_counts import attention_matrices, parameter_counts, router_bias_parameters
from dsjax.model.stage import stages_of
from dsjax.plan.compiled import DryRun
from dsjax.plan.figure import assumed
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.precision import Precision, bytes_of


def weight_bytes(
    config: ModelConfig, layout: InstanceLayout, precision: Precision, mtp: bool = False
) -> dict[str, int]:
    """Bytes of weights on one device by component. Exact: FP8 scales are counted block by block (ragged ends included).

    What `tp` divides: heads' matrices, MLP and shared-expert widths, the vocabulary; the latents' projections, router and
    norms are whole on every device.
    """
    counts, mesh = parameter_counts(config), layout.mesh
    if mesh.pp_size > 1:
        return max(_stages_weights(config, layout, precision, mtp), key=lambda sizes: sum(sizes.values()))
    tp, layers = mesh.tp_size, config.num_hidden_layers + (config.num_nextn_predict_layers if mtp else 0)
    moe_layers = layers - config.num_dense_layers if config.is_moe else 0
    dense_layers = layers - moe_layers
    width, (attention, others) = config.hidden_size, attention_matrices(config, tp)
    held = config.is_moe and not layout.experts
    slots = (config.n_routed_experts + layout.redundant) // mesh.ep_size if held else 0
    of_shared = mesh.expert_width_shards if layout.fused else tp
    sizes = {
        "attention": layers * (bytes_of(attention, precision.linear) + (others + 2 * width) * 2),
        "dense MLP": dense_layers * _mlp(width, config.intermediate_size // tp, precision.mlp),
        "experts": moe_layers * slots * expert_bytes(config, mesh.expert_width_shards, precision),
        "shared experts": moe_layers
        * _mlp(width, config.n_shared_experts * config.moe_intermediate_size // of_shared, precision.mlp),
        "router": moe_layers * (counts["router"] * 2 + router_bias_parameters(config) * 4),
        "embedding and head": (counts["embedding"] + counts["head"]) * 2 // tp + width * 2,
    }
    if mtp:
        sizes["MTP projection and norms"] = config.num_nextn_predict_layers * (2 * width * width + 3 * width) * 2
    return {name: size for name, size in sizes.items() if size}


def expert_side_bytes(config: ModelConfig, layout: InstanceLayout, precision: Precision, mtp: bool = False) -> int:
    """Bytes of routed experts on one of the devices that have nothing else."""
    layers = config.num_moe_layers + (config.num_nextn_predict_layers if mtp else 0)
    slots = (config.n_routed_experts + layout.redundant) // layout.experts
    return layers * slots * expert_bytes(config, 1, precision)


def _stages_weights(
    config: ModelConfig, layout: InstanceLayout, precision: Precision, mtp: bool
) -> list[dict[str, int]]:
    """Count the memory of each stage in the same way."""
    counts, width, found = parameter_counts(config), config.hidden_size, []
    for stage in stages_of(config, layout.mesh.pp_size, mtp=mtp):
        sizes = weight_bytes(
            stage.config(config), dataclasses.replace(layout, mesh=layout.mesh.stage), precision, mtp and stage.ends
        )
        embedded = stage.begins or (stage.ends and (mtp or config.tie_word_embeddings))
        whole = counts["embedding"] * embedded + counts["head"] * stage.ends
        sizes["embedding and head"] = whole * 2 // layout.mesh.tp_size + width * 2 * stage.ends
        found.append({name: size for name, size in sizes.items() if size})
    return found


def expert_bytes(config: ModelConfig, shards: int, precision: Precision) -> int:
    """Bytes of one routed expert on one device; shards: into how many pieces its width is cut."""
    return _mlp(config.hidden_size, config.moe_intermediate_size // shards, precision.expert)


def _mlp(width: int, hidden: int, itemsize: float) -> int:
    return bytes_of([(width, hidden), (width, hidden), (hidden, width)], itemsize) if hidden else 0


def cache_bytes_per_token(config: ModelConfig, precision: Precision, mtp: bool = False) -> int:
    """Bytes of one token in all layers of the latent cache, on each device of its replica; the MTP module's layer has its own."""
    layers = config.num_hidden_layers + (config.num_nextn_predict_layers if mtp else 0)
    latent = (config.kv_lora_rank + config.qk_rope_head_dim) * precision.cache
    return round(layers * (latent + index_key_bytes(config, precision.cache)))


@dataclass(frozen=True)
class Memory:
    """One device: weights by component, what is set aside, and what is left for the cache. Bytes."""

    weights: dict[str, int]
    reserve: float
    device: int
    cache_per_token: int

    @property
    def weights_total(self) -> int:
        """All weights."""
        return sum(self.weights.values())

    @property
    def cache(self) -> float:
        """Bytes left for the cache; not positive where the weights do not fit."""
        return self.device - self.weights_total - self.reserve

    @property
    def cache_tokens(self) -> float:
        """Tokens of a DP rank's cache."""
        return self.cache / self.cache_per_token

    def max_batch(self, tokens_each: float) -> int:
        """Requests of so many tokens that a DP rank holds at once."""
        return max(0, int(self.cache_tokens // tokens_each))


def memory(
    config: ModelConfig,
    layout: InstanceLayout,
    precision: Precision,
    device_bytes: int,
    aside: float,
    mtp: bool = False,
    dry_runs: tuple[DryRun, ...] = (),
    balanced: bool = False,
    expert_device_bytes: int | None = None,
) -> Memory:
    """Compute the memory of one device of a layout.

    aside: bytes of the runtime, communication buffers, graphs and a step's temporaries (`fit.set_aside`).

    expert_device_bytes: of the devices that have the experts, where these are others. Where the experts do not fit there, their memory is
    told; else that of a device with attention. balanced: experts move while serving, so that the
    staging buffer of one layer's slots is set aside too.
    """
    if layout.mesh.pp_size > 1:
        return _memory_of_stages(config, layout, precision, device_bytes, aside, mtp, balanced)
    weights = weight_bytes(config, layout, precision, mtp)
    reserve = _set_aside(device_bytes, aside, dry_runs)
    if layout.experts:
        there = {"experts": expert_side_bytes(config, layout, precision, mtp)}
        beside = Memory(there, aside, expert_device_bytes or device_bytes, 1)
        if beside.cache <= 0:  # what forbids the layout is that side
            return beside
    elif balanced:
        reserve = reserve + _staging(config, layout, precision)
    return Memory(weights, reserve, device_bytes, cache_bytes_per_token(config, precision, mtp))


def _staging(config: ModelConfig, layout: InstanceLayout, precision: Precision) -> float:
    """Bytes of a device for experts that are on their way to it: one layer's slots."""
    slots = (config.n_routed_experts + layout.redundant) // layout.mesh.ep_size
    return slots * expert_bytes(config, layout.mesh.expert_width_shards, precision)


def _memory_of_stages(
    config: ModelConfig,
    layout: InstanceLayout,
    precision: Precision,
    device_bytes: int,
    reserve: float,
    mtp: bool,
    balanced: bool,
) -> Memory:
    """The stage with room for the fewest tokens. Its tokens are of one of as many batches as there are stages, which share its cache."""
    count = layout.mesh.pp_size
    staging = _staging(config, layout, precision) if balanced else None
    each = [
        Memory(
            weights,
            reserve + staging if staging is not None and stage.config(config).is_moe else reserve,
            device_bytes,
            count * cache_bytes_per_token(stage.config(config), precision, mtp and stage.ends),
        )
        for stage, weights in zip(
            stages_of(config, count, mtp=mtp), _stages_weights(config, layout, precision, mtp), strict=True
        )
    ]
    return min(each, key=lambda memory: memory.cache_tokens)


def _set_aside(device_bytes: int, usual: float, dry_runs: tuple[DryRun, ...]) -> float:
    """What is not for weights and cache: assumed, or the larger step's temporaries as compiled and what a compiler cannot see.

    With a dry run of one of the two steps only, not less than what is assumed.
    """
    if not dry_runs:
        return usual
    run = max(dry_runs, key=lambda one: one.temporaries)
    unseen = assumed(
        0.02 * device_bytes,
        0.01 * device_bytes,
        0.05 * device_bytes,
        "runtime, communication buffers, fragmentation",
        "what a compiler does not see",
        "B",
    )
    temporaries = run.figure(run.temporaries, "temporaries", "B") + unseen
    if len({one.step for one in dry_runs}) == 1:
        temporaries = max(temporaries, usual)
    return temporaries
