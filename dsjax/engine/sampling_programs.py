"""The small programs beside the step, traced: one changes logits, one draws tokens, one scores prompts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Lowered
from jaxtyping import Array, Float, Int

from dsjax.engine.logit_edits import Penalties, change, edit_width, mask_words
from dsjax.engine.sampler import SamplingRows, Scores, Wanted, sample, score
from dsjax.model.step import Step


class SamplingPrograms:
    """Lowers for one step's mesh, ranks and vocabulary. Each DP rank works on its own rows, without any collective over ranks.

    rows, everywhere: shardings of what the host sends: one entry for each DP rank; the same on all devices.
    """

    def __init__(self, step: Step, num_ranks: int):
        self._step, self._ranks, self._vocab_size = step, num_ranks, step.config.vocab_size
        self._logits = step.rules.spec(("ranks", None, "vocab"))
        self._own = P(step.spec.batch_axes)
        self.rows, self.everywhere = NamedSharding(step.mesh, self._own), NamedSharding(step.mesh, P())

    def change(self, num_rows: int) -> Lowered:
        """``(logits, Penalties, edits, mask) -> logits``; the vocabulary stays spread over ``tp``."""
        vocab_axes = self._logits[2]

        def run(logits, penalties, edits, mask):
            first = lax.axis_index(vocab_axes) * logits.shape[-1] if vocab_axes else 0
            return change(logits, penalties, edits, mask, first)

        edits = self._described((self._ranks, edit_width(num_rows), 4), np.int32)
        mask = self._described((self._ranks, num_rows, mask_words(self._vocab_size)), np.int32)
        penalties = jax.tree.map(lambda a: self._described(a.shape, a.dtype), Penalties.none(self._ranks, num_rows))
        specs = (self._logits, self._own, self._own, self._own)
        return self._on_each_rank(run, specs, self._logits).lower(self._raw(num_rows), penalties, edits, mask)

    def sampler(self, num_rows: int) -> Lowered:
        """``(raw logits, changed logits, SamplingRows, Wanted) -> Sampled``; over ``tp`` all ranks draw the same."""
        greedy = SamplingRows.greedy(self._ranks, num_rows)
        rows = jax.tree.map(lambda a: self._described(a.shape, a.dtype), greedy)
        wanted = Wanted(*[jax.ShapeDtypeStruct((), bool, sharding=self.everywhere)] * 2)
        logits = self._raw(num_rows)
        draw = self._on_each_rank(sample, (self._own, self._own, self._own, P()), self._own)
        return draw.lower(logits, logits, rows, wanted)

    def score(self, logits: Float[Array, "B C V"], targets: Int[Array, "B C"]) -> Scores:
        """``sampler.score`` on each rank; traced as part of a larger program."""
        return self._on_each_rank(score, (self._own, self._own), self._own)(logits, jnp.maximum(targets, 0))

    def no_edits(self, num_rows: int) -> Array:
        """Edits on the devices that change nothing."""
        return jax.device_put(np.full((self._ranks, edit_width(num_rows), 4), -1, np.int32), self.rows)

    def no_mask(self, num_rows: int) -> Array:
        """A mask on the devices that allows everything."""
        return jax.device_put(np.full((self._ranks, num_rows, mask_words(self._vocab_size)), -1, np.int32), self.rows)

    def _raw(self, num_rows: int) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self._step.mesh, self._logits)
        return jax.ShapeDtypeStruct((self._ranks, num_rows, self._vocab_size), np.float32, sharding=sharding)

    def _described(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.rows)

    def _on_each_rank(self, function, in_specs, out_specs):
        mesh = self._step.mesh
        return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))
