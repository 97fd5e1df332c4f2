"""What fits is the largest that does: one more would not, and few programs are compiled to know."""

import math
from types import SimpleNamespace

import pytest

from dsjax.config import load_config
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.memory import DeviceMemory, fit, largest
from dsjax.dryrun.run import dry_run
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError


@pytest.mark.parametrize("start", [1, 7, 1000])
@pytest.mark.parametrize(("room", "answer"), [(99, 0), (110, 1), (1234, 113), (10_000_000, 5000)])
def test_a_straight_line_takes_few_calls(start, room, answer):
    asked = []

    def size(n):
        asked.append(n)
        return 100 + 10 * n

    assert largest(size, room, start, most=5000) == answer
    assert len(asked) <= 14
    assert len(set(asked)) == len(asked)


def test_steps_and_refusals_are_searched_too():
    assert largest(lambda n: 64 * -(-n // 64), 1000, 3, most=10_000) == 960
    assert largest(lambda n: n if n <= 40 else math.inf, 1000, 3, most=10_000) == 40
    assert largest(lambda n: 5 * n, 50, 1, most=100, least=20) == 0


@pytest.mark.parametrize(("room", "context"), [(90, 0), (2 * 100, 100), (100_000, 2048)])
def test_no_context_is_tried_that_has_no_room_for_the_prompts_of_a_mixed_step(monkeypatch, room, context):
    args = DryRunArgs(
        engine=EngineArgs(model="demo", page_size=4, prefill_chunk=64, gpu_memory_utilization=1.0),
        step="mixed", batch=2, context=1024,
    )  # fmt: skip
    monkeypatch.setattr("dsjax.dryrun.memory.compile_step", lambda asked, *_: asked)
    monkeypatch.setattr(DeviceMemory, "of", lambda asked: SimpleNamespace(total=asked.rows * asked.row_tokens))
    assert fit(args, load_config("demo"), None, room).context == context


@pytest.mark.parametrize(("room", "batch"), [(2, 0), (40, 13), (60, 60), (100_000, 65_536)])
def test_a_larger_batch_that_drafts_less_is_found_behind_one_that_does_not_fit(monkeypatch, room, batch):
    by_load = {"method": "mtp", "num_speculative_tokens": 2}
    by_load["num_speculative_tokens_per_batch_size"] = [[1, 40, 2], [41, 64, 0]]
    engine = EngineArgs(model="demo", page_size=4, gpu_memory_utilization=1.0, speculative_config=by_load)
    monkeypatch.setattr("dsjax.dryrun.memory.compile_step", lambda asked, *_: asked)
    monkeypatch.setattr(DeviceMemory, "of", lambda asked: SimpleNamespace(total=asked.rows * (1 + asked.drafts)))
    assert fit(DryRunArgs(engine=engine, batch=8, context=16), load_config("demo"), None, room).batch == batch


def test_one_more_row_or_page_would_not_fit(monkeypatch):
    """Both neighbours of each answer are among the programs that were compiled, whose sizes grow as those of real ones do: in steps."""
    args = DryRunArgs(engine=EngineArgs(model="demo", page_size=4, gpu_memory_utilization=0.8), batch=2, context=16)
    totals = {}

    def compiled(asked, *_):
        slots = asked.engine.cache_tokens or asked.rows * asked.row_tokens
        size = 10_000 + 1152 * slots + 64 * -(-asked.rows * 700 // 64) + 4 * asked.row_tokens**2
        totals[asked.rows, asked.row_tokens, asked.engine.cache_tokens] = size
        return SimpleNamespace(total=size)

    monkeypatch.setattr("dsjax.dryrun.memory.compile_step", compiled)
    monkeypatch.setattr(DeviceMemory, "of", lambda compiled: compiled)
    config, needed = load_config("demo"), compiled(args).total
    totals.clear()
    found = fit(args, config, None, memory_bytes=round(1.9 * needed / 0.8))
    assert found.room == int(round(1.9 * needed / 0.8) * 0.8)
    assert found.compilations == len(totals) + 1  # two searches start from the same program
    assert found.batch > 2
    assert totals[found.batch, 16, None] <= found.room < totals[found.batch + 1, 16, None]
    assert totals[2, 16, found.cache_tokens] <= found.room < totals[2, 16, found.cache_tokens + 4]
    assert totals[2, found.context, None] <= found.room < totals[2, found.context + 4, None]


def test_what_a_step_changes_in_place_is_there_once_and_the_cpu_has_no_memory_to_fit_into():
    step = DeviceMemory({}, cache=100, state=0, inputs=0, arguments=100, outputs=107, aliased=100, temporaries=20)
    assert step.total == 127
    with pytest.raises(UserError, match="--fit needs an accelerator"):
        dry_run(DryRunArgs(engine=EngineArgs(model="demo")), search=True)
