"""``StepDescription``: the static description of a step and its parts. Nothing here runs layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from dsjax.config import ModelConfig
from dsjax.kernels.table import OPERATIONS, Kernels
from dsjax.model.attention import AttentionFamily, PagedMLA
from dsjax.model.cache_groups import CacheGroup
from dsjax.model.compressed.family import Compressed
from dsjax.model.expert_dispatch import ExpertDispatch, ExpertsApart
from dsjax.model.forms import FORMS, Form, common_layout
from dsjax.model.fp8_product import WIDEN, ActivationScheme
from dsjax.model.in_place import MatricesInPlace
from dsjax.model.layer_parts import LayerParts
from dsjax.model.layer_values import Tokens
from dsjax.model.micro_batches import TwoBatchOverlap, count_micro_batches
from dsjax.model.parameters import ParameterTable, describe
from dsjax.model.rows import GroupShape, RowGroup, flatten
from dsjax.model.sparse import IndexScores
from dsjax.model.sparse.attend import Chosen
from dsjax.model.stage import Stage
from dsjax.model.token_sharding import TokenSharding
from dsjax.model.transformer import DecoderLayer, rotation_at
from sharding import MeshSpec, Rules
from sharding.dispatch import DispatchConfig
from sharding.layer_placement import LayerPlacements
from sharding.on_ranks import OneRank


@dataclass(frozen=True, eq=False)
class StepDescription:
    """Static description of a step: model, mesh, placement, forms, kernels. ``ModelStep`` computes the step.

    mesh: a ``OneRank`` only inside ``ModelStep._rank_by_rank``.
    stage: the pipeline stage (a run of the model's layers with a separate configuration and mesh); None: all layers. drafts: maximum draft
    tokens of a request in one step, for caches that keep a state after each.
    """

    config: ModelConfig
    table: ParameterTable
    spec: MeshSpec
    mesh: Mesh | OneRank
    rules: Rules
    placement: LayerPlacements
    dispatch: DispatchConfig
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    prefill_form: Form = FORMS["CC"]
    decode_form: Form = FORMS["A_CC_ME"]
    page_size: int = 16
    block_tokens: int | None = None
    kernels: Kernels = Kernels()
    shared_experts_fusion: bool = False
    nearest_copies: bool = False
    scheme: ActivationScheme = WIDEN
    index_scores: IndexScores = IndexScores()
    overlap: TwoBatchOverlap | None = None
    apart: ExpertsApart | None = None
    stage: Stage | None = None
    drafts: int = 0

    @property
    def begins(self) -> bool:
        """Whether this stage is the first: it has the embedding and the first layers."""
        return self.stage is None or self.stage.begins

    @property
    def ends(self) -> bool:
        """Whether this stage produces tokens: it has the last layers, the LM head and the MTP module."""
        return self.stage is None or self.stage.ends

    @property
    def expert_ranks(self) -> int:
        """Number of devices that together hold one copy of the routed experts."""
        return (self.apart or self).spec.ep_size

    @property
    def stored_placement(self) -> LayerPlacements:
        """Expert in each slot of the parameters: ``placement``, extended by ``stored``."""
        return self.stored(self.placement)

    def stored(self, placement: LayerPlacements) -> LayerPlacements:
        """Return a placement of the routed experts. With ``shared_experts_fusion`` each rank's last slot has the shared expert."""
        return placement.with_fused_shared(self.spec.ep_size) if self.shared_experts_fusion else placement

    @property
    def is_exact(self) -> bool:
        """Whether a token's values are bitwise equal on every mesh, in every batch and chunk.

        True if all products are native: each sum then has a fixed order (``docs/exactness.md``). Other MLA forms are not exact.
        """
        return set(self.implementations.values()) == {"native"}

    @property
    def forms_by_kind(self) -> bool:
        """Whether a token's MLA form depends on its being prompt or output, not on the row group that computes it.

        True if sums are exact and the two forms differ. Attention other than MLA has only one form.
        """
        return self.is_exact and self.prefill_form != self.decode_form and self.config.v4 is None

    @property
    def implementations(self) -> dict[str, str]:
        """Operation → backend: ``plain``, ``native`` or ``pallas``."""
        forms, backend = (self.decode_form, self.prefill_form), self.attention.backend
        attention = dict(zip(("decode attention", "prefill attention"), map(backend, forms), strict=True))
        return {operation: self.kernels.name(operation) for operation in OPERATIONS} | attention

    @property
    def attention(self) -> AttentionFamily:
        """Attention family over this step's cache."""
        if self.config.v4 is not None:
            where = self.mesh, self.rules, self.config, self.cache_dtype, self.drafts, self.kernels
            return Compressed(*where, self.index_scores)
        layout = common_layout(self.prefill_form, self.decode_form)
        where = self.mesh, self.rules, self.config, layout, self.cache_dtype, self.block_tokens, self.kernels
        return PagedMLA(*where) if self.config.mla.indexer is None else Chosen(*where, self.index_scores)

    @property
    def sharding(self) -> TokenSharding:
        """Sharding of this step's tokens over the mesh."""
        return TokenSharding(self.spec, self.mesh)

    @property
    def in_place(self) -> MatricesInPlace:
        """Products with a layer's matrices."""
        where = self.table.infos, self.spec, self.mesh, self.rules
        return MatricesInPlace(self.config, *where, self.kernels, self.scheme)

    @property
    def experts(self) -> ExpertDispatch:
        """Dispatch of this step's tokens to their routed experts."""
        return ExpertDispatch(
            self.placement,
            self.dispatch,
            self.nearest_copies,
            self.shared_experts_fusion,
            self.in_place,
            self.sharding,
        )

    @property
    def parts(self) -> LayerParts:
        """The four parts of each of this step's layers."""
        forms = (self.prefill_form, self.decode_form)
        return LayerParts(self.attention, forms, self.in_place, self.experts, self.sharding, self.apart is not None)

    @property
    def has_module(self) -> bool:
        """Whether this step's parameters include an MTP module."""
        return any(path.startswith("mtp.") for path in self.table.infos)

    @property
    def cache_layers(self) -> int:
        """Number of cache layers: the model's, followed by the MTP module's if the step has one."""
        return self.config.num_hidden_layers + self.has_module

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups of this step's layers."""
        return self.attention.groups(range(self.cache_layers), self.page_size)

    @property
    def moe_layers_with_module(self) -> int:
        """Number of layers with routed experts: the model's, followed by the MTP module's if the step has one."""
        return self.config.num_moe_layers + (self.has_module and self.config.is_moe)

    def abstract_parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return each parameter's shape, storage dtype and sharding, as the engine allocates them."""
        return describe(self.table.infos, self.rules, self.mesh)

    @property
    def fills_windows(self) -> bool:
        """Whether the last layer of the cache, the MTP module's, caches on window pages."""
        last = self.cache_layers - 1
        return any(group.table == "window" and last in group.layers for group in self.cache_groups)

    def filled_slots(self, groups: Sequence[RowGroup]) -> Int[Array, "B T"]:
        """Return the slot of each token's MTP entry on its DP rank, −1 for padding."""
        slots = RowGroup.window_slots if self.fills_windows else RowGroup.slots
        return self.sharding.whole(flatten([slots(group, self.page_size) for group in groups]))

    def logits_spec(self, positions: int) -> P:
        """Return the sharding of logits ``[B, positions, V]`` by the rules: over vocabulary, or over positions if ``tp`` divides them."""
        batch, tokens, vocab = self.rules.spec(("ranks", "head_tokens", "vocab"))
        return P(batch, tokens if positions % self.spec.tp_size == 0 else None, vocab)

    def tokens(self, groups: Sequence[RowGroup]) -> Tokens:
        """Return the layers' inputs for these groups' token slots."""
        parts = [
            [g.tokens for g in groups],
            [g.positions for g in groups],
            [g.active for g in groups],
            [g.slots(self.page_size) for g in groups],
        ]
        if groups[0].shape.windows:
            parts.append([g.window_slots(self.page_size) for g in groups])
        ids, positions, active, slots, *window_slots = (self.sharding.whole(flatten(part)) for part in parts)
        rotation = rotation_at(self.config, positions)
        return Tokens(groups, ids, active, slots, rotation, None, *window_slots)

    @property
    def rank_by_rank(self) -> bool:
        """Whether each rank runs its layers in a separate region, so that it skips work for which it has no tokens.

        True on emulated CPU devices, which share a few cores, if no sum spans ``tp``.
        """
        alone = self.spec.tp_size * self.spec.expert_width_shards == 1 and self.apart is None
        return self.in_place.native and alone and self.spec.num_devices > 1

    def split(self, stack: DecoderLayer, tokens: Tokens | None) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        """Return a stack's graph, the state that stays unsliced, and the state sliced per layer. tokens: None to leave out attention."""
        # The scan does not slice experts: the product reads single experts from the whole stack. On CPU, a scan would
        # first copy all of a layer's experts for the few that have tokens.
        # GPU kernels also multiply with other matrices in place if they support them.
        forms = [] if tokens is None else [group.shape.form for group in tokens.groups]
        in_place = self.in_place.names(self.attention.in_stack(forms))

        def stays(path, _) -> bool:
            return "experts" in path or (len(path) > 1 and path[-2] in in_place and path[-1] in ("weight", "scale"))

        return nnx.split(stack, stays, ...)

    def in_halves(self, shapes: Sequence[GroupShape]) -> bool:
        """Return whether a step of these groups runs in two halves (``dsjax/model/two_batch.py``): if enabled, and rows are exchanged."""
        away = self.apart is not None or self.spec.ep_size * self.spec.expert_width_shards > 1
        travels = self.config.is_moe and away
        return self.overlap is not None and travels and self.overlap.halves(shapes)

    def micro_batches(self, shapes: Sequence[GroupShape]) -> int:
        """Return the number of micro-batches in which layers with experts compute a step of these groups."""
        if not self.in_halves(shapes):
            return 1
        return count_micro_batches(shapes, 2 if self.apart is None else self.overlap.stages)
