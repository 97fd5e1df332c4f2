"""``StepDescription``: the static description of a step and its parts. Nothing here runs layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
from dsjax.model.sparse.attend import SparseMLA
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

    mesh: a ``OneRank`` only inside ``ModelStep._rank_by_rank``. block_tokens: see ``PagedMLA``. scheme: activation quantisation.
    apart: the devices with the routed experts under attention–FFN disaggregation (AFD); None: the experts are on this mesh.
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
    def is_first_stage(self) -> bool:
        """Whether this stage is the first: it has the embedding and the first layers."""
        return self.stage is None or self.stage.is_first

    @property
    def is_last_stage(self) -> bool:
        """Whether this stage produces tokens: it has the last layers, the LM head and the MTP module."""
        return self.stage is None or self.stage.is_last

    @property
    def expert_ranks(self) -> int:
        """Number of devices that together hold one copy of the routed experts."""
        expert_mesh = self.spec if self.apart is None else self.apart.spec
        return expert_mesh.ep_size

    def with_shared_slots(self, placement: LayerPlacements) -> LayerPlacements:
        """Return a placement of the routed experts with the shared expert in each rank's last slot, if ``shared_experts_fusion``."""
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

        True if sums are exact and the two forms differ.
        """
        return self.is_exact and self.prefill_form != self.decode_form and self.config.family.has_forms

    @property
    def implementations(self) -> dict[str, str]:
        """Operation → backend: ``plain``, ``native`` or ``pallas``."""
        backends = {operation: self.kernels.name(operation) for operation in OPERATIONS}
        backends["decode attention"] = self.attention.backend(self.decode_form)
        backends["prefill attention"] = self.attention.backend(self.prefill_form)
        return backends

    @property
    def attention(self) -> AttentionFamily:
        """Attention family over this step's cache."""
        if self.config.v4 is not None:
            return Compressed(
                self.mesh, self.rules, self.config, self.cache_dtype, self.drafts, self.kernels, self.index_scores
            )
        layout = common_layout(self.prefill_form, self.decode_form)
        mla = self.mesh, self.rules, self.config, layout, self.cache_dtype, self.block_tokens, self.kernels
        return PagedMLA(*mla) if self.config.mla.indexer is None else SparseMLA(*mla, self.index_scores)

    @property
    def sharding(self) -> TokenSharding:
        """Sharding of this step's tokens over the mesh."""
        return TokenSharding(self.spec, self.mesh)

    @property
    def products(self) -> MatricesInPlace:
        """Products with a layer's matrices."""
        return MatricesInPlace(
            self.config, self.table.infos, self.spec, self.mesh, self.rules, self.kernels, self.scheme
        )

    @property
    def experts(self) -> ExpertDispatch:
        """Dispatch of this step's tokens to their routed experts."""
        return ExpertDispatch(
            placement=self.placement,
            dispatch=self.dispatch,
            nearest_copies=self.nearest_copies,
            shared_experts_fusion=self.shared_experts_fusion,
            products=self.products,
            sharding=self.sharding,
        )

    @property
    def parts(self) -> LayerParts:
        """The four parts of each of this step's layers."""
        forms = (self.prefill_form, self.decode_form)
        return LayerParts(self.attention, forms, self.products, self.experts, self.sharding, self.apart is not None)

    @property
    def has_mtp(self) -> bool:
        """Whether this step's parameters include an MTP module."""
        return any(path.startswith("mtp.") for path in self.table.infos)

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Cache groups of this step's layers: the model's, followed by the MTP module's if the step has one."""
        return self.attention.groups(range(self.config.num_hidden_layers + self.has_mtp), self.page_size)

    @property
    def num_moe_layers_with_mtp(self) -> int:
        """Number of layers with routed experts: the model's, followed by the MTP module's if the step has one."""
        return self.config.num_moe_layers + (self.has_mtp and self.config.is_moe)

    def abstract_parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return each parameter's shape, storage dtype and sharding, as the engine allocates them."""
        return describe(self.table.infos, self.rules, self.mesh)

    @property
    def mtp_fills_windows(self) -> bool:
        """Whether the last layer of the cache, the MTP module's, caches on window pages."""
        last_layer = self.config.num_hidden_layers + self.has_mtp - 1
        return any(group.table == "window" and last_layer in group.layers for group in self.cache_groups)

    def mtp_slots(self, groups: Sequence[RowGroup]) -> Int[Array, "B T"]:
        """Return the slot of each token's MTP entry on its DP rank, −1 for padding."""
        slots = RowGroup.window_slots if self.mtp_fills_windows else RowGroup.slots
        return self._of_tokens(groups, lambda group: slots(group, self.page_size))

    def logits_spec(self, positions: int) -> P:
        """Return the sharding of logits ``[B, positions, V]`` by the rules: over vocabulary, or over positions if ``tp`` divides them."""
        batch, tokens, vocab = self.rules.spec(("ranks", "head_tokens", "vocab"))
        return P(batch, tokens if positions % self.spec.tp_size == 0 else None, vocab)

    def tokens(self, groups: Sequence[RowGroup]) -> Tokens:
        """Return the layers' inputs for these groups' token slots."""
        window_slots = None
        if groups[0].shape.windows:
            window_slots = self._of_tokens(groups, lambda group: group.window_slots(self.page_size))
        return Tokens(
            groups,
            ids=self._of_tokens(groups, lambda group: group.tokens),
            active=self._of_tokens(groups, lambda group: group.active),
            slots=self._of_tokens(groups, lambda group: group.slots(self.page_size)),
            rotation=rotation_at(self.config, self._of_tokens(groups, lambda group: group.positions)),
            window_slots=window_slots,
        )

    def _of_tokens(self, groups: Sequence[RowGroup], value: Callable[[RowGroup], Array]) -> Array:
        """Return ``value`` of all groups as one array over the step's token slots, ``[B, T]``."""
        return self.sharding.whole(flatten([value(group) for group in groups]))

    @property
    def runs_rank_by_rank(self) -> bool:
        """Whether each rank runs its layers in a separate region, so that it skips work for which it has no tokens.

        True on emulated CPU devices, which share a few cores, if no sum spans ``tp``.
        """
        has_sums_over_tp = self.spec.tp_size * self.spec.expert_width_shards > 1
        return self.products.native and self.spec.num_devices > 1 and self.apart is None and not has_sums_over_tp

    def split_stack(self, stack: DecoderLayer, tokens: Tokens | None) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        """Return a stack's graph, the state that stays unsliced, and the state sliced per layer. tokens: None to leave out attention."""
        forms = [] if tokens is None else [group.shape.form for group in tokens.groups]
        in_place = self.products.names(self.attention.in_stack(forms))

        def stays_unsliced(path: tuple[str, ...], _: Any) -> bool:
            # The product reads single experts from the whole stack. On CPU, a scan would first copy all of a layer's
            # experts for the few that have tokens.
            if "experts" in path:
                return True
            # GPU kernels also multiply with other matrices in place if they support them.
            return len(path) > 1 and path[-2] in in_place and path[-1] in ("weight", "scale")

        return nnx.split(stack, stays_unsliced, ...)

    def runs_in_halves(self, shapes: Sequence[GroupShape]) -> bool:
        """Return whether a step of these groups runs in two halves (``dsjax/model/two_batch.py``): if enabled, and rows are exchanged."""
        if self.overlap is None or not self.config.is_moe:
            return False
        exchanges_rows = self.apart is not None or self.spec.ep_size * self.spec.expert_width_shards > 1
        return exchanges_rows and self.overlap.halves(shapes)

    def num_micro_batches(self, shapes: Sequence[GroupShape]) -> int:
        """Return the number of micro-batches in which layers with experts compute a step of these groups."""
        if not self.runs_in_halves(shapes):
            return 1
        return count_micro_batches(shapes, 2 if self.apart is None else self.overlap.stages)
