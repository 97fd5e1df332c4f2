"""`Chip`: seconds of single operations on one device, from operator tables, converted to this device's peak FLOP/s and bandwidth."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

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
    bundled_device,
    convert_seconds,
    dense_curve,
    experts_work,
    grouped_seconds,
    product_work,
)
from dsjax.plan.operator_tables import AICONFIGURATOR, BUNDLED, PROMPTS, OperatorTables, cached_in
from dsjax.plan.precision import BF16, Precision, table_format
from dsjax.plan.rules import refuse

_EXPERTS = "experts' products"
_V3_WIDTH, _V3_INNER = 7168, 2048
"""Hidden size and expert width of DeepSeek-V3, whose experts were timed."""
_MAX_CONVERTED = 2.0**22
"""Largest number of rows or tokens whose times are converted from another device; beyond it, seconds are proportional to the number."""


class DecodeTimes(NamedTuple):
    """Decode attention with one cache dtype: the timed rows and contexts, seconds as a function of both, relative spread and source."""

    rows: Sequence[float]
    contexts: Sequence[float]
    seconds: Callable[[float, float], float]
    spread: float
    source: str


@dataclass(frozen=True)
class Chip:
    """One device and the precision of its weights. Raises `UserError` if the device has no unit for that precision."""

    hardware: Hardware
    precision: Precision
    operators: OperatorTables = BUNDLED
    curves: dict = field(default_factory=dict, compare=False, repr=False)  # shared by all users
    priced: dict = field(default_factory=dict, compare=False, repr=False)  # seconds in the current draw
    fp8_mla: bool = False  # on an H20, decode may also compute in FP8 with an FP8 cache
    # maximum FLOP/s (value, low, high) of dense FP8 products with the engine's kernel
    fp8_rate: tuple[float, float, float] | None = None

    def __post_init__(self):
        refuse("units", precision=self.precision, chip=self.hardware)

    @cached_property
    def relative_speed(self) -> float:
        """Assumed speed of this device ÷ the speed converted from another die's measurements; 1 on the same die."""
        hardware = self.hardware
        if hardware.same_die or hardware.key == hardware.operators:
            return 1.0
        why = f"measured on {hardware.operators or 'h200'}, not on {hardware.name}"
        return assumed(1.0, 0.8, 1.1, "carried over to this device", why)

    @cached_in("priced")
    def _uncertainty(self, spread: float, name: str, source: str) -> float:
        """Factor on a timed result: 1 with a relative uncertainty of `spread` each way, divided by `relative_speed`."""
        return measured(1.0, 1 / (1 + spread), 1 + spread, name, source) / self.relative_speed

    def _find_table(self, lookup: Callable, *arguments: object, last: str = "") -> tuple:
        """Return a table and the device it was timed on: this one, else a substitute (`operators`, `last`). (None, None) if absent."""
        for key in filter(None, (self.hardware.key, self.hardware.operators or "h200", last)):
            if table := lookup(key, *arguments):
                return table, self.operators.device(key)
        return None, None

    def _converted_curve(
        self, points: Iterable[tuple[float, float, OperationWork]], timed_on: Hardware, fixed: float
    ) -> Curve:
        """Convert points (size, seconds on `timed_on`, work) to a curve of seconds on this device."""
        return Curve((size, convert_seconds(time, work, timed_on, self.hardware, fixed)) for size, time, work in points)

    def product(self, rows: float, n: int, k: int, *, expert: bool = False) -> float:
        """Seconds of a dense product `[rows, k] × [k, n]` with bf16 results and weights in the precision's dtype."""
        itemsize = self.precision.mlp if expert else self.precision.linear
        return self._product(rows, n, k, table_format(itemsize))

    def bf16_product(self, rows: float, n: int, k: int) -> float:
        """Seconds of a product with bf16 weights: absorbed matrices, head, router."""
        return self._product(rows, n, k, "bfloat16")

    @cached_in("priced")
    def _product(self, rows: float, n: int, k: int, dtype: str) -> float:
        curves, spread, source = self._product_curves(n, k, dtype)
        seconds = math.sqrt(curves[0](rows) * curves[1](rows)) if len(curves) == 2 else curves[0](rows)
        seconds *= self._uncertainty(spread, "products", source)
        if self.fp8_rate is None or dtype != "fp8_block":
            return seconds
        # The engine's own kernel limits the speed.
        rate = measured(*self.fp8_rate, "rate of dense FP8 products", FLASHINFER_FP8, "FLOP/s")
        return max(seconds, 2.0 * rows * n * k / rate)

    @cached_in("curves")
    def _product_curves(self, n: int, k: int, dtype: str) -> tuple[list[Callable[[float], float]], float, str]:
        """(a curve of seconds over rows from each applicable table, relative spread of their geometric mean, its source)."""
        hardware = self.hardware

        def convert(curve: Curve, timed_on: Hardware) -> Curve:
            sizes = sorted({*curve.sizes, *doublings(1.0, _MAX_CONVERTED)})
            return self._converted_curve(((s, curve(s), product_work(s, n, k, dtype)) for s in sizes), timed_on, LAUNCH)

        table, timed_on = self._find_table(self.operators.product, dtype, n, k)
        curves = []
        spread = 0.15
        source = AICONFIGURATOR
        if table:
            curves = [convert(table, timed_on)]
            spread = max(0.05, min(0.25, self.operators.product_error(timed_on.key, dtype)))
        if dtype in ("fp8_block", "bfloat16") and (hardware.platform != "cuda" or hardware.is_hopper):
            deepgemm = convert(dense_curve(n, k, dtype), bundled_device("h800"))
            if table is None or hardware.key == "h800":
                curves = [deepgemm]
                source = DEEPGEMM
            elif timed_on.key != hardware.key:
                # Two tables of the same die, neither of this device: take their geometric mean.
                curves, spread, source = [deepgemm, *curves], 0.25, f"{DEEPGEMM}; {AICONFIGURATOR}"
        if not curves:
            curves, spread = [lambda rows: 2 * product_work(rows, n, k, dtype).seconds(hardware)], 0.25
            source = "half of the device's ceilings, for want of a table"
        return curves, spread, source

    def experts(
        self, used: float, rows: float, received: float, slots: float, width: int, inner: int, decode: bool
    ) -> float:
        """Return the seconds of a rank's routed experts: `received` tokens make `rows` rows, for `used` of the rank's `slots`."""
        if not decode and (contiguous := self._contiguous_layout(width, inner)):
            terms, least, spread = contiguous
            seconds = sum(term * size for term, size in zip(terms, (rows, received, slots, 1.0), strict=True))
            return max(least, seconds) * self._uncertainty(spread, _EXPERTS, AICONFIGURATOR)
        grid, spread, source = self._masked_layout(width, inner)
        return grid(used, rows) * self._uncertainty(spread, _EXPERTS, source)

    def _work(self, used: float, rows: float, width: int, inner: int) -> OperationWork:
        return experts_work(used, rows, width, inner, self.precision.expert, self.precision.expert_bits)

    def _convert_v3_experts(
        self,
        seconds: float,
        used: float,
        rows: float,
        rows_each: float,
        size: tuple[int, int],
        timed_on: Hardware,
        fixed: float,
    ) -> float:
        """Convert seconds of V3's FP8 experts on `timed_on` to experts of `size` (width, inner width) here. rows_each: per expert."""
        work = self._work(used, rows, *size)
        v3 = (_V3_WIDTH, _V3_INNER)
        ratio = work.seconds(timed_on) / experts_work(used, rows, *v3, 1.0, 8).seconds(timed_on)
        if work.bits == 4:  # from the dense table: there is no grouped one for FP4
            shapes = ((2 * _V3_INNER, _V3_WIDTH), (_V3_WIDTH, _V3_INNER))

            def dense_seconds(dtype: str) -> float:
                curves = [self.operators.product(timed_on.key, dtype, *shape) for shape in shapes]
                return sum(curve(max(rows_each, 1.0)) for curve in curves) if all(curves) else 0.0

            fp4, fp8 = dense_seconds("nvfp4"), dense_seconds("fp8_block")
            ratio = (fp4 / fp8 if fp4 and fp8 else 0.5) * math.prod(size) / math.prod(v3)
        return convert_seconds(seconds * ratio, work, timed_on, self.hardware, fixed)

    @cached_in("curves")
    def _masked_layout(self, width: int, inner: int) -> tuple[Grid, float, str]:
        """Return (seconds over used experts and total rows, relative spread, source) of decode's masked layout."""
        curves, timed_on = self._find_table(self.operators.grouped_decode)
        curves = curves or {}
        timed_on = timed_on or bundled_device("h800")
        last = max(curves, default=1.0)

        def time(used: float, rows: float) -> float:
            if curves:
                # Beyond the last curve, proportional to the experts: reading their weights dominates.
                seconds = curves[min(used, last)](rows / used) * max(1.0, used / last)
                fixed = 20e-6
            else:
                seconds = grouped_seconds(used, rows)
                fixed = LAUNCH
            return self._convert_v3_experts(seconds, used, rows, rows / used, (width, inner), timed_on, fixed)

        expert_counts = sorted({*curves, *doublings(max(last, 1.0), 512)})
        spread = 0.2 if self.precision.expert < 1 else 0.1 if curves else 0.15
        return Grid(expert_counts, doublings(1.0, _MAX_CONVERTED), time), spread, AICONFIGURATOR if curves else DEEPGEMM

    @cached_in("curves")
    def _contiguous_layout(self, width: int, inner: int) -> tuple[tuple[float, ...], float, float] | None:
        """Return ((seconds of a row, a received token, a slot, a step), minimum seconds of the sum, relative spread) of prefill's
        contiguous layout. Each term is converted separately, so that the sum grows with each size."""
        table, timed_on = self._find_table(self.operators.grouped_prefill)
        if not table:
            return None
        convert = partial(self._convert_v3_experts, size=(width, inner), timed_on=timed_on, fixed=0.0)
        no_work = OperationWork(0.0, 16, 0.0)
        row = convert(table.row, used=0.0, rows=1.0, rows_each=4096.0)
        token = convert_seconds(table.token * width / _V3_WIDTH, no_work, timed_on, self.hardware, 0.0)
        slot = convert(table.slot, used=1.0, rows=0.0, rows_each=1.0)
        spread = 0.2 if self.precision.expert < 1 else max(0.08, table.error)
        return (row, token, slot, table.fixed), table.least, spread

    def fused_experts(
        self, tokens: float, touched: Callable[[float], float], key: object, tp: int, ep: int
    ) -> float | None:
        """Seconds of the fused kernel of engines without wide EP, with experts split `tp` ways; None if it was not timed.

        On Hopper it is SGLang's Triton kernel, for FP8. On Blackwell it is TensorRT-LLM's own, which SGLang can use too
        (`--moe-runner-backend flashinfer_trtllm`), for FP8 and NVFP4; it was timed with all experts on every rank.
        touched: number of tokens → experts that they use; `key` is its cache key. The table's even routing touches more experts: the time
        of their weights is subtracted."""
        if not (self.hardware.same_die or self.hardware.is_blackwell):
            return None
        curve, _ = self._routed_curve(touched, key, ep, tp)
        if curve is None:
            return None
        return curve(tokens) * self._uncertainty(0.1, "fused experts", AICONFIGURATOR)

    def spread_experts(
        self,
        tokens: float,
        busiest: Callable[[float], float],
        key: object,
        ep: int,
        imbalance: Callable[[float], float] | None,
    ) -> tuple[float, bool] | None:
        """Return (seconds of whole experts on the busiest of `ep` ranks without DeepEP, whether `tokens` is within the timed range).

        None if no engine without DeepEP was timed. Beyond the timed range, return the seconds of the largest timed size, a lower bound.
        In such an engine, each rank has all tokens of the group; the timings include its work before and after the experts' matmuls.
        busiest: number of tokens → experts used on the rank that uses most; `key` is its cache key. The table's even routing uses fewer:
        the time of the missing weights is added. imbalance: tokens → rows of the busiest rank ÷ mean, if time depends on rows, not weights.
        """
        curve, even = self._routed_curve(busiest, key, ep, None)
        if curve is None:
            return None
        timed = min(tokens, curve.sizes[-1])
        seconds = curve(timed) * self._uncertainty(0.1, "spread experts", AICONFIGURATOR)
        # A table of uneven routing already has the busiest rank's time.
        if even and imbalance is not None:
            seconds *= imbalance(timed)
        return seconds, tokens == timed

    def _routed_curve(
        self, used: Callable[[float], float], key: object, ep: int, tp: int | None
    ) -> tuple[Curve | None, bool]:
        """Return (seconds over tokens, adjusted from even routing to `used` experts; whether routing was even), for V3's widths.
        The curve is None if there is no table. With `tp`: the fused kernel, and `used` counts the experts of all `ep` ranks; without: one
        rank of whole experts. key: cache key of `used`."""
        key = ("routed experts", key, ep, tp)
        if key not in self.curves:
            self.curves[key] = self._make_routed_curve(used, ep, tp)
        return self.curves[key]

    def _make_routed_curve(self, used: Callable[[float], float], ep: int, tp: int | None) -> tuple[Curve | None, bool]:
        timed, timed_on = self._find_table(self.operators.experts, table_format(self.precision.expert), ep, tp)
        if not timed:
            return None, False
        table, even = timed
        split, counted_ranks, first = (1, ep, 8) if tp else (ep, 1, 1)
        slots = 256 / split  # experts of the counted ranks
        # From 1 token (`first` experts) to 32 tokens (all experts), the table grows by the time to read the experts' weights.
        seconds_each = (table(32) - table(1)) / (slots - first) if even and slots > first else 0.0
        points = []
        for tokens in sorted({*table.sizes, *doublings(1.0, _MAX_CONVERTED, 2)}) if tp else table.sizes:
            touched = used(tokens)
            seconds = table(tokens) + (touched - min(slots, 8 * tokens / split)) * seconds_each
            work = self._work(touched / counted_ranks, tokens * 8 / ep, _V3_WIDTH, _V3_INNER // (tp or 1))
            points.append((tokens, max(seconds, table.seconds[0]), work))
        return self._converted_curve(points, timed_on, 20e-6), even

    @property
    def _caches(self) -> list[str]:
        """Dtypes in which an engine may compute attention. An engine may also convert an FP8 cache to bf16, on read or on write."""
        return ["bfloat16", "fp8"] if self.precision.cache < BF16 else ["bfloat16"]

    def _bits(self, cache: str) -> int:
        return 8 if cache == "fp8" and self.hardware.is_blackwell else 16

    @cached_in("priced")
    def decode_attention(self, heads: float, rows: float, context: float, latent: int, rank: int) -> float:
        """Seconds of absorbed attention in one layer: `rows` requests with `context` cached positions each, of `latent` values."""
        heads = round(heads, 6)  # a quotient; rounding keeps 32.0000001 from counting as 33
        grid, spread, source = self._decode_grid(heads, latent, rank, self.fp8_mla)
        return grid(rows, context) * self._uncertainty(spread, "attention", source)

    @cached_in("curves")
    def _decode_grid(self, heads: float, latent: int, rank: int, fp8_mla: bool) -> tuple[Grid, float, str]:
        # A kernel that converts an FP8 cache is at least as fast as the bf16 one, as it reads half the bytes.
        options = [self._decode_times(cache, heads, latent, rank) for cache in self._caches]
        candidates = [option.seconds for option in options]
        best = options[-1]
        if fp8_mla and self.hardware.is_hopper_cut_down and len(options) > 1:
            # The kernel published for the H20 multiplies queries, keys and values in FP8.
            bf16 = options[0]
            best = bf16._replace(spread=math.hypot(bf16.spread, 0.06), source=f"{bf16.source}; {FP8_MLA}")
            candidates.append(lambda rows, context: bf16.seconds(rows, context) / FP8_MLA_GAIN)

        def fastest(rows: float, context: float) -> float:
            return min(seconds(rows, context) for seconds in candidates)

        return Grid(best.rows, best.contexts, fastest), best.spread, best.source

    def _decode_times(self, cache: str, heads: float, latent: int, rank: int) -> DecodeTimes:
        """Return the times with an FP8 or bf16 cache."""
        itemsize = self.precision.cache if cache == "fp8" else BF16
        (curves, spread), timed_on = self._find_table(
            self.operators.decode_attention, cache, math.ceil(heads), last="h200"
        )
        least = min(curve.seconds[0] for curve in curves.values())

        def work(rows: float, context: float, values: int, out: int) -> OperationWork:
            positions = rows * context
            flops = 2.0 * heads * (values + out) * positions
            return OperationWork(flops, self._bits(cache), positions * values * itemsize)

        def time(rows: float, context: float) -> float:
            target, v3 = work(rows, context, latent, rank), work(rows, context, 576, 512)
            nearest = curves[min(curves, key=lambda timed: abs(timed - rows))]
            seconds = nearest(context) * target.seconds(timed_on) / v3.seconds(timed_on)
            return convert_seconds(seconds, target, timed_on, self.hardware, least)

        contexts = sorted({size for curve in curves.values() for size in curve.sizes})
        return DecodeTimes(sorted(curves), contexts, time, max(0.05, spread), AICONFIGURATOR)

    def absorbed_prompts(self, heads: int, tokens: float, context: float, latent: int, rank: int) -> float:
        """Return the seconds of absorbed attention in one layer of `tokens` prompt tokens with `context` positions each on average. Assumes
        95 % of FlashMLA's "up to" 660 TFLOP/s: this attention is compute-bound, and the decode tables end far below such sizes."""
        work = OperationWork(2.0 * heads * (latent + rank) * tokens * context, 16, 0.0)
        seconds = convert_seconds(work.flops / (0.95 * FLASH_MLA_FLOPS), work, bundled_device("h800"), self.hardware)
        return seconds * self._uncertainty(0.2, "attention", FLASH_MLA)

    @cached_in("priced")
    def prefill_attention(self, heads: int, tokens: float, prompts: float, context: float, per_pair: int) -> float:
        """Seconds of naive causal attention in one layer of `tokens` from `prompts` prompts, each attending to `context` on average.

        per_pair: key width + value width. A prompt with cached positions counts as an uncached one with the same mean context.
        """
        length = 2 * context - 1
        prompts = max(1.0, min(8.0, prompts))
        grids = [self._prefill_grid(cache, heads, per_pair) for cache in self._caches]
        seconds = min(max(least, tokens / prompts * grid(prompts, length)) for grid, least in grids)
        return seconds * self._uncertainty(0.07, "attention", AICONFIGURATOR)

    @cached_in("curves")
    def _prefill_grid(self, cache: str, heads: int, per_pair: int) -> tuple[Grid, float]:
        """Return (seconds of one token of each prompt, over the prompts in a step and their length; minimum seconds of a step). A token's
        time grows with the prompt length and falls with the number of prompts; the total time grows with that number."""
        table, timed_on = self._find_table(self.operators.prefill_attention, cache, heads, last="h200")
        least = min(min(times.values()) for times in table.values())

        def token_seconds(prompts: int, length: float) -> float:
            work = OperationWork(heads * per_pair * prompts * length * (length + 1), self._bits(cache), 0.0)
            seconds = table[length][prompts] * per_pair / 320
            return convert_seconds(seconds, work, timed_on, self.hardware, least) / (prompts * length)

        def time(prompts: int, length: float) -> float:
            return prompts * min(token_seconds(fewer, length) for fewer in table[length] if fewer <= prompts)

        return Grid(PROMPTS, sorted(table), time), least

    def stream(self, num_bytes: float) -> float:
        """Seconds of element-wise operations (norms, RoPE, activations) that move `num_bytes` bytes through memory."""
        return num_bytes / self._streaming

    @cached_property
    def _streaming(self) -> float:
        """Memory bytes per second of element-wise operations."""
        return assumption("element-wise share of bandwidth") * self.relative_speed * self.hardware.memory_bandwidth
