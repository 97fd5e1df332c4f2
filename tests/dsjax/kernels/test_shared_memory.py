"""What tiles take of a core's shared memory, by formulas that are held to what Triton asked for, and tiles that devices have room for."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from dsjax.config import load_config
from dsjax.dryrun.topology import cuda_target
from dsjax.fp4.formats import MXFP4, NVFP4
from dsjax.hardware import bundled_hardware, load_hardware
from dsjax.kernels.pallas import attention, fp4_products, products
from dsjax.kernels.pallas.attention import AttentionTiles
from dsjax.kernels.pallas.products import Groups, ProductTiles
from dsjax.kernels.pallas.shared_memory import AttentionBytes, Cores, ProductBytes, first_that_fits
from sharding import fp8

HAS_CUDA_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None
F32, BF16, E4M3 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), fp8.E4M3
HOPPER, BLACKWELL, ADA = Cores(), Cores(232_448, (10, 0)), Cores(101_376, (8, 9))
GPUS = [name for name in bundled_hardware() if load_hardware(name).platform == "cuda"]
BF16_EXPERTS, FP8_ROWS = ProductBytes(2, BF16, BF16, 2), ProductBytes(1, E4M3, E4M3, 1)


def cores_of(name: str) -> Cores:
    """A described GPU's cores, as its target configuration has them."""
    text = cuda_target(load_hardware(name))
    figure = lambda field: int(re.search(rf"{field}: (\d+)", text).group(1))  # noqa: E731
    return Cores(figure("shared_memory_per_block_optin"), (figure("major"), figure("minor")))


def tiles(rows: int, columns: int, depth: int, stages: int) -> ProductTiles:
    return ProductTiles(rows, columns, depth, spread=1, warps=4, stages=stages)


@pytest.mark.parametrize(
    ("cores", "taken", "shape", "asked"),
    [
        # What XLA of JAX 0.10.2 said that the programs request.
        (HOPPER, BF16_EXPERTS, (64, 64, 128, 4), 196_608),
        (BLACKWELL, BF16_EXPERTS, (64, 64, 128, 4), 196_640),
        (BLACKWELL, BF16_EXPERTS, (128, 128, 64, 3), 147_488),
        (HOPPER, ProductBytes(2, F32, F32, 4), (64, 64, 128, 4), 294_912),
        (HOPPER, ProductBytes(1, BF16, BF16, 1), (64, 64, 128, 4), 106_496),
        (BLACKWELL, FP8_ROWS, (64, 64, 128, 4), 65_552),
        (HOPPER, FP8_ROWS, (16, 64, 128, 4), 40_960),
        (ADA, FP8_ROWS, (128, 128, 64, 2), 32_768),
        (BLACKWELL, ProductBytes(2, E4M3, BF16, 1), (64, 128, 128, 4), 155_664),
    ],
)
def test_the_formula_bounds_what_products_ask_for(cores, taken, shape, asked):
    assert asked <= taken.of(tiles(*shape), cores) <= 2.1 * asked


@pytest.mark.parametrize(
    ("cores", "dtypes", "shape", "asked"),
    [
        (HOPPER, (BF16, BF16), (64, 64), 221_184),
        (BLACKWELL, (BF16, BF16), (64, 64), 287_280),
        (BLACKWELL, (BF16, BF16), (64, 32), 180_784),
        (BLACKWELL, (BF16, E4M3), (64, 64), 206_928),
        (ADA, (BF16, E4M3), (16, 64), 142_336),
        (HOPPER, (F32, F32), (64, 32), 229_632),
        (ADA, (F32, F32), (16, 16), 74_816),
    ],
)
def test_the_formula_bounds_what_attention_asks_for(cores, dtypes, shape, asked):
    found = AttentionBytes(512, 64, *dtypes).of(AttentionTiles(*shape), cores)
    assert asked <= found <= 1.2 * asked


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("operand", [BF16, F32])
def test_every_gpu_has_room_for_the_tiles_that_are_chosen(name, operand):
    cores, stored = cores_of(name), operand.itemsize
    for rows in (1, 8, 32, 200, 4096):
        for taken in (ProductBytes(2, operand, operand, stored), ProductBytes(2, operand, operand, 1), FP8_ROWS):
            chosen = ProductTiles.for_load(rows).fitting(taken, cores)
            assert taken.of(chosen, cores) <= cores.shared_memory
            assert chosen.stages >= 2
    for pairs in (1, 16, 64, 128 * 256):
        for cached in (operand, E4M3):
            taken = AttentionBytes(512, 64, operand, cached)
            chosen = first_that_fits(attention.smaller_tiles(pairs), taken, cores)
            assert taken.of(chosen, cores) <= cores.shared_memory


