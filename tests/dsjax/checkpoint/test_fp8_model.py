"""An FP8 checkpoint answers as its dequantised twin does: exactly when dequantised at load, closely when kept FP8."""

import contextlib

import numpy as np
import pytest
from fp8_checkpoints import RAGGED, WHOLE, dequantised, fp8_tensors, write_fp8_model

from dsjax import LLM
from dsjax.checkpoint.load import from_hf_tensors, to_hf_tensors
from dsjax.model import parameters
from sharding import MeshError

pytestmark = pytest.mark.slow  # all together

CONFIGS = {"ragged": RAGGED, "whole": WHOLE}
MESHES = [("ragged", "dp=4"), ("whole", "tp=2,ep=1")]
TOKENS = np.random.default_rng(0).integers(2, 72, size=21).tolist()


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """``(config, form)`` → directory of the checkpoint, ``fp8`` or ``plain``."""
    made = {}
    for name, config in CONFIGS.items():
        tensors = fp8_tensors(config)
        for form, kept in (("fp8", tensors), ("plain", dequantised(tensors))):
            made[name, form] = write_fp8_model(tmp_path_factory.mktemp(f"{name}-{form}"), config, kept)
    return made


@contextlib.contextmanager
def loaded(directory, mesh: str, **options):
    sizes = {"max_num_seqs": 2, "prefill_chunk": 16, "page_size": 4}
    llm = LLM(str(directory), mesh=mesh, dtype="float32", **sizes, **options)
    try:
        yield llm
    finally:
        llm.shutdown()


def logits(*model, **options) -> np.ndarray:
    with loaded(*model, **options) as llm:
        return llm.logits([TOKENS])[0]


@pytest.mark.parametrize(("config", "mesh"), MESHES)
def test_dequantised_at_load_or_kept_fp8_the_logits_are_those_of_the_dequantised_checkpoint(directories, config, mesh):
    reference = logits(directories[config, "plain"], mesh)
    np.testing.assert_array_equal(logits(directories[config, "fp8"], mesh), reference)

    with loaded(directories[config, "fp8"], mesh, weights="fp8") as llm:
        # In float32, fp8 × scale is what was read at load: at most the order of sums differs.
        assert np.abs(llm.logits([TOKENS])[0] - reference).max() <= 1e-5 * np.abs(reference).max()
        quantised = [path for path, info in llm.executor.model.table.infos.items() if info.quantised]
        assert {llm.executor.params[path].dtype for path in quantised} == {np.dtype(np.uint8)}
        assert "moe_layers.moe.experts.down.weight" in quantised


def test_fp8_matrices_that_lie_with_their_depth_last_answer_alike(directories, monkeypatch, no_programs_on_disk):
    """As on GPUs, with their kernels in Pallas's interpreter."""

    def run():
        options = {"weights": "fp8", "kernels": "pallas", "activation_scheme": "dynamic"}
        with loaded(directories["whole", "fp8"], "tp=2,ep=1", **options) as llm:
            return llm.logits([TOKENS])[0], {p for p, i in llm.executor.model.table.infos.items() if i.depth_last}

    expected, none = run()
    monkeypatch.setattr(parameters, "DEPTH_LAST", ("cpu",))
    found, moved = run()
    assert not none
    assert {"moe_layers.moe.experts.gate_up.weight", "dense_layers.mlp.down.weight", "moe_layers.attn.o.weight"} < moved
    assert "moe_layers.attn.kv_b.weight" not in moved, "its kernel reads it by heads"
    np.testing.assert_array_equal(found, expected)


def test_gpus_keep_fp8_matrices_as_the_checkpoint_has_them_and_give_them_back():
    tensors = fp8_tensors(RAGGED)
    cpu, gpu = (from_hf_tensors(RAGGED, tensors, weights="fp8", platform=platform) for platform in ("cpu", "gpu"))
    name, gate_up = "model.layers.1.mlp.experts.3", gpu["moe_layers.moe.experts.gate_up.weight"]
    np.testing.assert_array_equal(gate_up[0, 3, 1].view(np.uint8), tensors[f"{name}.up_proj.weight"].view(np.uint8))
    np.testing.assert_array_equal(cpu["moe_layers.moe.experts.gate_up.scale"], gpu["moe_layers.moe.experts.gate_up.scale"])  # fmt: skip
    for params in (cpu, gpu):
        back = to_hf_tensors(RAGGED, params)
        assert back.keys() == tensors.keys()
        for name, value in tensors.items():
            if value.itemsize == 1:
                np.testing.assert_array_equal(back[name].view(np.uint8), value.view(np.uint8))


def test_parts_that_are_never_quantised_are_kept_in_bf16_beside_fp8_weights(tmp_path):
    # DeepSeek's checkpoints have them so. Where they are float32, embedding, norms, router and head are rounded, each value
    # by at most 2⁻⁹ of itself.
    wider = lambda value: value.astype(np.float32) * np.float32(1 + 2**-10)  # noqa: E731 what bf16 cannot hold
    tensors = {name: wider(one) if one.dtype == "bfloat16" else one for name, one in fp8_tensors(RAGGED).items()}
    folder = write_fp8_model(tmp_path, RAGGED, tensors)
    reference, found = logits(folder, "dp=4"), logits(folder, "dp=4", weights="fp8")
    difference = np.abs(found - reference).max() / np.abs(reference).max()
    assert 0 < difference <= 1e-2


def test_a_tp_that_would_cut_blocks_is_refused_with_the_widths_it_cuts(directories):
    with pytest.raises(MeshError) as error:
        logits(directories["ragged", "fp8"], "tp=2", weights="fp8")
    for part in (
        "dense MLP width 272 over tp=2 is 136",
        "shared expert width 136 over tp=2 is 68",
        "query heads' width 224 over tp=2 is 112",
        "key and value heads' width 304 over tp=2 is 152",
        "value heads' width 144 over tp=2 is 72",
        "cuts a quantisation block of 128",
    ):
        assert part in str(error.value)
    with loaded(directories["ragged", "fp8"], "tp=2"):
        pass  # not FP8 in memory: nothing is cut
