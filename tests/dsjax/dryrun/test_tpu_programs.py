"""What only TPU programs have: products as convolutions, loops bounded by their condition, collectives in fusions, arrays in VMEM."""

import pytest
from hlo_text import computation
from hlo_text import program_of as entry

from dsjax.dryrun.program import OperationCost, Shape, play, program_collectives, program_costs
from dsjax.dryrun.program.costs import bytes_moved


@pytest.mark.parametrize(
    ("out", "left", "right", "attributes", "product"),
    [
        ("32,576", "32,2048", "2048,576", "dim_labels=bf_io->bf", 32 * 2048 * 576),
        ("32,4,192", "32,2048,1", "2048,4,192", "window={size=4 pad=3_3 rhs_reversal=1}, dim_labels=bf0_i0o->b0f", 32 * 2048 * 4 * 192),
        ("4,512,32", "32,4,128", "512,4,128", "window={size=4 stride=3 lhs_dilate=4}, dim_labels=b0f_o0i->0fb", 4 * 32 * 128 * 512),
        ("32,128,4", "32,128,512", "32,4,512", "window={size=32 stride=31 lhs_dilate=32}, dim_labels=0bf_0oi->0bf", 32 * 128 * 512 * 4),
        ("4,128,32", "32,4,512", "512,4,128",
         "window={size=4 stride=4 pad=3_3 lhs_dilate=3 rhs_reversal=1}, dim_labels=b0f_i0o->0fb", 4 * 32 * 512 * 128),
        # A true convolution of 3 × 3 over 3 × 3: one row of outputs in, and seven of nine meetings across.
        ("16,1,3,4", "16,7,3,3", "7,3,3,4", "window={size=3x3 pad=0_0x1_1}, dim_labels=bf01_i01o->b01f", 16 * 7 * 4 * 3 * 7),
    ],
)  # fmt: skip
def test_a_convolution_computes_its_product_and_not_its_holes(out, left, right, attributes, product):
    program = entry(
        f"%l = bf16[{left}] parameter(0)",
        f"%r = bf16[{right}] parameter(1)",
        f"ROOT %c = bf16[{out}] convolution(%l, %r), {attributes}, operand_precision={{highest,highest}}",
    )
    assert program_costs(program).flops == 2 * product


def loop(limit, step, passed, direction):
    carried = "%t = (s32[], s32[], f32[8]) parameter(0)"
    condition = computation(
        "condition", carried,
        "%i = s32[]{:T(128)} get-tuple-element(%t), index=0", f"%n = s32[]{{:T(128)}} {limit}",
        f"ROOT %lt = pred[] compare(%i, %n), direction={direction}",
    )  # fmt: skip
    return condition + computation(
        "body", carried,
        "%i = s32[] get-tuple-element(%t), index=0", "%m = s32[] get-tuple-element(%t), index=1",
        "%y = f32[8] get-tuple-element(%t), index=2", f"%one = s32[] constant({step})", "%add = s32[] add(%i, %one)",
        "%neg = f32[8] negate(%y)", f"ROOT %r = (s32[], s32[], f32[8]) tuple(%add, {passed}, %neg)",
    )  # fmt: skip


def turns(first="constant(0)", limit="constant(26)", most="constant(7)", step=1, passed="%m", direction="LT"):
    """Turns of the loop, by the bytes that its body moves: 64 each, and 5 of the condition where it compares."""
    program = entry(
        "%x = f32[8] parameter(0)",
        "%p = s32[] parameter(1)",
        f"%zero = s32[] {first}",
        "%copied = s32[]{:T(128)S(6)} copy(%zero)",
        f"%most = s32[] {most}",
        "%t = (s32[], s32[], f32[8]) tuple(%copied, %most, %x)",
        "ROOT %w = (s32[], s32[], f32[8]) while(%t), condition=%condition, body=%body",
        others=loop(limit, step, passed, direction),
    )
    (negate,) = (one for one in program.computations["body"].operations.values() if one.opcode == "negate")
    played = play(program, Seconds(), (), lambda loop: 1000)
    return played.seconds / bytes_moved(program, program.computations["body"], negate)


class Seconds:
    """A second a byte of negations; all else is free."""

    def operation(self, program, computation, operation):
        return OperationCost(bytes_moved(program, computation, operation) if operation.opcode == "negate" else 0)

    def transfer(self, collective):
        return {"link": OperationCost(100)}

    def loop_overhead(self, loop, known):
        return OperationCost(0)


