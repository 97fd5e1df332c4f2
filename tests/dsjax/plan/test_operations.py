"""Times of operations: monotone in sizes and resources, also beyond the sizes that were timed; tables are checked line by line."""

import itertools
from dataclasses import replace

import pytest
from step_models import step_model

from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import load_cluster
from dsjax.plan.layout import parse_layout
from dsjax.plan.network import all_reduce
from dsjax.plan.operations import experts_work, product_work
from dsjax.plan.operator_tables import BUNDLED_FOLDER, SPREAD, operator_tables
from dsjax.plan.precision import PRECISIONS, TABLE_FORMATS
from dsjax.plan.step_basis import routed_experts


@pytest.mark.parametrize("resource", ["fp8_flops", "memory_bandwidth"])
def test_a_little_more_of_a_resource_changes_a_time_a_little_and_never_for_the_worse(resource):
    hardware = load_hardware("h20")
    devices = (replace(hardware, **{resource: getattr(hardware, resource) * 1.05**step}) for step in range(60))
    times = [Chip(device, PRECISIONS["fp8"]).product(4096, 4096, 7168) for device in devices]
    assert all(0.9 < after / before <= 1 for before, after in itertools.pairwise(times))


def test_a_sum_grows_with_its_bytes_and_shrinks_with_the_link_but_for_what_it_takes_to_start():
    h200, h800 = load_cluster("h200-8"), load_cluster("h800-32")
    sizes = [2.0**n for n in range(10, 32)]
    for cluster in (h200, h800, load_cluster("b200-8"), load_cluster("gb200-nvl72-36")):
        times, faster = ([all_reduce(c, 8, size) for size in sizes] for c in (cluster, cluster.scaled("scale-up", 2)))
        assert times == sorted(times)
        assert all(a <= b for a, b in zip(faster, times, strict=True))
    assert all_reduce(h200, 8, 1024.0) == all_reduce(h800, 8, 1024.0)
    assert all_reduce(h800, 8, 2.0**30) == pytest.approx(450 / 200 * all_reduce(h200, 8, 2.0**30), rel=0.01)


@pytest.mark.parametrize("dtype", TABLE_FORMATS)
def test_one_expert_moves_the_bytes_of_its_two_dense_products(dtype):
    bits, itemsize = TABLE_FORMATS[dtype]
    work = experts_work(1, 100, 7168, 2048, itemsize, bits)
    dense = [product_work(100, n, k, dtype) for n, k in ((2 * 2048, 7168), (7168, 2048))]
    assert work.moved == pytest.approx(sum(product.moved for product in dense), rel=1e-12)
    assert work.flops == pytest.approx(sum(product.flops for product in dense), rel=1e-12)


def test_experts_that_are_widened_move_rows_in_bf16():
    widened, bf16 = (experts_work(0, 100, 7168, 2048, itemsize, 16).moved for itemsize in (0.5625, 2.0))
    assert widened == bf16 == 100 * (2 * 7168 + 2 * 2 * 2048 + 2 * 2048 + 2 * 7168)


def test_nothing_is_quantised_in_front_of_products_in_bf16(v3):
    cluster, layout = load_cluster("h200-32"), parse_layout("dp=32", 0, v3)
    steps = (step_model(v3, cluster, layout, PRECISIONS[name]) for name in ("fp8", "bf16"))
    fp8, bf16 = (step.prefill_parts(4096, prompt=4096)["element-wise"] for step in steps)
    assert fp8 > 1.1 * bf16  # a seventh of it reads the outputs of 128 heads and writes them in FP8


@pytest.mark.parametrize(
    ("cluster", "mesh", "last"), [("b200-8", "tp=8", 1024), ("h200-8", "tp=8", 16384), ("h200-32", "dp=32", 512)]
)
@pytest.mark.parametrize("decode", [True, False])
def test_one_token_more_than_were_timed_is_not_faster_than_the_most_that_were(v3, cluster, mesh, last, decode):
    tables = operator_tables(BUNDLED_FOLDER / "tensorrt-llm-1.2.0rc5")
    step = step_model(v3, load_cluster(cluster), parse_layout(mesh, 0, v3), operators=tables)
    times = [routed_experts(step, tokens, decode)["experts"] for tokens in (last - 1, last, last + 1, 2 * last)]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("h200,x,fp8_block,eight,balanced,1,0.1", "line 3: moe_ep_size is 'eight', not a whole number above 0"),
        ("h200,x,fp8_block,8,balanced,1.5,0.1", "line 3: num_tokens is '1.5', not a whole number above 0"),
        ("h200,x,fp8_block,8,balanced,0,0.1", "line 3: num_tokens is '0', not a whole number above 0"),
        ("h200,x,fp8_block,8,balanced,1,inf", "line 3 has no time above 0"),
        ("h200,x,,8,balanced,1,0.1", "line 3 has no moe_dtype"),
        ("h200,x,fp8_block,8,balanced,1", "line 3 has no latency_ms"),
    ],
)
def test_a_table_with_a_row_that_says_no_size_or_no_time_is_refused_by_its_line(tmp_path, row, message):
    columns = "device,kernel_source,moe_dtype,moe_ep_size,distribution,num_tokens,latency_ms"
    good = "h200,x,fp8_block,8,balanced,1,0.1"
    (tmp_path / f"{SPREAD}.csv").write_text("\n".join((columns, good, row)))
    with pytest.raises(UserError, match=message):
        operator_tables(tmp_path)
