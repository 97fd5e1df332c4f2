"""Another side of experts that cannot be had is left, the one of now stays, and another change may be made."""

from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from dsjax.engine.contract.commands import ChangeExperts, PrepareExperts
from dsjax.engine.setup.expert_scaling import ExpertScaling
from dsjax.errors import UserError
from dsjax.hosts.group import GroupError


@dataclass(frozen=True)
class Args:
    """What of the options says where experts are."""

    expert_mesh: str = "ep=4"
    afd_address: str = "127.0.0.1:1"


@dataclass(frozen=True)
class Facts:
    """What is said of an engine."""

    expert_mesh: str = "ep=4"
    physical_experts_per_device: int = 2
    expert_weight_bytes: int = 0


class Engine:
    """What changes the other side: no two changes are made at once."""

    def __init__(self):
        self.args, self.facts, self.busy = Args(), Facts(), False
        apart = SimpleNamespace(spec=SimpleNamespace(ep_size=2), bytes_of_device=7)
        self.executor = SimpleNamespace(model=SimpleNamespace(placement=SimpleNamespace(n_physical=8), apart=apart))

    def reserve(self):
        assert not self.busy
        self.busy = True

    def forget(self):
        self.busy = False

    def goes_on_with(self, args, facts):
        self.args, self.facts = args, facts


class Told:
    """An executor that remembers what it was told. error: why it cannot go on with the other side."""

    def __init__(self, prepared=None, error=None):
        self.commands, self._prepared, self._error = [], Future(), error
        if prepared is None:
            self._prepared.set_result(None)
        else:
            self._prepared.set_exception(prepared)

    def launch(self, command):
        self.commands.append(command)
        return command

    def collect(self, command):
        return self._prepared if isinstance(command, PrepareExperts) else self._error


def change(scaling, executor, later=None):
    one = scaling.begin(executor, "ep=2", "127.0.0.1:2")
    scaling.wait(one)
    scaling.end(later or executor, one)


def test_a_side_that_all_have_prepared_takes_over():
    engine, executor = Engine(), Told()
    scaling = ExpertScaling(engine)
    change(scaling, executor)
    assert executor.commands == [PrepareExperts(1, "ep=2", "127.0.0.1:2"), ChangeExperts(1, True)]
    assert engine.args == Args("ep=2", "127.0.0.1:2")
    assert engine.facts == Facts("ep=2", 4, 7)
    assert (scaling.number, engine.busy) == (1, False)


@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [
        (UserError("it has other options"), None, "^it has other options$"),
        (GroupError("process 1: it has other options"), None, "stays: process 1: it has other options"),
        (RuntimeError("the link is closed"), None, "cannot be prepared, and the one of now stays: the link is closed"),
        (None, "it has gone", "the one of now stays: it has gone"),
    ],
)
def test_a_side_that_one_could_not_prepare_is_dropped_by_all_and_another_may_take_over(failure, error, said):
    engine, executor = Engine(), Told(failure, error)
    scaling = ExpertScaling(engine)
    with pytest.raises(UserError, match=said):
        change(scaling, executor)
    assert executor.commands[1:] == [ChangeExperts(1, failure is None)]
    assert (engine.args, scaling.number, engine.busy) == (Args(), 0, False)
    change(scaling, again := Told())
    assert again.commands[0].number == 2


def test_an_interrupt_while_the_other_side_is_waited_for_leaves_the_one_of_now_and_another_change_may_be_made():
    engine, executor = Engine(), Told()
    scaling = ExpertScaling(engine)

    def interrupt():
        raise KeyboardInterrupt

    executor._prepared.exception = interrupt
    with pytest.raises(KeyboardInterrupt):
        scaling.change(executor, "ep=2", "127.0.0.1:2")
    assert executor.commands[1:] == [ChangeExperts(1, False)]
    assert (engine.args, scaling.number, engine.busy) == (Args(), 0, False)
    scaling.change(Told(), "ep=2", "127.0.0.1:2")
    assert (engine.args.expert_mesh, scaling.number) == ("ep=2", 1)


def test_a_side_that_was_prepared_for_another_mesh_of_the_attention_side_does_not_take_over():
    engine, executor = Engine(), Told()
    scaling, later = ExpertScaling(engine), Told()
    with pytest.raises(UserError, match="mesh has changed while"):
        change(scaling, executor, later)
    assert later.commands == []
    assert (engine.args, engine.busy) == (Args(), False)
