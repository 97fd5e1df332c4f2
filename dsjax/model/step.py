"""The step: the one program that serving runs, the dry run compiles and the planner measures.

A step takes row groups (see ``docs/architecture.md``), runs all layers against the paged cache, and gives the hidden
states of its tokens, and the logits of those that are asked for. What a layer does is in ``dsjax/model/layer_parts.py``; how the
MTP module drafts further tokens from the hidden states, in ``dsjax/model/mtp.py``. All of it is traced under ``jax.jit`` with
shardings; only cache access and expert dispatch are ``shard_map``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from dsjax.config import ModelConfig
from dsjax.kernels.table import Kernels
from dsjax.model.apart import ExpertsApart, run_apart
from dsjax.model.attention import Cache, PagedAttention
from dsjax.model.expert_dispatch import ExpertDispatch
from dsjax.model.forms import Form, common_layout
from dsjax.model.fp8_product import WIDEN, ActivationScheme
from dsjax.model.in_place import MatricesInPlace
from dsjax.model.layer_parts import LayerParts
from dsjax.model.layer_values import Layer, Tokens
from dsjax.model.parameters import ParameterTable
from dsjax.model.rope import Rotation
from dsjax.model.rows import GroupShape, RowGroup, flatten
from dsjax.model.sparse import IndexScores
from dsjax.model.stage import Stage
from dsjax.model.token_sharding import TokenSharding
from dsjax.model.transformer import DecoderLayer, Transformer
from dsjax.model.two_batch import TwoBatchOverlap, count_micro_batches, run_in_halves
from sharding import MeshSpec, Rules
from sharding.dispatch import DispatchConfig
from sharding.host_memory import rows_from_host
from sharding.layer_placement import LayerPlacements
from sharding.on_ranks import on_ranks
from sharding.placement import CopyTables


@dataclass(frozen=True, eq=False)
class ModelStep:
    """A model on a mesh, ready to be traced: everything static about a step but its row groups' shapes.

    stage: which run of a model's layers this is, with a configuration and a mesh of its own; None: all of them.
    """

    config: ModelConfig
    table: ParameterTable
    spec: MeshSpec
    mesh: Mesh
    rules: Rules
    placement: LayerPlacements
    dispatch: DispatchConfig
    dtype: jnp.dtype
    cache_dtype: jnp.dtype
    prefill_form: Form = "CC"
    decode_form: Form = "A_CC_ME"
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

    @property
    def begins(self) -> bool:
        """Whether tokens enter here: the step has the embedding and the first layers."""
        return self.stage is None or self.stage.begins

    @property
    def ends(self) -> bool:
        """Whether tokens are made here: the step has the last layers, the head and the MTP module."""
        return self.stage is None or self.stage.ends

    @property
    def stored_placement(self) -> LayerPlacements:
        """Which expert each slot of the parameters holds: ``placement``, and what ``stored`` adds to it."""
        return self.stored(self.placement)

    def stored(self, placement: LayerPlacements) -> LayerPlacements:
        """A placement of the routed experts, with the shared expert behind those of each rank where it is one of them."""
        return placement.with_one_of_all(self.spec.ep_size) if self.shared_experts_fusion else placement

    @property
    def is_exact(self) -> bool:
        """Whether a token's numbers are the same to the bit on every mesh, in every batch and chunk, in each of the two MLA forms.

        True where all products are native: each sum has one order then (``docs/exactness.md``).
        """
        parts = set(self.kernels.names(self.prefill_form, self.decode_form).values())
        return parts == {"native"}

    @property
    def attention(self) -> PagedAttention:
        """Attention against this step's cache."""
        layout = common_layout(self.prefill_form, self.decode_form)
        return PagedAttention(
            self.mesh,
            self.spec,
            self.config,
            layout,
            self.cache_dtype,
            self.block_tokens,
            self.kernels,
            self.index_scores,
        )

    @property
    def sharding(self) -> TokenSharding:
        """How this step's tokens lie over the mesh."""
        return TokenSharding(self.spec, self.mesh)

    @property
    def in_place(self) -> MatricesInPlace:
        """The products with a layer's matrices."""
        return MatricesInPlace(
            self.config,
            self.table.infos,
            self.spec,
            self.mesh,
            self.rules,
            self.attention.layout,
            self.kernels,
            self.scheme,
        )

    @property
    def experts(self) -> ExpertDispatch:
        """How this step's tokens find their routed experts."""
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
        return LayerParts(self.attention, self.in_place, self.experts, self.sharding, self.apart is not None)

    @property
    def has_module(self) -> bool:
        """Whether the parameters of an MTP module are among this step's."""
        return any(path.startswith("mtp.") for path in self.table.infos)

    @property
    def cache_layers(self) -> int:
        """Layers of the cache: the model's, and behind them the MTP module's where the step has one."""
        return self.config.num_hidden_layers + self.has_module

    @property
    def moe_layers_with_module(self) -> int:
        """Layers that have routed experts: the model's, and behind them the MTP module's where the step has one."""
        return self.config.num_moe_layers + (self.has_module and self.config.is_moe)

    def abstract_parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every parameter as a shape, its storage dtype and its sharding: what the engine's are made of."""
        return {
            path: jax.ShapeDtypeStruct(
                info.shape, info.storage_dtype, sharding=self.rules.sharding(self.mesh, info.logical_axes, info.shape)
            )
            for path, info in self.table.infos.items()
        }

    def hidden(
        self,
        params: Mapping[str, Array],
        cache: Cache,
        groups: Sequence[RowGroup],
        copies: CopyTables | None,
        x: Float[Array, "B T D"] | None = None,
    ) -> tuple[Float[Array, "B T D"], Cache, dict[str, Array]]:
        """Run all groups through all layers.

        copies: where the copies of each expert are, of all MoE layers (a leading axis); None in a model without experts. More
        layers than the model has are not read: the MTP module's come last.
        x: of a stage behind the first, what the one before gave.

        Returns the hidden states of all token slots after the final norm, which ``logits`` multiplies by the head, or of a
        stage before the last as its layers leave them; the updated cache; and dispatch reports stacked over MoE layers (empty
        unless ``dispatch.report``).
        """
        # float32 means float32: XLA would use TF32 on GPUs and bf16 passes on TPUs. Other dtypes have one meaning.
        with jax.default_matmul_precision("highest"):
            model: Transformer = self.table.bind(params)
            tokens = self.tokens(groups)
            if x is None:
                x = self.embed(model, tokens.ids)
                if self.in_place.native:  # a row of zeros stays one through all layers, and native kernels pass it over
                    x = jnp.where(tokens.active[..., None], x, 0)
            x = self.sharding.whole(x)
            layer, reports = jnp.int32(0), {}
            if copies is not None:
                copies = jax.tree.map(lambda array: _first(array, self.config.num_moe_layers), copies)
            for stack in model.stacks:
                if self.apart is not None and hasattr(stack, "moe"):
                    first = self.config.num_dense_layers
                    most = self.micro_batches([group.shape for group in groups])
                    x, cache, reports = run_apart(self, "moe_layers", params, x, cache, first, tokens, copies, most)
                    continue
                x, cache, layer, report = self._run_stack(stack, x, cache, layer, tokens, copies)
                reports |= report
            if not self.ends:
                return self.sharding.whole(x), cache, reports
            normed = self.in_place.normalise(model.final_norm, self.sharding.whole(x))
            return self.sharding.whole(normed), cache, reports

    def slots(self, groups: Sequence[RowGroup]) -> Int[Array, "B T"]:
        """Cache slot of each token on its DP rank, −1 for padding."""
        return self.sharding.whole(flatten([group.slots(self.page_size) for group in groups]))

    def logits(self, params: Mapping[str, Array], hidden: Float[Array, "B J D"]) -> Float[Array, "B J V"]:
        """Float32 logits of hidden states that ``hidden`` gave; the vocabulary is spread over ``tp`` where that divides it."""
        with jax.default_matmul_precision("highest"), jax.named_scope("head"):
            model: Transformer = self.table.bind(params)
            placed = self.logits_spec(hidden.shape[1])
            by_data = placed[1] is not None
            if by_data:
                hidden = self.sharding.split(self.sharding.whole(hidden))
            logits = self.in_place.project(model, hidden, self.dtype, by_data=by_data)
            return self.sharding.constrain(logits, *placed)

    def logits_spec(self, positions: int) -> P:
        """How logits ``[B, positions, V]`` are spread over ``tp``: by vocabulary, or by positions where it divides those."""
        batch, tokens, vocab = self.rules.spec(("ranks", "head_tokens", "vocab"))
        return P(batch, tokens if positions % self.spec.tp_size == 0 else None, vocab)

    def tokens(self, groups: Sequence[RowGroup]) -> Tokens:
        """What the layers need to know of these groups' token slots."""
        ids, positions, active, slots = (
            self.sharding.whole(flatten(parts))
            for parts in (
                [g.tokens for g in groups],
                [g.positions for g in groups],
                [g.active for g in groups],
                [g.slots(self.page_size) for g in groups],
            )
        )
        rotation = Rotation.at(positions, self.config.rope, self.config.qk_rope_head_dim)
        return Tokens(groups, ids, active, slots, rotation)

    def embed(self, model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The rows of the embedding, wherever that lies."""
        if "embedded_vocab" not in self.rules.in_host:
            return model.embed(tokens, self.dtype)
        return model.embed(tokens, self.dtype, partial(rows_from_host, mesh=self.mesh, batch_axes=self.spec.batch_axes))

    def _run_stack(self, stack: DecoderLayer, x, cache, layer, tokens: Tokens, copies: CopyTables | None):
        graph, whole, weights = split = self._split(stack, tokens)
        own_copies = None if hasattr(stack, "mlp") else copies

        def merge(weights) -> DecoderLayer:
            return nnx.merge(graph, whole, weights)

        if own_copies is not None and self.in_halves([group.shape for group in tokens.groups]):
            x, cache, reports = run_in_halves(self, merge, weights, x, cache, layer, tokens, own_copies)
            return x, cache, layer + self.config.num_moe_layers, reports

        if self.rank_by_rank:
            layers = jax.tree.leaves(weights)[0].shape[0]
            x, cache, reports = self._rank_by_rank(split, layers, x, cache, layer, tokens, own_copies)
            return x, cache, layer + layers, reports
        first = layer

        def body(carry, xs):
            x, cache, layer = carry
            weights, copies = xs
            of = Layer(merge(weights), layer - first, layer, tokens, copies)
            x, cache, report = self.run_layer(of, x, cache)
            return (x, cache, layer + 1), report

        (x, cache, layer), reports = jax.lax.scan(body, (x, cache, layer), (weights, own_copies))
        return x, cache, layer, reports

    def _split(self, stack: DecoderLayer, tokens: Tokens) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        """A stack's graph, what stays whole of it, and what is sliced layer by layer."""
        # Experts are not sliced by the scan: the product reads single experts out of the whole stack. A scan would
        # first copy a layer's experts on CPU, all of them, for the few that have tokens.
        # GPUs multiply with the other matrices in place as well, where a kernel can.
        in_place = self.in_place.names([group.shape.form for group in tokens.groups])
        return nnx.split(stack, lambda path, _: "experts" in path or (len(path) > 1 and path[-2] in in_place), ...)

    @property
    def rank_by_rank(self) -> bool:
        """Whether each rank computes its layers in a region of its own, where it leaves out what it has no token for.

        On the emulated devices of CPUs, which share a few cores, and where no sum goes over ``tp``.
        """
        alone = self.spec.tp_size * self.spec.expert_width_shards == 1 and self.apart is None
        return self.in_place.native and alone and self.spec.num_devices > 1

    def run_first(self, stack: DecoderLayer, x, cache, layer, tokens: Tokens, copies: CopyTables | None):
        """The first layer of a stack, where ranks run each by itself; arrays of reports and copies have a leading axis of 1."""
        return self._rank_by_rank(self._split(stack, tokens), 1, x, cache, layer, tokens, copies)

    def _rank_by_rank(self, split, layers: int, x, cache, layer, tokens: Tokens, copies: CopyTables | None):
        """The first ``layers`` of a stack as one region of each rank. A layer's arrays are sliced in the branches that read them."""
        graph, whole, weights = split

        def run(whole, weights, x, cache, first, tokens, copies):
            def body(carry, index):
                x, cache = carry
                own = lambda array: jax.lax.dynamic_index_in_dim(array, index, keepdims=False)  # noqa: E731
                bind = lambda: nnx.merge(graph, whole, jax.tree.map(own, weights))  # noqa: E731
                of = Layer(bind(), index, first + index, tokens, jax.tree.map(own, copies), bind)
                x, cache, report = self.run_layer(of, x, cache)
                return (x, cache), report

            (x, cache), reports = jax.lax.scan(body, (x, cache), jnp.arange(layers))
            return x, cache, reports

        def laid_out(state: nnx.State) -> nnx.State:
            specs = [self.rules.spec(leaf.info.logical_axes) for _, leaf in nnx.to_flat_state(state)]
            return jax.tree.unflatten(jax.tree.structure(state), specs)

        by_rank, of_cache = P(self.spec.batch_axes), P(None, self.spec.batch_axes)
        in_specs = (laid_out(whole), laid_out(weights), by_rank, of_cache, P(), by_rank, P())
        out_specs = by_rank, of_cache, P(None, self.spec.token_axes)
        return on_ranks(run, self.mesh, in_specs, out_specs)(whole, weights, x, cache, layer, tokens, copies)

    def in_halves(self, shapes: Sequence[GroupShape]) -> bool:
        """Whether a step of these groups is computed in two halves (``dsjax/model/two_batch.py``): where it is wanted and rows travel."""
        away = self.apart is not None or self.spec.ep_size * self.spec.expert_width_shards > 1
        travels = self.config.is_moe and away
        return self.overlap is not None and travels and self.overlap.halves(shapes)

    def micro_batches(self, shapes: Sequence[GroupShape]) -> int:
        """In how many parts the layers with experts compute a step of these groups."""
        if not self.in_halves(shapes):
            return 1
        return count_micro_batches(shapes, 2 if self.apart is None else self.overlap.stages)

    def run_layer(self, of: Layer, x: Float[Array, "B T D"], cache: Cache):
        """All parts of a decoder layer, one after the other; gives the tokens, the cache, and the dispatch's report."""
        parts = self.parts
        x, cache = parts.attend(of, x, cache)
        if hasattr(of.block, "mlp"):
            return parts.multiply_dense(of, x), cache, {}
        x, report = parts.receive(of, parts.compute(of, parts.send(of, x)))
        return x, cache, report


def _first(array: Array, layers: int) -> Array:
    return array if array.shape[0] == layers else array[:layers]
