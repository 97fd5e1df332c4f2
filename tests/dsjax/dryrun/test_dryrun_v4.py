"""A dry run of DeepSeek-V4: what is compiled has the bytes and the operations that arithmetic says."""

import importlib.util
import json

import pytest
from v4_models import v4_config

from dsjax.config import load_config
from dsjax.config.layers import kinds_of
from dsjax.dryrun.arguments import DryRunArgs
from dsjax.dryrun.assumptions import expected_tiles
from dsjax.dryrun.run import dry_run
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError
from dsjax.model.experts import default_tile
from dsjax.model.layer_costs import attention_cost, values_beside
from dsjax.plan.layout import parse_layout
from dsjax.plan.memory import weight_bytes
from dsjax.plan.precision import PRECISIONS

ROWS, CONTEXT = 4, 1024
SIZES = {
    "rates": (4, 128), "sliding_window": 128, "index_topk": 128, "max_position_embeddings": 4096, "dtype": "bfloat16", "hidden_size": 64,
    "head_dim": 32, "qk_rope_head_dim": 8, "num_experts_per_tok": 8, "vocab_size": 384,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("v4")
    (folder / "config.json").write_text(json.dumps(v4_config("wch", hashed=1, **SIZES)))
    return str(folder)


def asked(folder, target="cpu", **options):
    engine = EngineArgs(model=folder, **{"page_size": 128} | options)
    return dry_run(DryRunArgs(engine=engine, target=target, batch=ROWS, context=CONTEXT))


@pytest.fixture(scope="module")
def report(folder):
    return asked(folder)


@pytest.mark.slow
def test_weights_are_the_planners_and_the_cache_has_pages_of_both_kinds(folder, report):
    config, limits = load_config(folder), report.compiled.limits
    weights = weight_bytes(config, parse_layout("dp=1", 0, config), PRECISIONS["bf16"])
    assert report.memory.weight_bytes == sum(weights.values())
    # 32 entries of 32 values and index keys of 8, and one entry of 32; tokens of three layers and float32 states of two.
    context, window = 2 * (32 * (32 + 8) + 32), 2 * 3 * 128 * 32 + 4 * (6 * (32 + 8) + 3 * 32)
    assert limits.pages_per_rank == ROWS * CONTEXT // 128 + 1
    assert limits.windows_per_rank >= 3 * ROWS
    assert report.memory.windows == window * limits.windows_per_rank
    assert report.memory.cache == context * limits.pages_per_rank + report.memory.windows


@pytest.mark.slow
def test_a_quantised_cache_has_bytes_of_fp8_entries_and_fp4_keys_and_the_same_operations(folder, report):
    found = asked(folder, kv_cache_dtype="fp8", index_scores="fp4")
    # An entry is 24 values, 8 bytes of scales, and 8 rotated values of two bytes; a key 8 values of half a byte, and a scale.
    entry, key = 24 + 8 + 2 * 8, 4 + 1
    context, window = 32 * (entry + key) + entry, 3 * 128 * entry + 4 * (6 * (32 + 8) + 3 * 32)
    limits = found.compiled.limits
    assert found.memory.windows == window * limits.windows_per_rank
    assert found.memory.cache == context * limits.pages_per_rank + found.memory.windows
    assert found.costs.flops == report.costs.flops


@pytest.mark.slow
def test_operations_are_the_models_in_whole_pages_and_blocks(folder, report):
    config, total = load_config(folder), 0
    for kind, count in kinds_of(config.layer_runs):
        cost = attention_cost(config, kind.attention, "CC", rows=ROWS, chunk=1, context=CONTEXT)
        # Two window pages, and one block of 128 entries: those that were chosen, or of 8 entries.
        positions = {"window": 256, "csa": 256 + 128, "hca": 256 + 128}[kind.attention]
        attention = 2 * ROWS * 8 * (32 + 32) * positions
        total += count * (cost.linear_flops + cost.index_flops + attention + 2 * ROWS * values_beside(config, kind))
    # Each of 8 experts has the 4 tokens in tiles; where tokens leave, 4 streams are projected to their 4 weights.
    experts = 3 * 8 * expected_tiles(4, default_tile(4)) * default_tile(4) * 2 * 3 * 64 * 16
    ends = 2 * ROWS * (64 * 384 + 4 * 64 * 4)
    assert report.costs.flops == pytest.approx(total + experts + ends, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "compiler"), [("h200", "jax_cuda13_plugin"), ("tpu-v6e", "libtpu")])
def test_a_step_compiles_for_accelerators(folder, report, target, compiler):
    if importlib.util.find_spec(compiler) is None:
        pytest.skip(f"needs {compiler}, of an extra")
    compiled = asked(folder, target, mesh="dp=4")
    assert compiled.memory.windows == report.memory.windows
    assert compiled.costs.flops_assumed > 0


def test_what_is_not_built_is_refused_by_name(folder):
    with pytest.raises(UserError, match="hold a multiple of 128 tokens"):
        asked(folder, page_size=16)
    with pytest.raises(UserError, match="--index-scores is fp8, and DeepSeek's code rounds"):
        asked(folder, index_scores="fp8")
