"""`dsjax doctor --exact`: compare meshes, dispatch methods and MLA forms with one device. JAX is imported only when it runs."""

from __future__ import annotations

import functools
import itertools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dsjax.errors import UserError
from dsjax.model.forms import FORMS
from dsjax.options import Checked, OptionError, option

if TYPE_CHECKING:
    from rich.console import Console

    from dsjax.llm import LLM

MESHES = (
    "dp=1", "dp=8", "dp=2,tp=4", "tp=8", "tp=8,ep=1", "dp=8,ep=2", "dp=32", "dp=4,tp=8", "dp=16,tp=2,ep=8", "dp=8,ep=1,etp=8",
    "dp=8,ep=2,etp=4", "pp=2", "pp=3,dp=2", "pp=2,tp=4", "pp=2,dp=4,ep=2", "dp=4+ep=4", "dp=2,tp=2+ep=8",
)  # fmt: skip
"""`ATTENTION+EXPERTS` are two meshes; the host moves the rows between them, and their dispatch is `auto`."""
DISPATCHES = ("gather", "padded", "ragged", "hierarchical")
PAIRS = (("CC", "A_CC_ME"), ("A_CC_ME", "CC"))
"""(prefill, decode): each form with kernels is used once for prefill and once for decode."""
OWN = ("own", "own")
"""The forms that the engine chooses by default; the only pair for a model without MLA."""
VARIED: dict[str, dict[str, Any]] = {
    "speculative-config": {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
    "no-async-scheduling": {"async_scheduling": False},
    "enable-eplb": {"enable_eplb": True, "eplb_config": {"window_size": 4, "step_interval": 4, "payback": 0}},
    "enable-shared-experts-fusion": {"enable_shared_experts_fusion": True},
    "enable-dp-lm-head": {"moe_dense_tp_size": 1, "enable_dp_lm_head": True},
    "enable-dbo": {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2},
    "embedding-location": {"embedding_location": "host"},
}
"""Name in `--vary` → engine options of a run with it."""
CHANGES_NUMBERS = ("enable_shared_experts_fusion",)
"""Options that the one-device reference must share to give the same bits."""
NEW_TOKENS = 64
_LENGTHS, _DEVICES_PER_HOST = (1, 3, 7, 12, 16, 17, 30, 41), 4


def parse_slice(text: str) -> slice:
    """Parse `K/N`, every N-th run starting with the K-th, into a slice of a sequence.

    Raises:
        OptionError: not of this form, or K is larger than N.
    """
    found = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise OptionError(f"--slice is {text!r}, expected K/N with K from 1 to N, such as 3/77")
    return slice(int(found[1]) - 1, None, int(found[2]))


@dataclass(frozen=True)
class ExactOptions(Checked):
    """With --exact."""

    exact: bool = option(False, "Compare mesh layouts with one device. Takes minutes.", switch=True)
    model: str = option("demo", "Name of a bundled model, Hugging Face repository id, or checkpoint path.")
    mesh: list[str] | None = option(None, "Only this mesh, or ATTENTION+EXPERTS for AFD. Can be repeated.")
    dispatch: list[str] | None = option(None, f"Only this method: auto, {', '.join(DISPATCHES)}. Can be repeated.")
    mla: list[str] | None = option(
        None, "Only these MLA forms, such as CC/A_CC_ME (prefill/decode), or own for the default. Can be repeated."
    )
    vary: list[str] | None = option(
        None, f"Repeat each run with this option: {', '.join(VARIED)}. Can be repeated for all combinations."
    )
    slice: str = option("1/1", "K/N: every N-th run from the K-th. An N without factors 2, 3 and 5 covers all options.")
    weights: str = option("auto", "As in dsjax serve, for all layouts.")
    kv_cache_dtype: str = option("auto", "As in dsjax serve, for all layouts.")
    activation_scheme: str = option("auto", "As in dsjax serve, for all layouts.")
    kernels: str = option("auto", "As in dsjax serve. Native kernels are also compared with plain ones.")

    @property
    def runs(self) -> list[tuple[str, str, tuple[str, str], tuple[str, ...]]]:
        """(mesh, dispatch, MLA forms, varied options) of each run in the slice.

        Raises:
            OptionError: `--slice`, `--mla` or `--vary` is invalid.
        """
        if unknown := [name for name in self.vary or () if name not in VARIED]:
            raise OptionError(f"--vary is {unknown[0]!r}, expected one of {', '.join(VARIED)}")
        pairs = [OWN if pair == "own" else tuple(pair.split("/")) for pair in self.mla or map("/".join, PAIRS)]
        if wrong := [pair for pair in pairs if pair != OWN and (len(pair) != 2 or not {*pair} <= FORMS.keys())]:
            raise OptionError(f"--mla is {'/'.join(wrong[0])!r}, expected PREFILL/DECODE of {', '.join(FORMS)}")
        varied = [
            tuple(itertools.compress(self.vary or (), chosen))
            for chosen in itertools.product((False, True), repeat=len(self.vary or ()))
        ]
        runs = [
            (mesh, dispatch, pair, names)
            for mesh in self.mesh or MESHES
            for dispatch in (("auto",) if "+" in mesh else self.dispatch or ("auto", *DISPATCHES))
            for pair in pairs
            for names in varied
        ]
        return runs[parse_slice(self.slice)]


@dataclass(frozen=True)
class Answer:
    """A layout's output: logits at every position of the longest prompt, and greedy continuations of all prompts with log-probabilities."""

    logits: np.ndarray | None  # None if not requested
    tokens: list[list[int]]
    logprobs: list[list[float]] = field(default_factory=list)
    exact: bool = False  # whether these numbers are bitwise equal on every layout (`ModelStep.is_exact`)
    rebalances: int | None = None  # number of expert rebalances; None without EPLB


def prompts(vocab_size: int) -> list[dict[str, list[int]]]:
    """Return eight prompts of different lengths."""
    rng = np.random.default_rng(5)
    return [{"prompt_token_ids": rng.integers(2, vocab_size, size=length).tolist()} for length in _LENGTHS]


def meshes_of(layout: str) -> dict[str, str]:
    """Return the engine options for a layout's mesh, or for both meshes of `ATTENTION+EXPERTS`."""
    attention, _, experts = layout.partition("+")
    return {"attention_mesh": attention, "expert_mesh": experts} if experts else {"mesh": attention}


def answer(
    model: str,
    layout: str,
    dispatch: str,
    prefill: str,
    decode: str,
    *,
    mixed: bool = False,
    new_tokens: int = NEW_TOKENS,
    every_token: bool = True,
    prepare: Callable[[LLM], None] = lambda llm: None,
    **options: Any,
) -> Answer:
    """Run the eight prompts as one batch on a layout.

    mixed: batch decodes and prefills in one dispatch. every_token: compute the logits at every position, which compiles one more program.
    prepare: called with the engine before it runs.
    """
    from dsjax import LLM, SamplingParams
    from dsjax.checkpoint.hub import resolve_config
    from dsjax.config import load_config
    from dsjax.engine.device.buckets import Buckets, Rectangle

    own = meshes_of(layout)
    hosts = {} if "expert_mesh" in own else {"devices_per_host": _DEVICES_PER_HOST}  # several hosts for `hierarchical`
    page_size = math.lcm(4, load_config(resolve_config(model)).page_tokens)
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "prefill_chunk": 16, "page_size": page_size}
    forms = {} if (prefill, decode) == OWN else {"mla_prefill": prefill, "mla_decode": decode}
    llm = LLM(model, dtype="float32", dispatch=dispatch, **{**sizes, **forms, **own, **hosts, **options})
    try:
        # Three programs (four if mixed) instead of a dozen: this compares layouts, not buckets.
        speculation = llm.executor.buckets.speculation
        llm.executor.buckets = Buckets(decode=(8,), prefill=(Rectangle(2, 16),), mixed=mixed, speculation=speculation)
        prepare(llm)
        asked = prompts(llm.config.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=0)
        made = [output.outputs[0] for output in llm.generate(asked, params)]
        logits = llm.logits([asked[-1]["prompt_token_ids"]])[0] if every_token else None
        balance = llm.engine.core.statistics().get("balance")
        logprobs = [
            [entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True)] for one in made
        ]
        rebalances = None if balance is None else balance.rebalances
        return Answer(logits, [one.token_ids for one in made], logprobs, llm.executor.model.is_exact, rebalances)
    finally:
        llm.shutdown()


