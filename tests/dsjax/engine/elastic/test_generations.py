"""Another executor under running requests loses and changes none; a lost step is never seen. Also tests `schedule/mesh_changer.py`."""

import sys
import threading
from types import SimpleNamespace
from unittest.mock import DEFAULT, Mock

import pytest
from fake_executor import FakeExecutor, expected_tokens
from mixes import given_to
from quick_compilation import FEW_SHAPES

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.sampling_params import OutputKind
from dsjax.engine.device.access import DevicePart
from dsjax.engine.elastic import generations
from dsjax.engine.experts.eplb import ExpertMover
from dsjax.engine.llm_engine import LLMEngine
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.mesh_changer import MeshEpoch
from dsjax.errors import ChangeUnderWayError, UserError
from dsjax.hosts.group import GroupError
from sharding import MeshError, MeshSpec
from sharding.host_memory import on_device


class FakeGenerations:
    """Gives the executors that it was made with, one after the other."""

    def __init__(self, executors: list[FakeExecutor]):
        self.executors, self.errors = executors, []
        self.speculation, self.failure, self.changes, self.needs_change = None, None, 0, True

    def poll_change(self):
        changed, self.changes = self.changes > 0, max(0, self.changes - 1)
        return changed

    begin_change = end_change = lambda self, mesh=None, expert_mesh=None, afd_address=None: mesh

    def change_to(self, wanted=None):
        executor = self.executors.pop(0)
        return MeshEpoch(executor, executor.config)

    regroup = change_to

    def recover_from(self, error):
        self.errors.append(error)
        return self.change_to()


class AfterALoss(generations.Generations):
    """Whose process is lost while another mesh is asked for, and which then gets that mesh."""

    def __init__(self):
        self._is_reserved, self.failure, self._executor = False, None, None
        self.wanted = self.args = self._phase = None
        self._lock = threading.Lock()

    def _find_loss(self, error, seconds=None):
        return error

    def _rebuild(self, cause, reason):
        return cause


def test_who_asks_for_a_mesh_before_a_process_is_lost_hears_that_it_was_not_changed_to():
    asked = AfterALoss()
    asked._reserve()
    assert asked.recover_from(GroupError("it is gone")) == "loss"
    assert "ask again" in str(asked.failure)
    with pytest.raises(ChangeUnderWayError):  # the loss is not the end of what was requested before it
        asked._reserve()
    assert asked.change_to(generations.Wanted(MeshSpec(2), SimpleNamespace(expert_mesh=None))) == "scale"
    assert asked.failure is None
    asked.end_change()
    asked._reserve()


PROMPTS = {str(i): [1 + i, 2, 3 * i][: 1 + i % 3] + [5] * i for i in range(16)}


class Serving:
    """An engine over the first executor, which gets the others as its mesh changes, and what readers of streams get from it."""

    def __init__(self, *executors: FakeExecutor):
        first, *others = executors
        self.generations, self.token_ids = FakeGenerations(others), {}
        self.engine = LLMEngine(first.parts(mesh_changer=self.generations))
        params = SamplingParams(temperature=0, max_tokens=20, output_kind=OutputKind.DELTA)
        for name, prompt in PROMPTS.items():
            self.engine.add_request(name, prompt, params)

    def take(self, steps: int = 10_000) -> None:
        """Compute so many steps at most, and add up each request's deltas."""
        for _ in range(steps):
            if not self.engine.has_unfinished():
                return
            for output in self.engine.step():
                self.token_ids.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)

    def ends_as_if_alone(self) -> bool:
        """Compute the rest; whether each request has got its tokens, each once."""
        self.take()
        return self.token_ids == {name: expected_tokens(prompt, 20) for name, prompt in PROMPTS.items()}


def executors(*ranks: int) -> list[FakeExecutor]:
    return [FakeExecutor(num_ranks=each, max_in_flight=2) for each in ranks]


@pytest.mark.parametrize("at", [0, 1, 2, 5, 9, 14])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 1)])
def test_a_change_between_two_steps_changes_no_token(at, sizes):
    serving = Serving(*executors(*sizes))
    serving.take(at)
    serving.engine.scale("dp")
    assert serving.ends_as_if_alone()
    assert serving.engine.core.scheduler.num_unfinished == 0
    assert all(rank.pool.num_used == 0 for rank in serving.engine.core.scheduler.ranks)


