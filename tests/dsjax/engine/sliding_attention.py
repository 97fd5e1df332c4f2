"""An attention family of the tests: MLA over the last tokens alone, whose latents lie on window pages and whose rotary keys do not."""

from __future__ import annotations

import contextlib

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from dsjax.model import paging
from dsjax.model.attention import PagedMLA
from dsjax.model.cache_groups import CacheGroup
from dsjax.model.softmax import attend_in_blocks
from dsjax.model.step_description import StepDescription

WINDOW = 6
"""Tokens that a query attends to, itself included."""


class SlidingMLA(PagedMLA):
    """Every token reads both kinds of pages, so that a wrong one of either changes its numbers. Plain JAX, float32, without `tp`."""

    def groups(self, layers, entries=1, **kept):
        [latents] = super().groups(layers, entries, **kept)
        arrays = {name: {name: latents.arrays[name]} for name in ("latent", "rope")}
        return (
            CacheGroup("latents", latents.layers, entries, arrays["latent"], table="window"),
            CacheGroup("rotary keys", latents.layers, entries, arrays["rope"]),
        )

    def backend(self, form):
        return "plain"

    def in_stack(self, forms):
        return super().in_stack(forms) - {"kv_b"}  # which kernels alone read there

    def cache_entries(self, mla, cache, layer, tokens, p):
        def local(cache, layer, slots, window_slots, latent, rope):
            return {
                "latent": paging.write(cache["latent"], layer, window_slots[0], latent[0]),
                "rope": paging.write(cache["rope"], layer, slots[0], rope[0]),
            }

        by_rank, kept = P(self.batch), dict.fromkeys(cache, P(None, self.batch))
        run = self._shard_map(local, (kept, P(), *[by_rank] * 4), kept)
        return run(cache, layer, tokens.slots, tokens.window_slots, p.latent, p.k_rope)

    def attend(self, mla, form, cache, layer, index, rows, p, chosen=None):
        prepared = form.prepare(mla, p)
        queries, weights, G = list(prepared.queries), list(prepared.weights), cache["latent"].shape[2]
        Pr, Pw = rows.tables.shape[-1], rows.windows.shape[-1]

        def local(queries, weights, cache, layer, positions, tables, windows, filled):
            own, at = [query[0] for query in queries], positions[0]
            first = jnp.maximum(at[:, :1] - G + 1, 0) // G
            pages = first + jnp.arange(Pw)
            ring = jnp.take_along_axis(windows[0], pages % Pw, axis=1)
            context = jnp.take_along_axis(tables[0], jnp.minimum(pages, Pr - 1), axis=1)
            at = at - first * G
            at = at[:, None] if form.heads_first else at[..., None]

            def fetch(_):
                return {
                    "latent": paging.read(cache["latent"], layer, ring),
                    "rope": paging.read(cache["rope"], layer, context),
                }

            def score(entries):
                scores = form.score(own, weights, entries) * self.config.softmax_scale
                return jnp.where(jnp.arange(Pw * G) > at[..., None] - WINDOW, scores, -jnp.inf)

            def weigh(probs, entries):
                return form.weigh(probs, weights, entries)

            there = None if filled is None else lambda _: paging.read_filled(filled, ring)
            out = attend_in_blocks(at, fetch, score, weigh, filled=there, num_blocks=1, block=Pw * G)
            return (jnp.swapaxes(out, 1, 2) if form.heads_first else out)[None]

        by_rank, kept = P(self.batch), dict.fromkeys(cache, P(None, self.batch))
        specs = ([by_rank] * len(queries), [P()] * len(weights), kept, P(), *[by_rank] * 4)
        run = self._shard_map(local, specs, by_rank)
        arrays = rows.positions, rows.tables, rows.windows, rows.filled
        return prepared.finish(run(queries, weights, cache, layer, *arrays))


@contextlib.contextmanager
def slides():
    """Engines that are made meanwhile attend so."""

    def attention(step):
        where = step.mesh, step.rules, step.config, "split", step.cache_dtype, step.block_tokens, step.kernels
        return SlidingMLA(*where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepDescription, "attention", property(attention))
        yield
