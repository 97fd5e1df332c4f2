"""The sums of a program: what carries each out, in which order, and what that order could depend on."""

import json

import jax
import jax.numpy as jnp
import pytest
from hlo_text import computation, program_of
from jax import lax

from dsjax.dryrun.program import Program
from dsjax.dryrun.program.order_differences import order_differences, signatures
from dsjax.dryrun.program.reductions import program_reductions

MESH = {"dp": 1, "ep": 4, "tp": 2}


def combine(name, root, dtype="f32"):
    parameters = (f"%{one} = {dtype}[] parameter({place})" for place, one in enumerate("xy"))
    return computation(name, *parameters, f"ROOT %s = {dtype}[] {root}")


COMBINE = "\n".join(
    combine(*one) for one in (("add", "add(%x, %y)"), ("largest", "maximum(%x, %y)"), ("count", "add(%x, %y)", "s32"))
) + computation("last", "%x = f32[] parameter(0)", "ROOT %y = f32[] parameter(1)")


def sums(*lines, others="", platform="gpu"):
    """The sums of an entry computation of these lines, which may read ``%p`` of f32[8,64], ``%i`` of s32[8,1] and ``%z``, a zero."""
    own = "%p = f32[8,64]{1,0} parameter(0)", "%i = s32[8,1]{1,0} parameter(1)", "%z = f32[] constant(0)"
    return program_reductions(program_of(*own, *lines, others=COMBINE + others), MESH, platform)


def fused(kind, *lines, config="", platform="gpu"):
    own = "%q = f32[8,64]{1,0} parameter(0)", "%j = s32[8,1]{1,0} parameter(1)", "%o = f32[] constant(0)"
    call = f"ROOT %f = f32[8]{{0}} fusion(%p, %i), kind={kind}, calls=%inner"
    config = f", backend_config={{{config}}}" if config else ""
    return sums(call + config, others=computation("inner", *own, *lines), platform=platform)


ROW_SUM = (
    'ROOT %r = f32[8]{0} reduce(%q, %o), dimensions={1}, to_apply=%add, metadata={op_name="jit(run)/norm/reduce_sum"}'
)


def triton(*tile, warps=4, kind="__triton"):
    level = {"num_warps": str(warps), "output_tiles": [{"sizes": [str(size) for size in tile]}]}
    config = json.dumps({"kind": kind, "block_level_fusion_config": level}, separators=(",", ":"))
    return f'"fusion_backend_config":{config}'


@pytest.mark.parametrize(
    "line",
    [
        "ROOT %r = f32[8]{0} reduce(%p, %z), dimensions={1}, to_apply=%largest",
        "ROOT %r = s32[8]{0} reduce(%i, %i), dimensions={1}, to_apply=%count",
        "%w = f32[8,1]{1,0} slice(%p)\n  ROOT %r = f32[8]{0} reduce(%w, %z), dimensions={1}, to_apply=%add",
        "ROOT %r = f32[8,64]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%largest",
        "ROOT %r = f32[8,64]{1,0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add",
        "ROOT %r = f32[16,64]{1,0} all-gather(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}",
        "ROOT %r = f32[8,64]{1,0} scatter(%p, %i, %p), update_window_dims={1}, to_apply=%last",
        "ROOT %r = s32[8,1]{1,0} scatter(%i, %i, %i), update_window_dims={1}, to_apply=%count",
        'ROOT %r = f32[8,64]{1,0} custom-call(%p), custom_call_target="TopK"',
    ],
)
def test_what_no_order_changes_is_not_listed(line):
    assert sums(line) == ()


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


def test_a_collective_belongs_to_what_it_adds_and_of_what_one_device_has_is_told_from_a_sum_of_parts():
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
    (one,) = sums(
        '%t = f32[8,64]{1,0} tanh(%p), metadata={op_name="jit(run)/mlp/shard_map/tanh"}',
        "%b = f32[8,64]{1,0} bitcast(%t)",
        "ROOT %r = f32[8,64]{1,0} all-reduce(%b), replica_groups={}, to_apply=%add",
    )
    assert one.op_name == "jit(run)/mlp/shard_map/all-reduce"
    (nameless,) = sums("ROOT %r = f32[8,64]{1,0} all-reduce(%p), replica_groups={}, to_apply=%add")
    assert nameless.op_name == ""


