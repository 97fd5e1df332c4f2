"""Another executor under running requests: none is lost, none is answered otherwise, and what a lost step made is never seen."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from fake_executor import FakeExecutor, expected_tokens
from layouts import write_checkpoint
from quick_compilation import FEW_SHAPES
from tiny_tokenizer import tiny_tokenizer

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.sampling_params import OutputKind
from dsjax.engine.device.access import DevicePart
from dsjax.engine.elastic import generations
from dsjax.engine.engine import EngineParts, LLMEngine
from dsjax.engine.experts.eplb import ExpertMover
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.errors import ChangeUnderWayError, UserError
from dsjax.hosts.group import GroupError
from sharding import MeshError, MeshSpec
from sharding.host_memory import on_device


class FakeGenerations:
    """Gives the executors that it was made with, one after the other."""

    def __init__(self, executors: list[FakeExecutor], speculation=None):
        self.executors, self.speculation = executors, speculation
        self.errors: list[Exception] = []
        self.failure, self.changes, self.due = None, 0, True

    def take_change(self):
        changed, self.changes = self.changes > 0, max(0, self.changes - 1)
        return changed

    def regroup(self):
        return self.to(None)

    def ask(self, mesh, expert_mesh=None):
        return mesh

    def to(self, wanted):
        executor = self.executors.pop(0)
        return SimpleNamespace(executor=executor, config=config_of(executor), facts=None, larger_is_wanted=False)

    def after(self, error):
        self.errors.append(error)
        return self.to(None)


class AfterALoss(generations.Generations):
    """Whose process is lost while another mesh is asked for, and which then gets that mesh."""

    def __init__(self):
        self._asked, self.failure, self._executor = True, None, None
        self.wanted = self._args = None

    def _lost_by(self, error, seconds=None):
        return error

    def _make(self, kind, reason):
        self._asked = False
        return kind


def test_who_asks_for_a_mesh_before_a_process_is_lost_hears_that_it_was_not_changed_to():
    asked = AfterALoss()
    assert asked.after(GroupError("it is gone")) == "loss"
    assert "ask again" in str(asked.failure)
    assert asked.to(generations.Wanted(MeshSpec(2))) == "scale"
    assert asked.failure is None


def config_of(executor: FakeExecutor) -> SchedulerConfig:
    return SchedulerConfig.from_limits(executor.limits, max_num_batched_tokens=16)


def engine_over(executors: list[FakeExecutor]) -> tuple[LLMEngine, FakeGenerations]:
    first, *others = executors
    engine = LLMEngine(EngineParts(first, tiny_tokenizer(), config_of(first)))
    engine.core.generations = generations = FakeGenerations(others)
    return engine, generations


PROMPTS = {str(i): [1 + i, 2, 3 * i][: 1 + i % 3] + [5] * i for i in range(16)}


def add_all(engine: LLMEngine, **params) -> None:
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, SamplingParams(temperature=0, **{"max_tokens": 20, **params}))


def take(engine: LLMEngine, token_ids: dict[str, list[int]], steps: int = 10_000) -> None:
    """Step, adding up each request's deltas as a stream's reader does."""
    for _ in range(steps):
        if not engine.has_unfinished():
            return
        for output in engine.step():
            token_ids.setdefault(output.request_id, []).extend(output.outputs[0].token_ids)


@pytest.mark.parametrize("at", [0, 1, 2, 5, 9, 14])
@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (3, 1)])
def test_a_change_between_two_steps_changes_no_token(at, sizes):
    engine, _ = engine_over([FakeExecutor(num_ranks=ranks, max_in_flight=2) for ranks in sizes])
    token_ids: dict[str, list[int]] = {}
    add_all(engine, output_kind=OutputKind.DELTA)
    take(engine, token_ids, at)
    engine.scale("dp")
    take(engine, token_ids)
    assert token_ids == {name: expected_tokens(prompt, 20) for name, prompt in PROMPTS.items()}
    assert engine.core.scheduler.num_unfinished == 0
    assert all(rank.pool.num_used == 0 for rank in engine.core.scheduler.ranks)


@pytest.mark.parametrize("due", [True, False])
def test_an_engine_without_threads_goes_on_with_processes_that_come_back(due):
    engine, generations = engine_over([FakeExecutor(num_ranks=ranks, max_in_flight=2) for ranks in (1, 2)])
    token_ids: dict[str, list[int]] = {}
    add_all(engine, output_kind=OutputKind.DELTA)
    take(engine, token_ids, 5)
    generations.changes, generations.due = 1, due
    take(engine, token_ids)
    assert engine.core.executor.limits.num_ranks == 1 + due
    assert token_ids == {name: expected_tokens(prompt, 20) for name, prompt in PROMPTS.items()}


def test_generations_say_once_that_a_process_has_gone_or_come_back_and_that_one_leaves_until_it_is_decided():
    seen, woken = AfterALoss(), []
    seen._has_changed, seen._group, seen.wake = False, SimpleNamespace(leavers=[]), lambda: woken.append(1)
    assert not seen.take_change()
    seen._note_change(None)
    assert [seen.take_change(), seen.take_change(), woken] == [True, False, [1]]
    seen._group.leavers.append("one")
    assert [seen.take_change(), seen.take_change()] == [True, True]


@pytest.mark.parametrize("at", [0, 1, 2, 3, 7, 11])
def test_nothing_of_a_step_that_is_lost_is_seen(at):
    executors = [FakeExecutor(num_ranks=ranks, max_in_flight=2) for ranks in (4, 2, 3)]
    executors[0].fail_at_step, executors[1].fail_at_step = at, 4
    engine, generations = engine_over(executors)
    token_ids: dict[str, list[int]] = {}
    add_all(engine, output_kind=OutputKind.DELTA)
    take(engine, token_ids)
    assert [str(error) for error in generations.errors] == ["the fake device is lost"] * 2
    assert token_ids == {name: expected_tokens(prompt, 20) for name, prompt in PROMPTS.items()}


def test_tokens_that_were_entered_before_something_behind_them_failed_are_given():
    executors = [FakeExecutor(num_ranks=2), FakeExecutor(num_ranks=1)]
    engine, generations = engine_over(executors)
    token_ids: dict[str, list[int]] = {}
    add_all(engine, output_kind=OutputKind.DELTA)
    take(engine, token_ids, 3)
    real, calls = engine.core._clear_dirty, []

    def fail_once():
        if not calls and engine.core._owed:
            calls.append(None)
            raise RuntimeError("gone between two steps")
        real()

    engine.core._clear_dirty = fail_once
    take(engine, token_ids)
    assert calls
    assert len(generations.errors) == 1
    assert token_ids == {name: expected_tokens(prompt, 20) for name, prompt in PROMPTS.items()}


def test_an_error_that_nothing_survives_is_raised_as_it_was():
    executor = FakeExecutor()
    executor.fail_at_step = 1
    engine = LLMEngine(EngineParts(executor, tiny_tokenizer(), config_of(executor)))
    add_all(engine)
    with pytest.raises(RuntimeError, match="the fake device is lost"):
        take(engine, {})


def test_a_request_that_the_smaller_cache_cannot_hold_ends_with_that_error_and_one_without_max_tokens_is_shortened():
    engine, _ = engine_over([FakeExecutor(pages_per_rank=33), FakeExecutor(pages_per_rank=5)])
    params = {"temperature": 0, "ignore_eos": True, "output_kind": OutputKind.FINAL_ONLY}
    engine.add_request("long", [1] * 10, SamplingParams(max_tokens=40, **params))
    engine.add_request("open", [2] * 3, SamplingParams(max_tokens=None, **params))
    engine.add_request("short", [3], SamplingParams(max_tokens=4, **params))
    engine.step()
    engine.scale("smaller")
    outputs = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output.outputs[0] for output in engine.step()}
    assert outputs["long"].finish_reason == "error"
    assert outputs["long"].error == "no_room_on_the_new_mesh"
    assert (
        "the server's mesh has changed, and the prompt has 10 tokens and max_tokens is 40"
        in outputs["long"].stop_reason
    )
    assert outputs["open"].finish_reason == "length"
    assert outputs["open"].token_ids == expected_tokens([2] * 3, 17 - 3)
    assert outputs["short"].token_ids == expected_tokens([3], 4)
    # And what comes later is refused by the new size.
    with pytest.raises(UserError, match="the cache of a rank holds 16"):
        engine.add_request("later", [1] * 10, SamplingParams(max_tokens=40, **params))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), mtp=True, first_k_dense_replace=0)


FEATURES = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "enable_eplb": True,  # which rests on one device
    "eplb_config": {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0},
    "cache_tokens": 32,
    "host_cache_bytes": 200_000,
}


def answer(output):
    """Tokens, and the log-probability of each."""
    (made,) = output.outputs
    return list(made.token_ids), [one[token].logprob for token, one in zip(made.token_ids, made.logprobs, strict=True)]


def begin(llm, prompts, params):
    """Add requests; give the answers of those that have ended, by number, and a function that computes a step."""
    for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        llm.engine.add_request(str(index), prompt, param)
    found = {}

    def step():
        found.update({output.request_id: answer(output) for output in llm.engine.step() if output.finished})

    return found, step


@pytest.mark.slow
def test_a_model_goes_up_and_down_in_the_middle_of_requests_which_get_the_bits_of_each_alone_on_one_device(
    checkpoint, tmp_path, kernels
):
    fixed = {"max_tokens": 9, "ignore_eos": True, "detokenize": False, "logprobs": 0}
    params = [
        SamplingParams(temperature=0, **fixed),
        SamplingParams(temperature=0.9, seed=4, **fixed),
        SamplingParams(temperature=0, repetition_penalty=1.4, **fixed),
    ]
    prompts = [{"prompt_token_ids": list(range(3 + i, 9 + 2 * i))} for i in range(3)]
    disk = {
        "disk_cache": str(tmp_path / "pages"),
        "disk_cache_bytes": 10_000_000,
    }  # its lock is given back and taken again
    options = FEW_SHAPES | FEATURES | disk | {"kernels": "native", "batch_invariant": True}
    llm = LLM(str(checkpoint), mesh="dp=2", **options)
    llm.scale("dp=1")
    expected = [answer(llm.generate([prompt], [param])[0]) for prompt, param in zip(prompts, params, strict=True)]
    llm.engine.flush_prefix_cache()
    found, step = begin(llm, prompts, params)
    for mesh in ("dp=2", "dp=1", "dp=2"):
        for _ in range(3):
            step()
        assert len(found) < len(prompts)
        llm.scale(mesh)
        assert llm.facts.mesh == mesh
        assert (llm.executor.extension(ExpertMover) is None) == (mesh == "dp=1")
    assert llm._generations.number == 4
    while llm.engine.has_unfinished():
        step()
    assert [found[str(index)] for index in range(3)] == expected
    with pytest.raises(
        MeshError, match=r"mesh dp=4096 wants 4096 devices, and this server has \d+; ask for a mesh of at most so many"
    ):
        llm.scale("dp=4096")
    with pytest.raises(MeshError, match="heads are not divisible by tp=3"):
        llm.scale("tp=3")
    llm._generations.ask("dp=1")
    with pytest.raises(ChangeUnderWayError, match="the mesh is being changed"):
        llm.scale("dp=1")
    llm.shutdown()


@pytest.mark.slow
def test_attention_and_experts_apart_go_up_and_down_in_the_middle_of_requests_and_change_no_bit(checkpoint, kernels):
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": list(range(3 + i, 9 + 2 * i))} for i in range(3)]
    options = FEW_SHAPES | {"kernels": "native", "batch_invariant": True}
    one = LLM(str(checkpoint), mesh="dp=1", **options)
    expected = [answer(one.generate([prompt], params)[0]) for prompt in prompts]
    one.shutdown()
    moving = {name: FEATURES[name] for name in ("enable_eplb", "eplb_config")}
    llm = LLM(str(checkpoint), attention_mesh="dp=2", expert_mesh="ep=4", **options | moving)
    (found, step), kept = begin(llm, prompts, [params] * 3), 0
    for mesh, experts in (("dp=1", None), (None, "ep=2"), ("tp=2", "ep=3")):
        for _ in range(2):
            step()
        assert len(found) < len(prompts)
        llm.scale(mesh, expert_mesh=experts)
        assert llm.facts.mesh == (mesh or "dp=1")
        assert llm.executor.device.model.apart.params
        counts = llm._generations.counts.weight_bytes
        assert counts["read"] == 0  # what either side holds goes on to the other devices
        assert counts["kept"] + counts["moved"] > kept
        kept = counts["kept"] + counts["moved"]
    assert llm.facts.expert_mesh == "ep=3"
    while llm.engine.has_unfinished():
        step()
    assert [found[str(index)] for index in range(3)] == expected
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


@pytest.mark.slow
def test_stages_come_and_go_in_the_middle_of_requests_and_change_no_bit(checkpoint, tmp_path, kernels):
    params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, detokenize=False, logprobs=0)
    prompts = [{"prompt_token_ids": list(range(3 + i, 9 + 2 * i))} for i in range(3)]
    moving = {
        name: FEATURES[name] for name in ("enable_eplb", "eplb_config")
    }  # which rests where a stage has one device
    tiers = {
        "cache_tokens": 32,
        "host_cache_bytes": 200_000,
        "disk_cache": str(tmp_path / "pages"),
        "disk_cache_bytes": 10_000_000,
    }
    exact = {"kernels": "native", "batch_invariant": True}
    llm = LLM(str(checkpoint), mesh="dp=2", **FEW_SHAPES | moving | tiers | exact)
    expected = [answer(llm.generate([prompt], params)[0]) for prompt in prompts]
    found, step = begin(llm, prompts, [params] * 3)
    for mesh in ("pp=2,dp=2", "pp=3", "tp=2"):
        for _ in range(2):
            step()
        assert len(found) < len(prompts)
        llm.scale(mesh)
        assert llm.facts.mesh == mesh
        assert (llm.executor.extension(ExpertMover) is None) == (mesh == "pp=3")
    while llm.engine.has_unfinished():
        step()
    assert [found[str(index)] for index in range(3)] == expected
    with pytest.raises(UserError, match="more stages than the model has layers"):
        llm.scale("pp=64")
    assert llm.facts.mesh == "tp=2"
    llm.shutdown()


def test_stages_are_refused_beside_what_does_not_go_with_them_before_anything_is_given_up(checkpoint, monkeypatch):
    module = SimpleNamespace(attachment=Attachment, device_part=lambda *_: DevicePart())
    monkeypatch.setitem(sys.modules, "kept_elsewhere", module)
    llm = LLM(str(checkpoint), mesh="dp=1", page_source="kept_elsewhere", **FEW_SHAPES)
    before = llm.executor
    with pytest.raises(UserError, match="--page-source does not go with stages"):
        llm.scale("pp=2")
    assert llm.executor is before
    llm.shutdown()


def test_nothing_of_either_side_is_read_again_where_attention_goes_on_on_another_mesh(checkpoint):
    llm = LLM(str(checkpoint), attention_mesh="dp=2", expert_mesh="ep=2", **FEW_SHAPES)
    llm.scale("dp=1")
    device = llm.executor.device
    arrays = [*device.params.values(), *device.model.apart.params.values()]
    counts = llm._generations.counts.weight_bytes
    assert counts["kept"] + counts["moved"] == sum(array.nbytes for array in arrays)
    assert counts["read"] == 0
    llm.shutdown()


def test_an_engine_whose_experts_are_on_its_mesh_has_no_mesh_of_experts(checkpoint):
    llm = LLM(str(checkpoint), mesh="dp=1", **FEW_SHAPES)
    with pytest.raises(UserError, match="the experts of this engine are on the devices of its mesh; give mesh alone"):
        llm.scale(expert_mesh="ep=2")
    llm.shutdown()


def test_an_embedding_in_host_memory_comes_along_to_a_mesh_of_several_devices(checkpoint, kernels):
    llm = LLM(str(checkpoint), mesh="dp=2", embedding_location="host", **FEW_SHAPES | {"kernels": "native"})
    expected = llm.logits([[5, 9, 33]])[0]
    for mesh in ("dp=4", "tp=2"):
        llm.scale(mesh)
        assert not on_device(llm.executor.params["embed.weight"].sharding)
        np.testing.assert_array_equal(llm.logits([[5, 9, 33]])[0], expected)
    llm.shutdown()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MeshError("the mesh is not so"), "the mesh is not so"),
        (RuntimeError("RESOURCE_EXHAUSTED"), r"it could not be loaded \(RuntimeError: RESOURCE_EXHAUSTED\)"),
    ],
)
def test_a_mesh_that_fails_after_the_old_one_was_given_up_leaves_the_old_one_made_again(
    checkpoint, monkeypatch, error, said
):
    llm = LLM(str(checkpoint), mesh="dp=2", **FEW_SHAPES)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=0)
    expected = answer(llm.generate([{"prompt_token_ids": [5, 9, 33]}], params)[0])
    errors, load = [error], generations.load_generation
    monkeypatch.setattr(generations, "load_generation", lambda *told: raised(errors.pop()) if errors else load(*told))
    with pytest.raises((UserError, MeshError), match=said):
        llm.scale("dp=1")
    assert llm.facts.mesh == "dp=2"
    assert answer(llm.generate([{"prompt_token_ids": [5, 9, 33]}], params)[0]) == expected
    # Who asks next is not told this reason, should a lost process be dealt with in place of what was asked for.
    llm._generations.ask("dp=1")
    assert llm._generations.failure is None
    llm._generations.forget()
    llm.scale("dp=1")
    assert llm.facts.mesh == "dp=1"
    llm.shutdown()


def raised(error):
    raise error
