"""Stages change no bit of what one device gives. Also tests `pipeline/stage_executor.py` and `setup/stages.py`."""

import dataclasses
import itertools
from collections import deque
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from balanced_model import SIZES, few_buckets, generate
from layouts import answer, prompts

from dsjax import LLM, SamplingParams
from dsjax.engine.contract.commands import Clear, RankStep, Step, int32s
from dsjax.engine.pipeline.pipeline_executor import PipelineExecutor
from dsjax.engine.setup.facts import StageFacts
from dsjax.engine.setup.stages import OwnStages
from sharding import MeshSpec

OPTIONS = SIZES | {"mla_prefill": "CC", "mla_decode": "CC", "embedding_location": "host"}
OPTIONS |= {"mesh": "pp=2", "pp_layer_partition": "1,2"}  # a stage of the dense layer alone
OPTIONS |= {"enable_dbo": True, "dbo_decode_token_threshold": 2, "dbo_prefill_token_threshold": 2}


def assert_same_answer(found, reference) -> None:
    assert [one.tokens for one in found] == [list(tokens) for tokens in reference.tokens]
    assert [one.logprobs for one in found] == reference.logprobs
    assert all(np.isfinite(one.logprobs).all() and one.logprobs for one in found)


GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def one_device(checkpoint):
    return answer(checkpoint, "dp=1", "auto", "CC", "CC", new_tokens=12)


@pytest.fixture(scope="module")
def stages(checkpoint):
    llm = LLM(str(checkpoint), **OPTIONS)
    few_buckets(llm)
    yield llm
    llm.shutdown()


@pytest.mark.slow
def test_prompts_in_chunks_decodes_and_logits_are_those_of_one_device_to_the_bit(stages, one_device):
    assert_same_answer(generate(stages), one_device)
    np.testing.assert_array_equal(stages.logits([prompts()[-1]["prompt_token_ids"]])[0], one_device.logits)


@pytest.mark.slow
def test_each_stage_has_the_parameters_and_the_cache_of_its_layers_on_devices_of_its_own(stages):
    first, last = stages.executor.stages
    assert [stage.first for stage in (first.model.stage, last.model.stage)] == [0, 1]
    assert [one.state.cache["latent"].shape[0] for one in (first, last)] == [1, 2]
    assert ("embed.weight" in first.params, "embed.weight" in last.params) == (True, False)
    assert ("head.weight" in first.params, "head.weight" in last.params) == (False, True)
    arrays = [(*one.params.values(), one.state.tables) for one in (first, last)]
    held = [{device for array in own for device in array.devices()} for own in arrays]
    assert not held[0] & held[1]
    facts = stages.facts
    assert (facts.mesh, facts.num_devices, facts.mesh_shape["pp"]) == ("pp=2", 2, 2)
    assert [stage.layers for stage in facts.stages] == [(0, 0), (1, 2)]
    assert facts.parameters == sum(info.count for one in (first, last) for info in one.model.table.infos.values())


@pytest.mark.slow
def test_the_bytes_of_several_processes_are_those_of_the_fullest_stage(stages):
    steps = [stage.model for stage in stages.executor.stages]
    dense, sparse = (
        dataclasses.replace(stages.facts, weight_bytes={"dense": number}, cache_bytes=10 * number, **others)
        for number, others in (
            (3, {"physical_experts_per_device": 0, "dispatch": {"decode": "of 0"}}),
            (7, {"physical_experts_per_device": 8, "dispatch": {"decode": "of 1"}}),
        )
    )

    def describe(facts, step, ask):
        group = SimpleNamespace(agreement=SimpleNamespace(all_gather=ask))
        own = SimpleNamespace(spec=MeshSpec.parse("pp=2"), is_divided=True, group=group)
        return OwnStages.describe(own, [facts], [step])

    said = []
    for facts, step in zip((dense, sparse), steps, strict=True):
        describe(facts, step, lambda name, value: said.append(value) or [value])
    everybody = [msgspec.msgpack.decode(msgspec.msgpack.encode(value)) for value in said]
    each = [StageFacts((0, 0), 3, 30), StageFacts((1, 2), 7, 70)]
    together = dataclasses.replace(sparse, parameters=2 * dense.parameters, num_processes=2, stages=each)
    assert describe(dense, steps[0], lambda name, value: everybody) == together


