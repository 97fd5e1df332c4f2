"""The plain forward pass of `dsjax.model.compressed.attention`, `Streams` and V4's routers on meshes, against transformers' class."""

import functools
import importlib.util
import json
from importlib.metadata import version

import jax
import numpy as np
import pytest
from goldens.our_model import COMPILE_QUICKLY
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from step_model import on_mesh
from v4_models import YARN, v4_config, v4_tensors

from dsjax.checkpoint.convert import convert_checkpoint
from dsjax.checkpoint.load import from_hf_tensors, load
from dsjax.checkpoint.source import open_checkpoint
from dsjax.checkpoint.v4_tensors import dsjax_name
from dsjax.config import ModelConfig
from dsjax.model.parameter_table import parameter_table
from sharding import MeshSpec
from sharding.rules import Rules

if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
    pytest.skip("compares with torch and transformers, which dsjax itself never needs", allow_module_level=True)
if tuple(map(int, version("transformers").split(".")[:2])) < (5, 24):
    pytest.skip("compares with DeepSeek-V4's class of transformers 5.24", allow_module_level=True)

WARNINGS = pytest.mark.filterwarnings("ignore::dsjax.checkpoint.errors.CheckpointWarning")
pytestmark = [pytest.mark.slow, pytest.mark.torch, WARNINGS]

CASES = {
    "windows alone": (v4_config("ww"), 50),
    "window longer than the prompt": (v4_config("wch", sliding_window=64), 40),
    "rate 4, fewer entries than index_topk": (v4_config("cc", index_topk=64), 50),
    "rate 4, as many as index_topk": (v4_config("cc", index_topk=12), 50),
    "rate 4, more than index_topk": (v4_config("ccc", hashed=3), 61),
    "the second rate alone": (v4_config("hhh", hashed=1), 50),
    "one stream": (v4_config("wch", hc_mult=1), 50),
    "as Flash": (v4_config("wwchchc", hashed=3), 50),
    "as Pro, with YaRN": (v4_config("hhchc", hashed=3, rope_parameters=YARN), 70),
    "rates and window as published": (v4_config("wch", rates=(4, 128), sliding_window=128, index_topk=32), 300),
}
MESHES = ("dp=8", "tp=4", "dp=2,tp=4")
"""Beside one device: each case on one of them, by turns."""
WIDEST = "as Flash, an expert a device"
CASES[WIDEST] = (v4_config("wwchchc", hashed=3, n_routed_experts=32), 50)


def reference(raw, tensors, tokens):
    """transformers' hidden states and logits, of a model with these tensors."""
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    model = DeepseekV4ForCausalLM(DeepseekV4Config(**raw, attn_implementation="eager")).eval()

    def of(name):
        head, _, part = name.rpartition(".experts.")
        if not head:
            return tensors[dsjax_name(name, 0)]
        parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[part]
        experts = range(raw["n_routed_experts"])
        return np.stack([np.concatenate([tensors[f"{head}.experts.{e}.{p}.weight"] for p in parts]) for e in experts])

    state = {name: torch.from_numpy(of(name)) for name in model.state_dict()}
    model.load_state_dict(state)
    with torch.no_grad():
        found = model.model(torch.from_numpy(tokens), use_cache=False).last_hidden_state
        return model, found.numpy(), model.lm_head(found).numpy()


