"""The step: the one program that serving runs, the dry run compiles and the planner measures.

A step takes row groups (see ``docs/architecture.md``), runs all layers against the paged cache, and gives the hidden
states of its tokens, and the logits of those that are asked for. From the hidden states the MTP module drafts further
tokens (``further``), with a layer of its own in the same cache. All of it is traced under ``jax.jit`` with shardings; only
cache access and expert dispatch are ``shard_map``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered
from jaxtyping import Array, Bool, Float, Int

from dsjax.config import ModelConfig
from dsjax.kernels.native_calls import ExchangeInMemory
from dsjax.kernels.table import Kernels
from dsjax.model import paging
from dsjax.model.apart import ExpertsApart, run_apart
from dsjax.model.attention import Cache, PagedAttention, Rows
from dsjax.model.experts import ExpertProduct
from dsjax.model.forms import Form, common_layout
from dsjax.model.fp8_product import WIDEN, ActivationScheme
from dsjax.model.in_place import MatricesInPlace
from dsjax.model.layer_values import Computed, Layer, Sent, Tokens
from dsjax.model.mla import Projections
from dsjax.model.moe import RoutedExperts
from dsjax.model.parameters import ParameterTable
from dsjax.model.rope import Rotation
from dsjax.model.router import Routing
from dsjax.model.rows import RowGroup, flatten
from dsjax.model.sparse import IndexScores
from dsjax.model.stage import Stage
from dsjax.model.transformer import MTP, DecoderLayer, Transformer
from dsjax.model.two_batch import TwoBatchOverlap, run_in_halves
from sharding import MeshSpec, Rules
from sharding.cut import CutLowered, lower_cut
from sharding.dispatch import DispatchConfig, Exchange, ExpertsOfMesh, Transit
from sharding.host_memory import rows_from_host
from sharding.layer_placement import LayerPlacements
from sharding.placement import CopyTables, assign_copies, slot_distances


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
                x = self._embed(model, tokens.ids)
                if self.in_place.native:  # a row of zeros stays one through all layers, and native kernels pass it over
                    x = jnp.where(tokens.active[..., None], x, 0)
            x = self._constrain(x, self.spec.batch_axes)
            layer, reports = jnp.int32(0), {}
            if copies is not None:
                copies = jax.tree.map(lambda array: _first(array, self.config.num_moe_layers), copies)
            for stack in model.stacks:
                if self.apart is not None and hasattr(stack, "moe"):
                    first = self.config.num_dense_layers
                    halves = self.in_halves([group.shape for group in groups])
                    x, cache, reports = run_apart(self, "moe_layers", params, x, cache, first, tokens, copies, halves)
                    continue
                x, cache, layer, report = self._run_stack(stack, x, cache, layer, tokens, copies)
                reports |= report
            if not self.ends:
                return self._whole(x), cache, reports
            return self._whole(self.in_place.normalise(model.final_norm, self._whole(x))), cache, reports

    def further(
        self,
        params: Mapping[str, Array],
        cache: Cache,
        filled: Bool[Array, "P G"] | None,
        groups: Sequence[RowGroup],
        hidden: Float[Array, "B T D"],
        next_tokens: Int[Array, "B T"],
        copies: CopyTables | None,
    ) -> tuple[Float[Array, "B T D"], Cache, Bool[Array, "P G"] | None, dict[str, Array]]:
        """Run the first MTP module over the groups' token slots: from each hidden state and the token after it, one token further.

        ``h' = M [RMSNorm(Emb(t_{i+1})) ; RMSNorm(h_i)]``, one decoder layer, its own final norm (V3 report §2.2,
        equations 21 to 23). The entry of slot i in the module's layer of the cache, layer ``num_hidden_layers``, has the position
        of its hidden state.

        filled: which cache slots hold an entry of the module, of all pages (P, page_size), pages spread over the DP ranks. The
            active tokens' slots are marked first; then each token attends to the filled slots of its context and to itself.
            None: every slot of the context is filled.
        groups: positions, lengths, page tables and forms are read; tokens are not.
        hidden: from ``hidden``, or from ``further`` itself for one token more. next_tokens: the token after each.
        copies: of all ``moe_layers_with_module``; the module's experts are the last.

        Returns the module's hidden states after its own final norm, which ``logits`` multiplies by the head; the updated cache
        and ``filled``; and dispatch reports with a leading axis of 1, which continue those of ``hidden``.
        """
        scope = f"mtp_{hidden.shape[1]}"  # which pass over how many tokens of a rank: drafting has several
        with jax.default_matmul_precision("highest"), jax.named_scope(scope):
            model: Transformer = self.table.bind(params)
            module = _first_module(model.mtp)
            tokens = self.tokens(groups)
            if filled is not None:
                filled = self.mark(filled, tokens.slots, True)
            tokens = replace(tokens, filled=filled)
            embedded = self._embed(model, self._whole(next_tokens))
            normalise = self.in_place.normalise
            halves = [normalise(module.embed_norm, embedded), normalise(module.hidden_norm, self._whole(hidden))]
            x = self.in_place.multiply(jnp.int32(0))(module.eh_proj, jnp.concatenate(halves, axis=-1))
            x = self._constrain(x, self.spec.batch_axes)
            if self.apart is not None:
                own_copies = jax.tree.map(lambda array: array[self.config.num_moe_layers :], copies)
                first = self.config.num_hidden_layers
                x, cache, reports = run_apart(self, "mtp.layers", params, x, cache, first, tokens, own_copies)
                return normalise(module.final_norm, x), cache, filled, reports
            own_copies = (
                None if copies is None else jax.tree.map(lambda array: array[self.config.num_moe_layers], copies)
            )
            layer = jnp.int32(self.config.num_hidden_layers)
            x, cache, report = self._run_layer(module.layers, x, cache, layer, layer, tokens, own_copies)
            return normalise(module.final_norm, x), cache, filled, jax.tree.map(lambda array: array[None], report)

    def mark(self, filled: Bool[Array, "P G"], slots: Int[Array, "B T"], value: bool) -> Bool[Array, "P G"]:
        """``filled`` with each DP rank's ``slots`` set to ``value``; −1 is dropped."""

        def local(filled, slots):
            return paging.mark(filled, slots[0], value)

        by_rank = P(self.spec.batch_axes)
        marked = jax.shard_map(local, mesh=self.mesh, in_specs=(by_rank, by_rank), out_specs=by_rank, check_vma=False)
        return marked(filled, slots)

    def slots(self, groups: Sequence[RowGroup]) -> Int[Array, "B T"]:
        """Cache slot of each token on its DP rank, −1 for padding."""
        return self._whole(flatten([group.slots(self.page_size) for group in groups]))

    def logits(self, params: Mapping[str, Array], hidden: Float[Array, "B J D"]) -> Float[Array, "B J V"]:
        """Float32 logits of hidden states that ``hidden`` gave; the vocabulary is spread over ``tp`` where that divides it."""
        with jax.default_matmul_precision("highest"), jax.named_scope("head"):
            model: Transformer = self.table.bind(params)
            placed = self.logits_spec(hidden.shape[1])
            by_data = placed[1] is not None
            if by_data:
                hidden = self._split(self._whole(hidden))
            logits = self.in_place.project(model, hidden, self.dtype, by_data=by_data)
            return self._constrain(logits, *placed)

    def logits_spec(self, positions: int) -> P:
        """How logits ``[B, positions, V]`` are spread over ``tp``: by vocabulary, or by positions where it divides those."""
        batch, tokens, vocab = self.rules.spec(("ranks", "head_tokens", "vocab"))
        return P(batch, tokens if positions % self.spec.tp_size == 0 else None, vocab)

    def tokens(self, groups: Sequence[RowGroup]) -> Tokens:
        """What the layers need to know of these groups' token slots."""
        ids, positions, active, slots = (
            self._whole(flatten(parts))
            for parts in (
                [g.tokens for g in groups],
                [g.positions for g in groups],
                [g.active for g in groups],
                [g.slots(self.page_size) for g in groups],
            )
        )
        rotation = Rotation.at(positions, self.config.rope, self.config.qk_rope_head_dim)
        return Tokens(groups, ids, active, slots, rotation)

    def lower(self, program: Callable, *arguments: Any, donate_argnum: int) -> Lowered | CutLowered:
        """Trace a program that has layers in it, for described arguments: one, or where experts are apart as many as it takes."""
        if self.apart is not None:
            return lower_cut(program, *arguments, donate_argnum=donate_argnum)
        return jax.jit(program, donate_argnums=donate_argnum).lower(*arguments)

    def _run_stack(self, stack: DecoderLayer, x, cache, layer, tokens: Tokens, copies: CopyTables | None):
        # Experts are not sliced by the scan: the product reads single experts out of the whole stack. A scan would
        # first copy a layer's experts on CPU, all of them, for the few that have tokens.
        # GPUs multiply with the other matrices in place as well, where a kernel can.
        in_place = self.in_place.names([group.shape.form for group in tokens.groups])
        graph, whole, weights = nnx.split(
            stack, lambda path, _: "experts" in path or (len(path) > 1 and path[-2] in in_place), ...
        )
        first = layer
        own_copies = None if hasattr(stack, "mlp") else copies

        def merge(weights) -> DecoderLayer:
            return nnx.merge(graph, whole, weights)

        if own_copies is not None and self.in_halves([group.shape for group in tokens.groups]):
            x, cache, reports = run_in_halves(self, merge, weights, x, cache, layer, tokens, own_copies)
            return x, cache, layer + self.config.num_moe_layers, reports

        def body(carry, xs):
            x, cache, layer = carry
            weights, copies = xs
            x, cache, report = self._run_layer(merge(weights), x, cache, layer, first, tokens, copies)
            return (x, cache, layer + 1), report

        (x, cache, layer), reports = jax.lax.scan(body, (x, cache, layer), (weights, own_copies))
        return x, cache, layer, reports

    def in_halves(self, shapes: Sequence[GroupShape]) -> bool:
        """Whether a step of these groups is computed in two halves (``dsjax/model/two_batch.py``): where it is wanted and rows travel."""
        away = self.apart is not None or self.spec.ep_size * self.spec.expert_width_shards > 1
        travels = self.config.is_moe and away
        return self.overlap is not None and travels and self.overlap.halves(shapes)

    def _run_layer(self, block: DecoderLayer, x, cache: Cache, layer, first, tokens: Tokens, copies: CopyTables | None):
        """The decoder layer that is ``layer`` of the cache, of a stack whose first layer is ``first``."""
        of = Layer(block, layer - first, layer, tokens, copies)
        x, cache = self.attend(of, x, cache)
        if hasattr(block, "mlp"):
            normed, multiply = self._normed(of, x), self.in_place.multiply(of.index, by_data=self.by_data(of, x))
            y = block.mlp(normed, multiply)
            return self._constrain(x + y, self.spec.batch_axes), cache, {}
        x, report = self.receive(of, self.compute(of, self.send(of, x)))
        return x, cache, report

    def by_data(self, of: Layer, x: Float[Array, "B T D"]) -> bool:
        """Whether the layer's tokens are split over ``tp`` behind attention, since nothing that follows in it is cut over ``tp``.

        Attention's sum is then scattered, and the layer's result gathered: together what one all-reduce sends.
        """
        if self.spec.tp_size == 1 or x.shape[1] % self.spec.tp_size:
            return False
        if hasattr(of.block, "mlp"):
            return not self.rules.table["mlp_width"]
        if self.apart is not None:
            return False  # they go to other devices
        return not (hasattr(of.block.moe, "shared") and self.rules.table["shared_width"])

    def attend(self, of: Layer, x: Float[Array, "B T D"], cache: Cache) -> tuple[Float[Array, "B T D"], Cache]:
        """The first of a layer's four parts: attention, and the entries that it writes to the cache."""
        x = self._whole(x)
        normed = self._whole(self.in_place.normalise(of.block.attn_norm, x))
        attended, cache = self._attend(of, normed, cache)
        return (self._split(x + attended) if self.by_data(of, x) else x + attended), cache

    def _normed(self, of: Layer, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What attention left, normalised for the MLP or the experts."""
        by_data = self.by_data(of, x)
        normed = self.in_place.normalise(of.block.mlp_norm, x, by_data=by_data)
        return self._split(normed) if by_data else self._whole(normed)

    def send(self, of: Layer, x: Float[Array, "B T D"]) -> Sent:
        """The second part: choose the experts of each token, and send it to them."""
        return self.exchange_tokens(of, self.route(of, x))

    def route(self, of: Layer, x: Float[Array, "B T D"]) -> Sent:
        """``send`` without the exchange: its tokens are packed."""
        normed, routing = self.choose(of, x)
        return Sent(x, normed, self._prepare(of, normed, routing))

    def choose(self, of: Layer, x: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Routing]:
        """The tokens as experts read them, and the experts of each."""
        normed, by_data = self._normed(of, x), self.by_data(of, x)
        multiply = self.in_place.multiply(of.index, split_tokens=True, by_data=by_data)
        return normed, of.block.moe.router(normed, partial(self._on_each_rank, by_data=by_data), multiply)

    def exchange_tokens(self, of: Layer, sent: Sent) -> Sent:
        """The rest of ``send``: the exchange alone."""
        with jax.named_scope("experts"):
            return replace(sent, transit=self.exchange(of, sent.normed)[0].send(sent.transit))

    def compute(self, of: Layer, sent: Sent) -> Computed:
        """The third part: the routed experts of the tokens that arrived here, and the shared experts of this rank's own."""
        exchange, experts = self.exchange(of, sent.normed)
        with jax.named_scope("experts"):
            transit = exchange.compute(sent.transit, experts)
        return Computed(sent.x, transit, self.share(of, sent.normed))

    def share(self, of: Layer, normed: Float[Array, "B T D"]) -> Float[Array, "B T D"] | None:
        """What the shared experts add, where they are not among the routed ones."""
        if not hasattr(of.block.moe, "shared"):
            return None
        multiply = self.in_place.multiply(of.index, split_tokens=True, by_data=self.by_data(of, normed))
        return of.block.moe.shared(normed, multiply)

    def receive(self, of: Layer, computed: Computed) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """The fourth part: bring the experts' sums back, and add them; and the exchange's counts."""
        return self.add(of, self.exchange_sums(of, computed))

    def exchange_sums(self, of: Layer, computed: Computed) -> Computed:
        """The exchange of ``receive`` alone."""
        with jax.named_scope("experts"):
            return replace(computed, transit=self.exchange(of, computed.x)[0].answer(computed.transit))

    def add(self, of: Layer, computed: Computed) -> tuple[Float[Array, "B T D"], dict[str, Array]]:
        """The rest of ``receive``: each token's sum of what came back."""
        exchange, experts = self.exchange(of, computed.x)
        with jax.named_scope("experts"):
            y, report = exchange.add(computed.transit, experts)
        y, by_data = y.reshape(computed.x.shape), self.by_data(of, computed.x)
        return self.add_sum(computed.x, y, computed.shared, by_data=by_data), report or {}

    def add_sum(
        self,
        x: Float[Array, "B T D"],
        y: Float[Array, "B T D"],
        shared: Float[Array, "B T D"] | None,
        *,
        by_data: bool = False,
    ) -> Float[Array, "B T D"]:
        """Tokens with the sums of their routed and of the shared experts added. by_data: all three are split over ``tp``."""
        # Where the shared experts' sum comes split, too, the two are added before they are gathered.
        if self.kernels.name("other products") != "pallas" and not by_data:
            y = self._constrain(y, self.spec.batch_axes)
        if shared is not None:
            y += shared
        return self._constrain(x + y, self.spec.batch_axes)

    def _attend(self, of: Layer, x: Float[Array, "B T D"], cache: Cache) -> tuple[Float[Array, "B T D"], Cache]:
        index, layer, tokens, by_data = of.index, of.layer, of.tokens, self.by_data(of, x)
        attention, mla, multiply = self.attention, of.block.attn, self.in_place.multiply(index)
        in_stack = mla.kv_b.weight[...].ndim == len(mla.kv_b.weight.info.shape)
        by_head = index if in_stack else None
        query_heads = any(group.shape.form != "AM_CC_ME" for group in tokens.groups) or self.in_place.native
        p = self._spread_heads(
            mla.project(
                x, tokens.rotation, query_heads=query_heads, multiply=multiply, normalise=self.in_place.normalise
            )
        )
        cache = attention.write(mla, cache, layer, tokens.slots, p)
        outs, start = [], 0
        for group in tokens.groups:
            B, R, C = group.tokens.shape
            part = jax.tree.map(lambda a: a[:, start : start + R * C].reshape(B, R, C, *a.shape[2:]), p)  # noqa: B023
            rows = Rows(group.positions, group.tables, group.length, tokens.filled)
            heads = attention.attend(mla, group.shape.form, cache, layer, rows, part, by_head)
            if by_data and len(tokens.groups) == 1:
                heads, multiply = (
                    heads.reshape(B, R * C, *heads.shape[3:]),
                    self.in_place.multiply(index, split_tokens=True, scatter=True),
                )
            out = mla.add_output_bias(heads) if group.shape.form == "AM_CC_ME" else mla.output(heads, multiply)
            outs.append(out.reshape(B, R * C, -1))
            start += R * C
        attended = jnp.concatenate(outs, axis=1) if len(outs) > 1 else outs[0]
        return self._split(attended) if by_data else self._whole(attended), cache

    def _embed(self, model: Transformer, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The rows of the embedding, wherever that lies."""
        if "embedded_vocab" not in self.rules.in_host:
            return model.embed(tokens, self.dtype)
        return model.embed(tokens, self.dtype, partial(rows_from_host, mesh=self.mesh, batch_axes=self.spec.batch_axes))

    def _on_each_rank(self, choose: Callable, *, by_data: bool = False) -> Callable:
        """``choose(logits, bias)`` for each DP rank's tokens by itself."""
        tokens = P(self.spec.batch_axes, self.spec.head_axes if by_data else None)
        return jax.shard_map(choose, mesh=self.mesh, in_specs=(tokens, P()), out_specs=tokens, check_vma=False)

    def _prepare(self, of: Layer, x: Float[Array, "B T D"], routing: Routing) -> Transit:
        """Pack active tokens for the physical copies of their experts."""
        B, T, D = x.shape
        with jax.named_scope("experts"):
            by_data = self.by_data(of, x)
            rows = self._constrain(x.reshape(B * T, D), self.spec.token_axes if by_data else self.spec.batch_axes)
            return self.exchange(of, x)[0].prepare(rows, *self.assign(of, routing, by_data=by_data))

    def assign(
        self, of: Layer, routing: Routing, *, by_data: bool = False
    ) -> tuple[Int[Array, "N K"], Float[Array, "N K"]]:
        """The physical experts of all token slots, and their weights. by_data: tokens are split over ``tp``."""
        B, T, K = routing.ids.shape
        whole, axes = (self._split, self.spec.token_axes) if by_data else (self._whole, self.spec.batch_axes)
        logical, active = whole(routing.ids).reshape(B * T, K), whole(of.tokens.active).reshape(B * T)
        # Copies take turns on each DP rank, or on each device where the tokens are split already.
        runs = self.spec.tp_size if by_data else 1
        slots = assign_copies(of.copies, logical, active, B * runs, self._slot_distances(runs))
        return self._constrain(slots, axes), self._constrain(whole(routing.weights).reshape(B * T, K), axes)

    def _slot_distances(self, runs: int) -> Int[np.ndarray, "R P"] | None:
        """What ``assign_copies`` takes, where a token goes to the nearest copies; runs: of a DP rank's tokens."""
        if not self.nearest_copies:
            return None
        hosts = np.array([device.process_index for device in self.mesh.devices.flat])
        if self.dispatch.devices_per_host is not None:
            hosts = np.arange(hosts.size) // self.dispatch.devices_per_host
        return np.repeat(slot_distances(self.spec, hosts, self.placement.n_physical), runs, axis=0)

    def exchange(self, of: Layer, x: Float[Array, "B T D"]) -> tuple[Exchange, ExpertsOfMesh]:
        """How this layer's tokens go to their experts, and these."""
        (B, T, D), K = x.shape, self.config.num_experts_per_tok
        experts = of.block.moe.experts
        stack = experts.stored()
        specs = {name: self._expert_spec(experts, name) for name in stack}
        product = ExpertProduct(
            weight_dtype=experts.down.weight.info.dtype,
            platform=self._platform,
            mean_load=self.mean_load(B * T, K),
            kernels=self.kernels,
            scheme=self.scheme,
            width_shares=self.spec.expert_width_shards,
        )
        exchange = Exchange.of(
            self.spec,
            self.mesh,
            replace(
                self.dispatch,
                by_choice=self.dispatch.by_choice or self.in_place.ordered,
                in_memory=self._exchange_in_memory,
            ),
            jax.ShapeDtypeStruct((B * T, D), x.dtype),
            jax.ShapeDtypeStruct((B * T, K), jnp.int32),
            experts=self.placement.n_physical,
            home=self.shared_experts_fusion,
        )
        return exchange, ExpertsOfMesh(product, stack | {"layer": of.index}, specs | {"layer": P()})

    def mean_load(self, tokens: int, top_k: int) -> float:
        """Pairs of one physical expert in one product, if all ``tokens`` of the mesh are routed evenly."""
        devices = self.spec.num_devices
        local_rows = (
            tokens / devices
            if self.dispatch.chunk_tokens is None
            else min(tokens / devices, self.dispatch.chunk_tokens)
        )
        return local_rows * self.spec.ep_size * top_k / self.placement.n_physical

    def _spread_heads(self, p: Projections) -> Projections:
        batch, heads = self.spec.batch_axes, self.rules.spec(("heads",))[0]
        return Projections(
            self._constrain(p.q_nope, batch, None, heads),
            self._constrain(p.q_rope, batch, None, heads),
            *(self._constrain(a, batch) for a in (p.q_latent, p.latent, p.k_rope)),
            jax.tree.map(lambda a: self._constrain(a, batch), p.index),
        )

    def _expert_spec(self, experts: RoutedExperts, name: str):
        matrix, part = name.split(".")
        axes = getattr(getattr(experts, matrix), part).info.logical_axes
        return self.rules.spec(axes)

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
    def _exchange_in_memory(self) -> ExchangeInMemory | None:
        """What carries rows between emulated devices, where all are in this process: their native kernels."""
        alone = all(device.process_index == jax.process_index() for device in self.mesh.devices.flat)
        if not self.in_place.native or not alone or self.dispatch.overlapped:
            return None
        return ExchangeInMemory(self.kernels.native, self.mesh.axis_names)

    @property
    def _platform(self) -> str:
        return self.mesh.devices.flat[0].platform

    def _whole(self, array: Array) -> Array:
        """Keep each DP rank's tokens whole on each of its ``tp`` devices.

        Dispatch splits a rank's tokens over ``tp``. Without this constraint XLA would carry that split backwards, into everything
        that is computed before, and add collectives there.
        """
        return self._constrain(array, self.spec.batch_axes)

    def _split(self, array: Array) -> Array:
        """Split each DP rank's tokens over its ``tp`` devices."""
        return self._constrain(array, self.spec.batch_axes, self.spec.head_axes)

    def _constrain(self, array: Array, *axes) -> Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, P(*axes)))


def _first(array: Array, layers: int) -> Array:
    return array if array.shape[0] == layers else array[:layers]


def _first_module(stack: MTP) -> MTP:
    """The first of the stacked modules; its experts stay in their stack, as the expert product takes them."""
    graph, experts, weights = nnx.split(stack, lambda path, _: "experts" in path, ...)
    return nnx.merge(graph, experts, jax.tree.map(lambda array: array[0], weights))
