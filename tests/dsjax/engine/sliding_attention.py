"""An attention family of the tests, whose latents lie on window pages and whose rotary keys do not; only its cache is ever made."""

from __future__ import annotations

import contextlib

import pytest

from dsjax.model.attention import PagedMLA
from dsjax.model.cache_groups import CacheGroup
from dsjax.model.step_description import StepDescription


class SlidingMLA(PagedMLA):
    """MLA with arrays on pages of both kinds."""

    def groups(self, layers, entries=1, **kept):
        [latents] = super().groups(layers, entries, **kept)
        arrays = {name: {name: latents.arrays[name]} for name in ("latent", "rope")}
        return (
            CacheGroup("latents", latents.layers, entries, arrays["latent"], table="window"),
            CacheGroup("rotary keys", latents.layers, entries, arrays["rope"]),
        )


@contextlib.contextmanager
def slides():
    """Steps that are made meanwhile have such a cache."""

    def attention(step):
        where = step.mesh, step.rules, step.config, "split", step.cache_dtype, step.block_tokens, step.kernels
        return SlidingMLA(*where)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepDescription, "attention", property(attention))
        yield
