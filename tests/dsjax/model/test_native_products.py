"""A trainer's log-probabilities are those that the engine gave: equal, not close."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import MODELS, TINY, prompts, write_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.engine.device.buckets import Buckets, Rectangle
from dsjax.model.native_products import NativeProducts
from dsjax.model.parameter_table import parameter_table
from dsjax.model.softmax import log_softmax
from dsjax.model.transformer import XlaProducts

pytestmark = pytest.mark.slow  # all together
NEW_TOKENS = 30
# Sparse attention in layers of a kind: the gradient of all parameters is a long program, and dense layers would be as long again.
SMALL = {"v3": {}, "v3.2": MODELS["v3.2"] | {"num_hidden_layers": 2, "first_k_dense_replace": 0}}


def scored(entries, tokens) -> np.ndarray:
    return np.array([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)], np.float32)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """``engine(model, **options)``: an engine's sequences, their log-probabilities, how many are of the prompt, and its parameters."""
    # Two blocks of attention and more.
    longer = {"prompt_token_ids": np.random.default_rng(3).integers(2, TINY["vocab_size"], size=150).tolist()}

    @functools.cache
    def run(model, **options):
        directory = write_checkpoint(tmp_path_factory.mktemp("trained"), max_position_embeddings=256, **SMALL[model])
        sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_chunk": 32, "page_size": 4}
        llm = LLM(str(directory), dtype="float32", **sizes, **options)
        llm.executor.buckets = Buckets(decode=(4,), prefill=(Rectangle(2, 32),), mixed=True)
        try:
            params = SamplingParams(temperature=1, seed=3, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False,
                                    logprobs=0, prompt_logprobs=0)  # fmt: skip
            found = []
            for output in llm.generate([*prompts()[-2:], longer], params):
                (completion,) = output.outputs
                of_prompt = scored(output.prompt_logprobs[1:], output.prompt_token_ids[1:])
                logprobs = np.concatenate([of_prompt, scored(completion.logprobs, completion.token_ids)])
                found.append((output.prompt_token_ids + list(completion.token_ids), logprobs, len(of_prompt)))
            return found, {name: jnp.array(array) for name, array in llm.executor.params.items()}, llm.config
        finally:
            llm.shutdown()

    return run


def log_probabilities(params, config, tokens, products):
    logits = parameter_table(config, weights="f32", mtp=False).bind(params)(tokens, products=products).logits
    logprobs = log_softmax(logits[:, :-1])
    return jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]


def padded(found):
    """Sequences side by side, as trainers have them: what stands behind one changes nothing of it."""
    most = max(len(tokens) for tokens, *_ in found)
    return jnp.array([tokens + [5] * (most - len(tokens)) for tokens, *_ in found])


def assert_given(found, logprobs):
    for (_, given, _), row in zip(found, logprobs, strict=True):
        np.testing.assert_array_equal(np.asarray(row)[: len(given)], given)


def forward(params, config, tokens, products):
    return jax.jit(lambda params, tokens: log_probabilities(params, config, tokens, products))(params, tokens)


def test_a_jitted_forward_gives_the_engines_log_probabilities(engine, kernels):
    """Of a sequence alone; the forward of a gradient below is of several, with padding."""
    found, params, config = engine("v3", batch_invariant=True)
    assert_given(found[1:2], forward(params, config, jnp.array([found[1][0]]), NativeProducts(kernels.native)))


def test_without_batch_invariance_it_gives_those_of_prompts_in_their_own_form(engine, kernels):
    found, params, config = engine("v3")
    logprobs = forward(params, config, padded(found), NativeProducts(kernels.native, form="CC"))
    assert_given([(tokens, given[:count], count) for tokens, given, count in found], logprobs)


@pytest.mark.parametrize(("model", "trained"), [("v3", "embed.weight"), ("v3.2", "all")])
def test_a_gradients_forward_gives_them_too_and_the_gradient_is_the_plain_passs(engine, kernels, model, trained):
    found, params, config = engine(model, batch_invariant=True)
    tokens = padded(found)
    chosen = {name: array for name, array in params.items() if trained in ("all", name)}

    def loss(chosen, products):
        logprobs = log_probabilities(params | chosen, config, tokens, products)
        return -jnp.mean(logprobs), logprobs

    def run(products):
        return jax.jit(lambda chosen: jax.value_and_grad(loss, has_aux=True)(chosen, products))(chosen)

    ((_, logprobs), gradients), (_, plain) = run(NativeProducts(kernels.native)), run(XlaProducts())
    assert_given(found, logprobs)
    for name, gradient in gradients.items():
        most = float(jnp.abs(plain[name]).max())
        assert float(jnp.abs(gradient - plain[name]).max()) <= 1e-4 * most, name
        # These choose, and have no gradient.
        assert most > 0 or name.endswith("router.bias") or ".indexer." in name, name
