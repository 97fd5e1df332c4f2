"""``MeshSpec``: what ``--mesh`` means, which mistakes it names, and in which order devices lie."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding import MeshError, MeshSpec
from sharding.mesh import hosts_of_experts, joined_neighbours


@dataclass(frozen=True)
class FakeDevice:
    """As much of a ``jax.Device`` as the order of devices depends on."""

    id: int
    process_index: int
    platform: str = "gpu"
    slice_index: int | None = None


# DESIGN's table: spec, sizes of the physical axes, devices, experts on a device (of 256 and the redundant), redundant.
TABLE = [
    ("dp=32", (1, 32, 1), 32, 8, 0),
    ("dp=4,tp=8", (1, 4, 8), 32, 8, 0),
    ("tp=8", (1, 1, 8), 8, 32, 0),
    ("tp=8,ep=1", (1, 1, 8), 8, 256, 0),
    ("dp=32,ep=8", (4, 8, 1), 32, 32, 0),
    ("dp=72", (1, 72, 1), 72, 4, 32),
    ("dp=8,ep=1,etp=8", (1, 1, 8, 1), 8, 256, 0),
    ("dp=8,ep=2,etp=4", (1, 2, 4, 1), 8, 128, 0),
    ("dp=4,tp=2,ep=2,etp=4", (1, 2, 2, 2), 8, 128, 0),
    ("dp=8,tp=4,ep=8,etp=2", (2, 2, 2, 4), 32, 32, 0),
    ("dp=8,tp=4,ep=4,etp=4", (2, 4, 4), 32, 64, 0),
]


@pytest.mark.parametrize(("text", "shape", "devices", "experts_on_a_device", "redundant"), TABLE)
def test_each_row_of_the_design_gives_its_physical_mesh(text, shape, devices, experts_on_a_device, redundant):
    spec = MeshSpec.parse(text)
    spec.check_fits(heads=128 if spec.tp_size > 1 else 1, experts=256, redundant=redundant, expert_width=2048)
    assert (spec.shape, spec.num_devices) == (shape, devices)
    experts_over = math.prod(size for axis, size in zip(spec.axes, shape, strict=True) if axis in spec.expert_axes)
    assert (256 + redundant) // experts_over == experts_on_a_device
    assert str(spec) == text


def test_stages_are_runs_of_neighbours_each_with_the_mesh_of_the_rest():
    spec = MeshSpec.parse("pp=2,dp=2,tp=4,ep=2")
    assert (spec.num_devices, spec.stage_devices, str(spec)) == (16, 8, "pp=2,dp=2,tp=4,ep=2")
    assert spec.stage == MeshSpec.parse("dp=2,tp=4,ep=2")
    assert (spec.shape, spec.axes) == (spec.stage.shape, spec.stage.axes)
    assert str(MeshSpec.parse("pp=3")) == "pp=3"
    assert str(MeshSpec.parse("pp=1,tp=2")) == "tp=2"
    # Ids are not contiguous over processes: those of process 0 are 0, 2, …
    devices = [FakeDevice(id, id % 2) for id in range(16)]
    first, last = spec.build_stages(devices)
    assert [device.process_index for device in first.devices.flat] == [0] * 8
    assert [device.process_index for device in last.devices.flat] == [1] * 8
    with pytest.raises(MeshError, match=r"has 2 stages, each a mesh of its own \(dp=2,tp=4,ep=2\)"):
        spec.build(devices)
    with pytest.raises(MeshError, match="wants 16 devices, found 15"):
        spec.build_stages(devices[:15])
    with pytest.raises(MeshError, match="expected a size of at least 1"):
        MeshSpec.parse("pp=0")


@pytest.mark.parametrize(
    ("text", "expert_axes", "width_axes", "copies"),
    [
        ("dp=2,tp=4,ep=4", ("ep", "tp"), (), 2),
        ("dp=2,tp=4,ep=2", ("ep",), ("tp",), 1),
        ("dp=4,tp=2,ep=2,etp=4", ("ep",), ("etp", "tp"), 1),  # DP ranks share the width too
        ("dp=8,tp=4,ep=8,etp=2", ("ep", "tp"), ("etp",), 2),
    ],
)
def test_width_is_split_only_where_ep_leaves_no_room_for_tp(text, expert_axes, width_axes, copies):
    spec = MeshSpec.parse(text)
    assert (spec.expert_axes, spec.expert_width_axes, spec.expert_copies) == (expert_axes, width_axes, copies)
    assert ("etp" in spec.batch_axes) == ("etp" in text)


def test_axes_left_out_take_their_defaults_and_spaces_do_not_count():
    assert MeshSpec.parse("tp=4") == MeshSpec(1, 4, 4)
    assert MeshSpec.parse(" ep=2, dp=8 ,tp=1") == MeshSpec(8, 1, 2)
    assert MeshSpec() == MeshSpec.parse("dp=1") == MeshSpec(1, 1, 1)
    assert MeshSpec.parse("tp=8,ep=1,etp=8") == MeshSpec.parse("tp=8,ep=1")
    assert MeshSpec.parse("dp=8,etp=4").ep_size == 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["found ''", "axis=size"]),
        ("dp", ["found 'dp'", "axis=size"]),
        ("dp=4;tp=2", ["found 'dp=4;tp=2'"]),
        ("sp=2", ["found 'sp=2'", "pp, dp, tp, ep, etp"]),
        ("dp=8,ep=2,etp=3", ["ep × etp = 2 × 3 = 6", "8 × 1 = 8", "[1, 2, 4]"]),
        ("dp=4,tp=4,ep=2,etp=2", ["etp=2 is no multiple of tp=4", "ep=2"]),
        ("dp=-2", ["found 'dp=-2'"]),
        ("dp=2,tp=2,dp=4", ["axis dp is given twice"]),
        ("ep=0", ["ep=0", "at least 1"]),
        ("dp=6,ep=4", ["ep=4", "6 × 1 = 6", "[1, 2, 3, 6]"]),
        # 6 divides 3 × 4 = 12, but is no multiple of tp = 4 and no divisor of dp = 3.
        ("dp=3,tp=4,ep=6", ["ep=6", "tp=4", "dp=3", "[1, 3, 4, 12]"]),
    ],
)
def test_a_wrong_mesh_is_named_with_what_would_fit(text, parts):
    with pytest.raises(MeshError) as error:
        MeshSpec.parse(text)
    for part in parts:
        assert part in str(error.value)


def fits(text, **model):
    MeshSpec.parse(text).check_fits(**({"heads": 128, "experts": 256, "expert_width": 2048} | model))


@pytest.mark.parametrize(
    ("text", "model", "parts"),
    [
        ("tp=3,ep=1", {"heads": 8, "expert_width": 6}, ["8 attention heads", "tp=3", "[1, 2, 4, 8]"]),
        ("dp=72", {}, ["256 physical experts (256 + 0 redundant)", "ep=72", "fits is 32"]),
        ("dp=72", {"redundant": 40}, ["296 physical experts (256 + 40 redundant)", "fits is 32"]),
        ("tp=4,ep=1", {"expert_width": 18}, ["expert width 18", "tp=4", "[1, 2, 3, 6, 9, 18]"]),
        ("dp=8,ep=1,etp=8", {"expert_width": 12}, ["expert width 12", "etp=8", "[1, 2, 3, 4, 6, 12]"]),
        ("tp=4", {"dense_widths": {"dense MLP width": 10}}, ["dense MLP width 10", "tp=4", "[1, 2, 5, 10]"]),
        ("tp=32,ep=1", {"block": 128}, ["expert width 2048 over tp=32 is 64", "block of 128", "[1, 2, 4, 8, 16]"]),
        # 384 is three blocks: tp = 2 cuts the middle one although fewer than three devices share it.
        ("tp=2", {"dense_widths": {"wide": 384}, "block": 128}, ["wide 384 over tp=2 is 192", "tp may be [1, 3]"]),
        # All that does not fit, at once.
        ("dp=3,tp=5", {"heads": 8, "dense_widths": {"wide": 12}}, ["8 attention heads", "256 physical", "is 14", "wide 12"]),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_told_which_number_and_what_would(text, model, parts):
    with pytest.raises(MeshError) as error:
        fits(text, **model)
    for part in (f"mesh {text} does not fit", *parts):
        assert part in str(error.value)


def test_what_divides_fits_and_only_split_widths_are_looked_at():
    fits("dp=72", redundant=32)
    fits("tp=16,ep=1", block=128)
    fits("tp=3", heads=3, experts=255, expert_width=7)  # experts stay whole
    fits("dp=7", experts=0)
    fits("dp=4", dense_widths={"ragged": 130}, block=128)  # no split cuts anything


SIZES = st.integers(1, 12)


@given(dp=SIZES, tp=SIZES, ep=st.integers(1, 144), etp=st.integers(0, 24))
def test_any_spec_covers_its_devices_exactly_or_is_refused(dp, tp, ep, etp):
    valid = dp * tp % ep == 0 and (ep % tp == 0 or dp % ep == 0)
    if etp:
        valid = dp * tp % (ep * etp) == 0 and (etp % tp == 0 or (ep % tp == 0 and dp % (ep // tp * etp) == 0))
    if not valid:
        with pytest.raises(MeshError, match=f"ep ?.*{ep}"):
            MeshSpec(dp, tp, ep, etp)
        return
    spec = MeshSpec(dp, tp, ep, etp)
    sizes = dict(zip(spec.axes, spec.shape, strict=True))
    assert math.prod(spec.shape) == spec.num_devices == dp * tp
    assert math.prod(sizes[axis] for axis in spec.batch_axes) == dp
    assert math.prod(sizes[axis] for axis in spec.expert_axes) == ep
    assert math.prod(sizes[axis] for axis in spec.expert_width_axes) == spec.expert_width_shards == spec.etp_size
    assert spec.expert_copies * ep * spec.expert_width_shards == spec.num_devices
    assert MeshSpec.parse(str(spec)) == spec
    # No expert's weights are split over an axis that also spreads experts, or over the copies.
    assert not set(spec.expert_axes) & set(spec.expert_width_axes)
    assert "dp" not in spec.expert_axes + spec.expert_width_axes


@given(dp=SIZES, experts=st.integers(1, 64))
def test_the_number_of_redundant_experts_that_is_named_fits_and_is_the_least(dp, experts):
    spec = MeshSpec(dp)
    for redundant in range(dp):
        try:
            spec.check_fits(heads=1, experts=experts, redundant=redundant, expert_width=1)
            break
        except MeshError as error:
            named = int(str(error).rsplit(" ", 1)[1])
            assert named > redundant or (experts + redundant) % dp
    else:
        pytest.fail("no number of redundant experts below dp fits")
    if redundant:
        assert named == redundant


def hosts_with_interleaved_ids(hosts: int, per_host: int) -> list[FakeDevice]:
    """Device ids run over the hosts like cards dealt, with gaps, and come in reverse."""
    return [FakeDevice(id=10 * (i * hosts + h), process_index=h) for h in range(hosts) for i in range(per_host)][::-1]


def hosts_of(block) -> set[int]:
    return {device.process_index for device in block.flat}


def test_tp_then_ep_neighbours_stay_inside_a_host_and_a_slice():
    devices = hosts_with_interleaved_ids(hosts=4, per_host=8)
    mesh = MeshSpec.parse("dp=8,tp=4,ep=8").build(devices)
    assert (mesh.devices.shape, mesh.axis_names) == ((4, 2, 4), ("dp", "ep", "tp"))
    # A whole EP group of 8 is on one host of 8; one that is wider still keeps tp inside a host.
    assert [hosts_of(copy) for copy in mesh.devices] == [{0}, {1}, {2}, {3}]
    ids = [device.id for device in mesh.devices[2].flat]
    assert ids == sorted(ids)
    wider = MeshSpec.parse("dp=8,tp=4").build(devices).devices[0]
    assert [hosts_of(row) for row in wider] == [{i // 2} for i in range(8)]
    first = MeshSpec.parse("dp=2,tp=2").build(devices)
    assert [device.id for device in first.devices.flat] == [0, 40, 80, 120], "further devices are left"
    of_two_slices = [FakeDevice(id=i, process_index=0, slice_index=i % 2) for i in range(8)]
    mesh = MeshSpec.parse("dp=2,tp=4").build(of_two_slices)
    assert [{device.slice_index for device in row} for row in mesh.devices[0]] == [{0}, {1}]


def test_fast_links_join_the_devices_of_a_slice_or_on_a_cpu_of_a_process():
    def joined(owners, platform="gpu", slices=None):
        owned = zip(owners, slices or [None] * len(owners), strict=True)
        devices = [FakeDevice(i, owner, platform, slice) for i, (owner, slice) in enumerate(owned)]
        return joined_neighbours(MeshSpec.parse(f"dp={len(owners)}").arrange(devices))

    each_its_own, of_two = range(8), [0, 0, 0, 0, 1, 1, 1, 1]
    assert joined(each_its_own, slices=of_two) == 4  # a process for each GPU, of which four are on a host
    assert joined(of_two, "tpu", [0] * 8) == 8  # two hosts of a TPU slice, whose chips ICI joins
    assert joined(of_two, "cpu", [0] * 8) == 4
    assert joined(of_two) == 4
    assert joined([0, 0, 0, 1, 1, 1, 1, 1]) is None
    assert joined([0, 1, 0, 1]) is None


def test_experts_know_their_hosts_where_every_copy_has_as_many_neighbouring_ranks_of_each():
    def hosts(text, owners):
        spec = MeshSpec.parse(text)
        devices = [FakeDevice(i, owner, "gpu", None) for i, owner in enumerate(owners)]
        return hosts_of_experts(spec.arrange(devices).devices, spec.ep_size)

    four_hosts = [rank // 8 for rank in range(32)]
    assert hosts("dp=32", four_hosts) == 4
    assert hosts("dp=4,tp=8", four_hosts) == 4
    assert hosts("dp=32,ep=16", four_hosts) == 2  # two copies, each on two hosts of its own
    assert hosts("dp=32,ep=8", four_hosts) == 1
    assert hosts("dp=4,tp=8,ep=4", four_hosts) == 1  # eight devices share the width of each expert
    assert hosts("dp=8", [0, 0, 0, 0, 0, 1, 1, 1]) == 1
    assert hosts("dp=8", [0, 1] * 4) == 1
    assert hosts("dp=8,ep=4", [0, 0, 1, 1, 2, 2, 2, 2]) == 1


def test_too_few_devices_names_wanted_and_found_and_what_to_do():
    gpus = [FakeDevice(i, 0) for i in range(3)]
    with pytest.raises(MeshError, match=r"dp=2,tp=2 wants 4 devices, found 3 of platform 'gpu'.*at most 3 devices"):
        MeshSpec.parse("dp=2,tp=2").build(gpus)
    cpus = [FakeDevice(i, 0, "cpu") for i in range(3)]
    with pytest.raises(MeshError, match=r"wants 8 devices, found 3 of platform 'cpu'.*emulate_devices\(8\)"):
        MeshSpec.parse("dp=8").build(cpus)
