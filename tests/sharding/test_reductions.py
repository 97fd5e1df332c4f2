"""The sums of a program: what carries each out, in which order, and what that order could depend on."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec
from sharding.program import Program
from sharding.program.order_differences import order_differences, signatures
from sharding.program.reductions import program_reductions

MESH = {"dp": 1, "ep": 4, "tp": 2}

COMBINE = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%largest (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] maximum(%x, %y)
}

%count (x: s32[], y: s32[]) -> s32[] {
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %s = s32[] add(%x, %y)
}

%last (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %y = f32[] parameter(1)
}
"""


def sums(*lines, others="", platform="gpu"):
    """The sums of an entry computation of these lines, which may read ``%p`` of f32[8,64], ``%i`` of s32[8,1] and ``%z``, a zero."""
    entry = "ENTRY %main (p: f32[8,64], i: s32[8,1]) -> f32[8] {\n  %p = f32[8,64]{1,0} parameter(0)\n"
    entry += "  %i = s32[8,1]{1,0} parameter(1)\n  %z = f32[] constant(0)\n"
    text = "HloModule m, is_scheduled=true\n" + COMBINE + others + "\n" + entry + "\n".join(f"  {x}" for x in lines)
    return program_reductions(Program.parse(text + "\n}\n"), MESH, platform)


def fused(kind, *lines, config="", platform="gpu"):
    """The sums of one fusion of these lines."""
    inner = "%inner (q: f32[8,64], j: s32[8,1]) -> f32[8] {\n  %q = f32[8,64]{1,0} parameter(0)\n"
    inner += "  %j = s32[8,1]{1,0} parameter(1)\n  %o = f32[] constant(0)\n" + "\n".join(f"  {x}" for x in lines)
    call = f"ROOT %f = f32[8]{{0}} fusion(%p, %i), kind={kind}, calls=%inner"
    config = f", backend_config={{{config}}}" if config else ""
    return sums(call + config, others=inner + "\n}\n", platform=platform)


ROW_SUM = (
    'ROOT %r = f32[8]{0} reduce(%q, %o), dimensions={1}, to_apply=%add, metadata={op_name="jit(run)/norm/reduce_sum"}'
)


def triton(*tiles, warps=4, kind="__triton"):
    sizes = ",".join('{"sizes":["' + '","'.join(map(str, tile)) + '"]}' for tile in tiles)
    return (
        f'"fusion_backend_config":{{"kind":"{kind}","block_level_fusion_config":{{"num_warps":"{warps}",'
        f'"output_tiles":[{sizes}]}}}}'
    )


# What adds nothing, or adds what no order changes.


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %r = f32[8]{0} reduce(%p, %z), dimensions={1}, to_apply=%largest",
        "ROOT %r = s32[8]{0} reduce(%i, %i), dimensions={1}, to_apply=%count",
        "ROOT %r = f32[8,64]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%largest",
        "ROOT %r = f32[8,64]{1,0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add",
        "ROOT %r = f32[16,64]{1,0} all-gather(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}",
        "ROOT %r = f32[8,64]{1,0} all-to-all(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}",
        "ROOT %r = f32[8,64]{1,0} scatter(%p, %i, %p), update_window_dims={1}, to_apply=%last",
        "ROOT %r = s32[8,1]{1,0} scatter(%i, %i, %i), update_window_dims={1}, to_apply=%count",
        'ROOT %r = f32[8,64]{1,0} custom-call(%p), custom_call_target="TopK"',
        'ROOT %r = s32[8,1]{1,0} custom-call(%p), custom_call_target="somebody"',
    ],
)
def test_what_no_order_changes_is_not_listed(line):
    assert sums(line) == ()


def test_a_sum_of_one_term_is_none():
    assert (
        sums("%w = f32[8,1]{1,0} slice(%p)", "ROOT %r = f32[8]{0} reduce(%w, %z), dimensions={1}, to_apply=%add") == ()
    )


# Collectives.


