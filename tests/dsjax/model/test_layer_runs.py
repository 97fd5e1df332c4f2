"""Layers with and without experts that take turns: in DeepSeek-V4, whose layers take turns too, all have experts."""

import dataclasses

import jax
import numpy as np
import pytest
from layouts import TINY
from step_model import Model, tensors

from dsjax.checkpoint.load import from_hf_tensors
from dsjax.config import ModelConfig
from dsjax.config.layers import LayerKind, LayerRun, moe_layers, stacks
from dsjax.model.parameter_table import parameter_table
from dsjax.model.stage import stages_of

EVEN, ODD = LayerKind("even_layers", "dense"), LayerKind("odd_layers", "moe")


@dataclasses.dataclass(frozen=True)
class Alternating(ModelConfig):
    """Layers with a dense MLP and layers with experts by turns."""

    @property
    def layer_runs(self):
        return (LayerRun((EVEN, ODD), self.num_hidden_layers // 2),)


CONFIG = Alternating.from_dict(TINY | {"num_hidden_layers": 4, "first_k_dense_replace": 2})
TOKENS = np.random.default_rng(0).integers(2, CONFIG.vocab_size, size=6)


def test_each_kind_has_a_stack_each_layer_with_experts_a_row_and_stages_cut_each_stack():
    assert stacks(CONFIG.layer_runs) == {EVEN: range(0, 4, 2), ODD: range(1, 4, 2)}
    assert moe_layers(CONFIG.layer_runs) == [1, 3]
    names = set(tensors(CONFIG))
    assert "model.layers.2.mlp.gate_proj.weight" in names
    assert "model.layers.3.mlp.experts.0.gate_proj.weight" in names
    first, last = stages_of(CONFIG, 2, given="1,3")
    assert first.window(CONFIG).layers == {"even_layers": range(0, 1), "odd_layers": range(0, 0)}
    assert last.window(CONFIG).layers == {"even_layers": range(1, 2), "odd_layers": range(0, 2)}
    assert last.first_row(CONFIG) == 0


@pytest.mark.parametrize("options", [{}, {"kernels": "plain"}], ids=["rank by rank", "scan"])
def test_a_step_on_a_mesh_gives_the_forward_passs_numbers(kernels, options):
    one = Model("dp=2", CONFIG, report=True, **options)
    table = parameter_table(CONFIG, weights="f32", mtp=False)
    plain = jax.jit(lambda params: table.bind(params)(TOKENS[None]))(from_hf_tensors(CONFIG, tensors(CONFIG)))
    logits, _ = one.run(one.empty_cache(), [one.prefill([(TOKENS.tolist(), 0, [1, 2])], [])])
    np.testing.assert_allclose(logits[0, 0], plain.logits[0, -1], rtol=1e-5, atol=1e-5)
    counts = np.asarray(one.reports["tokens_per_expert"])  # by layer, device and expert there
    slots = [np.bincount(ids.ravel(), minlength=CONFIG.n_routed_experts) for ids in plain.routing.ids]
    np.testing.assert_array_equal(counts.reshape(2, -1), slots)
