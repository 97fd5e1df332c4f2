"""``Rules``: one table from logical axes to mesh axes, which says when an entry cannot be."""

import pytest
from jax.sharding import PartitionSpec as P

from sharding import MeshError, MeshSpec, Rules


@pytest.fixture
def wide():
    """Experts over ep and tp together."""
    spec = MeshSpec.parse("dp=2,tp=4,ep=8")
    return Rules.for_mesh(spec), spec.build()


def test_logical_axes_become_the_mesh_axes_of_the_table(wide):
    rules, mesh = wide
    assert rules.spec(("embed", "stack", "mlp_width")) == P(None, None, "tp")
    assert rules.spec(("layers", "experts", "embed")) == P(None, ("ep", "tp"), None)
    assert rules.spec(("ranks", None, "vocab")) == P(("dp", "ep"), None, "tp")
    sharding = rules.sharding(mesh, ("layers", "experts", "embed"), (3, 16, 5))
    assert sharding.shard_shape((3, 16, 5)) == (3, 2, 5)


def test_collisions_and_names_that_are_unknown_or_given_twice_are_refused_by_name(wide):
    rules, _ = wide
    with pytest.raises(MeshError, match=r"'heads' and 'vocab' are both split over mesh axis 'tp'"):
        rules.spec(("heads", "vocab"))
    # A collision may also be brought about by a change of the table.
    with pytest.raises(MeshError, match=r"'experts' and 'expert_width' are both split over mesh axis 'tp'"):
        rules.replace(expert_width=("tp",)).spec(("experts", "embed", "stack", "expert_width"))
    with pytest.raises(MeshError, match="name it once"):
        Rules({"heads": ("tp", "tp")})
    rules, mesh = wide
    for call in (lambda: rules.spec(("head",)), lambda: rules.ways(mesh, "head")):
        with pytest.raises(MeshError, match=r"no rule for logical axis 'head'; the names are .*'heads'"):
            call()
    with pytest.raises(MeshError, match=r"no logical axis is called \['head'\]; the names are .*'heads'"):
        rules.replace(head=("tp",))


def test_replacing_an_entry_changes_it_alone_and_leaves_the_original(wide):
    rules, mesh = wide
    whole = rules.replace(shared_width=())
    assert (rules.ways(mesh, "shared_width"), whole.ways(mesh, "shared_width")) == (4, 1)
    assert {name for name in rules.table if rules.table[name] != whole.table[name]} == {"shared_width"}
    with pytest.raises(TypeError):
        rules.table["embed"] = ("tp",)


def test_a_dimension_that_does_not_divide_is_named_with_its_size_and_the_way_out(wide):
    rules, mesh = wide
    with pytest.raises(MeshError, match=r"'vocab' of size 10 is not divisible by 4.*Rules.replace\(vocab=\(\)\)"):
        rules.sharding(mesh, ("embed", "vocab"), (3, 10))
    with pytest.raises(MeshError, match=r"'experts' of size 12 is not divisible by 8"):
        rules.sharding(mesh, ("experts", "embed"), (12, 5))
    rules.sharding(mesh, ("embed", "vocab"), (3, 12))