@pytest.mark.parametrize(
    ("line", "what", "ranks", "axes"),
    [
        ("all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add", "all-reduce", 2, ("tp",)),
        ("all-reduce-start(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add", "all-reduce", 4, ("ep",)),
        ("reduce-scatter(%p), replica_groups={}, dimensions={0}, to_apply=%add", "reduce-scatter", 8, ("ep", "tp")),
    ],
)
def test_a_collective_that_adds_depends_on_the_mesh(line, what, ranks, axes):
    (one,) = sums(f"ROOT %r = f32[8,64]{{1,0}} {line}")
    assert (one.carrier, one.what, one.depth, one.axes, one.depends) == ("collective", what, ranks, axes, ("mesh",))


def test_a_collective_of_what_one_device_has_is_told_from_a_sum_of_parts():
    masked = (
        "%b = f32[8,64]{1,0} broadcast(%z), dimensions={}",
        "%m = pred[8,64]{1,0} compare(%p, %b), direction=LT",
        "%s = f32[8,64]{1,0} select(%m, %p, BRANCH)",
        "%c = f32[8,64]{1,0} bitcast(%s)",
        "ROOT %r = f32[8,64]{1,0} all-reduce(%c), replica_groups={}, to_apply=%add",
    )
    (one,) = sums(*(line.replace("BRANCH", "%b") for line in masked))
    assert one.what == "all-reduce of masked values"
    (other,) = sums(*(line.replace("BRANCH", "%p") for line in masked))
    assert other.what == "all-reduce"


def test_a_collective_that_the_compiler_made_belongs_to_what_it_adds():
    (one,) = sums(
        '%t = f32[8,64]{1,0} tanh(%p), metadata={op_name="jit(run)/mlp/shard_map/tanh"}',
        "%b = f32[8,64]{1,0} bitcast(%t)",
        "ROOT %r = f32[8,64]{1,0} all-reduce(%b), replica_groups={}, to_apply=%add",
    )
    assert one.op_name == "jit(run)/mlp/shard_map/all-reduce"
    (nameless,) = sums("ROOT %r = f32[8,64]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add")
    assert nameless.op_name == ""


# What the compiler lays out.


def test_one_thread_of_a_loop_fusion_adds_in_sequence():
    (one,) = fused("kLoop", ROW_SUM)
    assert (one.carrier, one.depth, one.order, one.depends) == ("reduce", 64, "in sequence", ())
    assert one.op_name == "jit(run)/norm/reduce_sum"


def test_a_tile_of_triton_is_told_and_the_emitter_of_row_sums_is_not():
    (tiled,) = fused("kCustom", ROW_SUM, config=triton((1, 64)))
    assert (tiled.order, tiled.told, tiled.depends) == ("tile 1×64, 4 warps", True, ("compiler",))
    (emitted,) = fused("kInput", ROW_SUM)
    assert (emitted.order, emitted.told, emitted.depends) == ("", False, ("compiler",))


@pytest.mark.parametrize("kind", ["kLoop", "kInput"])
def test_on_other_platforms_the_kind_of_a_fusion_tells_nothing(kind):
    (one,) = fused(kind, ROW_SUM, platform="cpu")
    assert (one.told, one.depends) == (False, ("compiler",))


DOT = (
    "ROOT %d = f32[8,8]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
    'metadata={op_name="jit(run)/head/dot_general"}, backend_config={"sizes":["16"]}'
)


def test_a_product_in_triton_has_its_tiles_and_its_chunk_of_the_depth():
    (one,) = fused("kCustom", DOT, config=triton((16, 8), warps=2, kind="__triton_nested_gemm_fusion"))
    assert (one.carrier, one.what, one.depth) == ("product", "dot", 64)
    assert (one.order, one.depends) == ("tile 16×8, 2 warps, depth 16", ("compiler",))


def test_an_older_programs_split_of_the_depth_is_told():
    config = '"fusion_backend_config":{"kind":"__triton_gemm","triton_gemm_config":{"block_m":"16","block_k":"64","split_k":"4"}}'
    (one,) = fused("kCustom", DOT.replace(', backend_config={"sizes":["16"]}', ""), config=config)
    assert one.order == "block m 16, block k 64, split k 4"


