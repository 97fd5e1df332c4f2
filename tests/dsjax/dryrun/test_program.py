"""The compiled-program reader, held to programs whose operations, bytes and loops can be counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from hlo_text import program_of
from jax import lax
from jax.sharding import PartitionSpec as P

from dsjax.dryrun.program import Program, ProgramTextError, Shape, executed, program_collectives, program_costs
from dsjax.dryrun.program.groups import mesh_axes, replica_groups, source_target_pairs
from sharding import MeshSpec

F32 = jnp.float32


def compiled(function, *shapes, **options):
    text = jax.jit(function, **options).lower(*[jax.ShapeDtypeStruct(s, F32) for s in shapes]).compile().as_text()
    return Program.parse(text)


def test_a_line_is_read_with_its_tuple_its_operands_and_its_attributes():
    program = program_of(
        "%p0 = bf16[2,3]{1,0:T(8,128)(2,1)} parameter(0)",
        '%p1 = s4[5]{0} parameter(1), metadata={op_name="a(b)/c"}',
        'ROOT %t.2 = (bf16[2,3]{1,0}, /*index=1*/f8e4m3fn[7]{0}) custom-call(%p0, /*index=1*/%p1), custom_call_target="x)y"',
    )
    first, second, root = program.entry.operations.values()
    assert first.shapes == (Shape("bf16", (2, 3)),)
    assert (first.nbytes, second.nbytes, root.nbytes) == (12, 3, 12 + 7)
    assert (root.opcode, root.operands, root.is_root) == ("custom-call", ("p0", "p1"), True)
    assert second.op_name == "a(b)/c"
    assert program.entry.parameters == (first, second)
    assert program.entry.users["p0"] == (root,)
    with pytest.raises(ProgramTextError, match="no ENTRY"):
        Program.parse("hello")


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, x", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x", ((0, 1), (2, 3))),
        ("replica_groups={}, x", ((0, 1, 2, 3),)),
    ],
)
def test_every_notation_of_groups_is_read(attributes, groups):
    assert replica_groups(attributes, 4) == groups


def test_groups_are_named_by_the_axes_along_which_they_run():
    mesh = {"dp": 2, "ep": 4, "tp": 2}
    assert mesh_axes(tuple((i, i + 1) for i in range(0, 16, 2)), mesh) == ("tp",)
    assert mesh_axes((tuple(range(8)), tuple(range(8, 16))), mesh) == ("ep", "tp")
    assert mesh_axes((tuple(range(16)),), mesh) == ("dp", "ep", "tp")
    assert mesh_axes(tuple((i, i + 8) for i in range(8)), mesh) == ("dp",)
    assert mesh_axes(((0, 3), (1, 2)), {"dp": 1, "ep": 4, "tp": 1}) is None
    assert source_target_pairs("source_target_pairs={{0,7},{8,15}}") == ((0, 7), (8, 15))


def test_loops_in_loops_multiply_products_and_collectives():
    spec = MeshSpec.parse("dp=8,ep=1")

    def local(x, w):
        def inner(x, _):
            return lax.psum(x @ w, "dp"), None

        def outer(x, _):
            return lax.scan(inner, x, None, length=3)[0], None

        return lax.scan(outer, x, None, length=5)[0]

    over_dp = jax.shard_map(local, mesh=spec.build(), in_specs=(P("dp"), P()), out_specs=P("dp"), check_vma=False)
    program = compiled(over_dp, (8 * 4, 16), (16, 16))
    costs = program_costs(program)
    assert costs.flops == 15 * 2 * 4 * 16 * 16
    assert costs.flops_assumed == 0
    (one,) = program_collectives(program, {"dp": 8, "ep": 1, "tp": 1}, host_devices=4)
    assert (one.kind, one.axes, one.ranks, one.times) == ("all-reduce", ("dp",), 8, 15)
    assert one.operand_bytes == 4 * 16 * 4
    # Reduce-scatter and all-gather of eighths, to three neighbours on the host and four elsewhere.
    assert (one.bytes_inside, one.bytes_between) == (2 * 3 * 32, 2 * 4 * 32)
    assert not one.asynchronous


def test_a_loop_of_unknown_length_runs_as_often_as_the_caller_says():
    def run(x, w, n):
        return lax.fori_loop(0, n[0].astype(jnp.int32), lambda _, x: x @ w, x)

    program = compiled(run, (4, 16), (16, 16), (1,))
    once = 2 * 4 * 16 * 16
    assert program_costs(program).flops == program_costs(program).flops_assumed == once
    assert program_costs(program, trip_count=lambda loop: 7).flops == 7 * once
    loops = [one.operation for one in executed(program) if one.operation.opcode == "while"]
    assert [loop.trip_count for loop in loops] == [None]


def test_a_scan_over_a_stack_moves_each_layer_once():
    layers, width = 64, 128

    def run(x, stack):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]

    moved = program_costs(compiled(run, (4, width), (layers, width, width))).bytes
    stack = 4 * layers * width * width
    # The CPU program may copy a layer's slice before it multiplies: read, written, read; but never the stack for a layer.
    assert stack <= moved <= 3.5 * stack


def test_start_and_done_pairs_tell_what_runs_beside():
    program = entry(
        ["bf16[4,8]{1,0}", "f32[8,8]{1,0}"],
        "%all-gather-start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%p0), channel_id=1, "
        'replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(run)/attend/all_gather"}',
        "%dot = f32[8,8]{1,0} dot(%p1, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%exp = f32[8,8]{1,0} exponential(%dot)",
        "%all-to-all-start = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-to-all-start(%p0), channel_id=2, "
        "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}",
        "%all-to-all-done = bf16[4,8]{1,0} all-to-all-done(%all-to-all-start)",
        "ROOT %all-gather-done = bf16[16,8]{1,0} all-gather-done(%all-gather-start)",
    )
    gather, exchange = program_collectives(program, {"dp": 2, "ep": 1, "tp": 4}, host_devices=4)
    assert (gather.kind, gather.axes, gather.asynchronous) == ("all-gather", ("tp",), True)
    assert gather.beside == ("dot", "exp", "all-to-all-start", "all-to-all-done")
    assert (gather.ranks, gather.neighbours, exchange.ranks, exchange.neighbours) == (4, 4, 8, 4)
    assert (gather.operand_bytes, gather.bytes_inside, gather.bytes_between) == (64, 3 * 64, 0)
    assert gather.op_name == "jit(run)/attend/all_gather"
    assert (exchange.kind, exchange.axes, exchange.beside) == ("all-to-all", ("dp", "tp"), ())
    assert (exchange.bytes_inside, exchange.bytes_between) == (3 * 8, 4 * 8)


def entry(parameters, *lines):
    """A program of one computation with these lines; its parameters (such as ``bf16[2,3]``) are ``%p0``, ``%p1``, …."""
    return program_of(*(f"%p{place} = {shape} parameter({place})" for place, shape in enumerate(parameters)), *lines)


def test_a_ragged_exchange_sends_no_more_than_its_smaller_buffer_holds():
    call = "ragged-all-to-all(%p0, %p1, %p2, %p2, %p2, %p2), replica_groups={{0,1,2,3}}"
    program = entry(["bf16[64,8]{1,0}", "bf16[16,8]{1,0}", "s32[4]{0}"], f"ROOT %r = bf16[16,8]{{1,0}} {call}")
    (one,) = program_collectives(program, {"dp": 1, "ep": 4, "tp": 1}, host_devices=2)
    assert (one.kind, one.axes, one.operand_bytes) == ("ragged-all-to-all", ("ep",), 64 * 8 * 2)
    assert (one.bytes_inside, one.bytes_between) == (16 * 8 * 2 // 4, 2 * 16 * 8 * 2 // 4)


def test_cudnns_block_scaled_product_counts_in_fp4_and_its_operands_have_half_a_byte_a_value():
    values = [f"f4e2m1fn[4,{rows},64]{{2,1,0:E(4)}}" for rows in (128, 32)]
    program = entry(
        [*values, "f8e4m3fn[4,128,4]{2,1,0}", "f8e4m3fn[4,32,4]{2,1,0}"],
        '%k = (f32[4,128,32]{2,1,0}, u8[0]{0}) custom-call(%p0, %p1, %p2, %p3), custom_call_target="__cudnn$blockScaledDot"',
        "ROOT %r = f32[4,128,32]{2,1,0} get-tuple-element(%k), index=0",
    )
    costs = program_costs(program)
    assert (costs.flops_by_dtype, costs.uncounted) == ({"f4e2m1fn": 2 * 4 * 128 * 32 * 64}, {})
    assert costs.bytes == 4 * (128 * 64 // 2 + 32 * 64 // 2 + 128 * 4 + 32 * 4 + 128 * 32 * 4)


def test_custom_calls_are_counted_by_what_they_tell_on_gpus_and_tpus_and_others_are_named():
    told = {"cost_flops": "4096", "cost_bytes": "640", "cost_dtype": "bf16", "cost_assumed": "1"}
    text = ", ".join(rf"\22{name}\22: \22{value}\22" for name, value in told.items())
    call = 'custom_call_target="__gpu$xla.gpu.triton", backend_config={serialized_metadata = "{' + text + '}"}'
    costs = program_costs(
        entry(
            ["f32[100]"],
            f"%k = f32[100]{{0}} custom-call(%p0), {call}",
            'ROOT %u = f32[100]{0} custom-call(%k), custom_call_target="somebody"',
        )
    )
    assert (costs.flops, costs.flops_by_dtype, costs.flops_assumed) == (4096, {"bf16": 4096}, 4096)
    assert (costs.bytes, costs.bytes_assumed) == (640 + 800, 640)  # the other one's operand and result
    assert costs.uncounted == {"somebody": 1}
    told = '"cost_assumed":"0",\n"cost_bytes":"640",\n"cost_dtype":"bf16",\n"cost_flops":"4096"\n'
    program = entry(
        ["f32[100]{0}"],
        '%b = f32[100]{0} custom-call(), custom_call_target="AllocateBuffer"',
        '%k = f32[100]{0} custom-call(%p0), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
        + told
        + '}}, metadata={op_name="jit(run)/attend/pallas_call"}',
    )
    costs = program_costs(program)
    assert (costs.flops_by_dtype, costs.bytes, costs.uncounted) == ({"bf16": 4096}, 640, {})
    assert program.entry.operations["k"].op_name == "jit(run)/attend/pallas_call"
