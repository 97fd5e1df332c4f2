"""An engine's programs on disk: two of one name are the same to the letter, and an engine that is made again traces none."""

from collections import defaultdict
from dataclasses import replace

import pytest
from layouts import write_checkpoint
from quick_compilation import FEW_SHAPES
from tiny_steps import limits_of, tiny

from dsjax import LLM, SamplingParams
from dsjax.engine.device import device_state
from dsjax.engine.device.buckets import Rectangle
from dsjax.engine.device.programs import Programs
from dsjax.engine.program_cache.compiled_programs import CompiledPrograms
from dsjax.engine.program_cache.folder import ProgramFolder
from dsjax.engine.program_cache.library import ProgramLibrary

STEPS = [
    *({"mesh": mesh} for mesh in ("dp=1", "dp=2", "tp=2", "dp=2,tp=2")),
    *({"mesh": "dp=2", "dispatch": method} for method in ("gather", "padded", "ragged")),
    {"mesh": "dp=2", "dispatch": "padded", "moe_chunk_tokens": 2},
    {"mesh": "dp=2", "dispatch": "padded", "dispatch_wire": "fp8"},
    {"mesh": "dp=2", "kernels": "plain"},
    {"mesh": "dp=2", "kernels": "plain", "mla_decode": "CC"},
    {"mesh": "dp=2", "kernels": "plain", "mla_prefill": "A_CC_ME"},
    {"mesh": "dp=2", "kernels": "plain", "kv_cache_dtype": "fp8"},
    {"mesh": "dp=2", "enable_dbo": True, "dbo_decode_token_threshold": 2},
    {"mesh": "dp=2", "redundant_experts": 2},
    {"mesh": "dp=2", "redundant_experts": 2, "ep_dispatch_algorithm": "static"},
    {"mesh": "tp=2", "moe_dense_tp_size": 1},
    {"mesh": "tp=2", "enable_dp_lm_head": True},
    {"mesh": "dp=1", "embedding_location": "host"},
]
"""Options that a step depends on, one by one. What the engine adds to them (drafts, balancing) is in the parameters and the state."""
TIERS = {"host_pages_per_rank": 8, "disk_pages": 4, "disk_page_bytes": 64, "transfers": True, "moves_pages": True}


def programs_of(folder: ProgramFolder, options: dict, **limits):
    """Give of some of a step's programs the name on disk, and a function that lowers it to what the compiler is given."""
    step = tiny(**options)
    limits = replace(limits_of(step.spec.dp_size), **limits)
    state = device_state.describe(step, limits, 0)
    programs = Programs(step, step.abstract_parameters(), state, limits, library=ProgramLibrary(folder))
    for key in (("step", programs.shape(Rectangle(2, 1), None), False), ("admit",)):
        chosen = programs._compiler_options(key)
        name = programs.store.shelf.name(key)
        assert name is not None, options
        yield name, lambda key=key, chosen=chosen: (programs.lower(key).as_text(), str(chosen))


@pytest.mark.slow
def test_programs_of_one_name_are_the_same_to_the_letter(tmp_path):
    """Only programs that share a name are lowered: a name of its own leads to no other text."""
    folder, by_name = ProgramFolder.inside(tmp_path), defaultdict(list)
    for options, limits in (*((options, {}) for options in (*STEPS, STEPS[7])), (STEPS[7], TIERS)):
        for name, lower in programs_of(folder, options, **limits):
            by_name[name].append(lower)
    shared = [lowers for lowers in by_name.values() if len(lowers) > 2]
    assert len(shared) >= 2, "the programs of the step that is described three times"
    for first, *others in shared:
        text = first()
        assert all(other() == text for other in others)


@pytest.mark.slow  # compiles an engine
def test_an_engine_that_is_made_again_traces_no_program_and_makes_the_same_tokens(tmp_path, monkeypatch):
    model = str(write_checkpoint(tmp_path, mtp=True))
    (tmp_path / "programs").mkdir(mode=0o700)
    monkeypatch.setattr(ProgramFolder, "inside", classmethod(lambda cls, cache: cls(tmp_path / "programs")))
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2)
    made = []
    for _ in range(2):
        llm = LLM(model=model, mesh="pp=2", **FEW_SHAPES)
        try:
            (output,) = llm.generate([{"prompt_token_ids": [5, 3, 9, 2]}], params)
            made.append((output.outputs[0].token_ids, output.outputs[0].logprobs))
        finally:
            llm.shutdown()
        monkeypatch.setattr(CompiledPrograms, "_compile", lambda self, key, *_: pytest.fail(f"{key} is compiled"))
    assert made[0] == made[1]