def test_parts_of_a_product_that_the_compiler_split_are_told_from_other_sums():
    (one,) = fused("kLoop", ROW_SUM.replace("norm/reduce_sum", "router/dot_general"))
    assert (one.what, one.depth, one.order) == ("terms of a product", 64, "in sequence")


def test_a_tpus_window_is_the_chunk_of_the_depth_whatever_its_rows():
    def window(rows):
        bounds = {"kernel": ["4", "1"], "output": [str(rows), "1"], "input": [str(rows), "2"]}
        return f'"window_config":{json.dumps({f"{name}_window_bounds": size for name, size in bounds.items()})}'

    lines = (
        "%w = f32[512,64]{1,0} constant({...})",
        "%x = f32[64,512]{1,0} constant({...})",
        "ROOT %c = f32[64,64]{1,0} convolution(%x, %w), dim_labels=bf_io->bf",
    )
    few, many = (fused("kOutput", *lines, config=window(rows), platform="tpu") for rows in (1, 8))
    assert few == many
    (one,) = many
    assert (one.what, one.depth, one.order, one.told) == ("convolution", 512, "depth 256", True)


def test_a_sum_in_a_tpus_product_has_a_window_of_another_operation_and_is_not_told():
    config = '"window_config":{"kernel_window_bounds":["4","1"],"output_window_bounds":["260","2","1"]}'
    (one,) = fused("kOutput", ROW_SUM, config=config, platform="tpu")
    assert (one.order, one.told) == ("", False)


def test_a_tpus_product_without_a_window_tells_nothing():
    line = "ROOT %c = f32[8,8]{1,0} convolution(%p, %p), dim_labels=bf_oi->bf"
    (one,) = sums(line, platform="tpu")
    assert (one.depth, one.order, one.told, one.depends) == (64, "", False, ("compiler",))


# Libraries, kernels, and calls that say nothing.


def test_a_librarys_product_is_its_own_choice():
    (one,) = sums(
        'ROOT %g = f32[8,8]{1,0} custom-call(%p, %p), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    )
    assert (one.carrier, one.what, one.depth, one.depends) == ("library", "__cublas$gemm", 64, ("library", "rows"))


def kernel(fields, quote=r"\22"):
    text = ", ".join(f"{quote}{name}{quote}: {quote}{value}{quote}" for name, value in fields.items())
    return sums(
        'ROOT %k = f32[8,64]{1,0} custom-call(%p), custom_call_target="__gpu$xla.gpu.triton", '
        f'metadata={{op_name="jit(run)/mlp/shard_map/dense/pallas_call"}}, backend_config={{serialized_metadata = "{{{text}}}"}}'
    )


@pytest.mark.parametrize("quote", [r"\22", '"'])
def test_a_kernel_says_its_chunks_and_what_chose_them(quote):
    cost = {"cost_flops": "4096", "cost_bytes": "8", "cost_dtype": "bf16", "cost_assumed": "0"}
    (one,) = kernel(cost | {"order_splits": "5", "order_depth": "128", "order_depends": "rows.mesh"}, quote)
    assert (one.carrier, one.what, one.order) == ("kernel", "dense", "depth 128, splits 5")
    assert one.depends == ("rows", "mesh")
    (fixed,) = kernel(cost | {"order_depth": "128", "order_depends": ""}, quote)
    assert (fixed.order, fixed.depends) == ("depth 128", ())
    assert kernel(cost | {"order_depends": "exact"}, quote) == ()


def test_a_kernel_that_says_nothing_of_its_order_is_unknown():
    (one,) = kernel({"cost_flops": "4096", "cost_bytes": "8", "cost_dtype": "bf16", "cost_assumed": "0"})
    assert (one.carrier, one.what, one.depends) == ("unknown", "dense", ("rows", "mesh"))


# Scatters.


@pytest.mark.parametrize(
    ("platform", "attributes", "order", "depends"),
    [
        ("gpu", "", "atomic", ("timing", "rows")),
        ("tpu", "", "in the order of the updates", ("rows",)),
        ("gpu", ", unique_indices=true", "one term for each place", ()),
    ],
)
def test_a_scatter_that_adds_is_atomic_on_a_gpu_unless_its_places_are_unique(platform, attributes, order, depends):
    line = f"ROOT %r = f32[8,64]{{1,0}} scatter(%p, %i, %p), update_window_dims={{1}}, to_apply=%add{attributes}"
    for found in (
        sums(line, platform=platform),
        fused("kInput", line.replace("%p", "%q").replace("%i", "%j"), platform=platform),
    ):
        (one,) = found
        assert (one.carrier, one.order, one.depends) == ("scatter", order, depends)


# Sums that a loop carries, in programs of the CPU's compiler.


def compiled(function, *shapes):
    text = jax.jit(function).lower(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]).compile().as_text()
    return program_reductions(Program.parse(text), {"dp": 1, "ep": 1, "tp": 1}, "cpu")


