"""The engine end to end on one GPU: greedy tokens of the CPU, FP8 weights kept, pages given back."""

import jax
import numpy as np
import pytest
from fp8_checkpoints import RAGGED, dequantised, fp8_tensors, write_fp8_model
from layouts import prompts, write_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.cli.exact import DISPATCHES, NEW_TOKENS

pytestmark = pytest.mark.gpu

OPTIONS = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "prefill_chunk": 16, "page_size": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)

CPU_ANSWER = """
import json, sys
from layouts import answer
found = answer(sys.argv[1], "dp=1", "auto", "CC", "A_CC_ME")
print(json.dumps({"tokens": [list(map(int, tokens)) for tokens in found.tokens], "logits": found.logits.tolist()}))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def cpu_answer(checkpoint, on_cpu):
    return on_cpu(CPU_ANSWER, str(checkpoint))


@pytest.mark.parametrize("dispatch", ["auto", *DISPATCHES])
def test_greedy_tokens_and_logits_are_those_of_the_cpu(checkpoint, cpu_answer, dispatch, gpu):
    llm = LLM(str(checkpoint), dtype="float32", dispatch=dispatch, **OPTIONS)
    try:
        assert llm.facts.platform == gpu.platform
        llm.warm_up()
        outputs = llm.generate(prompts(), GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == cpu_answer["tokens"]
        reference = np.array(cpu_answer["logits"])
        (found,) = llm.logits([prompts()[-1]["prompt_token_ids"]])
        # float32 with exact products: another order of sums, as between layouts on the CPU
        assert np.abs(found - reference).max() <= 1e-4 * max(1.0, np.abs(reference).max())
        assert [rank.pool.num_used for rank in llm.engine.core.scheduler.ranks] == [0]
    finally:
        llm.shutdown()


def test_fp8_weights_are_kept_and_the_logits_near_the_dequantised_twin(tmp_path_factory):
    tensors = fp8_tensors(RAGGED)
    tokens = np.random.default_rng(0).integers(2, RAGGED.vocab_size, size=21).tolist()

    def logits(kept, weights):
        folder = write_fp8_model(tmp_path_factory.mktemp("fp8"), RAGGED, kept)
        llm = LLM(str(folder), weights=weights, dtype="float32", **OPTIONS)
        try:
            quantised = [path for path, info in llm.executor.model.table.infos.items() if info.quantised]
            kinds = {llm.executor.params[path].dtype for path in quantised}
            return llm.logits([tokens])[0], kinds
        finally:
            llm.shutdown()

    reference, _ = logits(dequantised(tensors), "auto")
    at_load, none = logits(tensors, "auto")
    kept, kinds = logits(tensors, "fp8")
    assert none == set()
    assert kinds == {np.dtype(jax.numpy.float8_e4m3fn)}  # the dtype itself, not its bits: that is for the CPU alone
    np.testing.assert_array_equal(at_load, reference)
    assert np.abs(kept - reference).max() <= 1e-2 * np.abs(reference).max()
