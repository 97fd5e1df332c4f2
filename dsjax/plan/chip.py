"""`Chip`: seconds of single operations on one device: from the tables of operations, carried over to the device's own ceilings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dsjax.hardware import Hardware
from dsjax.plan.curves import Curve, Grid, doublings
from dsjax.plan.figure import assumed, measured
from dsjax.plan.operations import (
    DEEPGEMM,
    FLASH_MLA,
    FLASHINFER_FP8,
    FP8_MLA,
    FP8_MLA_GAIN,
    decode_attention_seconds,
    dense_curve,
    grouped_seconds,
    prefill_attention_seconds,
)
from dsjax.plan.operator_tables import AICONFIGURATOR, BUNDLED, Grouped, OperatorTables
from dsjax.plan.precision import BF16, Precision

_EXPERTS = "experts' products"
_CEILING = 0.95
"""The largest share of a ceiling that an operation is taken to reach on any device."""
_LAUNCH = 3e-6
"""Seconds of a kernel's start and end, which no ceiling changes."""
_V3_WIDTH, _V3_INNER = 7168, 2048
_FARTHEST = 2.0**22
"""Rows and tokens up to which times are carried over; beyond they grow in proportion."""


class OperationWork(NamedTuple):
    """What an operation has to do: operations, of which unit (`fp8`, `bf16`, `fp4`), and bytes of memory."""

    flops: float
    unit: str
    moved: float

    def on(self, chip: Hardware) -> tuple[float, float]:
        """Seconds of its operations and of its bytes at `_CEILING` of a device's figures."""
        peak = chip.bf16_flops if self.unit == "bf16" else chip.fp8_flops
        if self.unit == "fp4" and chip.fp4_flops:
            peak = chip.fp4_flops
        return self.flops / (_CEILING * peak), self.moved / (_CEILING * chip.memory_bandwidth)

    def best(self, chip: Hardware) -> float:
        """The longer of the two."""
        return max(self.on(chip))


def carried(seconds: float, work: OperationWork, there: Hardware, here: Hardware, fixed: float = _LAUNCH) -> float:
    """Seconds of an operation here that took `seconds` there.

    What it took beyond the bound of its operations and bytes is loss. A fixed part (starting the kernel) stays as it is. The rest
    is waiting for data, and shrinks as memory gets faster; the bound itself is the new device's. A device with few operations for
    each byte (H20) so reaches a larger share of its peak, by as much as its products take longer for the same waiting; and more of
    any resource never makes an operation slower.
    """
    if there is here or seconds <= 0:
        return seconds
    bound = work.best(there)
    if seconds <= bound:
        return seconds * work.best(here) / bound
    loss = seconds - bound
    fixed = min(fixed, loss)
    return work.best(here) + fixed + (loss - fixed) * there.memory_bandwidth / here.memory_bandwidth


