"""DeepSeek-V4 in two processes, with its experts in a third: one device's tokens, with a quantised cache, drafts and offloading."""

import contextlib
import json

import pytest
from llm_process import generate, generate_alone, sample
from processes import free_port, outputs_of
from quick_compilation import FEW_SHAPES
from v4_models import write_v4_checkpoint

from dsjax.engine.expert_process import load_experts
from dsjax.engine.setup.args import EngineArgs

pytestmark = pytest.mark.slow

OPTIONS = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "cache_tokens": 36,
    "host_cache_bytes": 4_000_000,
}
QUANTISED = {"kv_cache_dtype": "fp8", "index_scores": "fp4"}


def written(folder, layers):
    """A checkpoint of a model with these layers, and the tokens of one device: greedy and drawn."""
    # With these rates each page of `FEW_SHAPES`, 4 tokens, ends at a window's end.
    sizes = {"rates": (2, 4), "sliding_window": 4, "num_nextn_predict_layers": 1, "head_dim": 80, "index_head_dim": 64}
    model = str(write_v4_checkpoint(folder, layers, hashed=1, **sizes))
    return model, *generate_alone(model, lambda llm: (generate(llm), sample(llm)), **FEW_SHAPES, **QUANTISED)


def hold_to_one_device(model, greedy, sampled, **options):
    """Two processes with these options make one device's tokens, and fetch pages that others pushed out."""
    options = {"model": model, **FEW_SHAPES, **OPTIONS, **QUANTISED, **options}
    with contextlib.ExitStack() as started:
        if "expert_mesh" in options:
            options["afd_address"] = f"127.0.0.1:{free_port()}"
            experts = load_experts(EngineArgs.from_options(afd_role="expert", **options))
            started.callback(experts.close)
            options["afd_role"] = "attention"
        outputs = outputs_of(options, "go", "others", "go", "sampled")
    first, _, again, drawn = (json.loads(line) for line in outputs[0].splitlines() if line.startswith("{"))
    assert [one["tokens"] for one in (first, again, drawn)] == [greedy, greedy, sampled]
    assert again["fetched"] > first["fetched"]


def test_two_processes_whose_experts_are_in_a_third_make_the_tokens_of_one_device(tmp_path):
    hold_to_one_device(*written(tmp_path, "ch"), attention_mesh="dp=2,tp=2", expert_mesh="ep=2")
