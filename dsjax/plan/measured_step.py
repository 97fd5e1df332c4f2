"""A step whose parts' times come from a file of module benchmarks, where it has them; published tables give the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dsjax.plan.measured import Measured
from dsjax.plan.skew import zipf_variation
from dsjax.plan.step import StepModel

DECODE_FORM, PREFILL_FORM = "A_CC_ME", "CC"
"""`dsjax serve`'s own."""
_TILE = 16
_TIMED_SKEW = 0.3
"""How the rows `skewed` were drawn: popularity ∝ rank^-0.3."""


@dataclass(frozen=True)
class MeasuredStep(StepModel):
    """`StepModel` with measured modules. Those of a replica's whole width serve `tp=1`; others keep their published times."""

    measured: Measured | None = None

    def decode_parts(self, batch: float, context: float, *, drafts: int = 0, uneven: float = 0.0) -> dict[str, float]:
        """Seconds of the parts of a step; the model's loop over the context runs to the longest of a batch, for all its rows."""
        reach = min(math.sqrt(3), math.sqrt(2 * math.log(batch))) if batch > 1 else 0.0
        return super().decode_parts(batch, context * (1 + uneven * reach), drafts=drafts)

    def _whole(self, parts: dict[str, float]) -> float:
        """The sum: modules were timed with all that their launches take."""
        return sum(parts.values())

    def attention(self, tokens: float, read: float, context: float, decode: bool) -> float:
        """One layer as it was timed, with its projections; published where the file has none for such a layout."""
        whole = self.layout.mesh.tp_size == 1 and context > 0
        measured = self._measured_attention(tokens, read, context, decode, 1, 0) if whole else None
        return measured or super().attention(tokens, read, context, decode)

    def launches(self, tokens: float = math.inf) -> float:
        """In the modules' own times."""
        return 0.0

    def host_of_drafts(self, drafts: int) -> dict[str, float]:
        """Nothing: where each token is the most probable one, dsjax makes the drafts in the step's own program, whose launch was timed."""
        return {}

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
        parts = super()._parts(tokens, read, context, decode, layers, wait, dense, busy, halved)
        dense = self.config.num_dense_layers if dense is None else dense
        stacks = (dense > 0) + (layers > dense)
        whole = self.layout.mesh.tp_size == 1
        attention = self._measured_attention(tokens, read, context, decode, layers, stacks) if whole else None
        if attention:
            # What was timed as attention has the projections, rotation, launches and all else between the norms.
            for name in ("projections", "attention", "small kernels", "element-wise"):
                parts.pop(name, None)
            parts["attention"] = attention * wait
            norms = self._module("norms", tokens, layers, stacks)
            parts |= {"norms": norms} if norms else {}
        if dense and whole:
            parts |= _given("dense MLP", self._module("dense MLP", tokens, dense))
        if layers > dense:
            self._add_experts(parts, tokens, layers - dense, whole, busy)
        return parts

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
        # `context` is the mean position that is attended to: cached + (prompt + 1) / 2, and read = tokens × cached ÷ prompt.
        prompt = max(1.0, (context - 0.5) / (read / tokens + 0.5))
        cached = read / tokens * prompt
        chunks = [row["sizes"]["chunk"] for row in self.measured.rows("attention", f"{PREFILL_FORM} prefill")]
        chunk = min(prompt, tokens, max(chunks, default=tokens))
        seconds = find(PREFILL_FORM, 1, chunk, cached + (prompt - chunk) / 2, times=layers, places=stacks)
        if seconds is None or tokens == chunk:
            return seconds
        return seconds * (tokens / chunk)

    def _add_experts(self, parts: dict[str, float], tokens: float, layers: int, whole: bool, busy: float) -> None:
        config, mesh = self.config, self.layout.mesh
        rank_tokens = tokens / mesh.tp_size
        parts |= _given("router", self._module("router", rank_tokens, layers))
        if config.n_shared_experts and whole:
            parts |= _given("shared experts", self._module("shared expert", tokens, layers))
        if not mesh.splits_expert_width:
            routed = _given("experts", self._timed_experts(rank_tokens * busy, layers))
            if routed:  # what was timed has the padding that the program computes with
                parts.pop("products beyond the model's own", None)
            parts |= routed
        if mesh.ep_size == mesh.num_devices > 1 and self.dispatch in ("gather", "padded", "ragged"):
            sizes = {"mesh": str(mesh), "variant": f"{self.dispatch} even"}
            both = self._module("dispatch", rank_tokens * mesh.tp_size, layers, **sizes)
            if both:  # timed there and back together
                parts |= {"dispatch": both / 2, "combine": both / 2}

    def _timed_experts(self, rank_tokens: float, layers: int) -> float | None:
        """The busiest rank's experts: between the timed even and skewed routing, by the skew that is planned for."""
        config, mesh = self.config, self.layout.mesh
        slots = (config.n_routed_experts + self.layout.redundant) // mesh.ep_size
        rows = rank_tokens * config.num_experts_per_tok
        slowest = self.skew.slowest(self.expert_slots, config.n_routed_experts, rows, self.places_by_load)
        # Between two sizes a product's time follows the weights that are brought in: of the experts that have a token, and anew
        # for every `_TILE` rows of one.
        ranks, top_k = config.n_routed_experts / slots, config.num_experts_per_tok

        def visits(tokens: float) -> float:
            unused = (1 - top_k / config.n_routed_experts) ** (tokens * ranks)
            return slots * (1 - unused) + tokens * top_k / _TILE

        times = {"times": layers, "experts": slots, "scale": visits}
        even = self.measured.seconds("experts", rank_tokens * slowest, variant="even", **times)
        if even is None:
            return None
        if mesh.ep_size > 1:
            return even
        skewed = self.measured.seconds("experts", rank_tokens, variant="skewed", **times)
        if skewed is None:
            return even
        timed = zipf_variation(_TIMED_SKEW, config.n_routed_experts)
        share = min(1.0, self.skew.variation / timed)
        return (1 - share) * even + share * skewed

    def head(self, tokens: float) -> float:
        """As timed: final norm, projection, most probable token."""
        measured = self._module("head", tokens, 1) if self.layout.mesh.tp_size == 1 else None
        return measured if measured else super().head(tokens)

    def beside(self, tokens: float, rows: float, decode: bool) -> dict[str, float]:
        """As timed: the launch, the step's integers, the embedding."""
        launch = self._module("launch", rows, 1, places=0)
        if launch is None:
            return super().beside(tokens, rows, decode)
        parts = {"launch": launch, **self.moving()}
        for name, variant in (("inputs", ""), ("embedding", "device")):
            parts |= _given(name, self._module(name, tokens, 1, variant=variant))
        return parts


def _given(name: str, figure: float | None) -> dict[str, float]:
    return {name: figure} if figure else {}
