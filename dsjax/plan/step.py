"""The time of one step: every layer's parts, decode and prefill, with and without two-batch overlap."""

from __future__ import annotations

import math

from dsjax.plan.balancing import STEP_INTERVAL
from dsjax.plan.figure import assumed, measured
from dsjax.plan.halves import HALVES, halved_layers
from dsjax.plan.host_time import captured_layer, compiled_layer, eager_layer
from dsjax.plan.memory import expert_bytes
from dsjax.plan.network import all_reduce, moved_bytes
from dsjax.plan.operator_tables import AICONFIGURATOR
from dsjax.plan.precision import BF16
from dsjax.plan.program import excess, nearest, tensor_parallel_sums
from dsjax.plan.routed import routed_experts
from dsjax.plan.sparse import index_projections, sparse_attention
from dsjax.plan.step_basis import StepBasis

_COMMUNICATION = ("dispatch", "combine")


class StepModel(StepBasis):
    """What a step of one instance costs. All sizes are of one DP rank, all times seconds."""

    def decode(self, batch: float, context: float, *, drafts: int = 0, uneven: float = 0.0) -> float:
        """Seconds of one decode step, as `decode_parts` has it."""
        return self._whole(self.decode_parts(batch, context, drafts=drafts, uneven=uneven))

    def decode_parts(self, batch: float, context: float, *, drafts: int = 0, uneven: float = 0.0) -> dict[str, float]:
        """Seconds of the parts of one decode step.

        batch: requests; context: cached positions of each; drafts: tokens verified beside the next one. The MTP module makes
        each in a pass of its own: the first goes over all tokens that were computed, whose entries its cache needs, each further
        one over one token of a request. uneven: coefficient of variation of the requests' contexts; the replica with the
        longest contexts is waited for.
        """
        tokens = batch * (1 + drafts)
        wait = _longest(self.layout.mesh.dp_size, batch, uneven)
        layers = self._layers(tokens, batch * context, context, True, self.config.num_hidden_layers, wait)
        parts = {**layers, "head": self.head(tokens), **self.beside(tokens, batch, True)}
        return parts | self.drafting(batch, context, drafts=drafts, uneven=uneven)

    def drafting(self, batch: float, context: float, *, drafts: int, uneven: float = 0.0) -> dict[str, float]:
        """Seconds of such a step in which the drafts are made; prompts beside them do not shorten it."""
        if not drafts:
            return {}
        wait = _longest(self.layout.mesh.dp_size, batch, uneven)
        made = self._draft(batch * (1 + drafts), batch, context, wait)
        if drafts > 1:
            made = made + self._draft(batch, batch, context, wait) * (drafts - 1)
        return {"MTP module": made, **self.host_of_drafts(drafts)}

    def host_of_drafts(self, drafts: int) -> dict[str, float]:
        """What launching the module's passes takes: each of them, or the one program that makes all drafts."""
        return {"host, drafts": self.host.draft() * drafts if self.eager else self.host.drafting_program()}

    def prefill(
        self, tokens: float, *, prompt: float, cached: float = 0.0, busy: float = 1.0, drafts: int = 0
    ) -> float:
        """One prefill step of `tokens` new tokens from prompts with `prompt` new tokens each, after `cached` cached ones.

        A prompt longer than the step is taken in chunks; the figures are those of its mean chunk. busy: the share of DP
        ranks that have so many tokens; the others have none, and their experts work for these. drafts: where there are any, the MTP module
        goes over the prompt too, as of `drafting_prompts`.
        """
        done, rows = self.prefill_device(tokens, prompt=prompt, cached=cached, busy=busy, drafts=drafts)
        return self.launched(done, tokens, rows)

    def launched(self, done: float, tokens: float, rows: float) -> float:
        """A prefill step in which the device computes for so long: with what launches and host take."""
        launched = self.launches(tokens)
        if launched > done:
            done = launched
        return self._whole({"device": done, **self.beside(tokens, rows, False)})

    def prefill_device(
        self, tokens: float, *, prompt: float, cached: float = 0.0, busy: float = 1.0, drafts: int = 0
    ) -> tuple[float, float]:
        """(seconds that the device computes in such a step, requests that get their first token in it)."""
        parts, rows = self.prefill_parts(tokens, prompt=prompt, cached=cached, busy=busy, drafts=drafts)
        return sum(parts.values()), rows

    def prefill_parts(
        self, tokens: float, *, prompt: float, cached: float = 0.0, busy: float = 1.0, drafts: int = 0
    ) -> tuple[dict[str, float], float]:
        """(seconds of the parts that the device computes in such a step, requests that get their first token in it)."""
        attended = cached + (prompt + 1) / 2
        layers = self._layers(
            tokens, tokens * cached / prompt, attended, False, self.config.num_hidden_layers, 1.0, busy=busy
        )
        uneven = self._known("uneven prompts", uneven_prompts)
        layers = {name: part * uneven for name, part in layers.items()}
        rows = max(1.0, tokens / prompt)
        parts = {**layers, "head": self.head(rows)}
        if drafts:
            parts["MTP module"] = self.drafting_prompts(tokens, prompt=prompt, cached=cached, busy=busy)
        return parts, rows

    def drafting_prompts(self, tokens: float, *, prompt: float, cached: float = 0.0, busy: float = 1.0) -> float:
        """Seconds of the MTP module's pass over a step's prompt tokens, whose entries its cache needs as the model's does.

        SGLang: `forward_draft_extend` of its srt/speculative/eagle_worker.py; TensorRT-LLM: its worker's context requests.
        """
        attended = cached + (prompt + 1) / 2
        parts = self._layers(tokens, tokens * cached / prompt, attended, False, 1, 1.0, dense=0, busy=busy)
        joined = self.chip.bf16_product(tokens, self.config.hidden_size, 2 * self.config.hidden_size)
        return sum(parts.values()) + joined + self.head(max(1.0, tokens / prompt))

    def _whole(self, parts: dict[str, float]) -> float:
        """The step that these parts make: their sum, times what operations that are timed alone leave out."""
        step = sum(parts.values())
        return step * self._known("whole engine", whole_engine)

    def launches(self, tokens: float = math.inf) -> float:
        """Seconds in which a prefill step's kernels can be started one by one: a graph holds none but those of few tokens, if any."""
        config = self.config
        if self.cluster.hardware.platform != "cuda":
            return 0.0
        captured = tokens <= self.captured
        key = ("launches", self.layout.mesh.ep_size > 1, self.eager, captured)
        if key not in self.shared:
            layer = captured_layer() if captured else eager_layer() if self.eager else compiled_layer()
            time = layer * config.num_hidden_layers
            if not self.eager and config.is_moe and self.layout.mesh.ep_size > 1:
                launch_table = self.chip.operators.grouped_prefill("h200")
                least = launch_table.least if launch_table else 0.37e-3
                range_of = (share * least * config.num_moe_layers for share in (1, 0.8, 1.1))
                time += measured(*range_of, "launches of the experts", AICONFIGURATOR, "s")
            self.shared[key] = time
        return self.shared[key]

    def beside(self, tokens: float, rows: float, decode: bool) -> dict[str, float]:
        """What a step of so many tokens and requests takes beside its layers and head."""
        step = self._known(f"host, {'decode' if decode else 'prefill'}", lambda: self.host.step(decode))
        return {"host": step, **self.moving()}

    def moving(self) -> dict[str, float]:
        """Seconds of a step in which experts travel to where the balancer wants them: a whole rebalance ÷ the steps between two."""
        if not (self.places_by_load and self.layout.mesh.ep_size > 1 and self.config.is_moe):
            return {}
        key = ("moving", self.layout.mesh, self.expert_slots)
        if key not in self.shared:
            config, mesh, places = self.config, self.layout.mesh, self.expert_slots
            slots = places.physical // mesh.ep_size * self.skew.moved(places, config.n_routed_experts)
            each = expert_bytes(config, mesh.expert_width_shards, self.precision)
            sent = slots * each * config.num_moe_layers
            self.shared[key] = moved_bytes(self.cluster, mesh.ep_size, sent) / STEP_INTERVAL
        return {"moving experts": self.shared[key]}

    def parts(self, tokens: float, read: float, context: float, decode: bool) -> dict[str, float]:
        """What all layers of a step, or of a half batch where it overlaps two, cost by name; nothing waits for another replica."""
        layers, halved = self.config.num_hidden_layers, self.overlap and self.in_windows
        return self._parts(tokens, read, context, decode, layers, 1.0, None, halved=halved)

    def hidden(self) -> float:
        """With two-batch overlap: the share of the shorter of computation and communication that the longer hides."""
        name, why = "share of the shorter that is hidden", "first and last halves have no partner"
        return self._known(name, lambda: assumed(0.9, 0.7, 1.0, name, why))

    def beside_routed(self) -> float:
        """In decode: the share of the shared experts' time that is not hidden beside the routed ones, on a second stream."""
        if self.cluster.hardware.platform != "cuda":
            return 1.0
        name = "share of the shared experts that is not hidden"
        why = "SGLang and TensorRT-LLM run them beside the routed experts, with which they share the memory"
        return self._known(name, lambda: assumed(0.5, 0.0, 1.0, name, why))

    def copying(self) -> float | None:
        """With two-batch overlap in decode: the share of an exchange in which it copies on the multiprocessors.

        The low-latency kernels leave them free only while rows travel.
        """
        if self.cluster.hardware.platform != "cuda":
            return None
        name, why = (
            "share of an exchange that is copies",
            "sending and receiving take 0.06 of 0.17 ms of a dispatch, as published",
        )
        return self._known(name, lambda: assumed(0.35, 0.25, 0.5, name, why))

    def _layers(
        self,
        tokens: float,
        read: float,
        context: float,
        decode: bool,
        layers: int,
        wait: float,
        dense: int | None = None,
        busy: float = 1.0,
    ) -> dict[str, float]:
        """All layers' parts by name. read: cached positions that the rank reads; context: positions a token attends to."""
        if self.overlap and self.in_windows:
            whole = (
                self.config.num_dense_layers if dense is None else dense
            )  # computed as a whole; so is the MTP module's layer
            if layers - whole > 1:
                parts = self._parts(tokens, read, context, decode, whole, wait, whole, busy)
                half = self._parts(tokens / 2, read / 2, context, decode, layers - whole, wait, 0, busy, halved=True)
                return halved_layers(self, tokens, decode, layers - whole, parts, half)
        if not self.overlap or self.in_windows or not self.config.is_moe:
            parts = self._parts(tokens, read, context, decode, layers, wait, dense, busy)
            return parts
        half = self._parts(tokens / 2, read / 2, context, decode, layers, wait, dense, busy)
        talk = sum([half[n] * 2 for n in _COMMUNICATION])
        work = sum([p * 2 for n, p in half.items() if n not in _COMMUNICATION])
        share = self.copying() if decode else self.beside_communication()
        if share and decode:
            work = work + talk * share
        elif share:
            work = work / (1 - share)
        hidden = self.hidden()
        return {HALVES: _overlapped(work, talk, hidden)}

    def _parts(
        self,
        tokens: float,
        read: float,
        context: float,
        decode: bool,
        layers: int,
        wait: float,
        dense: int | None,
        busy: float = 1.0,
        halved: bool = False,
    ) -> dict[str, float]:
        config, tp = self.config, self.layout.mesh.tp_size
        dense = config.num_dense_layers if dense is None else dense
        moe = layers - dense
        absorbed = decode or self.absorbs(tokens, read, context)
        seconds_of = dict(self._shared(tokens, read, decode, layers, dense, absorbed))
        # The rank with the longest contexts reads as much as more rows of the mean one would.
        seconds_of["attention"] = self.attention(tokens * wait, read * wait, context, decode) * layers
        whole = self.dry_runs and layers == config.num_hidden_layers
        run = nearest(self.dry_runs, decode, tokens / tp) if whole else None
        if run:
            if tp > 1:
                seconds_of["tensor-parallel sums"] = tensor_parallel_sums(self.cluster, run, tokens / tp)
            beyond = excess(self.chip, config, run, tokens / tp)
            if beyond:
                seconds_of["products beyond the model's own"] = beyond
        if not moe:
            return seconds_of
        seconds_of |= self._routed(tokens, decode, moe, busy, halved)
        if decode and self.shared_beside and "shared experts" in seconds_of and not self.overlap:
            seconds_of["shared experts"] = seconds_of["shared experts"] * self.beside_routed()
        return seconds_of

    def _routed(self, tokens: float, decode: bool, layers: int, busy: float, halved: bool) -> dict[str, float]:
        """The routed experts of so many layers, and the way there and back."""
        return routed_experts(self, tokens, decode, layers, busy, halved)

    def absorbs(self, tokens: float, read: float, context: float) -> bool:
        """Whether prompts behind cached positions are faster absorbed than with every cached latent expanded, as a few tokens behind many
        are, by published times of both kinds of kernels; the recipe says so to the engine. read, context: as of `attention`.
        """
        if read <= 0 or self.config.index_topk is not None:
            return False
        key = ("absorbs", self.layout.mesh.tp_size, tokens, read, context)
        if key not in self.shared:
            ways = (
                self._projections(tokens, read, way) + self._prompt_attention(tokens, read, context, way)
                for way in (False, True)
            )
            naive, absorbed = ways
            self.shared[key] = absorbed < naive
        return self.shared[key]

    def absorbing(self, tokens: float, context: float) -> float:
        """Seconds by which a layer of prompts takes longer absorbed. context: that a token attends to on average."""
        config = self.config
        heads, rank = config.num_attention_heads // self.layout.mesh.tp_size, config.kv_lora_rank
        absorbed = self.chip.absorbed_prompts(heads, tokens, context, rank + config.qk_rope_head_dim, rank)
        naive = self._prompt_attention(tokens, 0.0, context, False)
        products = [self._projections(tokens, 0.0, way) for way in (True, False)]
        return max(0.0, absorbed - naive + products[0] - products[1])

    def _prompt_attention(self, tokens: float, read: float, context: float, absorbed: bool) -> float:
        """Seconds in one layer of prompts, in either form. read = tokens × cached ÷ prompt, context = cached + (prompt + 1) / 2."""
        config = self.config
        heads, rank = config.num_attention_heads // self.layout.mesh.tp_size, config.kv_lora_rank
        prompt = max(1.0, (context - 0.5) / (read / tokens + 0.5))
        if absorbed:
            latent = rank + config.qk_rope_head_dim
            return self.chip.decode_attention(heads * prompt, tokens / prompt, context, latent, rank)
        return self.chip.prefill_attention(
            heads, tokens, tokens / prompt, context, config.qk_head_dim + config.v_head_dim
        )

    def _shared(
        self, tokens: float, read: float, decode: bool, layers: int, dense: int, absorbed: bool
    ) -> dict[str, float]:
        """The parts, without attention, that are the same in all layouts of a replica's width, computed once for them."""
        config, chip, mesh = self.config, self.chip, self.layout.mesh
        tp, moe, streamed = mesh.tp_size, layers - dense, self._streamed(tokens, decode)
        key = (tp, tokens, read, decode, absorbed, layers, dense, streamed, self.layout.fused)
        if key in self.shared:
            return self.shared[key]
        seconds_of = {
            "projections": self._projections(tokens, read, absorbed) * layers,
            "element-wise": chip.stream(streamed) * layers,
        }
        if decode:
            # On Blackwell the sums over tp were timed with the two norms that follow them.
            within_sums = 2 if tp > 1 and self.cluster.hardware.is_blackwell else 0
            count = 6 if self.layout.fused else 8
            each = self._known(f"{count} small kernels, {within_sums}", lambda: small_kernels(count, within_sums))
            seconds_of["small kernels"] = each * layers
        if tp > 1:
            seconds_of["tensor-parallel sums"] = all_reduce(self.cluster, tp, tokens * config.hidden_size * BF16) * (
                2 * layers
            )
        if dense:
            seconds_of["dense MLP"] = self._mlp(tokens, config.intermediate_size // tp) * dense
        if moe:
            seconds_of["router"] = chip.bf16_product(tokens / tp, config.n_routed_experts, config.hidden_size) * moe
        if moe and config.n_shared_experts and not self.layout.fused:
            hidden = config.n_shared_experts * config.moe_intermediate_size // tp
            seconds_of["shared experts"] = self._mlp(tokens, hidden) * moe
        self.shared[key] = seconds_of
        return seconds_of

    def _projections(self, tokens: float, read: float, absorbed: bool) -> float:
        """Query and latent projections and the output, and the absorbed products, or the expansion of keys and values."""
        config, chip, tp = self.config, self.chip, self.layout.mesh.tp_size
        heads, width, rank = config.num_attention_heads // tp, config.hidden_size, config.kv_lora_rank
        per_query, both = config.qk_head_dim, config.qk_nope_head_dim + config.v_head_dim
        latent = rank + config.qk_rope_head_dim
        query = config.q_lora_rank or width
        time = chip.product(tokens, latent + (query if config.query_compressed else 0), width)
        time = time + chip.product(tokens, heads * per_query, query)
        time = time + chip.product(tokens, width, heads * config.v_head_dim)
        if config.index_topk is not None:
            time = time + index_projections(chip, config, tokens)
        if absorbed:
            return time + chip.bf16_product(tokens, heads * both, rank)
        return time + chip.product(tokens + read, heads * both, rank)

    def attention(self, tokens: float, read: float, context: float, decode: bool) -> float:
        """Seconds in one layer of `tokens` that attend to `context` positions each; decode reads `read` positions in all."""
        config = self.config
        heads = config.num_attention_heads // self.layout.mesh.tp_size
        rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
        # Of a prompt's tokens, whose mean is `context`, half see more.
        if config.index_topk is not None and context * (1 if decode else 2) > config.index_topk:
            return sparse_attention(self.chip, config, heads, tokens, read, context, decode)
        if not decode:
            return self._prompt_attention(tokens, read, context, self.absorbs(tokens, read, context))
        # Drafts of a request are further query rows on the same cached positions.
        rows = read / context if context else tokens
        return self.chip.decode_attention(heads * max(1.0, tokens / max(rows, 1e-9)), rows, context, rank + rope, rank)

    def _streamed(self, tokens: float, decode: bool) -> float:
        """Bytes that a layer's small operations read and write: a count of their operands, each once."""
        config, mesh = self.config, self.layout.mesh
        heads, width, F = config.num_attention_heads // mesh.tp_size, config.hidden_size, config.moe_intermediate_size
        norms = 2 * 7 * width + 3 * ((config.q_lora_rank or 0) + config.kv_lora_rank + config.qk_rope_head_dim)
        rotation = 4 * heads * config.qk_head_dim
        keys = 0 if decode else 2 * heads * (config.qk_head_dim + config.qk_nope_head_dim)
        output = 3 * heads * config.v_head_dim
        apart = 0 if self.layout.fused else config.n_shared_experts
        shared = 5 * F * apart / mesh.tp_size  # the routed experts' are in their products' times
        return tokens * (norms + rotation + keys + output + shared)

    def _mlp(self, tokens: float, hidden: int) -> float:
        width = self.config.hidden_size
        up = self.chip.product(tokens, 2 * hidden, width, expert=True)
        return up + self.chip.product(tokens, width, hidden, expert=True)

    def head(self, tokens: float) -> float:
        """Seconds for the logits of so many tokens."""
        config, tp = self.config, self.layout.mesh.tp_size
        key = ("head", tp, tokens)
        if key not in self.shared:
            logits = self.chip.stream(3 * 4 * tokens * config.vocab_size / tp)
            product = self.chip.bf16_product(tokens, config.vocab_size // tp, config.hidden_size)
            self.shared[key] = product + logits
        return self.shared[key]

    def _draft(self, tokens: float, batch: float, context: float, wait: float) -> float:
        """One pass of the MTP module: a layer with experts and its projection of two widths over all tokens, the head for each request."""
        config = self.config
        layer = sum(list(self._layers(tokens, batch * context, context, True, 1, wait, dense=0).values()))
        joined = self.chip.bf16_product(tokens, config.hidden_size, 2 * config.hidden_size)
        return layer + joined + self.head(batch)


def _overlapped(work: float, talk: float, hidden: float) -> float:
    """The longer of the two, and the part of the shorter that is not hidden."""
    return max(work, talk) + min(work, talk) * (1 - hidden)


def _longest(ranks: int, batch: float, variation: float) -> float:
    """Expected longest mean context of `ranks` replicas ÷ the mean."""
    if ranks == 1 or variation == 0:
        return 1.0
    return 1 + variation * math.sqrt(2 * math.log(ranks) / max(batch, 1))


def small_kernels(count: int, within_sums: int) -> float:
    """Seconds of a layer's kernels that are in no timed operation, captured in a CUDA graph. within_sums: of them in a timed sum."""
    why = (
        "SGLang 0.5.10's DeepSeek MoE layer has 8 (srt/models/deepseek_v2.py, deepseek_common/attention_forward_methods/"
        "forward_mla.py): four norms, choosing experts, the second absorbed product, and unless it is fused the shared expert's "
        "activation and adding it; rotation, cache write and joining are in the timed attention (aiconfigurator f93be4a, "
        "collector/trtllm/collect_mla.py); 1 to 4 µs each"
    )
    count -= within_sums
    return assumed(*(count * each for each in (2e-6, 1e-6, 4e-6)), "small kernels of a layer", why)


def uneven_prompts() -> float:
    """What a prefill step takes with prompts as they come ÷ with prompts of one length."""
    return assumed(1.03, 1.0, 1.15, "uneven prompts", "ranks wait for the one with the longest prompts")


def whole_engine() -> float:
    """What a step of a whole engine takes ÷ the sum of its operations' times."""
    why = "operations were timed alone and warm, by one version of one engine: gaps, contention and other versions are left out"
    return assumed(1.0, 0.85, 1.18, "whole engine ÷ its operations", why)