def difference(found: Answer, reference: Answer) -> str | None:
    """Describe how an answer differs from the reference; None if it does not.

    Two exact answers must be bitwise equal. Otherwise logits may differ by 1e-4 × max(1, the reference's largest magnitude), and greedy
    tokens must be equal. Logits are compared only if both answers have them.
    """
    exact = found.exact and reference.exact
    if found.logits is not None and reference.logits is not None:
        delta = float(np.abs(found.logits - reference.logits).max())
        allowed = 0 if exact else 1e-4 * max(1.0, float(np.abs(reference.logits).max()))
        if not delta <= allowed:
            return f"logits differ by {delta:.2e}, allowed {allowed:.2e}"
    for what in ("logprobs", "tokens") if exact else ("tokens",):
        for index, (ours, theirs) in enumerate(zip(getattr(found, what), getattr(reference, what), strict=True)):
            if list(ours) != list(theirs):
                return f"prompt {index}: {what} {ours} instead of {theirs}"
    return None


def sweep(options: ExactOptions, console: Console) -> list[dict[str, Any]]:
    """Execute the runs, print each result, and return all; `verdict` is `equal`, `left out: …`, `no expert moved` or the difference.

    An exact run is compared with one device under the same arithmetic, which is compared with the plain kernels up to rounding; other
    runs are compared with the plain kernels.
    """
    from sharding.emulation import emulate_devices
    from sharding.errors import MeshError

    runs, rows = options.runs, []
    emulate_devices(32)
    kept = {name: getattr(options, name) for name in ("weights", "kv_cache_dtype", "activation_scheme")}

    @functools.cache
    def one_device(prefill: str, decode: str, kernels: str, *changes: tuple[str, Any]) -> Answer:
        return answer(options.model, "dp=1", "auto", prefill, decode, kernels=kernels, **kept, **dict(changes))

    for number, (mesh, dispatch, forms, names) in enumerate(runs, 1):
        own, began, exact = {k: v for name in names for k, v in VARIED[name].items()}, time.monotonic(), False
        try:
            found = answer(options.model, mesh, dispatch, *forms, kernels=options.kernels, **own, **kept)
        except (UserError, MeshError) as error:
            verdict = f"left out: {error}"
        else:
            exact, plain = found.exact, one_device(*(forms if forms == OWN else ("CC", "A_CC_ME")), "plain")
            reference = plain
            verdict = "equal" if found.rebalances != 0 else "no expert moved"
            if exact:
                changes = [(name, own[name]) for name in CHANGES_NUMBERS if name in own]
                reference = one_device(*forms, options.kernels, *changes)
                # An activation halfway between two FP8 numbers may round to either, depending on float32 rounding.
                rounds = options.activation_scheme not in ("auto", "none")
                verdict = (not rounds and difference(reference, plain)) or verdict
            verdict = difference(found, reference) or verdict
        row = {"mesh": mesh, "dispatch": dispatch, "mla": "/".join(forms), "vary": names, "verdict": verdict}
        rows.append(row | {"exact": exact, "seconds": time.monotonic() - began})
        name = " ".join((mesh, dispatch, row["mla"], *names))
        said = f"{verdict} to the bit" if exact and verdict == "equal" else verdict
        console.print(
            f"{number}/{len(runs)} {name}: {said} ({rows[-1]['seconds']:.1f} s)", highlight=False, markup=False
        )
    return rows
