"""Programs for meshes that losses may lead to are compiled ahead: an engine on such a mesh compiles none."""

from types import SimpleNamespace

import pytest
from layouts import TINY, write_checkpoint
from quick_compilation import FEW_SHAPES

from dsjax.config import ModelConfig
from dsjax.engine.elastic.compile_ahead import CompileAhead, meshes_after_losses
from dsjax.engine.program_cache.library import ProgramLibrary, Shelf
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.loading import load_model
from sharding import MeshSpec


@pytest.mark.slow
def test_an_engine_whose_programs_were_compiled_ahead_compiles_none(tmp_path, monkeypatch, no_programs_on_disk):
    drafts = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    moving = {"enable_eplb": True, "eplb_config": {"num_redundant_experts": 4}}
    model = str(write_checkpoint(tmp_path, mtp=True, num_hidden_layers=1, first_k_dense_replace=0))
    args = EngineArgs(model=model, mesh="dp=2", host_cache_bytes=200_000, **FEW_SHAPES, **drafts, **moving)
    library = ProgramLibrary()
    ahead = CompileAhead(args, library)
    ahead.prepare(MeshSpec.parse("dp=2"), "this test is run")
    assert ahead.done == ahead.total > 10
    compiled = []
    monkeypatch.setattr(Shelf, "compile", lambda self, key, lowered: compiled.append(key))
    executor = load_model(args, library=library).executor
    executor.warm_up()
    executor.shutdown()
    assert not compiled


APART = {"attention_mesh": "dp=2", "expert_mesh": "ep=2", "afd_role": "attention", "afd_address": "127.0.0.1:7000"}


@pytest.mark.parametrize("options", [{"compile_ahead": 0}, APART], ids=["as asked", "experts apart"])
def test_nothing_is_compiled_ahead_where_that_is_asked_for_or_cannot_be(tmp_path, options):
    library = ProgramLibrary()
    ahead = CompileAhead(EngineArgs(model=str(tmp_path), **options), library)
    ahead.prepare(MeshSpec.parse("dp=2"), "this test is run")
    ahead.begin(MeshSpec.parse("dp=2"), MeshSpec.parse("dp=2"), [0, 1], "f32")
    assert not library.in_memory
    assert ahead.total == 0


CONFIG = ModelConfig.from_dict(TINY)


@pytest.mark.parametrize(
    ("own", "losses", "wanted", "found"),
    [
        (0, 1, "dp=8", {"dp=6": (0, 1, 4, 5, 6, 7)}),
        (1, 1, "dp=8", {"dp=6": (0, 1, 2, 3, 6, 7)}),  # without 2: process 1 has a part in it
        (3, 2, "dp=8", {"dp=6": (0, 1, 4, 5, 6, 7), "dp=4": (0, 1, 6, 7)}),
        (0, 3, "dp=8", {"dp=6": (0, 1, 4, 5, 6, 7), "dp=4": (0, 1, 6, 7), "dp=2": (0, 1)}),
        # After /scale to three of the four: the one that stands by takes the place of one that goes, and then there are fewer.
        (0, 1, "dp=6", {"dp=6": (0, 1, 4, 5, 6, 7)}),
    ],
)
def test_each_mesh_that_losses_may_lead_to_is_a_candidate_once(own, losses, wanted, found):
    devices = [SimpleNamespace(id=i, process_index=i // 2) for i in range(8)]
    given = meshes_after_losses(EngineArgs(mesh="dp=8"), CONFIG, "f32", MeshSpec.parse(wanted), devices, own, losses)
    assert {str(each.spec): tuple(device.id for device in each.devices) for each in given} == found