@pytest.mark.parametrize(
    ("kind", "config", "platform", "order", "depends"),
    [
        ("kLoop", "", "gpu", "in sequence", ()),  # one thread adds
        ("kCustom", triton(1, 64), "gpu", "tile 1×64, 4 warps", ("compiler",)),
        ("kInput", "", "gpu", "", ("compiler",)),  # the emitter of row sums tells nothing
        ("kLoop", "", "cpu", "", ("compiler",)),
        ("kInput", "", "cpu", "", ("compiler",)),
    ],
)
def test_a_fusion_tells_its_order_by_its_kind_and_its_tiles(kind, config, platform, order, depends):
    (one,) = fused(kind, ROW_SUM, config=config, platform=platform)
    assert (one.carrier, one.what, one.depth, one.op_name) == ("reduce", "terms", 64, "jit(run)/norm/reduce_sum")
    assert (one.order, one.is_complete, one.depends) == (order, bool(order), depends)
    (split,) = fused(kind, ROW_SUM.replace("norm/reduce_sum", "router/dot_general"), config=config, platform=platform)
    assert (split.what, split.order) == ("terms of a product", order), "the compiler split a product"


DOT = (
    "ROOT %d = f32[8,8]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={1}, "
    'metadata={op_name="jit(run)/head/dot_general"}, backend_config={"sizes":["16"]}'
)

NESTED = triton(16, 8, warps=2, kind="__triton_nested_gemm_fusion")
OLDER = '"fusion_backend_config":{"kind":"__triton_gemm","triton_gemm_config":{"block_m":"16","block_k":"64","split_k":"4"}}'


@pytest.mark.parametrize(
    ("line", "config", "order"),
    [
        (DOT, NESTED, "tile 16×8, 2 warps, depth 16"),
        (DOT.replace(', backend_config={"sizes":["16"]}', ""), OLDER, "block m 16, block k 64, split k 4"),
    ],
)
def test_a_product_in_triton_has_its_tiles_and_its_chunk_of_the_depth(line, config, order):
    (one,) = fused("kCustom", line, config=config)
    assert (one.carrier, one.what, one.depth) == ("product", "dot", 64)
    assert (one.order, one.depends) == (order, ("compiler",))


def test_a_tpus_window_is_the_chunk_of_a_products_depth_and_tells_nothing_of_another_operations_sum():
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
    assert (one.what, one.depth, one.order, one.is_complete) == ("convolution", 512, "depth 256", True)
    config = '"window_config":{"kernel_window_bounds":["4","1"],"output_window_bounds":["260","2","1"]}'
    (one,) = fused("kOutput", ROW_SUM, config=config, platform="tpu")
    assert (one.order, one.is_complete) == ("", False)


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
    (silent,) = kernel(cost, quote)
    assert (silent.carrier, silent.what, silent.depends) == ("unknown", "dense", ("rows", "mesh"))


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
    inner = line.replace("%p", "%q").replace("%i", "%j")
    for (one,) in (sums(line, platform=platform), fused("kInput", inner, platform=platform)):
        assert (one.carrier, one.order, one.depends) == ("scatter", order, depends)


def compiled(function, *shapes):
    text = jax.jit(function).lower(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]).compile().as_text()
    return program_reductions(Program.parse(text), {"dp": 1, "ep": 1, "tp": 1}, "cpu")


def test_a_loop_that_adds_up_is_a_sum_in_turns_and_one_that_replaces_what_it_carries_adds_nothing():
    def run(x, w, n):
        total = lax.fori_loop(0, 5, lambda i, total: 0.5 * total + jnp.tanh(x[i] * w), jnp.zeros_like(w))
        return lax.fori_loop(0, n[0].astype(jnp.int32), lambda i, total: total + jnp.tanh(w), total)

    loops = [one for one in compiled(run, (5, 64), (64,), (1,)) if one.carrier == "loop"]
    assert {(one.depth, one.depends) for one in loops} == {(5, ()), (None, ("values",))}

    def run(x):
        def turn(i, carry):
            last, rows = carry
            return jnp.tanh(last), rows.at[i].set(last + 1)

        return lax.fori_loop(0, 5, turn, (x, jnp.zeros((5, 64))))

    assert [one for one in compiled(run, (64,)) if one.carrier == "loop"] == []


def test_programs_differ_where_a_sum_has_other_chunks_other_terms_or_is_not_there():
    def ways(**tiles):
        found = {place: fused("kCustom", ROW_SUM, config=triton(1, tile))[0] for place, tile in tiles.items()}
        return signatures(found.values(), lambda one: next(name for name, other in found.items() if other is one))

    here, there = ways(a=64, b=32, c=16), ways(a=64, b=64)
    wide, narrow, least = (f"reduce terms of 64 in f32, tile 1×{tile}, 4 warps" for tile in (64, 32, 16))
    assert order_differences(here, there) == {("b", narrow): (wide,), ("c", least): ()}
    assert order_differences(here, here) == {}
    # Where one program has a way more, all of that place are taken to differ.
    here, there = {"a": frozenset({"x", "y"})}, {"a": frozenset({"x", "y", "z"})}
    assert order_differences(here, there) == {("a", "x"): ("z",), ("a", "y"): ("z",)}
    assert order_differences(here, {"a": frozenset({"x", "z"})}) == {("a", "y"): ("z",)}
