"""What loading reads of a model's folder, and the facts of the engine. Also tests `setup/facts.py` and `setup/fitting.py`."""

import threading
from unittest.mock import Mock

import jax
import pytest
from layouts import TINY, write_checkpoint
from tiny_tokenizer import CONFIG, tiny_tokenizer, write_tokenizer
from waits import until

from dsjax import LLM
from dsjax.config import ModelConfig
from dsjax.engine.device.mesh_executor import MeshExecutor
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.fitting import check_layout
from dsjax.engine.setup.loading import load_model, read_eos_token_ids, read_tokenizer
from dsjax.engine.text.prompt_encoder import V4Encoder, V32Encoder
from dsjax.engine.text.tokenizer import TokenizerError
from dsjax.errors import UserError
from sharding import MeshError, MeshSpec


def test_generation_config_adds_to_the_tokenizer_and_comes_before_config(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert read_eos_token_ids(tmp_path, tiny_tokenizer()) == (1, 9)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert read_eos_token_ids(tmp_path, tiny_tokenizer()) == (1, 7, 8)
    assert read_eos_token_ids(tmp_path, None) == (7, 8)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(TokenizerError, match="eos_token_id '</s>'"):
        read_eos_token_ids(tmp_path, None)


def test_options_name_another_tokenizer_template_or_encoder_than_the_model_s(tmp_path):
    model, other = tmp_path / "model", tmp_path / "other"
    for directory in (model, other):
        directory.mkdir()
    (model / "config.json").write_text('{"model_type": "deepseek_v32"}')
    assert read_tokenizer(EngineArgs(), model) is None
    write_tokenizer(other)
    read = lambda **options: read_tokenizer(EngineArgs(tokenizer=str(other), **options), model).chat_template  # noqa: E731
    assert read().source == CONFIG["chat_template"]
    assert isinstance(read(tokenizer_mode="deepseek_v4"), V4Encoder)
    (other / "tokenizer_config.json").unlink()
    assert isinstance(read(), V32Encoder)
    (tmp_path / "mine.jinja").write_text("{{ 1 }}")
    assert read(chat_template=str(tmp_path / "mine.jinja")).source == "{{ 1 }}"
    with pytest.raises(UserError, match=r"missing.jinja cannot be read"):
        read(chat_template="missing.jinja")


@pytest.mark.parametrize(
    ("mesh", "options", "prefill", "decode"),
    [
        ("dp=8", {}, "padded", "gather"),  # 300 tokens of a rank and launch, and 4
        ("dp=8", {"enable_dbo": True, "dbo_prefill_token_threshold": 300}, "gather", "gather"),  # twice 150
        ("dp=8", {"dispatch": "ragged"}, "ragged", "ragged"),
        ("dp=2,tp=4", {}, "gather", "gather"),  # a device sends a quarter of its DP rank's tokens
        ("dp=1", {"dispatch": "ragged"}, "local", "local"),
        ("dp=8", {"kernels": "native", "prefill_chunk": 100}, "memory", "memory"),  # experts read tokens where they are
    ],
)
def test_dispatch_is_told_as_what_launches_do(tmp_path, kernels, mesh, options, prefill, decode):
    write_checkpoint(tmp_path, max_position_embeddings=512)
    sizes = {"prefill_chunk": 300, "max_num_seqs": 4, "cache_tokens": 512, "kernels": "plain"}
    facts = load_model(EngineArgs(model=str(tmp_path), mesh=mesh, **sizes | options)).facts
    assert facts.dispatch == {"prefill": prefill, "decode": decode}


def test_stages_count_the_bytes_that_they_read_as_one_mesh_does(tmp_path):
    path = str(write_checkpoint(tmp_path))
    whole, stages = (
        load_model(EngineArgs(model=path, mesh=mesh, max_model_len=32, max_num_seqs=2, prefill_chunk=8)).sources
        for mesh in ("dp=1", "pp=2")
    )
    assert (stages.kept, stages.moved) == (0, 0)
    assert stages.read == whole.read > 0
    assert stages.file > 0


SEPARATED = {"prefill_mesh": "dp=1", "decode_mesh": "dp=1"}
PLACES = {
    "tokens": ({}, "dsjax.engine.setup.loading.read_eos_token_ids"),
    "core": ({}, "dsjax.engine.engine.EngineCore"),
    "generations": ({}, "dsjax.engine.elastic.generations.Generations"),
    "tokens of stages": ({"mesh": "pp=2"}, "dsjax.engine.setup.loading.read_eos_token_ids"),
    "prefill": (SEPARATED, "dsjax.engine.disaggregated.PrefillEngine"),
    "core of two": (SEPARATED, "dsjax.engine.engine.EngineCore"),
}


@pytest.mark.parametrize(("options", "place"), PLACES.values(), ids=PLACES)
def test_whoever_keeps_an_error_of_the_start_keeps_no_cache_and_no_thread(tmp_path, monkeypatch, options, place):
    made, make, before = [], MeshExecutor.__init__, set(threading.enumerate())
    monkeypatch.setattr(MeshExecutor, "__init__", lambda self, *a, **k: made.append(self) or make(self, *a, **k))
    monkeypatch.setattr(place, Mock(side_effect=RuntimeError("not now")))
    sizes = {"page_size": 4, "max_model_len": 32, "max_num_seqs": 2, "prefill_chunk": 8, "max_num_batched_tokens": 8}
    events = {"kv_events_config": {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events"}}
    disk = {"disk_cache": str(tmp_path / "pages"), "disk_cache_bytes": 1 << 20} if "mesh" in options else {}
    with pytest.raises(RuntimeError, match="not now") as kept:
        LLM(str(write_checkpoint(tmp_path, mtp=bool(options))), **sizes, **events, **disk, **options)
    assert kept.value
    assert len(made) == (2 if options else 1)
    assert all(array.is_deleted() for executor in made for array in jax.tree.leaves(executor.state))
    until(lambda: not any("dsjax" in thread.name for thread in {*threading.enumerate()} - before))


def test_an_address_that_the_other_side_cannot_reach_is_refused_before_weights_are_read():
    with pytest.raises(UserError, match=r"--transfer-host: '192\.0\.2\.1' is no address of this host"):
        load_model(EngineArgs(model="missing", disaggregation_mode="prefill", transfer_host="192.0.2.1"))


def test_a_dense_width_that_tp_does_not_divide_fits_where_each_device_has_all_of_it():
    config, spec = ModelConfig.from_dict(TINY | {"intermediate_size": 50}), MeshSpec.parse("tp=4")
    with pytest.raises(MeshError, match="dense MLP width 50 is not divisible by tp=4"):
        check_layout(config, spec, 0, "f32")
    check_layout(config, spec, 0, "f32", dense_tp=1)
    with pytest.raises(UserError, match=r"--moe-dense-tp-size is 2.*give 1 or leave it out"):
        check_layout(config, spec, 0, "f32", dense_tp=2)
