"""A tiny checkpoint, and the sweep over layouts, dispatches and MLA forms that tests and ``tools/check_layouts.py`` share."""

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from goldens.our_model import bound, expected_shapes, hf_tensors
from goldens.random_weights import RandomWeights

from dsjax import LLM, SamplingParams
from dsjax.checkpoint.safetensors import TensorSpec, write_file
from dsjax.config import ModelConfig
from dsjax.config.weights import WEIGHT_FORMATS
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.experts.expert_balancer import ExpertBalancer
from dsjax.model.forms import reads

LAYOUTS = (
    "dp=1",
    "dp=8",
    "dp=2,tp=4",
    "tp=8",
    "tp=8,ep=1",
    "dp=8,ep=2",
    "dp=32",
    "dp=4,tp=8",
    "dp=16,tp=2,ep=8",
    "dp=8,ep=1,etp=8",
    "dp=8,ep=2,etp=4",
    "pp=2",
    "pp=3,dp=2",
    "pp=2,tp=4",
    "pp=2,dp=4,ep=2",
)
APART = ("dp=4+ep=4", "dp=2,tp=2+ep=8")
"""Layouts with attention and experts on meshes of their own. The host takes the rows from one to the other: dispatch is ``auto``."""
DISPATCHES = ("gather", "padded", "ragged", "hierarchical")
DEVICES_PER_HOST = 4
"""``hierarchical`` is told that each host has so many, so that most layouts have several hosts of several devices each."""
# (prefill, decode): every form decodes once, and prefills once.
FORMS = (("CC", "A_CC_ME"), ("CC", "A_CC"), ("CD", "CD"), ("A_CC_ME", "AM_CC_ME"), ("A_CC", "CC"), ("AM_CC_ME", "CC"))
TINY = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS = {
    "v3": {},
    "v3.2": {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "index_topk": 12,  # of contexts of up to 105 tokens
        "index_n_heads": 4,
        "index_head_dim": 8,
    },
}
"""What each model of the sweeps changes in ``TINY``."""
ARITHMETIC = {"CC": "CC", "A_CC": "A_CC_ME", "A_CC_ME": "A_CC_ME", "AM_CC_ME": "AM_CC_ME", "CD": "CC"}
"""MLA form → the form that computes the same sums in the same order, where kernels are native."""
CHANGES_NUMBERS = ("enable_shared_experts_fusion", "index_scores")
"""Options of a layout's run that one device must have too, to give the same bits."""
BLOCK = 128
"""Side of the square blocks of FP8 weights that share a scale."""


def meshes_of(layout: str) -> dict[str, str]:
    """The options that name a layout's mesh, or of ``ATTENTION+EXPERTS`` both meshes."""
    attention, _, experts = layout.partition("+")
    return {"attention_mesh": attention, "expert_mesh": experts} if experts else {"mesh": attention}


def wide(tp: int) -> dict:
    """What to change in ``TINY`` for FP8 weights: every width that ``tp`` devices share is whole blocks on each of them."""
    if tp == 1:
        return {}
    of_head = BLOCK * tp // TINY["num_attention_heads"]
    heads = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), of_head)
    return heads | dict.fromkeys(("intermediate_size", "moe_intermediate_size"), BLOCK * tp)


def widths(weights: str, tp: int) -> dict:
    """What to change in ``TINY`` for these weights: as ``wide`` for FP8, and experts of whole blocks of FP4 on each of ``tp`` devices.

    weights: as of ``--weights``; ``auto`` keeps those of the checkpoint, which no block limits.
    """
    if weights == "auto":
        return {}
    row = WEIGHT_FORMATS[weights]
    changed = wide(tp) if row.keeps_fp8 else {}
    if row.expert_block is not None:
        least = row.expert_block * tp
        changed["moe_intermediate_size"] = max(changed.get("moe_intermediate_size", 0), least)
    return changed


LENGTHS = (1, 3, 7, 12, 16, 17, 30, 41)
NEW_TOKENS = 64


def write_checkpoint(directory: Path, seed: int = 7, *, mtp: bool = False, **changed) -> Path:
    """A float32 checkpoint of ``TINY`` in Hugging Face's form, its correction bias partly negative.

    mtp: with an MTP module. changed: fields of ``TINY``.
    """
    fields = TINY | {"num_nextn_predict_layers": int(mtp)} | changed
    config = ModelConfig.from_dict(fields)
    tensors = hf_tensors(config, RandomWeights(seed, bias_center=-0.2))
    assert tensors.keys() == expected_shapes(config).keys()
    specs = {name: TensorSpec(value.dtype, value.shape) for name, value in tensors.items()}
    write_file(directory / "model.safetensors", specs, tensors.__getitem__)
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def takes(model: str, forms: tuple[str, str]) -> bool:
    """Whether a model of ``MODELS`` can be computed in these forms."""
    return all(reads(form, np.float32, ModelConfig.from_dict(TINY | MODELS[model])) for form in forms)


def prompts() -> list[dict]:
    """Eight prompts of unequal length."""
    rng = np.random.default_rng(5)
    return [{"prompt_token_ids": rng.integers(2, TINY["vocab_size"], size=length).tolist()} for length in LENGTHS]


