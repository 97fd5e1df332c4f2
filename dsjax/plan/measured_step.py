"""`MeasuredStep`: a step priced with measured modules (`--measured`), and with published tables for modules that the file lacks."""

import math

from dsjax.plan.measured import Measured
from dsjax.plan.skew import zipf_variation
from dsjax.plan.step import LayersWork, StepModel, mean_prompt

DECODE_FORM, PREFILL_FORM = "A_CC_ME", "CC"
"""MLA forms that `dsjax serve` uses by default."""
_REPLACED_BY_ATTENTION = ("projections", "attention", "small kernels", "element-wise")
"""Parts of a published step that the module `attention` includes: everything between the two norms of a layer."""
_ROWS_PER_READ = 16
"""Rows of an expert that a matmul computes per read of its weights."""
_TIMED_SKEW = 0.3
"""Exponent of the `skewed` routing that was timed: popularity ∝ rank^-0.3."""


class MeasuredStep(StepModel):
    """`StepModel` with measured modules.

    Modules timed at the full width of a replica apply to `tp=1` only; other layouts keep the published times.
    """

    @property
    def measured(self) -> Measured:
        """The file of module benchmarks."""
        return self.options.measured

    def decode_parts(self, batch: float, context: float, *, drafts: int = 0, uneven: float = 0.0) -> dict[str, float]:
        """Return the seconds of a step's parts. The loop over the context runs to the batch's longest context for all rows."""
        deviations = (
            min(math.sqrt(3), math.sqrt(2 * math.log(batch))) if batch > 1 else 0.0
        )  # of the longest from the mean
        return super().decode_parts(batch, context * (1 + uneven * deviations), drafts=drafts)

    def seconds(self, parts: dict[str, float]) -> float:
        """Return the sum of the parts: measured modules include their launches."""
        return sum(parts.values())

    def launches(self, tokens: float) -> float:
        """0: measured modules include their launches."""
        return 0.0

    def host_of_drafts(self, drafts: int) -> dict[str, float]:
        """Return no parts: with greedy sampling, dsjax makes the drafts in the step's own program, whose launch is measured."""
        return {}

    def attention(self, tokens: float, tokens_read: float, context: float, decode: bool, kind: str = "mla") -> float:
        """Seconds of attention in one layer, projections included if measured; else the published time."""
        is_timed = self.layout.mesh.tp_size == 1 and context > 0
        measured = self._attention(tokens, tokens_read, context, decode, 1, 0) if is_timed else None
        return measured or super().attention(tokens, tokens_read, context, decode, kind)

    def parts(self, work: LayersWork, halved: bool = False) -> dict[str, float]:
        """Seconds of the layers' parts: measured ones replace published ones."""
        parts = super().parts(work, halved)
        moe_layers = work.layers - work.dense
        measured: dict[str, float | None] = {}
        if self.layout.mesh.tp_size == 1:
            stacks = (work.dense > 0) + (moe_layers > 0)
            rank_times = [
                [self._attention(*group, work.layers, stacks) for group in rank.attending(work.verified)]
                for rank in work.ranks
            ]
            if not any(None in times for times in rank_times):
                parts = {name: seconds for name, seconds in parts.items() if name not in _REPLACED_BY_ATTENTION}
                measured["attention"] = max(map(sum, rank_times))
                measured["norms"] = self._module("norms", work.tokens, work.layers, stacks)
            if work.dense:
                measured["dense MLP"] = self._module("dense MLP", work.tokens, work.dense)
        if moe_layers:
            measured |= self._experts(work.tokens, moe_layers, work.busy)
        return parts | _without_missing(measured)

    def _module(self, name: str, tokens: float, applications: int, loops: int = 1, **sizes) -> float | None:
        """Return the seconds of a module's applications in `loops` loops of the program; None if the module was not measured."""
        return self.measured.seconds(name, tokens, applications=applications, loops=loops, **sizes)

    def _attention(
        self, tokens: float, tokens_read: float, context: float, decode: bool, layers: int, stacks: int
    ) -> float | None:
        """Return the seconds of attention in `layers` layers of `stacks` stacks; other arguments as in `attention`."""
        counts = {"applications": layers, "loops": stacks}
        if decode:
            rows = tokens_read / context if context else tokens
            width = round(tokens / rows)
            return self.measured.attention(DECODE_FORM, rows, width, context, verify=width > 1, **counts)
        prompt = mean_prompt(tokens, tokens_read, context)
        cached = tokens_read / tokens * prompt
        timed_chunks = [row.sizes["chunk"] for row in self.measured.of("attention", f"{PREFILL_FORM} prefill")]
        chunk = min(prompt, tokens, max(timed_chunks, default=tokens))
        seconds = self.measured.attention(PREFILL_FORM, 1, chunk, cached + (prompt - chunk) / 2, **counts)
        if seconds is None or tokens == chunk:
            return seconds
        return seconds * (tokens / chunk)

    def _experts(self, tokens: float, layers: int, busy: float) -> dict[str, float | None]:
        """Return the seconds of router, shared experts, routed experts, dispatch and combine in `layers` layers."""
        mesh = self.layout.mesh
        rank_tokens = tokens / mesh.tp_size
        measured = {"router": self._module("router", rank_tokens, layers)}
        if self.config.n_shared_experts and mesh.tp_size == 1:
            measured["shared experts"] = self._module("shared expert", tokens, layers)
        if not mesh.splits_expert_width:
            measured["experts"] = self._routed_experts(rank_tokens * busy, layers)
        if mesh.ep_size == mesh.num_devices > 1 and self.dispatch in ("gather", "padded", "ragged"):
            sizes = {"mesh": str(mesh), "variant": f"{self.dispatch} even"}
            if exchange := self._module("dispatch", tokens, layers, **sizes):  # dispatch and combine are timed together
                measured |= {"dispatch": exchange / 2, "combine": exchange / 2}
        return measured

    def _routed_experts(self, rank_tokens: float, layers: int) -> float | None:
        """Seconds of the busiest rank's experts, interpolated between even and skewed routing by the planned skew."""
        config = self.config
        mesh = self.layout.mesh
        top_k = config.num_experts_per_tok
        slots = (config.n_routed_experts + self.layout.redundant) // mesh.ep_size

        def weight_reads(tokens: float) -> float:
            """Return the reads of expert weights, over which times are interpolated: one per expert with a token, and one per tile."""
            unused = (1 - top_k / config.n_routed_experts) ** (tokens * config.n_routed_experts / slots)
            return slots * (1 - unused) + tokens * top_k / _ROWS_PER_READ

        def seconds(tokens: float, variant: str) -> float | None:
            return self._module("experts", tokens, layers, variant=variant, experts=slots, scale=weight_reads)

        even = seconds(rank_tokens * self.slowest(rank_tokens * top_k), "even")
        skewed = seconds(rank_tokens, "skewed") if mesh.ep_size == 1 else None
        if even is None or skewed is None:
            return even
        share = min(1.0, self.options.skew.variation / zipf_variation(_TIMED_SKEW, config.n_routed_experts))
        return (1 - share) * even + share * skewed

    def head(self, tokens: float) -> float:
        """Seconds of final norm, logits and greedy sampling, if measured."""
        measured = self._module("head", tokens, 1) if self.layout.mesh.tp_size == 1 else None
        return measured or super().head(tokens)

    def overhead(self, tokens: float, rows: float, decode: bool) -> dict[str, float]:
        """Seconds of the launch, the step's integers and the embedding, if measured."""
        launch = self._module("launch", rows, applications=1, loops=0)
        if launch is None:
            return super().overhead(tokens, rows, decode)
        inputs = self._module("inputs", tokens, 1, variant="")
        embedding = self._module("embedding", tokens, 1, variant="device")
        return {"launch": launch} | _without_missing({"inputs": inputs, "embedding": embedding})


def _without_missing(seconds: dict[str, float | None]) -> dict[str, float]:
    """Return the parts that were measured."""
    return {name: time for name, time in seconds.items() if time}