def test_a_loop_that_adds_up_is_a_sum_in_turns():
    def run(x, w):
        return lax.fori_loop(0, 5, lambda i, total: 0.5 * total + jnp.tanh(x[i] * w), jnp.zeros_like(w))

    loops = [one for one in compiled(run, (5, 64), (64,)) if one.carrier == "loop"]
    assert [(one.depth, one.depends) for one in loops] == [(5, ())]


def test_a_loop_of_unknown_length_depends_on_values():
    def run(x, n):
        return lax.fori_loop(0, n[0].astype(jnp.int32), lambda i, total: total + jnp.tanh(x), jnp.zeros_like(x))

    (one,) = [one for one in compiled(run, (64,), (1,)) if one.carrier == "loop"]
    assert (one.depth, one.depends) == (None, ("values",))


def test_a_loop_that_replaces_or_writes_what_it_carries_adds_nothing():
    def run(x):
        def turn(i, carry):
            last, rows = carry
            return jnp.tanh(last), rows.at[i].set(last + 1)

        return lax.fori_loop(0, 5, turn, (x, jnp.zeros((5, 64))))

    assert [one for one in compiled(run, (64,)) if one.carrier == "loop"] == []


def test_a_program_over_eight_devices_names_its_product_and_its_collective():
    mesh = MeshSpec.parse("dp=4,tp=2").build()

    def local(x, w):
        with jax.named_scope("out"):
            return lax.psum(x @ w, "tp")

    run = jax.shard_map(local, mesh=mesh, in_specs=(P("ep", "tp"), P("tp")), out_specs=P("ep"), check_vma=False)
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((32, 64), (64, 16))]
    program = Program.parse(jax.jit(run).lower(*shapes).compile().as_text())
    found = program_reductions(program, dict(mesh.shape), "cpu")
    assert [(one.what, one.depth) for one in found] == [("dot", 32), ("all-reduce", 2)]
    assert found[1].axes == ("tp",)
    assert all("out/" in one.op_name for one in found)


# Two programs of the same step.


def test_programs_differ_where_a_sum_has_other_chunks_other_terms_or_is_not_there():
    def named(place, tile, scope="norm"):
        line = ROW_SUM.replace("norm", scope)
        return {place: fused("kCustom", line, config=triton((1, tile)))[0]}

    def ways(**found):
        return signatures(found.values(), lambda one: next(name for name, other in found.items() if other is one))

    here = ways(**named("a", 64), **named("b", 32), **named("c", 16))
    there = ways(**named("a", 64), **named("b", 64))
    wide, narrow, least = (f"reduce terms of 64 in f32, tile 1×{tile}, 4 warps" for tile in (64, 32, 16))
    assert order_differences(here, there) == {("b", narrow): (wide,), ("c", least): ()}
    assert order_differences(here, here) == {}


def test_where_one_program_has_a_way_more_all_of_the_place_are_taken_to_differ():
    here, there = {"a": frozenset({"x", "y"})}, {"a": frozenset({"x", "y", "z"})}
    assert order_differences(here, there) == {("a", "x"): ("z",), ("a", "y"): ("z",)}
    assert order_differences({"a": frozenset({"x", "y"})}, {"a": frozenset({"x", "z"})}) == {("a", "y"): ("z",)}
