"""The compiled-program reader, held to programs whose operations, bytes and loops can be counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from sharding import MeshSpec
from sharding.program import Program, ProgramTextError, Shape, executed, program_collectives, program_costs
from sharding.program.groups import mesh_axes, replica_groups, source_target_pairs

F32 = jnp.float32


def compiled(function, *shapes, **options):
    text = jax.jit(function, **options).lower(*[jax.ShapeDtypeStruct(s, F32) for s in shapes]).compile().as_text()
    return Program.parse(text)


def over_dp(function, spec, in_specs=P("dp"), out_specs=P("dp")):
    return jax.shard_map(function, mesh=spec.build(), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def test_a_line_is_read_with_its_tuple_its_operands_and_its_attributes():
    program = Program.parse(
        "\n".join(
            (
                "HloModule m, is_scheduled=true",
                "",
                "ENTRY %main.1 (p0: bf16[2,3], p1: s4[5]) -> (bf16[2,3], f8e4m3fn[7]) {",
                "  %p0 = bf16[2,3]{1,0:T(8,128)(2,1)} parameter(0)",
                '  %p1 = s4[5]{0} parameter(1), metadata={op_name="a(b)/c"}',
                '  ROOT %t.2 = (bf16[2,3]{1,0}, /*index=1*/f8e4m3fn[7]{0}) custom-call(%p0, /*index=1*/%p1), custom_call_target="x)y"',
                "}",
            )
        )
    )
    first, second, root = program.entry.operations.values()
    assert first.shapes == (Shape("bf16", (2, 3)),)
    assert (first.nbytes, second.nbytes, root.nbytes) == (12, 3, 12 + 7)
    assert (root.opcode, root.operands, root.is_root) == ("custom-call", ("p0", "p1"), True)
    assert second.op_name == "a(b)/c"
    assert program.entry.parameters == (first, second)
    assert program.entry.users["p0"] == (root,)


def test_text_that_is_no_program_is_refused():
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

    program = compiled(over_dp(local, spec, (P("dp"), P())), (8 * 4, 16), (16, 16))
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


def test_partitioned_products_count_one_devices_share():
    mesh = MeshSpec.parse("tp=8").build()
    rows, columns = NamedSharding(mesh, P(None, "tp")), NamedSharding(mesh, P("tp"))
    text = (
        jax.jit(lambda x, w: x @ w, in_shardings=(rows, columns), out_shardings=NamedSharding(mesh, P()))
        .lower(jax.ShapeDtypeStruct((4, 64), F32), jax.ShapeDtypeStruct((64, 32), F32))
        .compile()
        .as_text()
    )
    program = Program.parse(text)
    assert program_costs(program).flops == 2 * 4 * 64 * 32 / 8
    (one,) = program_collectives(program, {"dp": 1, "ep": 1, "tp": 8}, host_devices=8)
    assert (one.kind, one.axes, one.bytes_between) == ("all-reduce", ("tp",), 0)


ASYNCHRONOUS = """HloModule m, is_scheduled=true

ENTRY %main (x: bf16[4,8], w: f32[8,8]) -> bf16[16,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  %all-gather-start = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), channel_id=1, \
replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="jit(run)/attend/all_gather"}
  %dot = f32[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %exp = f32[8,8]{1,0} exponential(%dot)
  %all-to-all-start = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-to-all-start(%x), channel_id=2, \
replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  %all-to-all-done = bf16[4,8]{1,0} all-to-all-done(%all-to-all-start)
  ROOT %all-gather-done = bf16[16,8]{1,0} all-gather-done(%all-gather-start)
}
"""


def test_start_and_done_pairs_tell_what_runs_beside():
    gather, exchange = program_collectives(Program.parse(ASYNCHRONOUS), {"dp": 2, "ep": 1, "tp": 4}, host_devices=4)
    assert (gather.kind, gather.axes, gather.asynchronous) == ("all-gather", ("tp",), True)
    assert gather.beside == ("dot", "exp", "all-to-all-start", "all-to-all-done")
    assert (gather.ranks, gather.neighbours, exchange.ranks, exchange.neighbours) == (4, 4, 8, 4)
    assert (gather.operand_bytes, gather.bytes_inside, gather.bytes_between) == (64, 3 * 64, 0)
    assert gather.op_name == "jit(run)/attend/all_gather"
    assert (exchange.kind, exchange.axes, exchange.beside) == ("all-to-all", ("dp", "tp"), ())
    assert (exchange.bytes_inside, exchange.bytes_between) == (3 * 8, 4 * 8)


RAGGED = """HloModule m, is_scheduled=true