def error(found, expected):
    return np.abs(np.asarray(found) - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(
    ("case", "meshes"),
    [(case, ("dp=32",) if case == WIDEST else ("dp=1", MESHES[at % len(MESHES)])) for at, case in enumerate(CASES)],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_hidden_states_and_logits_are_those_of_transformers_on_every_mesh(case, meshes):
    raw, length = CASES[case]
    config, rows = ModelConfig.from_dict(raw), max(MeshSpec.parse(mesh).dp_size for mesh in meshes)
    tensors, tokens = v4_tensors(config), np.random.default_rng(1).integers(0, raw["vocab_size"], (rows, length))
    _, hidden, logits = reference(raw, tensors, tokens)
    table, params = parameter_table(config, weights="f32"), from_hf_tensors(config, tensors)
    for mesh in meshes:
        spec = MeshSpec.parse(mesh)
        on = spec.build()
        placed = on_mesh(on, Rules.for_mesh(spec), table.infos, params)
        run = jax.jit(lambda params, tokens: table.bind(params)(tokens), compiler_options=COMPILE_QUICKLY)
        found = run(placed, jax.device_put(tokens, NamedSharding(on, P(spec.batch_axes))))
        assert error(found.hidden, hidden) <= 1e-5, mesh
        assert error(found.logits, logits) <= 1e-5, mesh


def test_a_checkpoint_and_a_configuration_that_transformers_saved_are_read(tmp_path):
    raw, length = CASES["as Pro, with YaRN"]
    config = ModelConfig.from_dict(raw)
    tensors, tokens = v4_tensors(config), np.arange(length)[None] % raw["vocab_size"]
    model, _, logits = reference(raw, tensors, tokens)
    model.save_pretrained(tmp_path)
    checkpoint, spec = open_checkpoint(tmp_path), MeshSpec.parse("dp=1")
    assert checkpoint.config.v4 == config.v4
    params = load(checkpoint.config, checkpoint, spec.build(jax.devices()[:1]), Rules.for_mesh(spec))
    for path, value in from_hf_tensors(config, tensors).items():
        np.testing.assert_array_equal(params[path], value, err_msg=path)
    # And what we write is the same model there.
    saved = json.loads((tmp_path / "config.json").read_text())
    again = {key: value for key, value in checkpoint.config.to_dict().items() if value is not None}
    np.testing.assert_array_equal(reference(saved | again, tensors, tokens)[2], logits)
    orbax = convert_checkpoint(tmp_path, tmp_path / "orbax", to="orbax")
    written = type(model).from_pretrained(convert_checkpoint(orbax, tmp_path / "hf", to="hf"))
    state = model.state_dict()
    assert all(np.array_equal(value, state[name]) for name, value in written.state_dict().items())


def test_the_mtp_module_reads_the_streams_through_two_projections():
    """As ``MTPBlock`` of DeepSeek's ``inference/model.py``, with transformers' layer, norms and sum of streams."""
    import torch

    raw = v4_config("wch", hashed=1, num_nextn_predict_layers=1)
    config, tokens = ModelConfig.from_dict(raw), np.random.default_rng(1).integers(0, raw["vocab_size"], (2, 41))
    tensors, following = v4_tensors(config), torch.from_numpy(tokens[:, 1:])
    with_module = v4_config("wchw", hashed=1)  # a fourth layer, whose names are the module's
    model, *_ = reference(with_module, tensors, tokens[:, :-1])
    module = "model.layers.3."
    own = {name.removeprefix(module): torch.from_numpy(tensors[name]) for name in tensors if name.startswith(module)}
    streams = []
    model.model.layers[2].register_forward_hook(lambda _, __, out: streams.append(out))

    def norm(name, x):
        return own[f"{name}.weight"] * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + raw["rms_norm_eps"])

    with torch.no_grad():
        model.model(torch.from_numpy(tokens[:, :-1]), use_cache=False)
        embedded = norm("enorm", model.model.embed_tokens(following)) @ own["e_proj.weight"].T
        x = embedded[:, :, None] + norm("hnorm", streams[0]) @ own["h_proj.weight"].T
        at = torch.arange(following.shape[1])
        rotation = {"main": model.model.rotary_emb(embedded, position_ids=at[None], layer_type="main")}
        unseen = (at[None] > at[:, None]) | (at[None] <= at[:, None] - raw["sliding_window"])
        mask = torch.zeros(unseen.shape).masked_fill(unseen, -torch.inf)[None, None]
        where = {"position_embeddings": rotation, "position_ids": at[None], "attention_mask": mask}
        x = model.model.layers[3](x, input_ids=following, **where)
        model.model.hc_head.load_state_dict({name: own[f"hc_head.{name}"] for name in model.model.hc_head.state_dict()})
        expected = model.lm_head(norm("shared_head.norm", model.model.hc_head(x))).numpy()
    table, params = parameter_table(config, weights="f32"), from_hf_tensors(config, tensors)

    @functools.partial(jax.jit, compiler_options=COMPILE_QUICKLY)
    def run(params):
        bound = table.bind(params)
        return bound.predict_further(bound(tokens[:, :-1]).passed, tokens[:, 1:]).logits

    assert error(run(params), expected) <= 1e-5
