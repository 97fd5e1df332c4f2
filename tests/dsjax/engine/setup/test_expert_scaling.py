"""Another side of experts that cannot be had is left, and the one of now stays."""

from types import SimpleNamespace

import numpy as np
import pytest

from dsjax.engine.setup.expert_scaling import ExpertScaling, _Prepared


class Engine:
    """What changes the other side: no two changes are made at once."""

    def __init__(self, executor):
        self.args, self.executor, self.facts, self.busy = None, executor, None, False

    def reserve(self):
        assert not self.busy
        self.busy = True

    def forget(self):
        self.busy = False


class Side:
    """A side that was connected, and that has gone since."""

    def __init__(self, rows):
        self.placement, self.closed = rows, False

    def place(self, row, experts):
        raise RuntimeError("it has gone")

    def close(self):
        self.closed = True


def test_a_side_that_cannot_place_experts_is_closed_and_another_change_may_be_made():
    rows = np.arange(8).reshape(2, 4)
    now, new = Side(rows), Side(np.roll(rows, 1, axis=1))
    device = SimpleNamespace(placements=SimpleNamespace(physical_to_logical=rows))
    executor = SimpleNamespace(model=SimpleNamespace(apart=now), device=device)
    engine = Engine(executor)
    scaling = ExpertScaling(engine)
    scaling._prepare = lambda *_: _Prepared(None, SimpleNamespace(apart=new), None, 0.0)
    prepared = scaling.prepare(None, None)
    assert engine.busy
    with pytest.raises(RuntimeError, match="it has gone"):
        scaling.apply(prepared)
    assert (now.closed, new.closed, scaling.number) == (False, True, 0)
    assert executor.model.apart is now
    assert scaling.prepare(None, None)