@pytest.mark.slow
def test_steps_under_way_together_share_no_request_and_each_takes_its_part_of_them(stages):
    executor, under_way, sizes = stages.executor, [], []
    launch, collect = executor.launch, executor.collect

    def slots_of(command):
        return set(np.frombuffer(command.ranks[0].decodes, "<i4")[::2].tolist()) if isinstance(command, Step) else set()

    def launch_and_check(command):
        slots = slots_of(command)
        assert not any(slots & others for others in under_way)
        under_way.append(slots)
        sizes.append((len(slots), sum(map(bool, under_way))))
        return launch(command)

    def collect_and_note(pending):
        under_way.remove(slots_of(pending.command))
        return collect(pending)

    executor.launch, executor.collect = launch_and_check, collect_and_note
    try:
        stages.generate(prompts()[:4], GREEDY)
    finally:
        del executor.launch, executor.collect
    assert (2, 2) in sizes  # of four requests in two batches, both under way
    assert max(size for size, _ in sizes) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "method", "behind", "call"),
    [
        (0, "wait", False, 0),
        (0, "commit_results", False, 5),
        (1, "launch", False, 5),
        (1, "wait", False, 0),
        (0, "launch", True, 5),
        (1, "launch", True, 0),
    ],
)
def test_an_interrupt_between_stages_changes_nothing_of_what_comes_later(
    stages, one_device, monkeypatch, number, method, behind, call
):
    """behind: it comes when the method has done its work, and before its caller knows."""
    stage, calls = stages.executor.stages[number], itertools.count()
    inner = getattr(stage, method)

    def interrupted(*arguments):
        if next(calls) != call:
            return inner(*arguments)
        if behind:
            inner(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stage, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            stages.generate(prompts()[:4], GREEDY)
    stages.engine.flush_prefix_cache()
    found = [one.outputs[0].token_ids for one in stages.generate(prompts()[:4], GREEDY)]
    assert found == [list(tokens[:6]) for tokens in one_device.tokens[:4]]


def test_on_accelerators_a_launch_that_did_not_reach_all_stages_is_the_last_one():
    first, last = Mock(outgoing=deque()), Mock(outgoing=deque())
    for stage in (first, last):
        stage.model.mesh.devices = np.array([SimpleNamespace(platform="gpu")])
        stage.model.stage.count = 3
    executor = PipelineExecutor([first, last])
    assert executor.max_in_flight == 3, "of all processes' stages, of which two are here"
    last.launch.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        executor.launch("a step")
    with pytest.raises(RuntimeError, match=r"KeyboardInterrupt.*start the engine anew"):
        executor.launch("another step")
    first.launch.assert_called_once_with("a step")
    last.launch.assert_called_once_with("a step")


@pytest.mark.slow
def test_what_nobody_waits_for_goes_through_all_stages_when_what_is_before_it_is_done(stages):
    executor, nothing = stages.executor, Clear([int32s([1])])
    assert executor.launch(nothing).num_stages_done == 2
    step = executor.launch(Step([RankStep([], [], b"", [], [])]))
    behind = executor.launch(nothing)
    assert (step.num_stages_done, behind.num_stages_done) == (0, 0)
    executor.collect(step)
    assert behind.num_stages_done == 2


@pytest.mark.slow
def test_a_flush_forgets_the_cache_of_all_stages(stages):
    stages.generate(prompts()[-1:], GREEDY)
    assert all(np.asarray(stage.state.cache["latent"]).any() for stage in stages.executor.stages)
    stages.engine.flush_prefix_cache()
    assert not any(np.asarray(stage.state.cache["latent"]).any() for stage in stages.executor.stages)