@pytest.mark.parametrize("due", [True, False])
def test_an_engine_without_threads_goes_on_with_processes_that_come_back(due):
    serving = Serving(*executors(1, 2))
    serving.take(5)
    serving.generations.changes, serving.generations.needs_change = 1, due
    assert serving.ends_as_if_alone()
    assert serving.engine.core.executor.limits.num_ranks == 1 + due


def test_generations_say_once_that_a_process_has_gone_or_come_back_and_that_one_leaves_until_it_is_decided():
    seen, woken = AfterALoss(), []
    seen._has_changed, seen._group, seen.failure = False, SimpleNamespace(has_leave_requests=False), None
    seen.watch(lambda: woken.append(1))
    assert not seen.poll_change()
    seen._note_change(None)
    assert [seen.poll_change(), seen.poll_change(), woken] == [True, False, [1]]
    seen._group.has_leave_requests = True
    assert [seen.poll_change(), seen.poll_change()] == [True, True]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7, 11])
def test_nothing_of_a_step_that_is_lost_is_seen(at):
    first, second, third = executors(4, 2, 3)
    first.fail_at_step, second.fail_at_step = at, 4
    serving = Serving(first, second, third)
    assert serving.ends_as_if_alone()
    assert [str(error) for error in serving.generations.errors] == ["the fake device is lost"] * 2


def test_tokens_that_were_entered_before_something_behind_them_failed_are_given():
    serving = Serving(FakeExecutor(num_ranks=2), FakeExecutor(num_ranks=1))
    serving.take(3)
    core, errors = serving.engine.core, serving.generations.errors
    real = core._clear_released_pages

    def fail_once():
        if not errors and core._unreturned:
            raise RuntimeError("gone between two steps")
        real()

    core._clear_released_pages = fail_once
    assert serving.ends_as_if_alone()
    assert [str(error) for error in errors] == ["gone between two steps"]


EXACT = FEW_SHAPES | {"kernels": "native"}
EPLB = {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0}
MOVING = {"enable_eplb": True, "eplb_config": EPLB}  # which rests on one device
TIERS = {"cache_tokens": 32, "host_cache_bytes": 200_000, "disk_cache_bytes": 10_000_000}
GENERATED = {"max_tokens": 14, "ignore_eos": True, "detokenize": False, "logprobs": 0}
PARAMS = {"temperature": 0}, {"temperature": 0.9, "seed": 4}, {"temperature": 0, "repetition_penalty": 1.4}
REQUESTS = [
    ({"prompt_token_ids": list(range(3 + i, 9 + 2 * i))}, SamplingParams(**params, **GENERATED))
    for i, params in enumerate(PARAMS)
]


class Running:
    """Three requests that an engine computes step by step."""

    def __init__(self, llm):
        self.engine, self.found = llm.engine, {}
        for index, (prompt, params) in enumerate(REQUESTS):
            llm.engine.add_request(str(index), prompt, params)

    def step(self, count):
        for _ in range(count):
            self.found |= {one.request_id: given_to(one) for one in self.engine.step() if one.finished}
        assert len(self.found) < 3

    def answers(self):
        """Compute the rest; give what each request got."""
        while self.engine.has_unfinished():
            self.found |= {one.request_id: given_to(one) for one in self.engine.step() if one.finished}
        return [self.found[str(index)] for index in range(3)]


@pytest.fixture(scope="module")
def featured(checkpoint, kernels, tmp_path_factory):
    """An engine with drafts, a balancer and both tiers, which has gone from two devices to one."""
    drafts = {"method": "mtp", "num_speculative_tokens": 1}
    folder = str(tmp_path_factory.mktemp("pages"))  # whose lock is given back and taken again
    options = EXACT | MOVING | TIERS | {"embedding_location": "host"}
    llm = LLM(str(checkpoint), mesh="dp=2", speculative_config=drafts, disk_cache=folder, **options)
    llm.scale("dp=1")
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def alone(featured):
    """What each of the three requests gets alone on one device."""
    found = [given_to(featured.generate([prompt], [params])[0]) for prompt, params in REQUESTS]
    featured.engine.flush_prefix_cache()
    return found


