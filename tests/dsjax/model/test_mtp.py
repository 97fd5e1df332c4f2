"""The MTP module equals a plain NumPy reading of the technical report's equations."""

import jax
import jax.numpy as jnp
import mtp_reference
import numpy as np
import pytest
from goldens.our_model import COMPILE_QUICKLY, hf_tensors
from goldens.random_weights import RandomWeights

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.config import ModelConfig, RopeConfig
from dsjax.model.dense import forward, predict_further
from dsjax.model.transformer import parameter_table

CONFIG = ModelConfig(
    model_type="deepseek_v3",
    vocab_size=41,
    hidden_size=23,
    intermediate_size=19,
    num_hidden_layers=2,
    num_attention_heads=3,
    q_lora_rank=9,
    kv_lora_rank=7,
    qk_nope_head_dim=5,
    qk_rope_head_dim=4,
    v_head_dim=6,
    moe_intermediate_size=11,
    n_routed_experts=8,
    n_shared_experts=1,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=1.5,
    rope=RopeConfig(theta=100.0),
    num_nextn_predict_layers=1,
    torch_dtype="float32",
)
TENSORS = hf_tensors(CONFIG, RandomWeights(seed=5, bias_center=-0.3))
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2, 6, 5], [40, 0, 7, 7, 7, 20, 30, 10, 11]])


@pytest.fixture(scope="module")
def passes():
    """Our main model's pass over the tokens, and our MTP module's over its states and the tokens one further."""

    def run(params, tokens):
        main = forward(params, table, CONFIG, tokens[:, :-1])
        return main, predict_further(params, table, CONFIG, main.hidden, tokens[:, 1:])

    table = parameter_table(CONFIG, weights="f32")
    params = from_hf_tensors(CONFIG, TENSORS)
    return jax.jit(run, compiler_options=COMPILE_QUICKLY)(params, jnp.asarray(TOKENS))


def test_the_module_is_that_of_the_report(passes):
    main, further = passes
    for row in range(2):
        expected = mtp_reference.mtp_logits(CONFIG, TENSORS, np.asarray(main.hidden[row]), TOKENS[row, 1:])
        # float32 against float64; the logits are of order 1.
        np.testing.assert_allclose(further.logits[row], expected, atol=1e-5 * max(1, np.abs(expected).max()))


def test_the_module_reads_the_state_that_the_head_multiplies(passes):
    main, _ = passes
    np.testing.assert_allclose(main.hidden @ TENSORS["lm_head.weight"].T, main.logits, atol=1e-5)


def test_the_module_is_causal_and_uses_the_next_token(passes):
    main, further = passes
    table = parameter_table(CONFIG, weights="f32")
    params = from_hf_tensors(CONFIG, TENSORS)
    changed = TOKENS[:, 1:].copy()
    changed[:, 5] = (changed[:, 5] + 1) % CONFIG.vocab_size
    again = jax.jit(lambda p, h, t: predict_further(p, table, CONFIG, h, t), compiler_options=COMPILE_QUICKLY)(
        params, main.hidden, changed
    )
    difference = np.abs(again.logits - further.logits).max(axis=(0, 2))
    assert difference[:5].max() < 1e-5
    assert difference[5] > 1e-2


def test_the_order_of_the_halves_matters():
    hidden = RandomWeights(seed=6).tensor("hidden", (4, CONFIG.hidden_size))
    layer = f"model.layers.{CONFIG.num_hidden_layers}.eh_proj.weight"
    swapped = TENSORS | {layer: np.roll(TENSORS[layer], CONFIG.hidden_size, axis=1)}
    straight, other = (mtp_reference.mtp_logits(CONFIG, t, hidden, TOKENS[0, :4]) for t in (TENSORS, swapped))
    assert np.abs(straight - other).max() > 0.1
