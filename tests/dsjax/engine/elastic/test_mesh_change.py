"""Which mesh the devices that are left make, and with which options."""

from types import SimpleNamespace

import pytest

from dsjax.engine.elastic.mesh_change import NoMeshError, changed_options, check_mesh, largest_mesh
from sharding import MeshError, MeshSpec

NOTHING = ("eplb", "init_expert_location", "moe_dense_tp_size", "expert_mesh", "pp_layer_partition", "speculation")


def args(num_redundant=0, **others):
    """The fields of `EngineArgs` that decide."""
    return SimpleNamespace(**dict.fromkeys(NOTHING) | {"num_redundant": num_redundant, "mesh": "dp=4"} | others)


def config(experts=32):
    widths = {"num_attention_heads": 8, "head_groups": 8, "moe_intermediate_size": 16}
    return SimpleNamespace(n_routed_experts=experts, is_moe=True, widths_over_tp=lambda in_blocks: {}, **widths)


@pytest.mark.parametrize(
    ("wanted", "devices", "expected"),
    [
        ("dp=32", 24, "dp=24"),
        ("dp=4,tp=8", 31, "dp=3,tp=8"),
        ("dp=4,tp=2,ep=4", 6, "dp=3,tp=2"),
        ("dp=4,tp=2,ep=4", 5, "dp=2,tp=2"),
        ("dp=4,tp=2,ep=2", 6, "dp=3,tp=2,ep=2"),
        ("dp=2", 8, "dp=2"),
    ],
)
def test_tp_stays_and_dp_shrinks_and_ep_stays_where_it_divides(wanted, devices, expected):
    assert str(largest_mesh(args(), config(256), "f32", MeshSpec.parse(wanted), [None] * devices)) == expected


def test_too_few_devices_for_one_dp_rank_are_named():
    with pytest.raises(NoMeshError, match="3 devices are left, too few for one DP rank of tp=4"):
        largest_mesh(args(), config(), "f32", MeshSpec(2, 4), [None] * 3)


def test_a_mesh_with_stages_is_refused_by_several_processes_and_not_taken_for_one_without():
    with pytest.raises(MeshError, match="can change only to a mesh without stages; leave pp out, or start the engine"):
        check_mesh(args(), config(), "f32", MeshSpec.parse("pp=2,dp=2"), [None] * 4, several_processes=True)


def test_stages_stay_as_they_are_wanted_and_their_layers_as_they_were_given_for_so_many():
    spec, given = MeshSpec.parse("pp=2,dp=2"), args(pp_layer_partition="3,2")
    assert largest_mesh(given, config(), "f32", spec, [None] * 5) == spec
    with pytest.raises(NoMeshError, match="3 devices are left, too few for mesh pp=2,dp=2"):
        largest_mesh(given, config(), "f32", spec, [None] * 3)
    given = [changed_options(given, config(), MeshSpec.parse(mesh)) for mesh in ("pp=2,dp=2", "pp=3,dp=2", "dp=4")]
    assert [one.get("pp_layer_partition", "as it was") for one in given] == ["as it was", None, None]


@pytest.mark.parametrize(
    ("asked", "mesh", "expected"), [(0, "dp=24", 8), (0, "dp=16", 0), (32, "dp=24", 32), (8, "dp=32", 32)]
)
def test_experts_get_the_fewest_copies_that_divide(asked, mesh, expected):
    assert changed_options(args(asked), config(256), MeshSpec.parse(mesh))["redundant_experts"] == expected


@pytest.mark.parametrize(
    ("mesh", "role", "devices", "error"),
    [
        ("dp=2,tp=2", "both", 10, None),
        ("dp=8", "both", 10, "mesh dp=8 and the experts' ep=6 want 14 devices, and this server has 10"),
        ("dp=8", "attention", 8, None),
        ("dp=4,ep=2", "both", 10, "leave ep out"),
    ],
)
def test_attention_gets_the_devices_that_experts_leave_it(mesh, role, devices, error):
    given, spec = args(2, expert_mesh="ep=6", afd_role=role, afd_address=None), MeshSpec.parse(mesh)
    if error is not None:
        with pytest.raises(MeshError, match=error):
            check_mesh(given, config(256), "f32", spec, [None] * devices)
        return
    check_mesh(given, config(256), "f32", spec, [None] * devices)
    options = changed_options(given, config(256), spec)
    assert (options["attention_mesh"], options["expert_mesh"]) == (mesh, "ep=6")
    assert options["redundant_experts"] == 2  # as the experts' devices need them, whatever attention's are
    assert str(largest_mesh(given, config(256), "f32", spec, [None] * devices)) == mesh
