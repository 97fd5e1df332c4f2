"""An MLA form of one's own: W^UK is absorbed into the query, and values are expanded from the latents, head by head.

    LLM(model="demo", mla_prefill=HalfAbsorbed, mla_decode=HalfAbsorbed)

For each head, a query and a position take M + O + U multiply-adds: more than with expanded keys (N + O + U), fewer than in latent space
(2 M + O). Each position of the context takes M × U more, once for all queries of a row. Letters as in docs/glossary.md.
"""

from __future__ import annotations

from dsjax.model.forms import Form, Prepared, product, shared_scores


class HalfAbsorbed(Form):
    """Multiplies latents and rotary keys separately; plain JAX on every backend."""

    name = "half_absorbed"

    def prepare(self, mla, p):
        up_key, up_value = mla.key_value_weight(p.latent.dtype)
        return Prepared((product("brchn,mhn->brchm", p.q_nope, up_key, dtype=None), p.q_rope), weights=(up_value,))

    def score(self, queries, weights, context):
        q_latent, q_rope = queries
        return shared_scores(context["latent"], q_latent) + shared_scores(context["rope"], q_rope)

    def weigh(self, probs, weights, context):
        values = product("rsm,mhu->rshu", context["latent"], weights[0], dtype=None)
        return product("rchs,rshu->rchu", probs, values)

    def pair_values(self, config):
        return config.mla.kv_lora_rank + config.mla.qk_rope_head_dim + config.mla.v_head_dim

    def expansion_values(self, config):
        return config.mla.kv_lora_rank * config.mla.v_head_dim

    def head_values(self, config):
        return config.mla.qk_head_dim + config.mla.kv_lora_rank + config.mla.v_head_dim