def test_a_counter_that_goes_up_to_a_constant_tells_the_turns_and_others_are_left_to_the_caller():
    assert turns() == 26
    assert turns(first="constant(3)") == 23
    assert turns(limit="get-tuple-element(%t), index=1") == 7  # carried along and never changed
    assert turns(first="constant(30)") == 0
    assert turns(first="add(%p, %p)") == 1000
    assert turns(limit="get-tuple-element(%t), index=1", most="add(%p, %p)") == 1000
    assert turns(limit="get-tuple-element(%t), index=1", passed="%add") == 1000
    assert turns(step=2) == 1000
    assert turns(direction="NE") == 1000


GROUPS = "channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}"
FUSED = (
    computation(
        "begin", "%a = f32[8] parameter(0)",
        f'%g1 = f32[32] all-gather(%a), {GROUPS}, metadata={{op_name="jit(run)/experts/all_gather"}}',
        'ROOT %s = (f32[8], f32[32]) custom-call(%g1), custom_call_target="AsyncCollectiveStart"',
    )
    + computation(
        "async_collective_fusion.1", "%a = f32[8] parameter(0)", "%b = f32[8] parameter(1)", "%c = f32[32] parameter(2)",
        "%n = f32[8] negate(%a)", f"%g2 = f32[32] all-gather(%b), {GROUPS}",
        "ROOT %t = (f32[8], f32[8], f32[32]) tuple(%n, %b, %c)",
    )
    + computation(
        "finish", "%b = f32[8] parameter(0)", "%c = f32[32] parameter(1)", f"%g3 = f32[32] all-gather(%b), {GROUPS}",
        'ROOT %d = f32[32] custom-call(%b, %c, %g3), custom_call_target="AsyncCollectiveDone"',
    )
    + computation(
        "scatter", "%a = f32[8] parameter(0)",
        "ROOT %h = f32[2] reduce-scatter(%a), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}",
    )
)  # fmt: skip


def test_a_collective_in_fusions_is_one_and_overlaps_what_is_fused_with_it():
    program = entry(
        "%x = f32[8] parameter(0)",
        "%start = (f32[8], f32[32]) fusion(%x), kind=kCustom, calls=%begin",
        "%b = f32[8] get-tuple-element(%start), index=0",
        "%c = f32[32] get-tuple-element(%start), index=1",
        "%mid = (f32[8], f32[8], f32[32]) fusion(%x, %b, %c), kind=kOutput, calls=%async_collective_fusion.1",
        "%negate = f32[8] negate(%x)",
        "%done = f32[32] fusion(%b, %c), kind=kCustom, calls=%finish",
        "%whole = f32[2] fusion(%x), kind=kCustom, calls=%scatter",
        "ROOT %last = f32[8] negate(%x)",
        others=FUSED,
    )
    gather, scatter = found = program_collectives(program, {"dp": 1, "ep": 4, "tp": 1}, host_devices=4)
    assert (gather.kind, gather.asynchronous, gather.beside) == ("all-gather", True, ("mid", "negate"))
    assert (gather.operand_bytes, gather.op_name) == (32, "jit(run)/experts/all_gather")
    assert (scatter.kind, scatter.asynchronous) == ("reduce-scatter", False)
    # The negations take 64 s each, beside a transfer of 100 s; the second transfer waits for nothing and is waited for.
    assert play(program, Seconds(), found).seconds == 100 + 100 + 64
    middle = program.entry.operations["mid"]
    assert bytes_moved(program, program.entry, middle) == 64  # what is negated, not what is passed on


def test_the_cores_own_memory_is_not_main_memory():
    program = entry(
        "%x = f32[8]{0:T(128)S(1)} parameter(0)",
        "%y = f32[8]{0:T(128)} parameter(1)",
        "ROOT %sum = (f32[8]{0:T(128)S(1)}, s32[2]{0}) add(%x, %y)",
    )
    x, y, total = program.entry.operations.values()
    assert (x.shapes, y.shapes) == ((Shape("f32", (8,), 1),), (Shape("f32", (8,)),))
    assert (total.nbytes, total.memory_bytes) == (40, 8)
    assert bytes_moved(program, program.entry, total) == 8 + 32
