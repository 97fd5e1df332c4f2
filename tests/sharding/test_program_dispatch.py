"""The reader beside the arithmetic of dispatch: what is compiled is what was reckoned, kind by kind and byte by byte."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dispatch_cases import K, coded_experts, codes
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec
from sharding.dispatch import DispatchConfig, dispatch, dispatch_collectives
from sharding.program import Program, program_collectives, true_dtypes

EXPERTS, TOKENS, WIDTH = 32, 6, 160
LAYOUTS = ("dp=1", "dp=32", "dp=4,tp=8", "tp=8,ep=1", "dp=8,tp=4,ep=2")
CONFIGS = {
    "gather": DispatchConfig("gather"),
    "padded": DispatchConfig("padded"),
    "ragged": DispatchConfig("ragged"),
    "hierarchical": DispatchConfig("hierarchical", devices_per_host=8),
}


def compiled_dispatch(spec, config, dtype, folder):
    mesh = spec.build()
    specs = {"code": P(spec.expert_axes, spec.expert_width_axes or None)}

    def layer(x, slots, weights, params):
        return dispatch(spec, mesh, config, x, slots, weights, params, coded_experts, specs)[0]

    total = TOKENS * spec.num_devices
    over_ranks = jax.sharding.NamedSharding(mesh, P(spec.token_axes))
    shapes = [
        jax.ShapeDtypeStruct(s, d, sharding=over_ranks)
        for s, d in (((total, WIDTH), dtype), ((total, K), jnp.int32), ((total, K), jnp.float32))
    ]
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd-partitioning", "xla_dump_hlo_as_text": True}
    lowered = jax.jit(layer).lower(*shapes, {"code": jnp.asarray(codes(np.arange(EXPERTS)))})
    text = lowered.compile(compiler_options=options).as_text()
    partitioned = [path.read_text() for path in Path(folder).glob("*after_spmd-partitioning*.txt")]
    assert len(partitioned) == int(spec.num_devices > 1)  # a program of one device is not partitioned
    dtypes = true_dtypes(Program.parse(partitioned[0])) if partitioned else {}
    return Program.parse(text), dtypes, dict(mesh.shape)


@pytest.fixture(autouse=True)
def _no_compile_cache():
    """A program that another test's engine has let JAX keep on disk is not compiled, and so not dumped."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_dispatch_sends_what_the_arithmetic_says(name, layout, tmp_path):
    spec, config = MeshSpec.parse(layout), CONFIGS[name]
    # bf16, which the CPU program sends as float32: the reader must not be misled.
    program, dtypes, mesh = compiled_dispatch(spec, config, jnp.bfloat16, tmp_path)
    found = [c for c in program_collectives(program, mesh, host_devices=8, dtypes=dtypes) if not c.data_dependent]
    wanted = dispatch_collectives(
        spec, config, tokens=TOKENS, width=WIDTH, top_k=K, experts=EXPERTS, dtype=jnp.bfloat16, platform="cpu"
    )
    # Ranks of a host, or one of each, are a part of the group's axes.
    whole = all(c.meet == "all" for c in wanted)
    assert sorted(
        (c.kind.replace("-", "_"), c.axes if whole else (), c.ranks, c.operand_bytes, c.bytes_sent, c.times)
        for c in found
    ) == sorted((c.kind, c.axes if whole else (), c.ranks, c.operand_bytes, c.bytes_sent, c.times) for c in wanted)
    for one, c in zip(found, wanted, strict=True) if not whole else ():
        assert (one.bytes_between if c.meet == "inside" else one.bytes_inside) == 0
    assert bool(wanted) == (spec.ep_size * spec.expert_width_shards > 1)