@dataclass(frozen=True)
class Chip:
    """One device and the precision of its weights. operators: tables of operations.

    fp8_mla: decode multiplies an FP8 cache as FP8 on an H20, too. fp8_rate: operations a second (value, low, high) that dense FP8
    products reach at most with the engine's kernel; None: those of the tables. known: curves, which all users share; priced: seconds, in
    the draw at hand.
    """

    hardware: Hardware
    precision: Precision
    operators: OperatorTables = BUNDLED
    known: dict = field(default_factory=dict, compare=False, repr=False)
    priced: dict = field(default_factory=dict, compare=False, repr=False)
    fp8_mla: bool = False
    fp8_rate: tuple[float, float, float] | None = None

    def _once(self, key: tuple, make):
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = make()
        return known

    def _price(self, key: tuple, make: Callable[[], float]) -> float:
        seconds = self.priced.get(key)
        if seconds is None:
            seconds = self.priced[key] = make()
        return seconds

    def _device(self, key: str) -> Hardware:
        """A device as its file has it: what its table was measured on."""
        device = self.known.get(("device", key))
        if device is None:
            device = self.operators.device(key)
            # Where nothing was scaled it is this very device, whose times are not carried anywhere.
            same = self.hardware.key == key and (device.fp8_flops, device.bf16_flops, device.memory_bandwidth) == (
                self.hardware.fp8_flops, self.hardware.bf16_flops, self.hardware.memory_bandwidth
            )  # fmt: skip
            device = self.known["device", key] = self.hardware if same else device
        return device

    @property
    def tables_of(self) -> tuple[str, ...]:
        """Devices whose tables speak of this one: its own, that of the same die, or what is carried over."""
        return (self.hardware.key, self.hardware.operators or "h200")

    @cached_property
    def carried_over(self) -> float:
        """Factor on the speed of what another die was measured at; 1 on the same die."""
        hardware = self.hardware
        if hardware.same_die or hardware.key == hardware.operators:
            return 1.0
        why = f"measured on {hardware.operators or 'h200'}, not on {hardware.name}"
        return assumed(1.0, 0.8, 1.1, "carried over to this device", why)

    def _timed(self, seconds: float, spread: float, name: str, source: str) -> float:
        """What was timed, within `spread` of it each way, over what carrying it to another die adds."""
        return measured(1.0, 1 / (1 + spread), 1 + spread, name, source) * seconds / self.carried_over

    def _table(self, find) -> tuple[object, Hardware] | None:
        """The first device of `tables_of` for which there is a table, and that device."""
        for key in dict.fromkeys(self.tables_of):
            table = find(key)
            if table is not None:
                return table, self._device(key)
        return None

    # Products -----------------------------------------------------------------------------------------------------------------

    def product(self, rows: float, n: int, k: int, *, expert: bool = False) -> float:
        """Seconds of a dense product `[rows, k] × [k, n]` with bf16 results, weights of the precision's kind."""
        itemsize = self.precision.mlp if expert else self.precision.linear
        self.precision.peak(self.hardware, expert)
        return self._product(rows, n, k, "nvfp4" if itemsize < 1 else "fp8_block" if itemsize < BF16 else "bfloat16")

    def bf16_product(self, rows: float, n: int, k: int) -> float:
        """Seconds of a product with bf16 weights: absorbed matrices, head, router."""
        return self._product(rows, n, k, "bfloat16")

    def _product(self, rows: float, n: int, k: int, dtype: str) -> float:
        return self._price(("product", rows, n, k, dtype), lambda: self._at_most(rows, n, k, dtype))

    def _at_most(self, rows: float, n: int, k: int, dtype: str) -> float:
        """A product by the tables, no faster than the engine's own kernel for dense FP8 is."""
        seconds = self._by_tables(rows, n, k, dtype)
        if self.fp8_rate is None or dtype != "fp8_block":
            return seconds
        rate = measured(*self.fp8_rate, "rate of dense FP8 products", FLASHINFER_FP8, "FLOP/s")
        return max(seconds, 2.0 * rows * n * k / rate)

    def _by_tables(self, rows: float, n: int, k: int, dtype: str) -> float:
        table, readme, spread, best = self._once(("curves", n, k, dtype), lambda: self._product_curves(n, k, dtype))
        if table and readme and self.hardware.key != "h800":
            # Two tables of the same die, neither of this device: between them.
            return self._timed(math.sqrt(readme(rows) * table(rows)), 0.25, "products", f"{DEEPGEMM}; {AICONFIGURATOR}")
        if curve := readme or table:
            return self._timed(curve(rows), spread, "products", DEEPGEMM if readme else AICONFIGURATOR)
        return self._timed(best(rows) / 0.5, 0.25, "products", "half of the device's ceilings, for want of a table")

    def _product_curves(self, n: int, k: int, dtype: str):
        """(aiconfigurator's seconds here over rows, DeepGEMM's, the spread of the first, seconds at the ceilings).

        DeepGEMM's are None for a device that the first were timed on itself.
        """
        itemsize, unit = {"fp8_block": (1.0, "fp8"), "bfloat16": (2.0, "bf16"), "nvfp4": (0.5625, "fp4")}[dtype]

        def work(rows: float) -> OperationWork:
            return OperationWork(2.0 * rows * n * k, unit, n * k * itemsize + rows * (k * itemsize + 2 * n))

        curves = self._table(lambda key: self.operators.product(key, dtype, n, k))
        table, readme, spread = None, None, 0.15
        if curves:
            table = self._carried(*curves, work)
            spread = max(0.05, min(0.25, self.operators.product_error(curves[1].key, dtype)))
        timed_here = curves and curves[1].key == self.hardware.key
        if (self.hardware.platform != "cuda" or self.hardware.is_hopper) and dtype != "nvfp4" and not timed_here:
            readme = self._carried(dense_curve(n, k, itemsize), self._device("h800"), work)
        return table, readme, spread, lambda rows: work(rows).best(self.hardware)

    def _carried(
        self, curve: Curve, there: Hardware, work: Callable[[float], OperationWork], fixed: float = _LAUNCH
    ) -> Curve:
        """A curve of a device carried over to this one, and to sizes far beyond those that were timed."""
        sizes = sorted({*curve.sizes, *doublings(1.0, _FARTHEST)})
        return Curve((s, carried(curve(s), work(s), there, self.hardware, fixed)) for s in sizes)

    # Experts ------------------------------------------------------------------------------------------------------------------

    def experts_work(self, used: float, rows: float, width: int, inner: int) -> OperationWork:
        """Both products of routed experts: `rows` in all, the weights of `used` experts."""
        itemsize = self.precision.expert
        unit = self.precision.expert_unit
        moved = used * 3 * width * inner * itemsize + rows * (width * (min(itemsize, 2) + 2) + 5 * inner)
        return OperationWork(6.0 * rows * width * inner, unit, moved)

    def experts(
        self, used: float, rows: float, received: float, slots: float, width: int, inner: int, decode: bool
    ) -> float:
        """Seconds of a rank's routed experts: `rows` over `used` of its `slots`, of `received` tokens that were brought here.

        Decode's are in the masked layout of wide EP, prefill's in the contiguous one.
        """
        self.precision.peak(self.hardware, True)
        return self._timed(*self._experts(used, rows, received, slots, width, inner, decode))

    def _experts(
        self, used: float, rows: float, received: float, slots: float, width: int, inner: int, decode: bool
    ) -> tuple[float, float, str, str]:
        """(seconds, relative spread, name, source)."""
        curves = None if decode else self._table(self.operators.grouped_prefill)
        if curves:
            terms, spread = self._once(("contiguous", width, inner), lambda: self._contiguous(*curves, width, inner))
            each = sum(term * size for term, size in zip(terms, (rows, received, slots, 1.0), strict=True))
            return max(curves[0].least, each), spread, _EXPERTS, AICONFIGURATOR
        masked = self._once(("masked", width, inner, decode), lambda: self._masked(width, inner, decode))
        grid, spread, source = masked
        return grid(used, rows), spread, _EXPERTS, source

    def _masked(self, width: int, inner: int, decode: bool) -> tuple[Grid, float, str]:
        """(seconds over experts with rows and rows in all, relative spread, source): decode's layout, and prefill's without a table."""
        masked = self._table(self.operators.grouped_decode) if decode else None
        curves, there = masked or ({}, self._device("h800"))
        last = max(curves, default=1.0)

        def time(used: float, rows: float) -> float:
            if curves:
                # Beyond the last in proportion: there, the experts' weights are what takes time.
                seconds, fixed = curves[min(used, last)](rows / used) * max(1.0, used / last), 20e-6
            else:
                seconds, fixed = grouped_seconds(used, rows, decode), _LAUNCH
            work = self.experts_work(used, rows, width, inner)
            ratio = self._ratio(work, _usual_experts(used, rows), rows / used, width * inner, there)
            return carried(seconds * ratio, work, there, self.hardware, fixed)

        firsts = sorted({*curves, *doublings(max(last, 1.0), 512)})
        spread = 0.2 if self.precision.expert < 1 else 0.1 if curves else 0.15
        return Grid(firsts, doublings(1.0, _FARTHEST), time), spread, AICONFIGURATOR if curves else DEEPGEMM

    def _contiguous(self, table: Grouped, there: Hardware, width: int, inner: int) -> tuple[tuple[float, ...], float]:
        """(seconds of a row, of a token that was brought here, of a slot, of a step; relative spread): prefill's layout.

        Each is carried over by itself, so that their sum grows with each of the sizes.
        """
        curves = []
        for seconds, used, rows, each in ((table.row, 0.0, 1.0, 4096.0), (table.slot, 1.0, 0.0, 1.0)):
            work = self.experts_work(used, rows, width, inner)
            ratio = self._ratio(work, _usual_experts(used, rows), each, width * inner, there)
            curves.append(carried(seconds * ratio, work, there, self.hardware, 0.0))
        token = carried(table.token * width / _V3_WIDTH, OperationWork(0.0, "bf16", 0.0), there, self.hardware, 0.0)
        spread = 0.2 if self.precision.expert < 1 else max(0.08, table.error)
        return (curves[0], token, curves[1], table.fixed), spread

    def _ratio(self, work: OperationWork, usual: OperationWork, each: float, weights: int, there: Hardware) -> float:
        """Time of this precision and an expert of so many weights a matrix ÷ of V3's in FP8; `each`: rows of an expert."""
        if work.unit == "fp4":
            return self._fp4_ratio(each, there) * weights / (_V3_WIDTH * _V3_INNER)
        return work.best(there) / usual.best(there)

    def _fp4_ratio(self, each: float, there: Hardware) -> float:
        """Time in FP4 ÷ in FP8 of an expert's two products with so many rows, by the dense table: no grouped one is at hand."""
        shapes = ((2 * _V3_INNER, _V3_WIDTH), (_V3_WIDTH, _V3_INNER))
        pairs = [[self.operators.product(there.key, d, *s) for s in shapes] for d in ("nvfp4", "fp8_block")]
        if any(curve is None for pair in pairs for curve in pair):
            return 0.5
        fp4, fp8 = (sum(curve(max(each, 1.0)) for curve in pair) for pair in pairs)
        return fp4 / fp8

    def fused_experts(self, tokens: float, touched: Callable[[float], float], of: object, tp: int, ep: int):
        """Seconds of the fused kernel that engines without wide EP use, experts cut `tp` ways; None where it was not timed.

        Hopper's is SGLang's Triton kernel, for FP8. Blackwell's is TensorRT-LLM's own, which SGLang starts too
        (`--moe-runner-backend flashinfer_trtllm`), for FP8 and NVFP4; it was timed with all experts on every rank.
        touched: experts that have a token of so many, told apart by `of`; the table's even routing touches more, whose weights
        are taken off.
        """
        curve = self._once(("fused", of, tp, ep), lambda: self._fused_experts(touched, tp, ep))
        return curve and self._timed(curve(tokens), 0.1, "fused experts", AICONFIGURATOR)

    def _fused_experts(self, touched: Callable[[float], float], tp: int, ep: int) -> Curve | None:
        if self.precision.expert >= BF16 or not (self.hardware.same_die or self.hardware.is_blackwell):
            return None
        dtype = "nvfp4" if self.precision.expert < 1 else "fp8_block"
        curves = self._table(lambda key: self.operators.fused(key, dtype, tp, ep))
        if not curves:
            return None
        curve, there = curves
        # From one token on 8 experts to 32 on all 256 the table tells what an expert's weights take.
        of_one = (curve(32) - curve(1)) / (256 - 8)
        points = []
        for tokens in sorted({*curve.sizes, *doublings(1.0, _FARTHEST, 2)}):
            used = touched(tokens)
            seconds = max(curve(tokens) - max(0.0, min(256.0, 8 * tokens) - used) * of_one, curve.seconds[0])
            work = self.experts_work(used / ep, tokens * 8 / ep, _V3_WIDTH, _V3_INNER // tp)
            points.append((tokens, carried(seconds, work, there, self.hardware, 20e-6)))
        return Curve(points)

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
        tokens: of the group. busiest: experts with a token on the rank that has most of them, of so many tokens, told apart by `of`; the
        table's even routing touches fewer, whose weights are added. more: rows of the busiest rank ÷ of the mean one, of so many tokens,
        where the rows count and not the weights; a table that was not routed evenly is of the busiest rank.
        """
        found = self._once(("spread", of, ep), lambda: self._spread_experts(busiest, ep))
        if found is None:
            return None
        curve, even = found
        most = curve.sizes[-1]
        seconds = self._timed(curve(min(tokens, most)), 0.1, "spread experts", AICONFIGURATOR)
        return seconds * more(min(tokens, most)) if even and more is not None else seconds, tokens <= most

    def _spread_experts(self, busiest: Callable[[float], float], ep: int) -> tuple[Curve, bool] | None:
        if self.precision.expert >= BF16:
            return None
        dtype = "nvfp4" if self.precision.expert < 1 else "fp8_block"
        found = self._table(lambda key: self.operators.spread(key, dtype, ep))
        if not found:
            return None
        (curve, even), there = found
        slots = 256 / ep
        # From one token to 32 the table tells what an expert's weights take; routed evenly, they touch one of a rank's or all of them.
        of_one = (curve(32) - curve(1)) / (slots - 1) if even and slots > 1 else 0.0
        points = []
        for tokens in curve.sizes:
            used = busiest(tokens)
            seconds = curve(tokens) + (used - min(slots, 8 * tokens / ep)) * of_one
            work = self.experts_work(used, tokens * 8 / ep, _V3_WIDTH, _V3_INNER)
            points.append((tokens, carried(max(seconds, curve.seconds[0]), work, there, self.hardware, 20e-6)))
        return Curve(points), even

    # Attention ----------------------------------------------------------------------------------------------------------------

    def decode_attention(self, heads: float, rows: float, context: float, latent: int, rank: int) -> float:
        """Seconds of absorbed attention in one layer: `rows` requests at `context` cached positions of `latent` values each."""
        return self._price(
            ("decode", heads, rows, context, latent, rank),
            lambda: self._decode_attention(heads, rows, context, latent, rank),
        )

    def _decode_attention(self, heads: float, rows: float, context: float, latent: int, rank: int) -> float:
        heads = round(heads, 6)  # a quotient of rows: 32.0000001 heads are not 33
        key = ("decode grid", heads, latent, rank)
        grid, spread, source = self._once(key, lambda: self._decode_grid(heads, latent, rank))
        return self._timed(grid(rows, context), spread, "attention", source)

    def _decode_grid(self, heads: float, latent: int, rank: int) -> tuple[Grid, float, str]:
        ways = [self._decode_times(False, heads, latent, rank)]
        if self.precision.cache < BF16:
            ways.append(self._decode_times(True, heads, latent, rank))
            if self.fp8_mla and self.hardware.is_hopper_cut_down:
                ways.append(self._multiplied_in_fp8(*ways[0]))
        # A kernel that converts what it reads can do at least what the one for bf16 does, with half the bytes.
        rows, contexts, _, spread, source = ways[-1]
        return Grid(rows, contexts, lambda *at: min(time(*at) for _, _, time, _, _ in ways)), spread, source

    def _multiplied_in_fp8(self, rows, contexts, time, spread: float, source: str):
        """The times of a bf16 cache, with queries, keys and values multiplied as FP8 by the kernel that is published for the H20."""

        def faster(rows: float, context: float) -> float:
            return time(rows, context) / FP8_MLA_GAIN

        return rows, contexts, faster, math.hypot(spread, 0.06), f"{source}; {FP8_MLA}"

    def _decode_times(self, fp8: bool, heads: float, latent: int, rank: int):
        """(rows and contexts that were timed, seconds at two of them, relative spread, source) with a cache in FP8 or in bf16."""
        unit = "fp8" if fp8 and self.hardware.is_blackwell else "bf16"
        table = self._table(
            lambda key: self.operators.decode_attention(key, "fp8" if fp8 else "bfloat16", math.ceil(heads))
        )
        (curves, spread), there = table or (({}, 0.15), self._device("h800"))
        least = min((curve.seconds[0] for curve in curves.values()), default=_LAUNCH)

        def work(rows: float, context: float, values: int, out: int) -> OperationWork:
            flops = 2.0 * heads * (values + out) * rows * context
            return OperationWork(flops, unit, rows * context * values * (self.precision.cache if fp8 else BF16))

        def time(rows: float, context: float) -> float:
            rank_work = work(rows, context, latent, rank)
            if not curves:
                return carried(
                    decode_attention_seconds(rank_work.flops, rank_work.moved), rank_work, there, self.hardware
                )
            near = curves.get(rows) or curves[min(curves, key=lambda known: abs(known - rows))]
            seconds = near(context) * rank_work.best(there) / work(rows, context, 576, 512).best(there)
            return carried(seconds, rank_work, there, self.hardware, least)

        rows = sorted(curves) or doublings(1.0, 4096)
        contexts = sorted({size for curve in curves.values() for size in curve.sizes}) or doublings(32.0, 131_072)
        return rows, contexts, time, max(0.05, spread), AICONFIGURATOR if curves else FLASH_MLA

    def prefill_attention(self, heads: int, tokens: float, prompts: float, context: float, per_pair: int) -> float:
        """Seconds of naive causal attention in one layer of `tokens` from `prompts` prompts, each attending to `context` on average.

        per_pair: key and value widths together. A prompt behind cached positions counts as one whose mean token attends to as many.
        """
        return self._price(
            ("prefill", heads, tokens, prompts, context, per_pair),
            lambda: self._prefill_attention(heads, tokens, prompts, context, per_pair),
        )

    def absorbed_prompts(self, heads: int, tokens: float, context: float, latent: int, rank: int) -> float:
        """Seconds of absorbed attention in one layer of so many prompt tokens, each attending to `context` positions on average.

        With so many rows it is bound by its products. Tables of decode end long before, and FlashMLA's published rate is taken.
        """
        work = OperationWork(2.0 * heads * (latent + rank) * tokens * context, "bf16", 0.0)
        seconds = decode_attention_seconds(work.flops, 0.0)
        return self._timed(carried(seconds, work, self._device("h800"), self.hardware), 0.2, "attention", FLASH_MLA)

    def _prefill_attention(self, heads: int, tokens: float, prompts: float, context: float, per_pair: int) -> float:
        # With an FP8 cache an engine may still compute prompts in bf16, and quantises what it stores; the faster way counts.
        ways = [False, True] if self.precision.cache < BF16 else [False]
        times = [self._prefill_attention_in(fp8, heads, tokens, prompts, context, per_pair) for fp8 in ways]
        return min(times)

    def _prefill_attention_in(
        self, fp8: bool, heads: int, tokens: float, prompts: float, context: float, per_pair: int
    ) -> float:
        each = self._once(("prefill curves", fp8, heads, per_pair), lambda: self._prefill_curves(fp8, heads, per_pair))
        if each is None:
            work = OperationWork(2.0 * heads * per_pair * tokens * context, "bf16", 0.0)
            seconds = prefill_attention_seconds(work.flops, context)
            return self._timed(carried(seconds, work, self._device("h800"), self.hardware), 0.2, "attention", FLASH_MLA)
        curves, least = each
        length, prompts = 2 * context - 1, max(1.0, min(8.0, prompts))
        at = max(n for n in curves if n <= prompts)
        seconds = tokens * curves[at](length)
        if prompts > at:
            # Between two numbers of prompts the seconds of all of them are straight, not those of one.
            share = (prompts - at) / at
            seconds = (
                tokens / prompts * ((1 - share) * at * curves[at](length) + share * 2 * at * curves[2 * at](length))
            )
        return self._timed(max(least, seconds), 0.07, "attention", AICONFIGURATOR)

    def _prefill_curves(self, fp8: bool, heads: int, per_pair: int) -> tuple[dict[float, Curve], float] | None:
        """(prompts in a step → seconds of a token over the length of a prompt, seconds that no step is below).

        A token takes longer in a longer prompt, less beside more prompts; and more prompts take longer together.
        """
        timed = self._table(lambda key: self.operators.prefill_attention(key, "fp8" if fp8 else "bfloat16", heads))
        if not timed:
            return None
        table, there = timed
        unit = "fp8" if fp8 and self.hardware.is_blackwell else "bf16"
        least = min(min(times.values()) for times in table.values())
        tokens: dict[float, dict[float, float]] = {}
        for length, times in table.items():
            for prompts, seconds in times.items():
                work = OperationWork(heads * per_pair * prompts * length * (length + 1), unit, 0.0)
                seconds = carried(seconds * per_pair / 320, work, there, self.hardware, least)
                tokens.setdefault(prompts, {})[length] = seconds / (prompts * length)
        counts = sorted(tokens)
        for before, after in itertools.pairwise(counts):
            tokens[after] = {n: min(time, tokens[before][n]) for n, time in tokens[after].items()}
        for before, after in itertools.pairwise(counts[::-1]):
            tokens[after] = {n: min(time, tokens[before][n] * before / after) for n, time in tokens[after].items()}
        return {count: Curve(tokens[count].items(), lambda length: length) for count in counts}, least

    def stream(self, moved: float) -> float:
        """Norms, rotation, activations: `moved` bytes through memory."""
        return moved / self._streaming

    @cached_property
    def _streaming(self) -> float:
        """Bytes a second."""
        share = assumed(
            0.75, 0.55, 0.9, "element-wise share of bandwidth", "at best a plain copy: 4.3 of 4.8 TB/s, H200"
        )
        return share * self.carried_over * self.hardware.memory_bandwidth


def _usual_experts(used: float, rows: float) -> OperationWork:
    """Both products of experts as they were timed: V3's widths, FP8."""
    moved = used * 3 * _V3_WIDTH * _V3_INNER + rows * (3 * _V3_WIDTH + 5 * _V3_INNER)
    return OperationWork(6.0 * rows * _V3_WIDTH * _V3_INNER, "fp8", moved)
