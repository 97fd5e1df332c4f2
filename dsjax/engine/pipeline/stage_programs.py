"""``StagePrograms``: the programs of one stage of a model."""

from __future__ import annotations

import jax
import numpy as np
from jax.stages import Compiled, Lowered

from dsjax.engine.device import slots, step_programs
from dsjax.engine.device.buckets import Buckets
from dsjax.engine.device.programs import Programs
from dsjax.engine.device.slots import LaunchShape, Positions
from dsjax.engine.program_cache.compiled_programs import ProgramKey

_OF_THE_END = ("draw", "biases", "score", "drafts", "drafting step")
"""Programs that only the last stage has."""


class StagePrograms(Programs):
    """Those of ``Programs``; of a stage before the last a step's program hands on hidden states, and ``enter`` takes what came of it."""

    def enter(self, shape: LaunchShape, drafts: int) -> Compiled:
        """``(state, positions, outcome) -> state``, with ``drafts`` above 0 ``(state, positions, outcome, drafts) -> state``.

        Enters what the last stage made of a launch's rows: the tokens, and so many drafts behind them. positions, outcome, drafts: as
        the ``step`` and ``drafts`` of ``Programs`` give them.
        """
        return self.get(*_entering(shape, drafts))

    def lower_step(self, shape: LaunchShape, scored: bool = False) -> Lowered:
        """Trace the program of ``step``.

        Of a stage before the last it is ``(params, state, packed) -> (state, positions, hidden, reports)``.
        """
        if self._step.ends:
            return super().lower_step(shape, scored)

        def run(params, state, packed, *arrived):
            state, rows, _, hidden, reports = step_programs.run_layers(
                self._step, params, state, packed, shape, *arrived
            )
            at = Positions.of(rows, shape).pack()
            pinned = self._pin((at, hidden), (self._of_positions(shape.positions)[0], self._hidden(shape.tokens)))
            return self._pin(state, self._state), *pinned, reports

        return self._lower_step(run, self._described((shape.packed_width,), np.int32), *self.arriving(shape.tokens))

    def lower_enter(self, positions: int, firsts: tuple[int, ...], drafts: int) -> Lowered:
        """The program of ``enter``."""
        outcome = self._described((positions,), np.int32)
        proposed = [self._described((len(firsts), drafts), np.int32)] if drafts else []

        def run(state, at, outcome, *proposed):
            at = Positions.unpack(at)
            state, _ = slots.commit(self._step, state, at, outcome)
            if proposed:
                own, following = (array[:, np.array(firsts)] for array in (at.slot, at.following))
                state = slots.enter_drafts(self._step, state, own, following, *proposed)
            return self._pin(state, self._state)

        packed, *_ = self._of_positions(positions)
        return jax.jit(run, donate_argnums=0).lower(self._state, packed, outcome, *proposed)

    def labels(self, buckets: Buckets) -> dict[ProgramKey, str]:
        """Those of ``Programs`` that this stage has, and ``enter``."""
        labels = super().labels(buckets)
        if not self._step.ends:
            entered = {_entering(key[1], key[2]) for key in labels if key[0] == "drafts"}
            entered |= {_entering(key[1], 0) for key in labels if key[0] == "step"}
            # A scored launch of a stage before the last is like any other.
            labels = {
                ((*key[:2], False) if key[0] == "step" else key): name
                for key, name in labels.items()
                if key[0] not in _OF_THE_END
            }
            labels |= {key: f"tokens of {key[1]} positions, {key[3]} drafts" for key in sorted(entered)}
        return {key: f"{self._step.stage}: {name}" for key, name in labels.items()}


def _entering(shape: LaunchShape, drafts: int) -> tuple[str, int, tuple[int, ...], int]:
    """The key of the program that enters a launch's tokens, which depends on its rows only where drafts are entered."""
    return "enter", shape.positions, tuple(shape.first_positions.tolist()) if drafts else (), drafts