@pytest.mark.slow
def test_a_model_goes_up_and_down_in_the_middle_of_requests_which_get_the_bits_of_each_alone_on_one_device(
    featured, alone
):
    """Stages come and go too, and the embedding stays in host memory."""
    before, running = featured._generations.number, Running(featured)
    for mesh in ("dp=2", "pp=2", "dp=1", "dp=2"):
        running.step(3)
        featured.scale(mesh)
        assert featured.facts.mesh == mesh
        assert (featured.executor.extension(ExpertMover) is None) == (mesh != "dp=2")  # each stage has one device
    assert featured._generations.number == before + 4
    assert not on_device(featured.executor.params["embed.weight"].sharding)
    assert running.answers() == alone
    for mesh, error in (
        ("dp=4096", r"mesh dp=4096 wants 4096 devices, and this server has \d+; ask for a mesh"),
        ("tp=3", "heads are not divisible by tp=3"),
        ("pp=64", "more stages than the model has layers"),
    ):
        with pytest.raises((MeshError, UserError), match=error):
            featured.scale(mesh)
    assert featured.facts.mesh == "dp=2"
    featured._generations.begin_change("dp=1")
    with pytest.raises(ChangeUnderWayError, match="the mesh is being changed"):
        featured.scale("dp=1")
    featured._generations.end_change()


@pytest.mark.slow
def test_attention_and_experts_apart_go_up_and_down_in_the_middle_of_requests_and_change_no_bit(checkpoint, alone):
    llm = LLM(str(checkpoint), attention_mesh="dp=1", expert_mesh="ep=2", **EXACT | MOVING)
    running, before = Running(llm), 0
    for mesh, experts in (("tp=2", None), (None, "ep=3")):
        running.step(2)
        llm.scale(mesh, expert_mesh=experts)
        assert (llm.facts.mesh, llm.facts.expert_mesh) == ("tp=2", experts or "ep=2")
        device, counts = llm.executor, llm._generations.counts.weight_bytes
        assert counts["read"] == 0  # what either side holds goes on to the other devices
        there, arrays = counts["kept"] + counts["moved"], device.params | device.programs.experts.params
        assert there - before == sum(array.nbytes for array in arrays.values())
        before = there
    assert running.answers() == alone
    for wanted, error in (
        ({"mesh": "dp=4096"}, r"mesh dp=4096 and the experts' ep=3 want 4099 devices, and this server has \d+"),
        ({"expert_mesh": "ep=4096"}, "want 4098 devices"),
        ({"expert_mesh": "tp=2"}, "expected ep= and the number of devices"),
        ({"mesh": "dp=2,ep=1"}, "leave ep out"),
        ({"afd_address": "127.0.0.1:1"}, "no experts in other processes"),
        ({"mesh": "dp=1", "afd_address": "127.0.0.1:1"}, "change one side and then the other"),
    ):
        with pytest.raises((MeshError, UserError), match=error):
            llm.scale(**wanted)
    llm.shutdown()


def test_what_does_not_go_with_an_engine_is_refused_before_anything_is_given_up(checkpoint, monkeypatch):
    module = SimpleNamespace(attachment=Attachment, device_part=lambda *_: DevicePart())
    monkeypatch.setitem(sys.modules, "kept_elsewhere", module)
    llm = LLM(str(checkpoint), mesh="dp=1", page_source="kept_elsewhere", **FEW_SHAPES)
    before = llm.executor
    with pytest.raises(UserError, match="--page-source does not go with stages"):
        llm.scale("pp=2")
    with pytest.raises(UserError, match="the experts of this engine are on the devices of its mesh; give mesh alone"):
        llm.scale(expert_mesh="ep=2")
    assert llm.executor is before
    llm.shutdown()


@pytest.mark.slow
def test_a_mesh_that_fails_after_the_old_one_was_given_up_leaves_the_old_one_made_again(featured, alone, monkeypatch):
    featured.scale("dp=1")
    load = Mock(wraps=generations.load_generation)
    monkeypatch.setattr(generations, "load_generation", load)
    for error, said in (
        (MeshError("the mesh is not so"), "the mesh is not so"),
        (RuntimeError("RESOURCE_EXHAUSTED"), r"it could not be loaded \(RuntimeError: RESOURCE_EXHAUSTED\)"),
    ):
        load.side_effect = [error, DEFAULT]
        with pytest.raises((UserError, MeshError), match=said):
            featured.scale("dp=2")
        assert featured.facts.mesh == "dp=1"
        prompt, params = REQUESTS[0]
        assert given_to(featured.generate([prompt], params)[0]) == alone[0]
    # Who asks next is not told this reason, should a lost process be dealt with in place of what was asked for.
    featured._generations.begin_change("dp=2")
    assert featured._generations.failure is None
    featured._generations.end_change()
    load.side_effect = None
    featured.scale("dp=2")
    assert featured.facts.mesh == "dp=2"
