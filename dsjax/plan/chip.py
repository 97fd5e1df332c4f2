"""`Chip`: seconds of single operations on one device: from the tables of operations, carried over to the device's own ceilings."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

from dsjax.hardware import Hardware
from dsjax.plan.curves import Curve, Grid, doublings
from dsjax.plan.figure import assumed, assumption, measured
from dsjax.plan.operations import (
    DEEPGEMM,
    FLASH_MLA,
    FLASH_MLA_FLOPS,
    FLASHINFER_FP8,
    FP8_MLA,
    FP8_MLA_GAIN,
    LAUNCH,
    OperationWork,
    as_filed,
    carried,
    dense_curve,
    experts_work,
    grouped_seconds,
    product_work,
)
from dsjax.plan.operator_tables import AICONFIGURATOR, BUNDLED, PROMPTS, OperatorTables, kept
from dsjax.plan.precision import BF16, Precision, tabled

_EXPERTS = "experts' products"
_V3_WIDTH, _V3_INNER = 7168, 2048
_FARTHEST = 2.0**22
"""Rows and tokens up to which times are carried over; beyond they grow in proportion."""


@dataclass(frozen=True)
class Chip:
    """One device and the precision of its weights, for which it must have a unit (else `UserError`).

    fp8_rate: operations a second (value, low, high) that dense FP8 products reach at most with the engine's kernel.
    """

    hardware: Hardware
    precision: Precision
    operators: OperatorTables = BUNDLED
    known: dict = field(default_factory=dict, compare=False, repr=False)  # curves, which all users share
    priced: dict = field(default_factory=dict, compare=False, repr=False)  # seconds, in the draw at hand
    fp8_mla: bool = False  # decode multiplies an FP8 cache as FP8 on an H20, too
    fp8_rate: tuple[float, float, float] | None = None

    def __post_init__(self):
        self.precision.check_units(self.hardware)

    @cached_property
    def carried_over(self) -> float:
        """Factor on the speed of what another die was measured at; 1 on the same die."""
        hardware = self.hardware
        if hardware.same_die or hardware.key == hardware.operators:
            return 1.0
        why = f"measured on {hardware.operators or 'h200'}, not on {hardware.name}"
        return assumed(1.0, 0.8, 1.1, "carried over to this device", why)

    @kept("priced")
    def _factor(self, spread: float, name: str, source: str) -> float:
        """On what was timed, within `spread` of it each way, over what carrying it to another die adds."""
        return measured(1.0, 1 / (1 + spread), 1 + spread, name, source) / self.carried_over

    def _table(self, find: Callable, *about: object, last: str = "") -> tuple:
        """What a table says of this device, else of the one whose tables speak of it, and the device it was timed on; or twice None."""
        for key in filter(None, (self.hardware.key, self.hardware.operators or "h200", last)):
            if table := find(key, *about):
                return table, self.operators.device(key)
        return None, None

    def _carried(self, points: Iterable[tuple[float, float, OperationWork]], there: Hardware, fixed: float) -> Curve:
        """The curve here of points (size, seconds there, work)."""
        return Curve((size, carried(time, work, there, self.hardware, fixed)) for size, time, work in points)

    def product(self, rows: float, n: int, k: int, *, expert: bool = False) -> float:
        """Seconds of a dense product `[rows, k] × [k, n]` with bf16 results, weights of the precision's kind."""
        itemsize = self.precision.mlp if expert else self.precision.linear
        return self._product(rows, n, k, tabled(itemsize))

    def bf16_product(self, rows: float, n: int, k: int) -> float:
        """Seconds of a product with bf16 weights: absorbed matrices, head, router."""
        return self._product(rows, n, k, "bfloat16")

    @kept("priced")
    def _product(self, rows: float, n: int, k: int, dtype: str) -> float:
        curves, spread, source = self._product_curves(n, k, dtype)
        seconds = curves[0](rows) if len(curves) == 1 else math.sqrt(curves[0](rows) * curves[1](rows))
        seconds *= self._factor(spread, "products", source)
        if self.fp8_rate is None or dtype != "fp8_block":
            return seconds
        # No faster than the engine's own kernel is.
        rate = measured(*self.fp8_rate, "rate of dense FP8 products", FLASHINFER_FP8, "FLOP/s")
        return max(seconds, 2.0 * rows * n * k / rate)

    @kept("known")
    def _product_curves(self, n: int, k: int, dtype: str) -> tuple[list[Callable[[float], float]], float, str]:
        """(seconds here over rows by each table that speaks of the device, the spread of their geometric mean, its source)."""
        hardware = self.hardware

        def here(curve: Curve, there: Hardware) -> Curve:
            sizes = sorted({*curve.sizes, *doublings(1.0, _FARTHEST)})
            return self._carried(((s, curve(s), product_work(s, n, k, dtype)) for s in sizes), there, LAUNCH)

        table, there = self._table(self.operators.product, dtype, n, k)
        curves, spread, source = [], 0.15, AICONFIGURATOR
        if table:
            curves = [here(table, there)]
            spread = max(0.05, min(0.25, self.operators.product_error(there.key, dtype)))
        if dtype in ("fp8_block", "bfloat16") and (hardware.platform != "cuda" or hardware.is_hopper):
            deepgemm = here(dense_curve(n, k, dtype), as_filed("h800"))
            if table is None or hardware.key == "h800":
                curves, source = [deepgemm], DEEPGEMM
            elif there.key != hardware.key:
                # Two tables of the same die, neither of this device: between them.
                curves, spread, source = [deepgemm, *curves], 0.25, f"{DEEPGEMM}; {AICONFIGURATOR}"
        if not curves:

            def halved(rows: float) -> float:
                return 2 * product_work(rows, n, k, dtype).seconds(hardware)

            return [halved], 0.25, "half of the device's ceilings, for want of a table"
        return curves, spread, source

    def experts(
        self, used: float, rows: float, received: float, slots: float, width: int, inner: int, decode: bool
    ) -> float:
        """Seconds of a rank's routed experts: `rows` over `used` of its `slots`, of `received` tokens that were brought here."""
        if not decode and (timed := self._contiguous(width, inner)):
            terms, least, spread = timed
            each = sum(term * size for term, size in zip(terms, (rows, received, slots, 1.0), strict=True))
            return max(least, each) * self._factor(spread, _EXPERTS, AICONFIGURATOR)
        grid, spread, source = self._masked(width, inner)
        return grid(used, rows) * self._factor(spread, _EXPERTS, source)

    def _work(self, used: float, rows: float, width: int, inner: int) -> OperationWork:
        return experts_work(used, rows, width, inner, self.precision.expert, self.precision.expert_bits)

    def _by_v3(
        self,
        seconds: float,
        used: float,
        rows: float,
        each: float,
        size: tuple[int, int],
        there: Hardware,
        fixed: float,
    ) -> float:
        """Seconds here of experts of this width and inner width, by those `there` of V3's in FP8. each: rows of an expert."""
        work, v3 = self._work(used, rows, *size), (_V3_WIDTH, _V3_INNER)
        ratio = work.seconds(there) / experts_work(used, rows, *v3, 1.0, 8).seconds(there)
        if work.bits == 4:  # by the dense table: no grouped one is at hand
            shapes = ((2 * _V3_INNER, _V3_WIDTH), (_V3_WIDTH, _V3_INNER))
            pairs = [[self.operators.product(there.key, d, *s) for s in shapes] for d in ("nvfp4", "fp8_block")]
            fp4, fp8 = (sum(c(max(each, 1.0)) for c in p) if all(p) else 0.0 for p in pairs)
            ratio = (fp4 / fp8 if fp4 and fp8 else 0.5) * math.prod(size) / math.prod(v3)
        return carried(seconds * ratio, work, there, self.hardware, fixed)

    @kept("known")
    def _masked(self, width: int, inner: int) -> tuple[Grid, float, str]:
        """(seconds over experts with rows and rows in all, relative spread, source): decode's layout."""
        curves, there = self._table(self.operators.grouped_decode)
        curves, there = curves or {}, there or as_filed("h800")
        last = max(curves, default=1.0)

        def time(used: float, rows: float) -> float:
            if curves:
                # Beyond the last in proportion: there, the experts' weights are what takes time.
                seconds, fixed = curves[min(used, last)](rows / used) * max(1.0, used / last), 20e-6
            else:
                seconds, fixed = grouped_seconds(used, rows), LAUNCH
            return self._by_v3(seconds, used, rows, rows / used, (width, inner), there, fixed)

        firsts = sorted({*curves, *doublings(max(last, 1.0), 512)})
        spread = 0.2 if self.precision.expert < 1 else 0.1 if curves else 0.15
        return Grid(firsts, doublings(1.0, _FARTHEST), time), spread, AICONFIGURATOR if curves else DEEPGEMM

    @kept("known")
    def _contiguous(self, width: int, inner: int) -> tuple[tuple[float, ...], float, float] | None:
        """(seconds of a row, of a token that was brought here, of a slot, of a step; the least; relative spread): prefill's layout, each
        carried over by itself, so that their sum grows with each of the sizes."""
        table, there = self._table(self.operators.grouped_prefill)
        if not table:
            return None
        size, nothing = (width, inner), OperationWork(0.0, 16, 0.0)
        row = self._by_v3(table.row, 0.0, 1.0, 4096.0, size, there, 0.0)
        token = carried(table.token * width / _V3_WIDTH, nothing, there, self.hardware, 0.0)
        slot = self._by_v3(table.slot, 1.0, 0.0, 1.0, size, there, 0.0)
        spread = 0.2 if self.precision.expert < 1 else max(0.08, table.error)
        return (row, token, slot, table.fixed), table.least, spread

    def fused_experts(
        self, tokens: float, touched: Callable[[float], float], of: object, tp: int, ep: int
    ) -> float | None:
        """Seconds of the fused kernel that engines without wide EP use, experts cut `tp` ways; None where it was not timed.

        Hopper's is SGLang's Triton kernel, for FP8. Blackwell's is TensorRT-LLM's own, which SGLang starts too
        (`--moe-runner-backend flashinfer_trtllm`), for FP8 and NVFP4; it was timed with all experts on every rank.
        touched: experts that have a token of so many, told apart by `of`; even routing touches more, whose weights are taken off.
        """
        found = self._of_kernel(touched, of, ep, tp) if self.hardware.same_die or self.hardware.is_blackwell else None
        return found and found[0](tokens) * self._factor(0.1, "fused experts", AICONFIGURATOR)

    def spread_experts(
        self,
        tokens: float,
        busiest: Callable[[float], float],
        of: object,
        ep: int,
        more: Callable[[float], float] | None,
    ) -> tuple[float, bool] | None:
        """(seconds of whole experts on the busiest of `ep` ranks, of an engine without DeepEP; whether so many tokens were timed).

        None where no such engine was timed. More tokens than were timed get the seconds of the most that were: they take no less.
        Its rank has all tokens of the group, and what it does before and behind its experts' products was timed with them.
        busiest: experts with a token on the rank that has most of them, of so many tokens, told apart by `of`; even routing touches fewer,
        whose weights are added. more: rows of the busiest rank ÷ of the mean one, where the rows count and not the weights.
        """
        found = self._of_kernel(busiest, of, ep, None)
        if found is None:
            return None
        curve, even = found
        timed = min(tokens, curve.sizes[-1])
        seconds = curve(timed) * self._factor(0.1, "spread experts", AICONFIGURATOR)
        # A table that was not routed evenly is of the busiest rank.
        return seconds * more(timed) if even and more is not None else seconds, tokens == timed

    def _of_kernel(
        self, used: Callable[[float], float], of: object, ep: int, tp: int | None
    ) -> tuple[Curve, bool] | None:
        """(seconds over tokens with `used` experts touched in place of even routing's, whether it was timed with that), for V3's widths.
        With `tp` of the fused kernel, and `used` are those of all `ep` ranks; else of a rank of whole experts."""
        key = ("kernel", of, ep, tp)
        if key in self.known:
            return self.known[key]
        found, there = self._table(self.operators.experts, tabled(self.precision.expert), ep, tp)
        if found:
            table, even = found
            together, alone, first = (1, ep, 8) if tp else (ep, 1, 1)
            slots = 256 / together
            # From one token (on `first` experts) to 32 (on all) the table tells what an expert's weights take.
            of_one = (table(32) - table(1)) / (slots - first) if even and slots > first else 0.0
            points = []
            for tokens in sorted({*table.sizes, *doublings(1.0, _FARTHEST, 2)}) if tp else table.sizes:
                touched = used(tokens)
                seconds = table(tokens) + (touched - min(slots, 8 * tokens / together)) * of_one
                work = self._work(touched / alone, tokens * 8 / ep, _V3_WIDTH, _V3_INNER // (tp or 1))
                points.append((tokens, max(seconds, table.seconds[0]), work))
            found = self._carried(points, there, 20e-6), even
        self.known[key] = found
        return found

    @property
    def _caches(self) -> list[str]:
        """What an engine may read the cache as: with an FP8 cache it may still compute in bf16, and converts what it reads or stores."""
        return ["bfloat16", "fp8"] if self.precision.cache < BF16 else ["bfloat16"]

    def _bits(self, cache: str) -> int:
        return 8 if cache == "fp8" and self.hardware.is_blackwell else 16

    @kept("priced")
    def decode_attention(self, heads: float, rows: float, context: float, latent: int, rank: int) -> float:
        """Seconds of absorbed attention in one layer: `rows` requests at `context` cached positions of `latent` values each."""
        heads = round(heads, 6)  # a quotient of rows: 32.0000001 heads are not 33
        grid, spread, source = self._decode_grid(heads, latent, rank, self.fp8_mla)
        return grid(rows, context) * self._factor(spread, "attention", source)

    @kept("known")
    def _decode_grid(self, heads: float, latent: int, rank: int, fp8_mla: bool) -> tuple[Grid, float, str]:
        # A kernel that converts what it reads can do at least what the one for bf16 does, with half the bytes.
        ways = [self._decode_times(cache, heads, latent, rank) for cache in self._caches]
        times = [time for _, _, time, _, _ in ways]
        rows, contexts, _, spread, source = ways[-1]
        if fp8_mla and self.hardware.is_hopper_cut_down and len(ways) > 1:
            # Queries, keys and values are multiplied as FP8 by the kernel that is published for the H20.
            rows, contexts, bf16, spread, source = ways[0]
            spread, source = math.hypot(spread, 0.06), f"{source}; {FP8_MLA}"
            times.append(lambda *at: bf16(*at) / FP8_MLA_GAIN)
        return Grid(rows, contexts, lambda *at: min(time(*at) for time in times)), spread, source

    def _decode_times(self, cache: str, heads: float, latent: int, rank: int) -> tuple:
        """(rows and contexts that were timed, seconds at two of them, relative spread, source) with a cache in FP8 or in bf16."""
        itemsize = self.precision.cache if cache == "fp8" else BF16
        (curves, spread), there = self._table(self.operators.decode_attention, cache, math.ceil(heads), last="h200")
        least = min(curve.seconds[0] for curve in curves.values())

        def work(rows: float, context: float, values: int, out: int) -> OperationWork:
            positions = rows * context
            flops = 2.0 * heads * (values + out) * positions
            return OperationWork(flops, self._bits(cache), positions * values * itemsize)

        def time(rows: float, context: float) -> float:
            asked, near = work(rows, context, latent, rank), curves[min(curves, key=lambda known: abs(known - rows))]
            seconds = near(context) * asked.seconds(there) / work(rows, context, 576, 512).seconds(there)
            return carried(seconds, asked, there, self.hardware, least)

        contexts = sorted({size for curve in curves.values() for size in curve.sizes})
        return sorted(curves), contexts, time, max(0.05, spread), AICONFIGURATOR

    def absorbed_prompts(self, heads: int, tokens: float, context: float, latent: int, rank: int) -> float:
        """Seconds of absorbed attention in one layer of so many prompt tokens, each attending to `context` positions on average, at 95 % of
        FlashMLA's "up to" 660 TFLOP/s: it is bound by its products, and tables of decode end long before."""
        work = OperationWork(2.0 * heads * (latent + rank) * tokens * context, 16, 0.0)
        seconds = carried(work.flops / (0.95 * FLASH_MLA_FLOPS), work, as_filed("h800"), self.hardware)
        return seconds * self._factor(0.2, "attention", FLASH_MLA)

    @kept("priced")
    def prefill_attention(self, heads: int, tokens: float, prompts: float, context: float, per_pair: int) -> float:
        """Seconds of naive causal attention in one layer of `tokens` from `prompts` prompts, each attending to `context` on average.

        per_pair: key and value widths together. A prompt behind cached positions counts as one whose mean token attends to as many.
        """
        length, prompts = 2 * context - 1, max(1.0, min(8.0, prompts))
        grids = [self._prefill_grid(cache, heads, per_pair) for cache in self._caches]
        seconds = min(max(least, tokens / prompts * grid(prompts, length)) for grid, least in grids)
        return seconds * self._factor(0.07, "attention", AICONFIGURATOR)

    @kept("known")
    def _prefill_grid(self, cache: str, heads: int, per_pair: int) -> tuple[Grid, float]:
        """(seconds of as many tokens as prompts, over the prompts in a step and their length; seconds that no step is below). A token takes
        longer in a longer prompt, less beside more prompts; and more prompts take longer together."""
        table, there = self._table(self.operators.prefill_attention, cache, heads, last="h200")
        least = min(min(times.values()) for times in table.values())

        def of_a_token(prompts: int, length: float) -> float:
            work = OperationWork(heads * per_pair * prompts * length * (length + 1), self._bits(cache), 0.0)
            seconds = table[length][prompts] * per_pair / 320
            return carried(seconds, work, there, self.hardware, least) / (prompts * length)

        def together(prompts: int, length: float) -> float:
            return prompts * min(of_a_token(fewer, length) for fewer in table[length] if fewer <= prompts)

        return Grid(PROMPTS, sorted(table), together), least

    def stream(self, moved: float) -> float:
        """Norms, rotation, activations: `moved` bytes through memory."""
        return moved / self._streaming

    @cached_property
    def _streaming(self) -> float:
        """Bytes a second."""
        return assumption("element-wise share of bandwidth") * self.carried_over * self.hardware.memory_bandwidth