@dataclass(frozen=True)
class Answer:
    """What a layout gives: logits at every position of the longest prompt, and greedy continuations of all with their log-probabilities.

    logits: None where they were not asked for. exact: whether these numbers are the same to the bit on every layout
    (``ModelStep.is_exact``). rebalances: of experts that moved.
    """

    logits: np.ndarray | None
    tokens: list[list[int]]
    logprobs: list[list[float]] = field(default_factory=list)
    exact: bool = False
    rebalances: int = 0


class InlinePool:
    """Lets an engine decide at once where experts should be, so that a rebalance begins at the same step each time."""

    def submit(self, function) -> Future:
        done = Future()
        done.set_result(function())
        return done


def answer(
    directory: Path,
    layout: str,
    dispatch: str,
    prefill: str,
    decode: str,
    *,
    mixed: bool = False,
    new_tokens: int = NEW_TOKENS,
    every_token: bool = True,
    **options,
) -> Answer:
    """Run the eight prompts together on a layout.

    mixed: decodes and prompts share launches. every_token: compute the logits at every position, which takes one more program.
    """
    options = meshes_of(layout) | options
    if "expert_mesh" not in options:
        options = {"devices_per_host": DEVICES_PER_HOST} | options
    llm = LLM(
        str(directory),
        dtype="float32",
        dispatch=dispatch,
        mla_prefill=prefill,
        mla_decode=decode,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        prefill_chunk=16,
        page_size=4,
        **options,
    )
    # Three programs (four if mixed) instead of a dozen: this is about layouts, not buckets.
    speculation = llm.executor.buckets.speculation
    llm.executor.buckets = Buckets(decode=(8,), prefill=(Rectangle(2, 16),), mixed=mixed, speculation=speculation)
    balancer = llm.engine.core.part(ExpertBalancer)
    if balancer is not None:
        balancer._pool = InlinePool()
    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, logprobs=0)
    try:
        outputs = llm.generate(prompts(), params)
        logits = llm.logits([prompts()[-1]["prompt_token_ids"]])[0] if every_token else None
        rebalances = balancer.statistics().rebalances if balancer is not None else 0
        completions = [output.outputs[0] for output in outputs]
        tokens = [completion.token_ids for completion in completions]
        logprobs = [
            [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
            for completion in completions
        ]
        return Answer(logits, tokens, logprobs, llm.executor.model.is_exact, rebalances)
    finally:
        llm.shutdown()


class References:
    """What answers are held to: of runs that are exact one device's answer by the same arithmetic, of others that of the plain forms.

    One device's exact answer keeps the bound against that of the plain forms, but where activations are quantised: a value in the middle
    between two FP8 numbers becomes either, as float32 rounds. Such products are held to their definition by ``tests/dsjax/kernels``.
    one_device: ``(prefill, decode, **options) -> Answer`` on ``dp=1``, kernels among the options; fixed: options of every run.
    """

    def __init__(self, one_device: Callable[..., Answer], fixed: dict, kernels: str = "auto"):
        self._answer, self._fixed, self._kernels = one_device, fixed, kernels
        self._exact: dict[tuple, Answer] = {}

    @cached_property
    def plain(self) -> Answer:
        return self._answer("CC", "A_CC_ME", kernels="plain", **self._fixed)

    def of(self, found: Answer, prefill: str, decode: str, options: dict) -> Answer:
        """The answer that this one must give, which was made with ``options``.

        Raises:
            AssertionError: one device's exact answer does not keep the bound against that of the plain forms.
        """
        if not found.exact:
            return self.plain
        forms, changes = (
            (ARITHMETIC[prefill], ARITHMETIC[decode]),
            {name: options[name] for name in CHANGES_NUMBERS if name in options},
        )
        key = (*forms, *changes.items())
        if key not in self._exact:
            exact = self._exact[key] = self._answer(*forms, kernels=self._kernels, **self._fixed | changes)
            assert exact.exact
            rounds = self._fixed.get("activation_scheme", "auto") not in ("auto", "none")
            wrong = None if rounds else difference(exact, self.plain)
            assert wrong is None, f"one device, {'/'.join(forms)}: {wrong}"
        return self._exact[key]


def difference(found: Answer, reference: Answer) -> str | None:
    """How an answer differs from the reference's, or None.

    Two that are exact are equal to the bit; otherwise logits keep the bound of float32's rounding, and greedy tokens are equal. Logits
    that one of the two lacks are not compared.
    """
    exact = found.exact and reference.exact
    if found.logits is not None and reference.logits is not None:
        delta, allowed = float(np.abs(found.logits - reference.logits).max()), 0 if exact else bound(reference.logits)
        if not delta <= allowed:
            return f"logits differ by {delta:.2e}, allowed {allowed:.2e}"
    if exact and found.logprobs != reference.logprobs:
        index = next(
            i for i, pair in enumerate(zip(found.logprobs, reference.logprobs, strict=True)) if pair[0] != pair[1]
        )
        return f"prompt {index}: log-probabilities {found.logprobs[index]} instead of {reference.logprobs[index]}"
    for index, (ours, theirs) in enumerate(zip(found.tokens, reference.tokens, strict=True)):
        if list(ours) != list(theirs):
            return f"prompt {index}: greedy tokens {ours} instead of {theirs}"
    return None


def judge(found: Answer, reference: Answer, *, rebalances: int = 0) -> str:
    """What a run comes to: "equal", or what is wrong. rebalances: fewest that it must have made."""
    wrong = [text for text in [difference(found, reference)] if text]
    if found.rebalances < rebalances:
        wrong.append(f"only {found.rebalances} rebalances")
    return "; ".join(wrong) or "equal"
