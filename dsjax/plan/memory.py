"""Memory of a device: weights to the byte, the KV cache, and the reserve."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dsjax.config import ModelConfig
from dsjax.model.cache_groups import HELD_WINDOWS, KEPT_WINDOWS
from dsjax.model.parameter_counts import (
    attention_matrices,
    parameter_counts,
    residual_parameters,
    router_bias_parameters,
)
from dsjax.model.stage import stages_of
from dsjax.plan.compiled import DryRun
from dsjax.plan.figure import assumed
from dsjax.plan.layout import InstanceLayout
from dsjax.plan.precision import Precision, matrix_bytes


@dataclass(frozen=True)
class StageShare:
    """One device of a pipeline stage: its part of the model, bytes of weights by component, and cache bytes per token and per request.

    In a model with window pages, `cache_per_request` is the size of the window pages that a request holds, and `cache_per_token` includes
    a token's share of the pages kept for finished requests.
    """

    config: ModelConfig
    weights: dict[str, int]
    cache_per_token: float
    cache_per_request: int


@functools.lru_cache(maxsize=4096)
def stage_shares(
    config: ModelConfig, layout: InstanceLayout, precision: Precision, mtp: bool = False
) -> Sequence[StageShare]:
    """Return the share of each stage, exactly: FP8 scales are counted block by block, partial blocks included.

    `tp` splits the per-head matrices, the MLP and shared-expert widths and the vocabulary. Every device holds the whole latent projections,
    router and norms.
    """
    mesh = layout.mesh
    width = config.hidden_size
    shares = []
    tp, shards = mesh.tp_size, mesh.expert_width_shards
    counts = parameter_counts(config)
    for stage in stages_of(config, mesh.pp_size, mtp=mtp):
        part = stage.config(config) if mesh.pp_size > 1 else config
        drafts = mtp and stage.is_last
        modules = config.num_nextn_predict_layers if drafts else 0
        kinds = [kind for run in part.layer_runs for kind in run.kinds * run.count] + [config.mtp_kind] * modules
        layers = len(kinds)
        attention = 0
        for kind, count in Counter(kind.attention for kind in kinds).items():
            matrices, other_parameters = attention_matrices(config, tp, kind)
            attention += count * (matrix_bytes(matrices, precision.linear) + (other_parameters + 2 * width) * 2)
        residual, at_end = residual_parameters(config)
        hashed = sum(kind.mlp == "hash" for kind in kinds)
        moe = layers - part.num_dense_layers if part.is_moe else 0
        selection = hashed * counts.get("hash_table", 0) + (moe - hashed) * router_bias_parameters(config)
        slots = (part.n_routed_experts + layout.redundant) // mesh.ep_size if part.is_moe and not layout.experts else 0
        shared = part.n_shared_experts * config.moe_intermediate_size // (shards if layout.fused else tp)
        embedded = stage.is_first or (stage.is_last and (mtp or config.tie_word_embeddings))
        vocabulary = counts["embedding"] * embedded + counts["head"] * stage.is_last
        sizes = {
            "attention": attention,
            "hyper-connections": 4 * (layers * residual + (stage.is_last + modules) * at_end),
            "dense MLP": (layers - moe) * _mlp(width, config.intermediate_size // tp, precision, precision.mlp),
            "experts": moe * slots * expert_bytes(config, shards, precision),
            "shared experts": moe * _mlp(width, shared, precision, precision.mlp),
            "router": moe * counts["router"] * 2 + 4 * selection,
            "embedding and head": vocabulary * 2 // tp + width * 2 * stage.is_last,
            "MTP projection and norms": modules * (2 * width * width + 3 * width) * 2,
        }
        nonzero = {name: size for name, size in sizes.items() if size}
        token, window = (size(part, precision, drafts) for size in (cache_bytes_per_token, window_page_bytes))
        token = token / (1 - KEPT_WINDOWS) if window else token
        shares.append(StageShare(part, nonzero, token, HELD_WINDOWS * window))
    return shares


def weight_bytes(
    config: ModelConfig, layout: InstanceLayout, precision: Precision, mtp: bool = False
) -> dict[str, int]:
    """Return the bytes of weights on one device by component; with several stages, those of the largest stage."""
    shares = stage_shares(config, layout, precision, mtp)
    return max((share.weights for share in shares), key=lambda sizes: sum(sizes.values()))


def expert_side_bytes(config: ModelConfig, layout: InstanceLayout, precision: Precision, mtp: bool = False) -> int:
    """Bytes of weights on one device of the expert mesh (AFD), which holds routed experts only."""
    layers = config.num_moe_layers + (config.num_nextn_predict_layers if mtp else 0)
    slots = (config.n_routed_experts + layout.redundant) // layout.experts
    return layers * slots * expert_bytes(config, 1, precision)


def expert_bytes(config: ModelConfig, shards: int, precision: Precision) -> int:
    """Bytes of one routed expert on one device. shards: devices that share its width."""
    return _mlp(config.hidden_size, config.moe_intermediate_size // shards, precision, precision.expert)


def _mlp(width: int, hidden: int, precision: Precision, itemsize: float) -> int:
    shapes = [(width, hidden), (width, hidden), (hidden, width)] if hidden else []
    return matrix_bytes(shapes, itemsize, precision.packed)


def cache_bytes_per_token(config: ModelConfig, precision: Precision, mtp: bool = False) -> int:
    """Return the KV cache bytes of one token in all layers, including the MTP module's, on each device of a replica.

    For DeepSeek-V4: the bytes that one more token of context adds, without window pages.
    """
    return _page_bytes("context", config, precision, mtp) // config.page_tokens


def window_page_bytes(config: ModelConfig, precision: Precision, mtp: bool = False) -> int:
    """Return the bytes of a window page of DeepSeek-V4; 0 for other models. A request of any length holds two or more of these pages."""
    return _page_bytes("window", config, precision, mtp)


def _page_bytes(table: str, config: ModelConfig, precision: Precision, mtp: bool) -> int:
    layers = config.num_hidden_layers + (config.num_nextn_predict_layers if mtp else 0)
    groups = precision.cache_groups(config, range(layers))
    return sum(group.page_bytes for group in groups if group.table == table)


@dataclass(frozen=True)
class Memory:
    """One device: weights by component, the reserve, and the rest for the cache. Bytes."""

    weights: dict[str, int]
    reserve: float
    device: int
    cache_per_token: float
    cache_per_request: int = 0

    @property
    def weights_total(self) -> int:
        """Bytes of all weights."""
        return sum(self.weights.values())

    @property
    def cache(self) -> float:
        """Bytes left for the cache; 0 or less if the weights do not fit."""
        return self.device - self.weights_total - self.reserve

    @property
    def cache_tokens(self) -> float:
        """Tokens of a DP rank's cache."""
        return self.cache / self.cache_per_token

    def max_batch(self, tokens_each: float) -> int:
        """Return how many requests of `tokens_each` tokens a DP rank holds at once."""
        return max(0, int(self.cache // self.request_bytes(tokens_each)))

    def request_bytes(self, tokens: float) -> float:
        """Return the cache bytes of a request of `tokens` tokens."""
        return tokens * self.cache_per_token + self.cache_per_request


def memory(
    config: ModelConfig,
    layout: InstanceLayout,
    precision: Precision,
    device_bytes: int,
    aside: float,
    mtp: bool = False,
    dry_runs: tuple[DryRun, ...] = (),
    balanced: bool = False,
) -> Memory:
    """Return the memory of one device: with several stages, of the stage with room for the fewest tokens.

    aside: bytes of the runtime, communication buffers, graphs and a step's temporaries (`fit.set_aside`). balanced: experts move while
    serving, which needs a buffer for one layer's slots. If the experts do not fit the devices of their own mesh (AFD), the result is
    the memory of one of those devices.
    """
    if layout.experts:
        experts = {"experts": expert_side_bytes(config, layout, precision, mtp)}
        expert_memory = Memory(experts, aside, device_bytes, 1)
        if expert_memory.cache <= 0:
            return expert_memory
    reserve = _set_aside(device_bytes, aside, dry_runs)
    stages = layout.mesh.pp_size
    staging = 0
    if balanced and not layout.experts:
        slots = (config.n_routed_experts + layout.redundant) // layout.mesh.ep_size
        staging = slots * expert_bytes(config, layout.mesh.expert_width_shards, precision)
    # A stage caches one batch for every stage.
    stages_memory = [
        Memory(
            share.weights,
            reserve + staging * share.config.is_moe,
            device_bytes,
            stages * share.cache_per_token,
            stages * share.cache_per_request,
        )
        for share in stage_shares(config, layout, precision, mtp)
    ]
    return min(stages_memory, key=lambda stage_memory: stage_memory.cache_tokens)


def _set_aside(device_bytes: int, usual: float, dry_runs: tuple[DryRun, ...]) -> float:
    """Return the bytes besides weights and cache: the assumption, or the larger step's compiled temporaries plus what XLA cannot see.

    If only one of the two steps has a dry run, return at least the assumption.
    """
    if not dry_runs:
        return usual
    run = max(dry_runs, key=lambda dry_run: dry_run.temporaries)
    ends = (share * device_bytes for share in (0.02, 0.01, 0.05))
    unseen = assumed(*ends, "runtime, communication buffers, fragmentation", "what a compiler does not see", "B")
    temporaries = run.temporaries + unseen
    return temporaries if len({dry_run.step for dry_run in dry_runs}) == 2 else max(temporaries, usual)
