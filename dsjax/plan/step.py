"""`StepModel.step`: time of each part of a step, for any work on an instance's DP ranks. Every plan and simulation uses it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dsjax.config.layers import LayerKind, kinds_of
from dsjax.model.parameter_counts import compressor_columns
from dsjax.plan.compressed import COMPRESSED, compressed_attention, compressed_projections, hyper_connections
from dsjax.plan.figure import assumption, measured
from dsjax.plan.network import all_reduce
from dsjax.plan.operator_tables import AICONFIGURATOR
from dsjax.plan.precision import BF16, operand_bytes
from dsjax.plan.sparse import index_projections, sparse_attention
from dsjax.plan.step_basis import HALVES, StepBasis, overlapped_layers, routed_experts, windowed_layers

WAITING = "waiting for launches"
"""The part of a step with prompts in which the device waits for kernel launches."""
MODULE = ("MTP module", "host, drafts")
"""The parts of a step that make drafts. Prompts in the same step do not shorten them."""


class RankWork(NamedTuple):
    """What one DP rank computes in a step."""

    decodes: float = 0  # requests that get a token
    context: float = 0  # positions that all of them attend to
    prompts: float = 0  # prompt tokens computed
    pairs: float = 0  # pairs of a prompt token and a position that it attends to
    cached: float = 0  # positions of these prompts that were already cached
    ended: float = 0  # prompts whose last token is computed

    def times(self, factor: float) -> RankWork:
        """Return the work of `factor` times as many requests and prompt tokens."""
        return RankWork(*(number * factor for number in self))

    def attending(self, verified: int) -> Iterator[tuple[float, float, float, bool]]:
        """Yield arguments of `StepModel.attention`: decodes at their mean context, and prompts at the context of their mean token."""
        if self.decodes:
            yield self.decodes * verified, self.context, self.context / self.decodes, True
        if self.prompts:
            yield self.prompts, self.cached, self.pairs / self.prompts, False


class LayersWork(NamedTuple):
    """Work of some layers."""

    ranks: tuple[RankWork, ...]  # attention waits for the one with most work
    tokens: float  # of the fullest rank
    busy: float  # mean tokens of all ranks ÷ `tokens`, for the experts, which see all ranks' tokens
    decode: bool
    verified: int  # tokens of a decode
    kinds: tuple[tuple[LayerKind, int], ...]  # kinds of layers with their numbers

    @property
    def layers(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.kinds)

    @property
    def dense(self) -> int:
        """Number of layers without experts."""
        return sum(count for kind, count in self.kinds if not kind.routed)

    @property
    def attentions(self) -> Counter[str]:
        """Number of layers of each kind of attention."""
        return sum((Counter({kind.attention: count}) for kind, count in self.kinds), Counter())

    def share(self, parts: int, routed: bool | None = None) -> LayersWork:
        """Return one of `parts` equal batches. routed: only layers with experts (True), only those without (False), or all (None)."""
        ranks = self.ranks if parts == 1 else tuple(rank.times(1 / parts) for rank in self.ranks)
        kinds = tuple(kind for kind in self.kinds if routed in (None, kind[0].routed))
        return self._replace(ranks=ranks, tokens=self.tokens / parts, kinds=kinds)


class StepModel(StepBasis):
    """Cost model of a step of one instance. Sizes are per DP rank; times are in seconds."""

    def step(
        self, ranks: Sequence[RankWork], *, drafts=0, busy: float | None = None, wait=1.0, uneven=1.0
    ) -> dict[str, float]:
        """Return the seconds of the parts of a step with this work on each DP rank. At least one rank must have work.

        All ranks wait for the fullest. A step with prompts is one program: its matmuls are over all tokens, at prefill's efficiencies.
        drafts: draft tokens that each decode verifies and makes anew. ranks: one entry suffices if all ranks, or a share `busy` of them,
        have the same work. wait: factor on attention, for the rank with the longest contexts; uneven: factor on all layers.
        """
        work = self._work(ranks, 1 + drafts, busy, wait, kinds_of(self.config.layer_runs))
        parts = self.layers(work)
        if uneven != 1.0:
            parts = {name: part * uneven for name, part in parts.items()}
        rows = max(1.0, max(rank.decodes + rank.ended for rank in ranks))
        parts["head"] = self.head(max(1.0, max(rank.decodes * work.verified + rank.ended for rank in ranks)))
        if drafts:
            parts |= self._drafts(ranks, drafts, busy, wait)
        slack = 0.0 if work.decode else self.launches(work.tokens) - sum(parts.values())
        waiting = {WAITING: slack} if slack > 0 else {}
        return parts | waiting | self.overhead(work.tokens, rows, work.decode)

    def seconds(self, parts: dict[str, float]) -> float:
        """Return the seconds of a step: the sum of its parts × a factor for what times of single operations leave out."""
        return sum(parts.values()) * assumption("whole engine ÷ its operations")

    def decode(self, batch: float, context: float, **how: float) -> float:
        """Return the seconds of one decode step; arguments as in `decode_parts`."""
        return self.seconds(self.decode_parts(batch, context, **how))

    def decode_parts(self, batch: float, context: float, *, drafts: int = 0, uneven: float = 0.0) -> dict[str, float]:
        """Seconds of the parts of one decode step of `batch` requests at `context` cached positions on each rank.

        uneven: coefficient of variation of the requests' contexts; the step waits for the rank with the longest expected mean context.
        """
        wait = 1 + uneven * math.sqrt(2 * math.log(self.layout.mesh.dp_size) / max(batch, 1))
        return self.step([RankWork(batch, batch * context)], drafts=drafts, wait=wait)

    def prefill(self, tokens: float, **how: float) -> float:
        """Return the seconds of one prefill step; arguments as in `prefill_parts`."""
        return self.seconds(self.prefill_parts(tokens, **how))

    def prefill_parts(
        self, tokens: float, *, prompt: float, cached: float = 0.0, busy: float = 1.0, drafts: int = 0
    ) -> dict[str, float]:
        """Seconds of the parts of a prefill step of `tokens` new tokens from prompts with `prompt` new tokens each, after `cached` ones.

        A prompt longer than the step counts as its mean chunk. busy: share of the DP ranks with `tokens` tokens; the others have none.
        """
        attended = cached + (prompt + 1) / 2
        ended = max(1.0, tokens / prompt)
        rank = RankWork(prompts=tokens, pairs=tokens * attended, cached=tokens * cached / prompt, ended=ended)
        return self.step([rank], drafts=drafts, busy=busy, uneven=assumption("uneven prompts"))

    def _work(
        self,
        ranks: Sequence[RankWork],
        verified: int,
        busy: float | None,
        wait: float,
        kinds: tuple[tuple[LayerKind, int], ...],
    ) -> LayersWork:
        rank_tokens = [rank.decodes * verified + rank.prompts for rank in ranks]
        most = max(rank_tokens)
        decode = not any(rank.prompts for rank in ranks)
        busy = sum(rank_tokens) / len(rank_tokens) / most if busy is None else busy
        ranks = tuple(ranks) if wait == 1.0 else tuple(rank.times(wait) for rank in ranks)
        return LayersWork(ranks, most, busy, decode, verified, kinds)

    def _drafts(self, ranks: Sequence[RankWork], drafts: int, busy: float | None, wait: float) -> dict[str, float]:
        """Return the seconds of the MTP module's passes: one over all computed tokens to fill its cache, others over one token per request.

        As in SGLang's `forward_draft_extend` (srt/speculative/eagle_worker.py), and for context requests in TensorRT-LLM's worker.
        """
        seconds = 0.0
        host = {}
        module = ((self.config.mtp_kind, 1),)
        if any(rank.prompts for rank in ranks):
            prompts = [rank._replace(decodes=0, context=0) for rank in ranks]
            seconds += self._pass(self._work(prompts, 1, busy, 1.0, module), max(rank.ended for rank in ranks))
        if any(rank.decodes for rank in ranks):
            decodes = [RankWork(*rank[:2]) for rank in ranks]
            batch = max(rank.decodes for rank in ranks)
            for verified, times in ((1 + drafts, 1), (1, drafts - 1)):
                if times:
                    seconds += self._pass(self._work(decodes, verified, busy, wait, module), batch) * times
            host = self.host_of_drafts(drafts)
        return {"MTP module": seconds, **host}

    def _pass(self, work: LayersWork, rows: float) -> float:
        """Return the seconds of one pass of the MTP module: an MoE layer, its projection from two widths, and the head for `rows` rows."""
        width = self.config.hidden_size
        joined = self.chip.bf16_product(work.tokens, width, 2 * width)
        return sum(self.layers(work).values()) + joined + self.head(max(1.0, rows))

    def host_of_drafts(self, drafts: int) -> dict[str, float]:
        """Return the host seconds to launch each of the MTP module's passes, or the one program that makes all drafts."""
        passes = assumption("host, a pass of the MTP module") * drafts
        return {"host, drafts": passes if self.engine.eager else assumption("host, the program of the drafts")}

    def launches(self, tokens: float) -> float:
        """Return the seconds to launch a prefill step's kernels one by one: CUDA graphs cover only steps of few tokens, if any."""
        if self.cluster.hardware.platform != "cuda":
            return 0.0
        config = self.config
        way = "a layer, eager" if self.engine.eager else "a layer, compiled"
        time = assumption(f"launches of {way}") * config.num_hidden_layers
        if not self.engine.eager and config.is_moe and self.layout.mesh.ep_size > 1:
            table = self.chip.operators.grouped_prefill("h200")
            least = (table.least if table else 0.37e-3) * config.num_moe_layers
            time += measured(least, 0.8 * least, 1.1 * least, "launches of the experts", AICONFIGURATOR, "s")
        return time

    def overhead(self, tokens: float, rows: float, decode: bool) -> dict[str, float]:
        """Return the seconds of a step of `tokens` tokens and `rows` requests besides its layers and head."""
        return {"host": assumption(f"host, {'decode' if decode else 'prefill'}")}

    # Layers -------------------------------------------------------------------------------------------------------------------

    def layers(self, work: LayersWork) -> dict[str, float]:
        """Seconds of all layers' parts by name; with two-batch overlap, `HALVES` stands for those that overlap."""
        moe = work.layers - work.dense
        if not self.overlap or not self.config.is_moe:
            return self.parts(work)
        if not self.in_windows:
            half = self.parts(work.share(2))
            return {HALVES: overlapped_layers(self, work.decode, half)}
        if moe <= 1:  # the MTP module's layer is computed as a whole
            return self.parts(work)
        half = self.parts(work.share(2, routed=True), halved=True)
        dense_parts = self.parts(work.share(1, routed=False))
        return dense_parts | {HALVES: windowed_layers(self, work.tokens, work.decode, moe, half)}

    def parts(self, work: LayersWork, halved: bool = False) -> dict[str, float]:
        """Return the seconds of the layers' parts without overlap. halved: the work is one of two half batches."""
        attention, rank = max((self.attentions(work, rank), rank) for rank in work.ranks)
        tokens, decode = work.tokens, work.decode
        absorbed = decode or (rank.prompts > 0 and self.absorbs(rank.prompts, rank.cached, rank.pairs / rank.prompts))
        parts = {**self._dense(work, rank.cached, absorbed), "attention": attention}
        moe = work.layers - work.dense
        if moe:
            routed = self.routed(tokens, decode, work.busy, halved)
            parts |= {name: seconds * moe for name, seconds in routed.items()}
            # The shared experts run on a second stream, in parallel with the routed ones.
            is_parallel = (
                decode and self.engine.shared_beside and not self.overlap and self.cluster.hardware.platform == "cuda"
            )
            if is_parallel and "shared experts" in parts:
                parts["shared experts"] *= assumption("share of the shared experts that is not hidden")
        return parts

    def routed(self, tokens: float, decode: bool, busy: float, halved: bool) -> dict[str, float]:
        """Return the seconds of one layer's routed experts, dispatch and combine."""
        return routed_experts(self, tokens, decode, busy, halved)

    def _dense(self, work: LayersWork, tokens_read: float, absorbed: bool) -> dict[str, float]:
        """Return the parts, without attention, that all layouts with the same `tp` share. They are computed once."""
        config, chip, tp = self.config, self.chip, self.layout.mesh.tp_size
        tokens, decode, layers, dense, attentions = work.tokens, work.decode, work.layers, work.dense, work.attentions
        moe = layers - dense
        fused = self.layout.fused
        streamed = sum(self._streamed(tokens, decode, kind) * count for kind, count in attentions.items())

        def make() -> dict[str, float]:
            projections = sum(
                self._projections(tokens, tokens_read, absorbed, kind) * count for kind, count in attentions.items()
            )
            seconds_of = {"projections": projections, "element-wise": chip.stream(streamed)}
            if decode:
                # On Blackwell the all-reduces over tp were timed together with the two norms that follow them.
                count = (6 if fused else 8) + (4 if config.streams else 0)
                count -= 2 if tp > 1 and self.cluster.hardware.is_blackwell else 0
                seconds_of["small kernels"] = assumption("small kernels of a layer") * count * layers
            if config.streams:
                seconds_of["hyper-connections"] = hyper_connections(chip, config, tokens) * layers
            if tp > 1:
                sum_seconds = all_reduce(self.cluster, tp, tokens * config.hidden_size * BF16)
                seconds_of["tensor-parallel sums"] = sum_seconds * (2 * layers)
            if dense:
                seconds_of["dense MLP"] = self._mlp(tokens, config.intermediate_size // tp) * dense
            if moe:
                router = chip.bf16_product(tokens / tp, config.n_routed_experts, config.hidden_size)
                seconds_of["router"] = router * moe
            if moe and config.n_shared_experts and not fused:
                hidden = config.n_shared_experts * config.moe_intermediate_size // tp
                seconds_of["shared experts"] = self._mlp(tokens, hidden) * moe
            return seconds_of

        return self.once((tp, tokens, tokens_read, decode, absorbed, work.kinds, streamed, fused), make)

    def _projections(self, tokens: float, tokens_read: float, absorbed: bool, kind: str = "mla") -> float:
        """Return the seconds of query, latent and output projections, and of the absorbed products or the expansion of keys and values."""
        config, chip, tp = self.config, self.chip, self.layout.mesh.tp_size
        if kind in COMPRESSED:
            return compressed_projections(chip, config, kind, tp, tokens)
        mla = config.mla
        heads = config.num_attention_heads // tp
        width = config.hidden_size
        rank = mla.kv_lora_rank
        query = mla.q_lora_rank or width
        latent = rank + mla.qk_rope_head_dim + (mla.q_lora_rank or 0)
        time = chip.product(tokens, latent, width) + chip.product(tokens, heads * mla.qk_head_dim, query)
        time += chip.product(tokens, width, heads * mla.v_head_dim)
        if mla.indexer is not None:
            time += index_projections(chip, config, tokens)
        kv_width = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        if absorbed:
            return time + chip.bf16_product(tokens, kv_width, rank)
        return time + chip.product(tokens + tokens_read, kv_width, rank)

    def _streamed(self, tokens: float, decode: bool, kind: str = "mla") -> float:
        """Return the bytes that a layer's small operations read and write, counting each operand once."""
        config, tp, precision = self.config, self.layout.mesh.tp_size, self.chip.precision
        attention = config.attention
        heads = config.num_attention_heads // tp
        linear, mlp = operand_bytes(precision.linear), operand_bytes(precision.mlp)
        norms = 2 * 7 * config.hidden_size
        norms += (2 + linear) * ((attention.q_lora_rank or 0) + attention.latent_dim + attention.qk_rope_head_dim)
        rotation = 4 * heads * attention.qk_head_dim
        keys = 0 if decode or kind in COMPRESSED else 2 * heads * (attention.qk_head_dim + attention.qk_nope_head_dim)
        output = (2 + linear) * heads * attention.v_head_dim if linear < BF16 else 0  # quantising it
        output += 8 * compressor_columns(config, kind)
        shared = 0 if self.layout.fused else config.n_shared_experts  # routed experts: part of their matmul times
        gated = (4 + mlp) * config.moe_intermediate_size * shared / tp
        return tokens * (norms + rotation + keys + output + gated)

    def _mlp(self, tokens: float, hidden: int) -> float:
        width = self.config.hidden_size
        up = self.chip.product(tokens, 2 * hidden, width, expert=True)
        return up + self.chip.product(tokens, width, hidden, expert=True)

    def head(self, tokens: float) -> float:
        """Return the seconds for the logits of `tokens` tokens."""
        config, tp = self.config, self.layout.mesh.tp_size
        logits = self.chip.stream(3 * 4 * tokens * config.vocab_size / tp)
        return self.chip.bf16_product(tokens, config.vocab_size // tp, config.hidden_size) + logits

    # Attention ----------------------------------------------------------------------------------------------------------------

    def attentions(self, work: LayersWork, rank: RankWork) -> float:
        """Return the seconds of one DP rank's attention in all layers."""
        asked = list(rank.attending(work.verified))
        kinds = work.attentions.items()
        return sum(sum(self.attention(*one, kind) for one in asked) * count for kind, count in kinds)

    def attention(self, tokens: float, tokens_read: float, context: float, decode: bool, kind: str = "mla") -> float:
        """Return the seconds in one layer of `tokens` that attend to `context` positions each. tokens_read: cached positions of all."""
        config = self.config
        heads = config.num_attention_heads // self.layout.mesh.tp_size
        if kind in COMPRESSED:
            prompt = None if decode else mean_prompt(tokens, tokens_read, context)
            return compressed_attention(self.chip, config, kind, heads, tokens, tokens_read, context, prompt)
        mla = config.mla
        # `context` is the mean over a prompt's tokens; half of them see more.
        if mla.indexer is not None and context * (1 if decode else 2) > mla.indexer.topk:
            prompt = None if decode else mean_prompt(tokens, tokens_read, context)
            return sparse_attention(self.chip, config, heads, tokens, tokens_read, context, prompt)
        if not decode:
            return self._prompt_attention(tokens, tokens_read, context, self.absorbs(tokens, tokens_read, context))
        # Drafts of a request are further query rows on the same cached positions.
        rows = tokens_read / context if context else tokens
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        tokens_per_row = max(1.0, tokens / max(rows, 1e-9))
        return self.chip.decode_attention(heads * tokens_per_row, rows, context, latent, mla.kv_lora_rank)

    def _prompt_attention(self, tokens: float, tokens_read: float, context: float, absorbed: bool) -> float:
        """Return the seconds of prompt attention in one layer. tokens_read, context: as in `mean_prompt`."""
        mla = self.config.mla
        heads = self.config.num_attention_heads // self.layout.mesh.tp_size
        prompt = mean_prompt(tokens, tokens_read, context)
        rank = mla.kv_lora_rank
        if absorbed:
            latent = rank + mla.qk_rope_head_dim
            return self.chip.decode_attention(heads * prompt, tokens / prompt, context, latent, rank)
        return self.chip.prefill_attention(heads, tokens, tokens / prompt, context, mla.qk_head_dim + mla.v_head_dim)

    def absorbs(self, tokens: float, tokens_read: float, context: float) -> bool:
        """Return whether prompts after cached positions use absorbed attention instead of expanding every cached latent.

        The faster form by published kernel times wins: the absorbed one for a few tokens after many. The recipe passes the choice to the
        engine. tokens_read, context: as in `attention`.
        """
        mla = self.config.mla
        if tokens_read <= 0 or mla is None or mla.indexer is not None:
            return False
        more = 2 * mla.kv_lora_rank + mla.qk_rope_head_dim - mla.qk_head_dim - mla.v_head_dim
        expanded = (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
        if tokens * context * more > tokens_read * expanded:  # more FLOPs, at no higher rate
            return False

        def faster() -> bool:
            naive, absorbed = (
                self._projections(tokens, tokens_read, way) + self._prompt_attention(tokens, tokens_read, context, way)
                for way in (False, True)
            )
            return absorbed < naive

        return self.once(("absorbs", self.layout.mesh.tp_size, tokens, tokens_read, context), faster)


def mean_prompt(tokens: float, tokens_read: float, context: float) -> float:
    """Return the new tokens of a step's mean prompt. tokens_read = tokens × cached ÷ prompt; context = cached + (prompt + 1) / 2."""
    return max(1.0, (context - 0.5) / (tokens_read / tokens + 0.5))
