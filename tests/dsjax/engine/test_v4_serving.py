"""A DeepSeek-V4 that is served: the plain forward pass's greedy tokens, in chunks, from the prefix cache and on a mesh; what is refused."""

import jax
import numpy as np
import pytest
from v4_models import write_v4_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.checkpoint.load import load
from dsjax.checkpoint.source import open_checkpoint
from dsjax.errors import UserError
from dsjax.model.parameter_table import parameter_table
from sharding import MeshSpec
from sharding.rules import Rules

LONGEST, LENGTHS = 96, (3, 8, 23, 41, 60)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "prefill_chunk": 12, "page_size": 8, "max_model_len": LONGEST}
PROMPTS = [np.random.default_rng(length).integers(2, 250, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_v4_checkpoint(tmp_path_factory.mktemp("v4"), "wchch", hashed=1)


def answers(llm):
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


def best_tokens(directory, sequence, start):
    """What the plain forward pass would choose behind each token from ``start`` on."""
    source, spec = open_checkpoint(directory), MeshSpec.parse("dp=1")
    params = load(source.config, source, spec.build(jax.devices()[:1]), Rules.for_mesh(spec))
    table, padded = parameter_table(source.config, weights="f32"), np.zeros((1, LONGEST), int)
    padded[0, : len(sequence)] = sequence
    logits = jax.jit(lambda params: table.bind(params)(padded).logits)(params)[0]
    return np.asarray(logits).argmax(-1)[start - 1 : len(sequence) - 1].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,tp=2"])
def test_answers_are_the_plain_forms_also_where_the_prefix_cache_has_the_prompt(checkpoint, mesh):
    llm = LLM(str(checkpoint), mesh=mesh, dtype="float32", **SIZES)
    found = answers(llm)
    for prompt, made in zip(PROMPTS, found, strict=True):
        assert best_tokens(checkpoint, prompt + made, len(prompt)) == made
    assert answers(llm) == found
    again = llm.generate([{"prompt_token_ids": PROMPTS[-1]}], GREEDY)[0]
    assert again.num_cached_tokens == (LENGTHS[-1] - 1) // 8 * 8, "up to the last border before the last token"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_dbo": True, "mesh": "dp=2"}, "--enable-dbo"),
        ({"enable_eplb": True, "mesh": "dp=2"}, "--enable-eplb"),
        ({"mla_decode": "CC"}, "has no MLA"),
        ({"batch_invariant": True}, "--batch-invariant"),
        ({"page_size": 12}, "--page-size is 12"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"mesh": "pp=2"}, "pp=2"),
    ],
)
def test_what_engines_cannot_do_with_it_is_refused_with_its_reason(checkpoint, options, named):
    with pytest.raises(UserError, match=named):
        LLM(str(checkpoint), dtype="float32", **SIZES | {"mesh": "dp=1"} | options)