def test_hopper_keeps_its_tiles_blackwell_reads_half_the_positions_and_small_cores_have_fewer_loads_under_way():
    taken = AttentionBytes(512, 64, BF16, BF16)
    chosen = {cores: first_that_fits(attention.smaller_tiles(128), taken, cores) for cores in (HOPPER, BLACKWELL)}
    assert chosen == {HOPPER: AttentionTiles(64, 64, 8, 2), BLACKWELL: AttentionTiles(64, 32, 8, 2)}
    for load in (4, 32, 2048):
        assert ProductTiles.for_load(load).fitting(BF16_EXPERTS, HOPPER) == ProductTiles.for_load(load)
    small, smaller = Cores(60_000, (9, 0)), Cores(30_000, (9, 0))
    wanted = tiles(64, 64, 64, 4)
    assert wanted.fitting(BF16_EXPERTS, small) == tiles(64, 64, 64, 2)
    assert wanted.fitting(BF16_EXPERTS, smaller) == tiles(64, 64, 32, 2)
    assert Cores.of(jax.devices()[0]) == Cores()


def lower_for(name: str, target: str, function, *shapes) -> jax.stages.Lowered:
    """The program of a function for a described GPU."""
    gpu = topologies.get_topology_desc(platform="cuda", topology_name=name, target_config=target, topology="1x1x1")
    place = SingleDeviceSharding(gpu.devices[0])
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), shapes)
    return jax.jit(function).lower(*arguments)


def asked_for(name: str, function, *shapes) -> int:
    """Shared memory that a program asks for, as the compiler tells where a GPU has next to none."""
    target = re.sub(r"optin: \d+", "optin: 64", cuda_target(load_hardware(name)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory size limit exceeded") as error:
        lower_for(name, target, function, *shapes).compile()
    return int(re.search(r"requested (\d+)", str(error.value)).group(1))


@pytest.mark.skipif(not HAS_CUDA_COMPILER, reason="needs the extra [cuda], without a GPU")
@pytest.mark.parametrize("name", ["h200", "b200", "rtx-4090"])
def test_the_compiler_asks_for_no_more_than_the_formula(name):
    of = jax.ShapeDtypeStruct
    cores, layer, load = cores_of(name), jnp.int32(0), 24.0
    config = load_config("deepseek-v3")
    D, F, X, rows = config.hidden_size, config.moe_intermediate_size, 4, 256
    groups = (of((X,), jnp.int32), of((X,), jnp.int32))

    def found(form, taken):
        arrays = {"weight": of((1, X, D // 2, 2, F), jnp.uint8)}
        arrays["scale"] = of((1, X, D // form.block, 2, F), E4M3 if form.has_global else jnp.uint8)
        arrays |= {"global_scale": of((1, X, 2, 1), jnp.float32)} if form.has_global else {}

        def run(arrays, x, start, count):
            return fp4_products.gate_up(arrays, form, layer, x, Groups(start, count, load), dtype=BF16, cores=cores)

        asked = asked_for(name, run, arrays, of((rows, D), BF16), *groups)
        return asked <= taken.of(ProductTiles.for_load(load).fitting(taken, cores), cores) <= cores.shared_memory

    assert found(NVFP4, ProductBytes(2, BF16, BF16, 1))
    assert found(MXFP4, ProductBytes(2, BF16, BF16, 1))

    def dense(weight, x, start, count):
        return products.gate_up(weight, None, BF16, layer, x, Groups(start, count, load), cores=cores)

    asked = asked_for(name, dense, of((1, X, D, 2, F), BF16), of((rows, D), BF16), *groups)
    assert asked <= BF16_EXPERTS.of(ProductTiles.for_load(load).fitting(BF16_EXPERTS, cores), cores)

    def attend(q, q_rope, latent, rope, start, length, tables):
        cache = {"latent": latent, "rope": rope}
        return attention.latent_attention(q, q_rope, cache, BF16, layer, start, length, tables, scale=0.1, cores=cores)

    R, H = 8, config.num_attention_heads
    shapes = (of((*lead, width), BF16) for lead in ((R, 1, H), (1, 64, 64)) for width in (512, 64))
    asked = asked_for(name, attend, *shapes, *[of((R,), jnp.int32)] * 2, of((R, 8), jnp.int32))
    taken = AttentionBytes(512, 64, BF16, BF16)
    assert asked <= taken.of(first_that_fits(attention.smaller_tiles(H), taken, cores), cores) <= cores.shared_memory
