"""bf16 experts stay bf16 for float32 computation, without loss. Also tests `setup/loading.py` and `setup/assembly.py`."""

import numpy as np
import pytest
from layouts import write_checkpoint

from dsjax import LLM
from dsjax.checkpoint.convert import convert_checkpoint
from dsjax.engine.setup import assembly, loading

SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "prefill_chunk": 16, "dtype": "float32"}
TOKENS = list(range(2, 20))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("f32"))


@pytest.fixture(scope="module")
def rounded(checkpoint, tmp_path_factory):
    """The same checkpoint with every matrix in bf16."""
    directory = tmp_path_factory.mktemp("bf16") / "checkpoint"
    convert_checkpoint(checkpoint, directory, to="hf", weights="bf16")
    return directory


def expert_storage(llm: LLM) -> set[str]:
    return {str(array.dtype) for path, array in llm.executor.params.items() if ".experts." in path}


@pytest.mark.slow
def test_experts_stay_in_bf16_and_give_the_very_same_logits(rounded, monkeypatch):
    with LLM(str(rounded), **SIZES) as mixed:
        assert mixed.facts.weights == "mixed"
        assert expert_storage(mixed) == {"uint16"}, "bits of bf16 on the CPU platform"
        logits = mixed.logits([TOKENS])[0]
    for module in (assembly, loading):
        monkeypatch.setattr(module, "weights_format", lambda *args: "f32")
    with LLM(str(rounded), **SIZES) as wide:
        assert expert_storage(wide) == {"float32"}
        np.testing.assert_array_equal(logits, wide.logits([TOKENS])[0])


def test_experts_in_float32_stay_so_whatever_the_configuration_says(tmp_path):
    with LLM(str(write_checkpoint(tmp_path, torch_dtype="bfloat16")), **SIZES) as llm:
        assert llm.facts.weights == "f32"
        assert expert_storage(llm) == {"float32"}


@pytest.mark.slow
def test_products_made_ahead_from_fp8_weights_give_the_logits_of_the_weights_themselves(checkpoint):
    logits = {}
    for form in ("A_CC_ME", "AM_CC_ME"):
        with LLM(str(checkpoint), weights="fp8", mla_prefill=form, mla_decode=form, **SIZES) as llm:
            logits[form] = llm.logits([TOKENS])[0]
    difference = np.abs(logits["AM_CC_ME"] - logits["A_CC_ME"]).max()
    assert difference <= 1e-4 * np.abs(logits["A_CC_ME"]).max(), "the products are kept in float32, not in bf16"
