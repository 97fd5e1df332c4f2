"""A tiny model whose experts follow the load, for tests of the exchange and of the engine around it."""

from pathlib import Path

from layouts import InlinePool, prompts

from dsjax import LLM, SamplingParams
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.engine.experts.expert_balancer import ExpertBalancer


def load(directory: Path, mesh: str, *, eplb: dict | None = None, dtype: str = "float32", **options) -> LLM:
    """eplb: over 8 redundant experts and a window that never ends."""
    config = {"num_redundant_experts": 8, "window_size": 10**6, "step_interval": 10**6} | (eplb or {})
    llm = LLM(
        str(directory),
        mesh=mesh,
        dtype=dtype,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        prefill_chunk=16,
        page_size=4,
        enable_eplb=True,
        eplb_config=config,
        **options,
    )
    llm.engine.core.part(ExpertBalancer)._pool = InlinePool()
    executor = getattr(llm.executor, "inner", llm.executor)
    speculation = executor.buckets.speculation
    executor.buckets = Buckets(decode=(8,), prefill=(Rectangle(2, 16),), mixed=False, speculation=speculation)
    return llm


def generate(llm: LLM, tokens: int = 12) -> list[list[int]]:
    """Greedy continuations of the eight prompts."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), params)]