ENTRY %main (x: bf16[64,8], y: bf16[16,8], n: s32[4]) -> bf16[16,8] {
  %x = bf16[64,8]{1,0} parameter(0)
  %y = bf16[16,8]{1,0} parameter(1)
  %n = s32[4]{0} parameter(2)
  ROOT %r = bf16[16,8]{1,0} ragged-all-to-all(%x, %y, %n, %n, %n, %n), replica_groups={{0,1,2,3}}
}
"""


def test_a_ragged_exchange_sends_no_more_than_its_smaller_buffer_holds():
    (one,) = program_collectives(Program.parse(RAGGED), {"dp": 1, "ep": 4, "tp": 1}, host_devices=2)
    assert (one.kind, one.axes, one.operand_bytes) == ("ragged-all-to-all", ("ep",), 64 * 8 * 2)
    assert (one.bytes_inside, one.bytes_between) == (16 * 8 * 2 // 4, 2 * 16 * 8 * 2 // 4)


def test_a_tpu_kernels_metadata_is_read_over_its_lines_and_custom_calls_that_order_move_nothing():
    told = '"cost_assumed":"0",\n"cost_bytes":"640",\n"cost_dtype":"bf16",\n"cost_flops":"4096"\n'
    program = Program.parse(
        "HloModule m, is_scheduled=true\n\nENTRY %main.1 (p0: f32[100]) -> f32[100] {\n"
        "  %p0 = f32[100]{0} parameter(0)\n"
        '  %b = f32[100]{0} custom-call(), custom_call_target="AllocateBuffer"\n'
        '  ROOT %k = f32[100]{0} custom-call(%p0), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={\n'
        + told
        + '}}, metadata={op_name="jit(run)/attend/pallas_call"}\n}\n'
    )
    costs = program_costs(program)
    assert (costs.flops_by_dtype, costs.bytes, costs.uncounted) == ({"bf16": 4096}, 640, {})
    assert program.entry.root.op_name == "jit(run)/attend/pallas_call"


def test_a_tpus_ragged_dot_counts_its_rows_by_its_groups_matrices():
    program = Program.parse(
        "HloModule m, is_scheduled=true\n\nENTRY %main.1 (p0: bf16[64,16], p1: bf16[4,16,32]) -> f32[64,32] {\n"
        "  %p0 = bf16[64,16]{1,0} parameter(0)\n  %p1 = bf16[4,16,32]{2,1,0} parameter(1)\n"
        '  %t = s32[5]{0} custom-call(), custom_call_target="tpu_custom_call", metadata={op_name="ragged-dot-metadata"}\n'
        '  ROOT %k = f32[64,32]{1,0} custom-call(%t, %p0, %p1), custom_call_target="tpu_custom_call", '
        "operand_layout_constraints={s32[5]{0}, bf16[64,16]{1,0}, bf16[4,16,32]{2,1,0}}, "
        'frontend_attributes={mosaic_fusion_entry_point="true",ragged_dot_tiling="64,16,32"}, '
        'metadata={op_name="jit(f)/ragged_dot_general/ragged-dot-none"}\n}\n'
    )
    costs = program_costs(program)
    assert (costs.flops_by_dtype, costs.uncounted) == ({"bf16": 2 * 64 * 16 * 32}, {})


def test_cudnns_block_scaled_product_counts_in_fp4_and_its_operands_have_half_a_byte_a_value():
    program = Program.parse(
        "HloModule m, is_scheduled=true\n\n"
        "ENTRY %main.1 (p0: f4e2m1fn[4,128,64], p1: f4e2m1fn[4,32,64], p2: f8e4m3fn[4,128,4], p3: f8e4m3fn[4,32,4]) -> f32[4,128,32] {\n"
        "  %p0 = f4e2m1fn[4,128,64]{2,1,0:E(4)} parameter(0)\n  %p1 = f4e2m1fn[4,32,64]{2,1,0:E(4)} parameter(1)\n"
        "  %p2 = f8e4m3fn[4,128,4]{2,1,0} parameter(2)\n  %p3 = f8e4m3fn[4,32,4]{2,1,0} parameter(3)\n"
        "  %k = (f32[4,128,32]{2,1,0}, u8[0]{0}) custom-call(%p0, %p1, %p2, %p3), "
        'custom_call_target="__cudnn$blockScaledDot"\n'
        "  ROOT %r = f32[4,128,32]{2,1,0} get-tuple-element(%k), index=0\n}\n"
    )
    costs = program_costs(program)
    assert (costs.flops_by_dtype, costs.uncounted) == ({"f4e2m1fn": 2 * 4 * 128 * 32 * 64}, {})
    assert costs.bytes == 4 * (128 * 64 // 2 + 32 * 64 // 2 + 128 * 4 + 32 * 4 + 128 * 32 * 4)


def test_a_custom_call_that_tells_its_cost_is_counted_by_that_and_another_is_named():
    told = r'serialized_metadata = "{\22cost_flops\22: \224096\22, \22cost_bytes\22: \22640\22, \22cost_dtype\22: \22bf16\22, '
    told += r'\22cost_assumed\22: \221\22}"'
    program = Program.parse(
        "\n".join(
            (
                "HloModule m, is_scheduled=true",
                "",
                "ENTRY %main.1 (p0: f32[100]) -> f32[100] {",
                "  %p0 = f32[100]{0} parameter(0)",
                f'  %k = f32[100]{{0}} custom-call(%p0), custom_call_target="__gpu$xla.gpu.triton", backend_config={{{told}}}',
                '  ROOT %u = f32[100]{0} custom-call(%k), custom_call_target="somebody"',
                "}",
            )
        )
    )
    costs = program_costs(program)
    assert (costs.flops, costs.flops_by_dtype, costs.flops_assumed) == (4096, {"bf16": 4096}, 4096)
    assert (costs.bytes, costs.bytes_assumed) == (640 + 800, 640)  # the other one's operand and result
    assert costs.uncounted == {"somebody": 1}
