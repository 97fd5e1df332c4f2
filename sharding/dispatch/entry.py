"""``dispatch``, and its stages as an ``Exchange``: they open ``shard_map`` and pass each rank's tokens to the chosen method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sharding.dispatch.choice import choose_method
from sharding.dispatch.collectives import Collective, gathered, over_width
from sharding.dispatch.config import DispatchConfig, default_capacity, host_capacity
from sharding.dispatch.gather import Gather, GatherByChoice
from sharding.dispatch.group import ExpertGroup
from sharding.dispatch.hierarchical import Hierarchical
from sharding.dispatch.local import Counts, LocalExperts, RankExperts
from sharding.dispatch.methods import Alone, ByChoice, InChunks, Memory
from sharding.dispatch.padded import Padded
from sharding.dispatch.ragged import Ragged
from sharding.dispatch.transit import ExchangePlan, Method, Stage, Transit, in_turn, run_together
from sharding.dispatch.wire import WireFormat
from sharding.errors import MeshError
from sharding.mesh import MeshSpec
from sharding.on_ranks import OneRank, on_ranks


def dispatch(
    spec: MeshSpec,
    mesh: Mesh,
    config: DispatchConfig,
    x_TD: Float[Array, "T D"],
    slots_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    params: Any,
    local_experts: LocalExperts,
    param_specs: Any,
    experts: int | None = None,
    fused_shared: bool = False,
) -> tuple[Float[Array, "T D"], Counts | None]:
    """Send every token to the ranks that hold its experts and return the weighted sums, inside ``jit``.

    x_TD: all tokens of the step, ordered by DP rank. Each DP rank's tokens are padded to a multiple of ``tp`` and split over its ranks.
    slots_TK: physical experts of each token, distinct per token; -1: none (padding, or an idle rank's tokens).
    weights_TK: their routing weights; used as float32.
    params: pytree of the experts' parameters. param_specs: ``PartitionSpec`` of each leaf, experts over
        ``spec.expert_axes``, widths over ``spec.expert_width_axes``.
    local_experts: ``(params, rows_ND, ids_NK, weights_NK) -> out_ND`` on one rank's shard of ``params``:
        ``out[n] = sum_k weights[n, k] * Expert_{ids[n, k]}(rows[n])``, with local ids and -1 for none. If the width is
        split, a partial sum over it. Rows may be ``PackedRows``: read them with ``rows.take(indices, axis=0)``.
    experts: physical experts over all ranks; None: the leading dimension of every leaf of ``params``.
    fused_shared: whether each rank holds a fused shared expert after its physical ones. The rank's own tokens use it, with weight 1, unless
        they have no slot. Its rows go only to the ranks that split its width. ``experts`` and the counts leave it out.

    Returns ``y_TD`` in x's dtype, sharded over ``spec.token_axes``, and, if ``config.report``, int32 counts with one row per rank in the
    order of ``spec.token_axes`` (``DispatchStatistics.of`` reads them), else None:
        ``tokens_per_expert [ranks, experts on a rank]``, ``rows_sent [ranks]``, ``rows_received [ranks]``, ``rounds [ranks]``.

    Raises:
        MeshError: the tokens do not divide over the DP ranks, or the experts over the EP group.
    """
    experts = _leading_dimension(params) if experts is None else experts
    exchange = Exchange.of(spec, mesh, config, x_TD, slots_TK, experts, fused_shared)
    ranks = ExpertsOfMesh(local_experts, params, param_specs)
    arrived = in_turn(exchange.dispatch_stages, exchange.prepare(x_TD, slots_TK, weights_TK))
    return exchange.add(in_turn(exchange.combine_stages, exchange.compute(arrived, ranks)), ranks)


class ExpertsOfMesh(NamedTuple):
    """``local_experts``, ``params`` and ``param_specs`` of ``dispatch``."""

    local_experts: LocalExperts
    params: Any
    param_specs: Any


@dataclass(frozen=True, eq=False)
class Exchange:
    """One dispatch in stages: ``prepare``, the exchanges ``dispatch_stages``, ``compute``, the exchanges ``combine_stages``, and ``add``.

    The first exchange of a direction contains only the collectives that carry rows; a second one reorders the rows first. Each stage passes
    a ``Transit`` to the next, whose arrays have a leading rank axis, sharded over ``spec.token_axes``.

    tokens: number of tokens of the whole step; the other fields are as in ``dispatch``. Make it with ``Exchange.of``.
    """

    spec: MeshSpec
    mesh: Mesh | OneRank
    config: DispatchConfig
    group: ExpertGroup
    method: Method
    tokens: int
    fused_shared: bool

    @classmethod
    def of(
        cls,
        spec: MeshSpec,
        mesh: Mesh | OneRank,
        config: DispatchConfig,
        x_TD,
        slots_TK,
        experts: int,
        fused_shared: bool = False,
    ) -> Exchange:
        """Make the exchange for arrays of these shapes. Arguments and errors as in ``dispatch``; mesh: see ``sharding.on_ranks``."""
        tokens, top_k = slots_TK.shape
        if tokens % spec.dp_size:
            raise MeshError(
                f"{tokens} tokens do not divide over dp={spec.dp_size} ranks; pad each rank's tokens to the same number, "
                "with expert id -1"
            )
        if experts % spec.ep_size:
            raise MeshError(
                f"{experts} physical experts are not divisible by ep={spec.ep_size}; add {-experts % spec.ep_size} redundant ones"
            )
        group = group_of(spec, config, experts, mesh.devices.flat[0].platform)
        on_rank = -(-tokens // spec.dp_size // spec.tp_size)
        method = _method(group, config, fused_shared, on_rank, top_k, x_TD.shape[1], x_TD.dtype)
        return cls(spec, mesh, config, group, method, tokens, fused_shared)

    def prepare(
        self, x_TD: Float[Array, "T D"], slots_TK: Int[Array, "T K"], weights_TK: Float[Array, "T K"]
    ) -> Transit:
        """Pack the tokens for sending; arguments as in ``dispatch``."""
        pad = partial(pad_per_dp_rank, dp=self._dp_ranks, multiple=self.spec.tp_size)
        inputs = pad(x_TD, fill=0), pad(slots_TK, fill=-1), pad(weights_TK.astype(jnp.float32), fill=0)
        run = self._on_ranks(lambda *inputs: _stacked(self.method.prepare(*inputs)), (self._over_ranks,) * 3)
        return run(*inputs)

    @property
    def dispatch_stages(self) -> tuple[Stage, ...]:
        """The exchanges of packed rows: one, or two if another rank forwards the rows."""
        return tuple(partial(self._travel, stage) for stage in self.method.dispatch_stages)

    @property
    def combine_stages(self) -> tuple[Stage, ...]:
        """The exchanges of the experts' results."""
        return tuple(partial(self._travel, stage) for stage in self.method.combine_stages)

    def compute(self, transit: Transit, experts: ExpertsOfMesh) -> Transit:
        """Apply the experts to the rows that arrived."""

        def on_rank(transit: Transit, params: Any) -> Transit:
            return _stacked(self.method.compute(_own(transit), self._experts(experts, params)))

        return self._on_ranks(on_rank, (self._over_ranks, experts.param_specs))(transit, experts.params)

    def add(self, transit: Transit, experts: ExpertsOfMesh) -> tuple[Float[Array, "T D"], Counts | None]:
        """Add the returned results and run any remaining rounds. Return the same as ``dispatch``."""

        def on_rank(transit: Transit, params: Any) -> tuple[jax.Array, Counts]:
            y_TD, counts = self.method.add(_own(transit), self._experts(experts, params))
            return y_TD, _stacked(counts)

        run = self._on_ranks(on_rank, (self._over_ranks, experts.param_specs))
        y_TD, counts = run(transit, experts.params)
        tokens = self.tokens // self.spec.dp_size * self._dp_ranks
        return unpad_per_dp_rank(y_TD, tokens, self._dp_ranks), counts if self.config.report else None

    def _travel(self, part: Stage, transit: Transit) -> Transit:
        return self._on_ranks(lambda transit: _stacked(part(_own(transit))), (self._over_ranks,))(transit)

    @property
    def _dp_ranks(self) -> int:
        """Number of DP ranks whose tokens the arrays hold."""
        return 1 if isinstance(self.mesh, OneRank) else self.spec.dp_size

    def _experts(self, experts: ExpertsOfMesh, params: Any) -> RankExperts:
        return RankExperts(self.group, experts.local_experts, params, self.config.report, self.fused_shared)

    @property
    def _over_ranks(self) -> P:
        return P(self.spec.token_axes)

    def _on_ranks(self, part: Callable, in_specs: tuple) -> Callable:
        return jax.named_scope("dispatch")(on_ranks(part, self.mesh, in_specs, self._over_ranks))


def further_together(exchanges: Sequence[tuple[Exchange, Transit, ExpertsOfMesh]]) -> list[Transit]:
    """Run the remaining rounds (after the first) of several exchanges with the same experts in one loop, between ``compute`` and ``add``.

    ``add`` then runs no round and no collective. Returns the transits unchanged if one round is always enough.
    """
    first, _, experts = exchanges[0]

    def on_ranks(transits: list[Transit], params: Any) -> list[Transit]:
        ran = run_together(
            [
                (one.method, _own(transit), one._experts(own, params))
                for (one, _, own), transit in zip(exchanges, transits, strict=True)
            ]
        )
        return [_stacked(transit) for transit in ran]

    run = first._on_ranks(on_ranks, (first._over_ranks, experts.param_specs))
    return run([transit for _, transit, _ in exchanges], experts.params)


def _stacked(tree: Any) -> Any:
    return jax.tree.map(lambda array: array[None], tree)


def _own(tree: Any) -> Any:
    return jax.tree.map(lambda array: array[0], tree)


METHODS: dict[str, type[Method]] = {kind.name: kind for kind in (Gather, Padded, Ragged, Hierarchical)}
"""Method classes by their name in ``DispatchConfig.method``, which also accepts a class."""


def exchange_plan(
    config: DispatchConfig, tokens: int, top_k: int, group: ExpertGroup, fused_shared: bool = False
) -> ExchangePlan:
    """Resolve ``config`` for a rank's ``tokens``, each with ``top_k`` choices. fused_shared: see ``dispatch``."""
    chunk = min(tokens, config.chunk_tokens or tokens)
    chunks = -(-tokens // chunk)
    chunk = -(-tokens // chunks)  # even chunks, so that the padding is less than one row a chunk
    capacity = min(chunk, config.capacity or default_capacity(chunk, top_k, group.size, config.overlapped))
    plan = ExchangePlan(Alone, chunk, chunks, capacity, chunk, top_k, shared=chunk if fused_shared else 0)
    if group.all_ranks == 1:
        return plan
    if config.by_choice:
        plan = plan._replace(shared=0)  # `ByChoice` computes the shared expert itself
    if config.reads_in_memory and group.width == 1:
        return plan._replace(kind=Memory)
    # With `by_choice`, terms are not added on the way, so each row to a host carries a single choice.
    on_host = 1 if config.by_choice and config.method == "auto" else group.on_host
    chosen = choose_method(
        config.method,
        chunk,
        top_k,
        group.size,
        group.platform,
        overlapped=config.overlapped,
        on_host=on_host,
        routed_groups=config.routed_groups,
        in_memory=config.in_memory is not None,
    )
    kind, rows, choices = METHODS.get(chosen, chosen), chunk, top_k
    if config.by_choice:
        of_choices = min(
            rows * top_k, config.capacity or default_capacity(rows * top_k, 1, group.size, config.overlapped)
        )
        if kind is Gather:
            kind = GatherByChoice if GatherByChoice.fits(group, chunk, top_k, of_choices) else Padded
        if not kind.keeps_choices:
            rows, choices, capacity = rows * top_k, 1, of_choices
    crossing = (config.capacity or 0) * group.on_host or host_capacity(
        rows, choices, group.size // group.on_host, config.overlapped, None if choices == 1 else config.routed_groups
    )
    return plan._replace(kind=kind, capacity=capacity, rows=rows, choices=choices, crossing=min(rows, crossing))


def resolved_method(
    spec: MeshSpec, config: DispatchConfig, *, tokens: int, top_k: int, experts: int, platform: str
) -> str:
    """Return the method that ``dispatch`` uses for ``tokens`` tokens of a DP rank: a method's name, ``memory``, or ``local`` on one device.

    top_k: experts per token. experts: total number of physical experts. platform: of the mesh's devices, ``cpu``, ``gpu`` or ``tpu``.
    """
    group = group_of(spec, config, experts, platform)
    return exchange_plan(config, -(-tokens // spec.tp_size), top_k, group).kind.name


def dispatch_collectives(
    spec: MeshSpec,
    config: DispatchConfig,
    *,
    tokens: int,
    width: int,
    top_k: int,
    experts: int,
    dtype: jnp.dtype,
    platform: str,
    rounds: int = 1,
    fused_shared: bool = False,
) -> tuple[Collective, ...]:
    """Return the collectives of one MoE layer on one device, in program order, from shapes alone; none for an EP group of one rank.

    tokens: tokens per device (those of a DP rank divided by its ``tp`` ranks, rounded up). width: D. experts: physical
    experts over all ranks. dtype: compute dtype. rounds: rounds per chunk of ``padded`` and ``hierarchical`` (1 unless
    routing overflows ``capacity``). fused_shared: see ``dispatch``; with ``by_choice``, the shared expert's collectives come last of their
    purpose.
    """
    group = group_of(spec, config, experts, platform)
    plan = exchange_plan(config, tokens, top_k, group, fused_shared)
    wire = WireFormat(width, plan.choices, jnp.dtype(dtype), config.wire == "fp8")
    found = plan.kind.collectives(group, wire, plan, rounds)
    if not (fused_shared and config.by_choice and group.width > 1):
        return tuple(found)
    sizes = wire.answer_bytes, 4 * top_k, 4 * top_k  # a token, its slots and weights: see `ByChoice.send`
    there = [gathered("dispatch", group.width_axes, group.width, plan.chunk * size, plan.chunks) for size in sizes]
    _, back = over_width(group, plan.chunk, 0, wire.answer_bytes, plan.chunks)
    combine = [one for one in found if one.purpose == "combine"]
    return *(one for one in found if one.purpose != "combine"), *there, *combine, back


def group_of(spec: MeshSpec, config: DispatchConfig, experts: int, platform: str) -> ExpertGroup:
    """Return the group of ranks that exchange rows. Arguments as in ``resolved_method``."""
    return ExpertGroup.of(spec, experts, platform, config.by_choice, config.in_memory, config.devices_per_host)


def _method(
    group: ExpertGroup,
    config: DispatchConfig,
    fused_shared: bool,
    tokens: int,
    top_k: int,
    width: int,
    dtype: jnp.dtype,
) -> Method:
    """Make the method that exchanges a rank's ``tokens`` tokens of ``width`` values."""
    plan = exchange_plan(config, tokens, top_k, group, fused_shared)
    wire = WireFormat(width, plan.choices, dtype, config.wire == "fp8")
    method = plan.kind.of(group, wire, plan, plan.shared > 0)
    if config.by_choice and plan.kind is not Alone:
        method = ByChoice(group, method, apart=not plan.kind.keeps_choices, fused_shared=fused_shared, top_k=top_k)
    return method if plan.chunks == 1 else InChunks(method, tokens, plan.chunk, plan.chunks)


def _leading_dimension(params: Any) -> int:
    counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(params)}
    if len(counts) != 1:
        raise MeshError(
            f"expert parameters lead with {sorted(counts)} experts; expected the same number in every leaf, or the "
            "number given as `experts`"
        )
    return counts.pop()


def pad_per_dp_rank(array: jax.Array, *, dp: int, multiple: int, fill: int) -> jax.Array:
    """Pad each DP rank's t rows of ``[dp * t, ...]`` to a multiple."""
    t = array.shape[0] // dp
    extra = -t % multiple
    if not extra:
        return array
    split = rearrange(array, "(dp t) ... -> dp t ...", dp=dp)
    padded = jnp.pad(split, ((0, 0), (0, extra)) + ((0, 0),) * (array.ndim - 1), constant_values=fill)
    return rearrange(padded, "dp t ... -> (dp t) ...")


def unpad_per_dp_rank(array: jax.Array, tokens: int, dp: int) -> jax.Array:
    """Undo ``pad_per_dp_rank``."""
    if array.shape[0] == tokens:
        return array
    whole = rearrange(array, "(dp t) ... -> dp t ...", dp=dp)
    return rearrange(whole[:, : tokens // dp], "dp t ... -> (dp t) ...")
