"""MLA's forms: each computes what the model's own attention does, and two go together where they read one layout of the cache."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layouts import TINY

from dsjax.config import ModelConfig
from dsjax.errors import UserError
from dsjax.model.forms import FORMS, Form, common_layout, form_of
from dsjax.model.transformer import Projections, attend, expand

# As in docs/architecture.md.
TOGETHER = {
    ("CD", "CD"): "decompressed", ("CC", "CC"): "split", ("CC", "A_CC"): "joined", ("CC", "A_CC_ME"): "split",
    ("CC", "AM_CC_ME"): "split", ("A_CC", "A_CC"): "joined", ("A_CC_ME", "A_CC_ME"): "split", ("A_CC_ME", "AM_CC_ME"): "split",
    ("AM_CC_ME", "AM_CC_ME"): "split",
}  # fmt: skip


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.product(FORMS, FORMS)))
def test_two_forms_share_a_layout_exactly_where_the_table_says(prefill, decode):
    expected = TOGETHER.get((prefill, decode)) or TOGETHER.get((decode, prefill))
    if expected:
        assert common_layout(FORMS[prefill], FORMS[decode]) == expected
        return
    with pytest.raises(UserError) as error:
        common_layout(FORMS[prefill], FORMS[decode])
    message = str(error.value)
    assert f"--mla-prefill {prefill} reads" in message
    assert f"--mla-decode {decode} one that is" in message
    named = message.rsplit("choose --mla-prefill from ", 1)[1].split(", ")
    assert named == [form for form in FORMS if (form, decode) in TOGETHER or (decode, form) in TOGETHER]


@pytest.mark.parametrize("unknown", ["cc", "MHA", "", int])
def test_what_is_no_form_is_answered_with_those_there_are(unknown):
    with pytest.raises(UserError, match=r"expected one of CD, CC, A_CC, A_CC_ME, AM_CC_ME, or a class that inherits"):
        form_of(unknown)


def test_a_form_is_found_by_its_name_and_made_of_its_class():
    own = type("Own", (Form,), {"name": "own"})
    assert form_of("CC") is FORMS["CC"]
    assert (form_of(own), str(form_of(own))) == (own(), "own")
    assert len({own(), *FORMS.values()}) == 1 + len(FORMS)


CONFIG = ModelConfig.from_dict(TINY)


def drawn(S):
    """Projections of a sequence of S tokens, and a layer's matrices: W^UQ, W^UK, W^UV, W^O by head."""
    H, M, Q, D = CONFIG.num_attention_heads, CONFIG.mla.kv_lora_rank, CONFIG.mla.q_lora_rank, CONFIG.hidden_size
    N, O, U = CONFIG.mla.qk_nope_head_dim, CONFIG.mla.qk_rope_head_dim, CONFIG.mla.v_head_dim
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    weights = draw(Q, H, N) / Q**0.5, draw(M, H, N) / M**0.5, draw(M, H, U) / M**0.5, draw(H, U, D)
    q_latent = draw(1, S, Q)
    q_nope = jnp.einsum("bsq,qhn->bshn", q_latent, weights[0])
    return Projections(q_nope, draw(1, S, H, O), q_latent, draw(1, S, M), draw(1, S, O)), weights


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("S", [1, 7])
def test_each_form_gives_what_the_models_own_attention_does(name, S):
    form, (p, (up_query, up_key, up_value, output)) = FORMS[name], drawn(S)
    ahead = jnp.einsum("qhn,mhn->qhm", up_query, up_key), jnp.einsum("mhu,hud->hmd", up_value, output)
    mla = SimpleNamespace(key_value_weight=lambda dtype: (up_key, up_value), materialised=lambda dtype: ahead)
    (layout,) = form.layouts[:1]
    context = {
        "split": {"latent": p.latent, "rope": p.k_rope},
        "joined": {"joined": jnp.concatenate([p.latent, p.k_rope], axis=-1)},
        "decompressed": dict(zip(("key", "value"), expand(p.latent, p.k_rope, up_key, up_value), strict=True)),
    }[layout]
    queries, weights, finish = form.prepare(mla, jax.tree.map(lambda a: a[:, None], p))  # a row of S queries
    scores = form.score([q[0] for q in queries], weights, context) * CONFIG.softmax_scale
    seen = np.tri(S, dtype=bool) if form.heads_first else np.tri(S, dtype=bool)[:, None]
    heads = form.weigh(jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), weights, context)
    found = finish((heads.swapaxes(1, 2) if form.heads_first else heads)[None])[0]
    expected = attend(CONFIG, p, up_key, up_value)[0]
    if form.materialised:
        expected = jnp.einsum("bshu,hud->bsd", expected, output)
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
