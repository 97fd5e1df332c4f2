"""Times of operations: monotone in sizes and resources, also beyond the sizes that were timed; tables are checked line by line."""

import dataclasses
import itertools

import pytest
from step_models import step_model

from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.plan.chip import Chip
from dsjax.plan.cluster import load_cluster
from dsjax.plan.layout import parse_layout
from dsjax.plan.network import all_reduce
from dsjax.plan.operator_tables import BUNDLED, SPREAD, operator_tables
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.step_basis import routed_experts


@pytest.mark.parametrize("resource", ["fp8_flops", "memory_bandwidth"])
def test_a_little_more_of_a_resource_changes_a_time_a_little_and_never_for_the_worse(resource):
    hardware = load_hardware("h20")
    times = []
    for step in range(60):
        more = dataclasses.replace(hardware, **{resource: getattr(hardware, resource) * 1.05**step})
        times.append(Chip(more, PRECISIONS["fp8"]).product(4096, 4096, 7168))
    assert all(0.9 < after / before <= 1 for before, after in itertools.pairwise(times))


def test_a_sum_grows_with_its_bytes_and_shrinks_with_the_link_but_for_what_it_takes_to_start():
    h200, h800 = load_cluster("h200-8"), load_cluster("h800-32")
    sizes = [2.0**n for n in range(10, 32)]
    for cluster in (h200, h800, load_cluster("b200-8"), load_cluster("gb200-nvl72-36")):
        times = [all_reduce(cluster, 8, size) for size in sizes]
        assert times == sorted(times)
        assert all(all_reduce(cluster.scaled("scale-up", 2), 8, s) <= t for s, t in zip(sizes, times, strict=True))
    assert all_reduce(h200, 8, 1024.0) == all_reduce(h800, 8, 1024.0)
    assert all_reduce(h800, 8, 2.0**30) == pytest.approx(450 / 200 * all_reduce(h200, 8, 2.0**30), rel=0.01)


def experts_of(cluster, mesh, v3, tokens, decode, tables):
    step = step_model(v3, load_cluster(cluster), parse_layout(mesh, 0, v3), PRECISIONS["fp8"], operators=tables)
    return routed_experts(step, tokens, decode)["experts"]


OLD_TENSORRT_LLM = BUNDLED.of_version("tensorrt-llm-1.2.0rc5")


@pytest.mark.parametrize(
    ("cluster", "mesh", "last"), [("b200-8", "tp=8", 1024), ("h200-8", "tp=8", 16384), ("h200-32", "dp=32", 512)]
)
@pytest.mark.parametrize("decode", [True, False])
def test_one_token_more_than_were_timed_is_not_faster_than_the_most_that_were(v3, cluster, mesh, last, decode):
    counts = (last - 1, last, last + 1, 2 * last)
    times = [experts_of(cluster, mesh, v3, tokens, decode, OLD_TENSORRT_LLM) for tokens in counts]
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
