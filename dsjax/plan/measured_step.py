"""A step whose parts' times come from a file of module benchmarks, where it has them; published tables give the rest."""

import math

from dsjax.plan.measured import Measured
from dsjax.plan.skew import zipf_variation
from dsjax.plan.step import LayersWork, StepModel, mean_prompt

DECODE_FORM, PREFILL_FORM = "A_CC_ME", "CC"
"""`dsjax serve`'s own."""
_WITH_ATTENTION = ("projections", "attention", "small kernels", "element-wise")
"""Parts that were timed together as attention: with the rotation, the launches and all else between the norms."""
_TILE = 16
_TIMED_SKEW = 0.3
"""How the rows `skewed` were drawn: popularity ∝ rank^-0.3."""


class MeasuredStep(StepModel):
    """`StepModel` with measured modules. Those of a replica's whole width serve `tp=1`; others keep their published times."""

    @property
    def measured(self) -> Measured:
        """The file of module benchmarks."""
        return self.options.measured

    def decode_parts(self, batch: float, context: float, *, drafts: int = 0, uneven: float = 0.0) -> dict[str, float]:
        """Seconds of the parts of a step; the model's loop over the context runs to the longest of a batch, for all its rows."""
        reach = min(math.sqrt(3), math.sqrt(2 * math.log(batch))) if batch > 1 else 0.0
        return super().decode_parts(batch, context * (1 + uneven * reach), drafts=drafts)

    def seconds(self, parts: dict[str, float]) -> float:
        """The sum: modules were timed with all that their launches take."""
        return sum(parts.values())

    def launches(self, tokens: float) -> float:
        """In the modules' own times."""
        return 0.0

    def host_of_drafts(self, drafts: int) -> dict[str, float]:
        """Nothing: where each token is the most probable one, dsjax makes the drafts in the step's own program, whose launch was timed."""
        return {}

    def attention(self, tokens: float, read: float, context: float, decode: bool, kind: str = "mla") -> float:
        """One layer as it was timed, with its projections; published where the file has none for such a layout."""
        whole = self.layout.mesh.tp_size == 1 and context > 0
        measured = self._measured_attention(tokens, read, context, decode, 1, 0) if whole else None
        return measured or super().attention(tokens, read, context, decode, kind)

    def parts(self, work: LayersWork, halved: bool = False) -> dict[str, float]:
        """Seconds of layers' parts; those that the file has replace the published ones."""
        parts, tokens = super().parts(work, halved), work.tokens
        moe, whole = work.layers - work.dense, self.layout.mesh.tp_size == 1
        found: dict[str, float | None] = {}
        if whole:
            stacks = (work.dense > 0) + (moe > 0)
            calls = [list(rank.attending(work.verified)) for rank in work.ranks]
            times = [[self._measured_attention(*one, work.layers, stacks) for one in each] for each in calls]
            if not any(None in each for each in times):
                parts = {name: part for name, part in parts.items() if name not in _WITH_ATTENTION}
                norms = self._module("norms", tokens, work.layers, stacks)
                found |= {"attention": max(map(sum, times)), "norms": norms}
            if work.dense:
                found["dense MLP"] = self._module("dense MLP", tokens, work.dense)
        if moe:
            found |= self._experts(tokens, moe, work.busy)
        return parts | _given(**found)

    def _module(self, name: str, tokens: float, times: int, places: int = 1, **sizes) -> float | None:
        return self.measured.seconds(name, tokens, times=times, places=places, **sizes)

    def _measured_attention(
        self, tokens: float, read: float, context: float, decode: bool, layers: int, stacks: int
    ) -> float | None:
        find = self.measured.attention
        if decode:
            rows = read / context if context else tokens
            width = round(tokens / rows)
            return find(DECODE_FORM, rows, width, context, times=layers, places=stacks, verify=width > 1)
        prompt = mean_prompt(tokens, read, context)
        cached = read / tokens * prompt
        chunks = [row.sizes["chunk"] for row in self.measured.of("attention", f"{PREFILL_FORM} prefill")]
        chunk = min(prompt, tokens, max(chunks, default=tokens))
        seconds = find(PREFILL_FORM, 1, chunk, cached + (prompt - chunk) / 2, times=layers, places=stacks)
        return seconds if seconds is None or tokens == chunk else seconds * (tokens / chunk)

    def _experts(self, tokens: float, layers: int, busy: float) -> dict[str, float | None]:
        """Seconds of the router, the shared and routed experts and their exchanges in so many layers."""
        config, mesh = self.config, self.layout.mesh
        rank_tokens = tokens / mesh.tp_size
        found = {"router": self._module("router", rank_tokens, layers)}
        if config.n_shared_experts and mesh.tp_size == 1:
            found["shared experts"] = self._module("shared expert", tokens, layers)
        if not mesh.splits_expert_width:
            found["experts"] = self._timed_experts(rank_tokens * busy, layers)
        if mesh.ep_size == mesh.num_devices > 1 and self.dispatch in ("gather", "padded", "ragged"):
            sizes = {"mesh": str(mesh), "variant": f"{self.dispatch} even"}
            both = self._module("dispatch", tokens, layers, **sizes)  # timed there and back together
            if both:
                found |= {"dispatch": both / 2, "combine": both / 2}
        return found

    def _timed_experts(self, rank_tokens: float, layers: int) -> float | None:
        """The busiest rank's experts: between the timed even and skewed routing, by the skew that is planned for."""
        config, mesh, top_k = self.config, self.layout.mesh, self.config.num_experts_per_tok
        slots = (config.n_routed_experts + self.layout.redundant) // mesh.ep_size
        slowest = self.slowest(rank_tokens * top_k)

        def visits(tokens: float) -> float:
            # Between two sizes a product's time follows the weights that are brought in: of the experts that have a token, and anew
            # for every `_TILE` rows of one.
            unused = (1 - top_k / config.n_routed_experts) ** (tokens * config.n_routed_experts / slots)
            return slots * (1 - unused) + tokens * top_k / _TILE

        def timed(tokens: float, variant: str) -> float | None:
            sizes = {"variant": variant, "experts": slots, "scale": visits}
            return self.measured.seconds("experts", tokens, times=layers, **sizes)

        even = timed(rank_tokens * slowest, "even")
        skewed = timed(rank_tokens, "skewed") if mesh.ep_size == 1 else None
        if even is None or skewed is None:
            return even
        share = min(1.0, self.options.skew.variation / zipf_variation(_TIMED_SKEW, config.n_routed_experts))
        return (1 - share) * even + share * skewed

    def head(self, tokens: float) -> float:
        """As timed: final norm, projection, most probable token."""
        measured = self._module("head", tokens, 1) if self.layout.mesh.tp_size == 1 else None
        return measured or super().head(tokens)

    def beside(self, tokens: float, rows: float, decode: bool) -> dict[str, float]:
        """As timed: the launch, the step's integers, the embedding."""
        launch = self._module("launch", rows, 1, places=0)
        if launch is None:
            return super().beside(tokens, rows, decode)
        inputs = self._module("inputs", tokens, 1, variant="")
        embedding = self._module("embedding", tokens, 1, variant="device")
        return {"launch": launch, **_given(inputs=inputs, embedding=embedding)}


def _given(**seconds: float | None) -> dict[str, float]:
    return {name: time for name, time in seconds.items() if time}
