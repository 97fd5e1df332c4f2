"""`dsjax tune`: which products it times, what it keeps, and how an interrupted run goes on."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from dsjax.bench import tune as tuning
from dsjax.bench.modules.timing import Budget
from dsjax.cli.main import app
from dsjax.config import load_config
from dsjax.errors import UserError
from dsjax.kernels.pallas import attention, products
from dsjax.kernels.pallas.attention import AttentionTiles
from dsjax.kernels.pallas.products import ProductTiles
from dsjax.kernels.pallas.tile_table import ATTENTION_SIZES, Product, TileTable, Tuned
from dsjax.kernels.table import choose_kernels
from dsjax.model.parameter_table import parameter_table
from sharding import MeshSpec, Rules

ONE, TWO = Product("dense", 256, 512, "bfloat16", 32), Product("experts_down_fp8", 128, 256, "float8_e4m3fn", 4.0)
ATTENTION = Product("latent_attention", 576, 128, "bfloat16", 32)
SIZES = (("columns", 64), ("depth", 64), ("rows", 32), ("splits", 1), ("stages", 2), ("warps", 4))
TUNED = TileTable("a GPU", (Tuned(ONE, SIZES, 1.0, 2.0),))


def test_the_products_of_v3_on_dp_32_are_found_once_each():
    config, spec = load_config("deepseek-v3"), MeshSpec.parse("dp=32")
    infos = parameter_table(config, weights="fp8", platform="gpu", mtp=False).infos
    found = tuning.find_products(config, infos, spec, Rules.for_mesh(spec), [32], n_physical=256, quantises=True)
    shapes = {(p.kernel, p.depth, p.columns): p.rows for p in found}
    dense = ((7168, 1536), (1536, 24576), (7168, 576), (16384, 7168), (7168, 2 * 18432), (18432, 7168))
    expected = [("dense_fp8", *sizes) for sizes in (*dense, (7168, 2 * 2048), (2048, 7168))]
    expected += [("experts_gate_up_fp8", 7168, 2048), ("experts_down_fp8", 2048, 7168)]
    assert shapes == dict.fromkeys(expected, 32)
    spec = MeshSpec.parse("dp=1,tp=2")
    half = tuning.find_products(config, infos, spec, Rules.for_mesh(spec), [32], n_physical=256, quantises=False)
    assert ("dense", 8192, 7168) in {(p.kernel, p.depth, p.columns) for p in half}, "W^O of half the heads"
    assert {p.rows for p in half if p.kernel.startswith("experts")} == {1.0}


def test_the_products_of_v4_are_those_of_its_attention_and_its_shared_expert_where_experts_are_in_fp4():
    config, spec = load_config("deepseek-v4-flash"), MeshSpec.parse("dp=8")
    infos = parameter_table(config, weights="mxfp4", platform="gpu", mtp=False).infos
    found = tuning.find_products(config, infos, spec, Rules.for_mesh(spec), [32], n_physical=256, quantises=False)
    assert {(p.kernel, p.depth, p.columns) for p in found} == {
        ("dense", 4096, 1024), ("dense", 1024, 64 * 512), ("dense", 4096, 512), ("dense", 1024, 64 * 128),
        ("dense", 8 * 1024, 4096), ("dense", 4096, 2 * 2048), ("dense", 2048, 4096),
    }  # fmt: skip


def test_the_fastest_is_kept_and_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    path, timed = tmp_path / "tiles.json", []

    def timer(product, tiles):
        timed.append(product)
        if tiles.warps == 8 and tiles.stages == 4:
            return None  # does not fit
        own = 1.5 - 0.001 * tiles.columns - 0.5 * (tiles.stages == 2)
        return 1.0 if tiles == tuning.default_tiles(product) else own

    def until_the_second():
        yield ONE
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tuning.tune(TileTable("a GPU"), until_the_second(), path, timer)
    (entry,) = (table := TileTable.read(path)).entries
    assert (entry.product, dict(entry.tiles)["stages"]) == (ONE, 2)
    assert entry.seconds < 0.99 * entry.default_seconds
    timed.clear()
    tuning.tune(table, [ONE, TWO], path, timer)
    assert set(timed) == {TWO}
    assert [entry.product for entry in TileTable.read(path).entries] == [ONE, TWO]


def test_sizes_serve_products_of_like_rows_and_others_keep_the_default():
    default = ProductTiles.dense(40, 256, 512, cores=132)
    tuned = default.tuned(TUNED, Product("dense", 256, 512, "bfloat16", 40))
    assert (tuned.rows, tuned.columns, tuned.warps, tuned.spread) == (32, 64, 4, 2)
    for other in (Product("dense", 256, 512, "bfloat16", 65), Product("dense", 256, 512, "float32", 40)):
        assert default.tuned(TUNED, other) == default


def test_a_product_with_tuned_sizes_gives_the_same_numbers():
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in ((32, 256), (2, 256, 512)))
    run = functools.partial(products.dense, weight, None, weight.dtype, jnp.int32(1), x, interpret=True)
    tuned, default = (run(tiles=tiles).astype(jnp.float32) for tiles in (TUNED, None))
    np.testing.assert_allclose(tuned, default, rtol=0.02, atol=0.1)


def setting(name="demo", heads=8, cache_dtype=np.float32, context=24):
    return tuning.AttentionSetting(load_config(name), heads, np.dtype(cache_dtype), 16, context)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["dense", "experts_gate_up_fp8", "experts_down", "latent_attention"])
def test_the_timer_runs_every_kind_of_kernel(kernel, monkeypatch):
    monkeypatch.setattr(tuning, "STACK_BYTES", 0)
    product = Product(kernel, 128, 64, "float8_e4m3fn" if kernel.endswith("fp8") else "float32", 3)
    if kernel == "latent_attention":
        (product,) = setting().find([3], 256, 1)
    timer = tuning.device_timer(np.dtype(np.float32), 2, setting(), Budget(1e-9, samples=1), interpret=True)
    assert timer(product, tuning.default_tiles(product)) > 0
    assert "fp8" not in kernel or tuning._arrays(product, np.dtype(np.float32), 2)[0][0].shape == (2, 2, 2, 64, 128)


def test_attention_of_v3_is_found_for_decodes_with_drafts_and_for_chunks_as_far_as_its_cache_fits():
    found = setting("deepseek-v3", 128, jnp.bfloat16, 4096).find([1, 256, 2048], 256, 2)
    assert {(p.kernel, p.depth, p.weights) for p in found} == {("latent_attention", 576, "bfloat16")}
    decode, chunk = 3 * 128, 256 * 128
    assert [(p.rows, p.columns) for p in found] == [(1, decode), (256, decode), (1, chunk), (8, chunk)], "no 2,048 rows"
    tiles = list(tuning.candidates(found[0]))
    assert tiles[0] == AttentionTiles()
    assert len(tiles) == len(set(tiles)) == 4 * 3 * 2 * 4
    assert all(size in ATTENTION_SIZES[name] for tile in tiles for name, size in vars(tile).items())


@pytest.mark.slow
def test_attention_with_tuned_sizes_gives_the_same_numbers_and_other_shapes_keep_the_default():
    own = setting()
    product, other = own.find([2], 256, 0)[0], own.find([64], 256, 0)[0]
    sizes = (("positions", 16), ("rows", 16), ("stages", 1), ("warps", 4))
    table = TileTable("a GPU", (Tuned(product, sizes, 1.0, 2.0),))
    default = tuning.default_tiles(product)
    assert default.tuned(table, product) == AttentionTiles(16, 16, 4, 1) != default
    assert default.tuned(table, other) == default
    (q_latent, q_rope, cache, tables), start, length = tuning._cache(product, np.dtype(np.float32), own)
    given = (q_latent, q_rope, cache, own.cache_dtype, jnp.int32(1), start, length, tables)
    run = functools.partial(attention.latent_attention, *given, scale=0.1, interpret=True)
    np.testing.assert_allclose(run(tiles=table), run(tiles=None), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{", "is no JSON"),
        ('{"format": 7}', "of format 1"),
        ('{"format": 1, "device": "x", "products": [{}]}', "product 0 lacks"),
        ((ONE, "rows", 48), "rows 48; expected one of 16, 32, 64, 128"),
        ((ONE, "positions", 64), "positions 64; expected only rows, warps, stages, columns, depth, splits"),
        ((ATTENTION, "depth", 64), "expected only rows, warps, stages, positions"),
    ],
)
def test_a_wrong_file_is_told_what_is_wrong(tmp_path, body, expected):
    path = tmp_path / "tiles.json"
    if not isinstance(body, str):
        product, name, size = body
        body = json.dumps(TileTable("x", (Tuned(product, ((name, size),), 1.0, 1.0),)).to_json())
    path.write_text(body)
    with pytest.raises(UserError, match=expected):
        TileTable.read(path)


def test_a_file_is_for_pallas_kernels_alone_and_without_a_gpu_there_is_nothing_to_tune(tmp_path):
    path = tmp_path / "tiles.json"
    TUNED.write(path)
    choose = lambda *args: choose_kernels(*args, devices=1, cache=None, tiles=path)  # noqa: E731
    assert choose("auto", "gpu", jnp.dtype("bfloat16")).pallas.tiles.find(ONE) == dict(SIZES)
    with pytest.raises(UserError, match="--kernels auto does not use on cpu devices"):
        choose("auto", "cpu", np.dtype(np.float32))
    with pytest.raises(UserError, match="there is nothing to tune"):
        CliRunner().invoke(app, ["tune", "--output", str(path)], catch_exceptions=False)
