"""Logits of the served step on one GPU against the committed goldens, which transformers computed in float32 on a CPU."""

import json
from pathlib import Path

import numpy as np
import pytest
from goldens.our_model import bound, hf_tensors
from goldens.random_weights import RandomWeights
from layouts import write_model

from dsjax import LLM
from dsjax.cli.exact import PAIRS
from dsjax.config import ModelConfig

pytestmark = pytest.mark.gpu

GOLDENS = Path(__file__).parents[1] / "goldens"
ENTRIES = {entry["name"]: entry for entry in json.loads((GOLDENS / "cases.json").read_text())["cases"]}
# Sigmoid and softmax routers, every router's groups, YaRN, biases, no compression, tied embeddings, no experts.
CASES = ("v3-groups", "v3-negative-bias", "v3-half-split-yarn", "v3-attention-bias", "kimi-k2-like", "moonlight-like")
CASES += ("v2-group-limited-yarn", "v2-tied-all-dense")


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS / "logits.npz") as file:
        return dict(file)


def served_logits(directory: Path, name: str, tokens: np.ndarray, dtype: str, **options) -> np.ndarray:
    """Through checkpoint, engine and paged cache, in chunks of 8 tokens."""
    entry = ENTRIES[name]
    tensors = hf_tensors(ModelConfig.from_dict(entry["config"]), RandomWeights(entry["seed"], entry["bias_center"]))
    write_model(directory, entry["config"], tensors)
    llm = LLM(str(directory), dtype=dtype, max_num_seqs=2, prefill_chunk=8, page_size=4, **options)
    try:
        return np.stack(llm.logits(tokens.tolist()))
    finally:
        llm.shutdown()


IN_FORMS = [{"mla_prefill": prefill, "mla_decode": decode} for prefill, decode in PAIRS]


@pytest.mark.parametrize(
    ("name", "forms"), [*((name, {}) for name in CASES), *(("v3-groups", forms) for forms in IN_FORMS)], ids=str
)
def test_float32_logits_keep_the_bound_of_the_cpu_in_every_mla_form(name, forms, goldens, tmp_path):
    # With exact products the GPU differs by the order of float32 sums alone, as another CPU does: the same bound.
    reference = goldens[f"{name}/logits"]
    found = served_logits(tmp_path, name, goldens[f"{name}/tokens"], "float32", **forms)
    assert np.abs(found - reference).max() <= bound(reference)


@pytest.mark.parametrize("name", ["v3-all-dense", "v2-tied-all-dense", "v3-groups", "moonlight-like"])
def test_bfloat16_logits_are_near(name, goldens, tmp_path):
    # Each rounding is at most 2⁻⁹ of a value; weights and some ten activations a layer, over two or three layers, add up
    # to 1 to 2 % of the largest logit. Rounding may choose another expert, which is no error; at most positions it does not.
    reference = goldens[f"{name}/logits"]
    found = served_logits(tmp_path, name, goldens[f"{name}/tokens"], "bfloat16")
    by_position = np.abs(found - reference).max(axis=-1) / np.abs(reference).max()
    assert by_position.max() > 1e-4
    assert (by_position.max() if "all-dense" in name else np.median(by_position)) <= 5e-2
