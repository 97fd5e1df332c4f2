"""`dsjax bench network`: which devices meet, that wrong data are found, what the verdict depends on, and what the planner takes from it."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from dsjax.bench.network import command, programs
from dsjax.bench.network.options import CollectiveGrid, VerdictOptions
from dsjax.bench.network.programs import CollectiveProgram, device_groups, device_pairs
from dsjax.bench.network.run import CollectiveCase, cases, check_cluster, expect, run_cases, why_not
from dsjax.bench.processes import Processes
from dsjax.cli import app
from dsjax.errors import UserError
from dsjax.hosts.rendezvous import GroupError
from dsjax.options import OptionError
from dsjax.plan.cluster import load_cluster
from dsjax.plan.measured import COLLECTIVES, SEND_RECEIVE, read_network
from dsjax.plan.network import all_reduce
from sharding import MeshSpec

CLUSTER = """
name = "two"
description = "2 hosts x 2 devices"
hardware = "h100"
hosts = 2
devices_per_host = 2
scale_up_devices = 2
network = "RoCE"
network_gbps = 100
nics_per_host = 1
latency_us = 5
latency_us_range = [2, 8]
"""
SOURCES = '\n[sources]\nnetwork_gbps = "ours"\n'
INSIDE, BETWEEN, ALL = [[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]
WRONG = {"rolled": lambda sent, y: jnp.roll(y, 1), "dropped": lambda sent, y: y * 0, "not sent": lambda sent, y: sent}
OWN = "[acceptance.inside_host.all_to_all]\nlatency_us = {us}\ngb_per_s = 1000\n"
ROLLED = [(name, "rolled") for name in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce")]


@pytest.fixture
def cluster_file(tmp_path):
    def write(acceptance=""):
        (tmp_path / "cluster.toml").write_text(CLUSTER + acceptance + SOURCES)
        return tmp_path / "cluster.toml"

    return write


def pretended(spec: str, processes: int):
    """A mesh whose devices say that they are of so many processes."""
    spec = MeshSpec.parse(spec)
    each = spec.num_devices // processes
    devices = np.empty(spec.num_devices, object)
    devices[:] = [SimpleNamespace(id=k, process_index=k // each) for k in range(spec.num_devices)]
    return spec, SimpleNamespace(devices=devices.reshape(spec.shape))


def timed(todo, grid, agree=lambda stage, own: [own]):
    return run_cases(todo, grid, jnp.dtype("float32"), None, agree)


def messages_of(pair, sizes, agree=lambda stage, own: [own], repeats=1, **options):
    grid = CollectiveGrid(only="send_receive", pair_sizes=sizes, repeats=repeats, **options)
    return timed(cases([pair], grid), grid, agree)


@pytest.fixture
def pair():
    return device_pairs(MeshSpec.parse("dp=2").build())[0]


def ids(group):
    return [[device.id for device in row] for row in group.devices]


@pytest.mark.parametrize(
    ("mesh", "found"),
    [
        ("dp=4", {("host",): INSIDE, ("hosts",): BETWEEN, ("experts",): ALL}),
        ("dp=2,tp=2", {("host", "tp"): INSIDE, ("hosts",): BETWEEN, ("experts",): ALL}),
        ("dp=4,ep=2", {("host", "experts"): INSIDE, ("hosts",): BETWEEN}),
    ],
)
def test_groups_are_the_links_and_what_serving_forms_of_them(mesh, found):
    groups = device_groups(*pretended(mesh, 2))
    assert {group.uses: ids(group) for group in groups} == found
    assert {group.uses: group.between_hosts for group in groups} == {uses: "host" not in uses for uses in found}


def test_messages_are_of_two_devices_of_each_host_and_the_first_of_each_two_hosts_and_collectives_of_groups():
    _, mesh = pretended("dp=9", 3)
    inside, between = device_pairs(mesh)
    assert (ids(inside), inside.between_hosts) == ([[0, 1], [3, 4], [6, 7]], False)
    assert (ids(between), between.between_hosts) == ([[0, 3]], True)  # the third host has nobody
    assert (inside.takes_part, between.takes_part) == (True, True)
    between.devices[0][0] = between.devices[0][1]
    assert not between.takes_part  # process 0 has no device left in it
    assert device_pairs(pretended("dp=2", 2)[1])[0].between_hosts, "hosts of one device have no pair inside"
    spec, mesh = pretended("dp=4", 2)
    groups = [*device_groups(spec, mesh), *device_pairs(mesh)]
    found = list(cases(groups, CollectiveGrid(sizes="1K", pair_sizes="64,1G")))
    messages = [(case.group.uses, case.size) for case in found if case.collective == "send_receive"]
    assert messages == [(("pair",), 64), (("pair",), 1 << 30)] * 2
    assert not [case for case in found if case.collective != "send_receive" and "pair" in case.group.uses]


def test_a_message_s_time_is_half_of_there_and_back(pair, monkeypatch):
    sample = lambda loop, repeats, agree: (loop.run(1), (4.0,) * repeats)[1]  # noqa: E731
    monkeypatch.setattr("dsjax.bench.network.run.sample", sample)
    (row,) = messages_of(pair, "64", repeats=2).rows
    assert (row.samples, row.sent_bytes, row.operand_bytes, row.correct) == ((2.0, 2.0), 64, 64, True)
    assert row.bandwidth == 32


def test_a_slow_small_message_does_not_keep_a_large_one_from_being_timed(pair, monkeypatch):
    seconds = iter([4.0, 4.0, 12.0])  # there and back
    monkeypatch.setattr("dsjax.bench.network.run.sample", lambda loop, repeats, agree: (next(seconds),))
    found = messages_of(pair, "64,4K,8K,64K", row_limit=20)
    assert [row.sent_bytes for row in found.rows] == [64, 4096, 8192]
    assert "--row-limit" in found.skipped[0][1]  # four seconds above the latency at 8 KiB are 32 at 64


def test_a_process_without_a_device_in_a_pair_waits_for_the_others(pair, monkeypatch):
    monkeypatch.setattr(type(pair), "takes_part", False)
    monkeypatch.setattr(CollectiveProgram, "loop", lambda program: pytest.fail("it has no device there"))
    told = {"sample": [[0.0] * 3, [0.0, 0.0, 12.0]], "correct": [True, True], "seconds": [1.0]}
    told["free"] = [["host", 1, 1e12]]
    found = messages_of(pair, "64", lambda stage, own: told[stage])
    assert found.rows[0].samples == (3.0,)


def test_processes_of_one_host_share_its_memory_and_those_of_several_do_not(pair):
    case = CollectiveCase(pair, "send_receive", 1 << 30)
    program = CollectiveProgram(pair, "send_receive", case.size, jnp.dtype("float32"))
    for hosts, reason in (("aaaa", "needs 17.2 GB, and 10.0 GB are free"), ("abcd", None)):
        free = [[host, 2, 10e9] for host in hosts]
        assert why_not(case, program, [], 20.0, lambda stage, own, free=free: free) == reason


@pytest.mark.parametrize("collective", sorted({*COLLECTIVES, SEND_RECEIVE} - {"ragged_all_to_all"}))  # the CPU has none
def test_a_loop_takes_no_more_memory_than_was_reckoned_before_it_was_made(pair, collective, monkeypatch):
    program = CollectiveProgram(pair, collective, 1 << 20, jnp.dtype("float32"))
    compiled, compile = [], jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *some: compiled.append(compile(*some)) or compiled[-1])
    program.loop().run(3)
    (memory,) = [one.memory_analysis() for one in compiled]
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes <= program.memory + 4096


@pytest.mark.parametrize("what", [KeyboardInterrupt(), GroupError("process 1 has gone away")])
def test_what_was_timed_before_the_run_ended_is_written(what, monkeypatch, tmp_path):
    asked = iter(range(100))

    def agree(stage, own):
        if next(asked) == 7:
            raise what
        return [own]

    monkeypatch.setattr("dsjax.bench.network.run.sample", lambda loop, repeats, agree: (agree("samples", 4.0)[0],))
    members = [SimpleNamespace(process_id=number, host=host) for number, host in enumerate("ab")]
    run = lambda *asked: pytest.fail("the others do not wait for it any more")  # noqa: E731
    agreement = SimpleNamespace(all_gather=agree, run=run)
    processes = Processes(SimpleNamespace(is_leader=True, members=members, agreement=agreement))
    monkeypatch.setattr(processes, "check_shares", lambda spec, mesh: None)
    file, spec = tmp_path / "network.json", MeshSpec.parse("dp=2")
    grid = CollectiveGrid(mesh="dp=2", only="send_receive", pair_sizes="64,128,256", repeats=1)
    with pytest.raises(type(what)):
        command._measure(grid, VerdictOptions(json_file=str(file), progress=False), spec, None, processes)
    body = json.loads(file.read_text())
    assert body["partial"]
    assert [row["sent_bytes"] for row in body["rows"]] == [64, 128]


def test_one_of_each_host_reaches_the_others_over_the_network_unless_a_rack_is_one_domain():
    groups = {group.uses[0]: group for group in device_groups(*pretended("dp=16", 2))}
    assert [groups[use].near(8, 8) for use in ("host", "hosts", "experts")] == [8, 1, 8]
    assert [groups[use].near(72, 8) for use in ("host", "hosts", "experts")] == [8, 2, 16]


def test_a_mesh_with_an_uneven_share_of_each_process_is_refused():
    spec, mesh = pretended("dp=4", 2)
    mesh.devices.flat[2].process_index = 0
    with pytest.raises(UserError, match="1 to 3 devices of a process"):
        device_groups(spec, mesh)


@pytest.fixture(scope="module")
def host():
    spec = MeshSpec.parse("dp=4,ep=2")
    return device_groups(spec, spec.build())[-1]


@pytest.mark.parametrize(("collective", "wrong"), [*ROLLED, (SEND_RECEIVE, "dropped"), (SEND_RECEIVE, "not sent")])
def test_data_that_arrive_wrong_are_found(host, pair, collective, wrong, monkeypatch):
    assert host.devices.shape == (2, 2)  # two groups at once
    group = pair if collective == SEND_RECEIVE else host
    program = CollectiveProgram(group, collective, 64, jnp.dtype("bfloat16"))
    assert program.sent_bytes == 64
    assert program.arrives_right()
    right = programs._APPLY[collective]
    monkeypatch.setitem(programs._APPLY, collective, lambda x, ranks: WRONG[wrong](x, right(x, ranks)))
    assert not CollectiveProgram(group, collective, 64, jnp.dtype("bfloat16")).arrives_right()


def test_a_collective_that_drowns_in_noise_has_a_line_and_no_figure(host, monkeypatch):
    monkeypatch.setattr("dsjax.bench.modules.timing.seconds_of", lambda run, applications: 0.05)
    grid = CollectiveGrid(mesh="dp=4,ep=2", sizes="64", only="all_to_all", repeats=1)
    found = timed(cases([host], grid), grid)
    assert not found.rows
    assert "run it again" in found.skipped[0][1]


def test_expectations_are_the_planner_s_or_the_file_s_own(cluster_file):
    spec, mesh = pretended("dp=4", 2)
    groups = {group.uses[0]: group for group in device_groups(spec, mesh)} | {"pair": device_pairs(mesh)[1]}
    plain = load_cluster(cluster_file())
    asked = (("hosts", "all_to_all"), ("pair", "send_receive"), ("host", "all_to_all"), ("hosts", "all_reduce"))
    away, pair, inside, summed = (expect(plain, CollectiveCase(groups[use], name, 0), 1 << 30) for use, name in asked)
    # All goes over the device's half of a card of 100 Gb/s, at the planner's 60 %.
    assert away.expected == pytest.approx((1 << 30) / (0.6 * 6.25e9), rel=1e-3)
    assert pair.expected == pytest.approx(away.expected / 2, rel=1e-3)  # alone on the card
    assert inside.expected == pytest.approx((1 << 30) / (0.6 * 450e9), rel=0.02)
    assert (inside.warning, inside.failing) == (inside.expected * 1.5, inside.expected * 3)
    # 2 bytes a value of one of two ranks, in a ring over hosts with one device each.
    assert summed.expected == pytest.approx(all_reduce(plain, 2, 1 << 30, near=1))
    assert summed.expected > away.expected / 2
    table = "[acceptance.between_hosts.all_gather]\nlatency_us = 10\ngb_per_s = 1\n"
    own = load_cluster(cluster_file(f"[acceptance]\nwarning = 2\nfailing = 5\n{table}"))
    found = expect(own, CollectiveCase(groups["experts"], "all_gather", 0), 1_000_000)
    assert (found.expected, found.warning, found.failing) == pytest.approx((1.01e-3, 2.02e-3, 5.05e-3))
    assert found.source == "two: acceptance.between_hosts.all_gather"


@pytest.mark.parametrize(
    ("acceptance", "message"),
    [
        ("[acceptance]\nwarning = 4\nfailing = 3\n", "the second no less than the first"),
        ("[acceptance]\nwarning = 0.5\n", "expected 1 or more"),
        ("[acceptance]\nworse = 4\n", "acceptance is .* unknown field `worse`"),
        ("[acceptance.inside_host.broadcast]\nlatency_us = 1\n", "invalid enum value 'broadcast'"),
        ("[acceptance.inside_host.all_gather]\nlatency_us = 1\n", "missing required field `gb_per_s`"),
        ("[acceptance.inside_host.all_gather]\nlatency_us = 1\ngb_per_s = 0\n", "expected `float` > 0"),
    ],
)
def test_a_wrong_acceptance_table_says_what_is_wrong(cluster_file, acceptance, message):
    with pytest.raises(UserError, match=message):
        load_cluster(cluster_file(acceptance))


def test_a_cluster_of_smaller_hosts_is_refused(cluster_file):
    with pytest.raises(UserError, match="has 2 hosts of 2 devices, and the mesh takes 4 devices of each of 1 process"):
        check_cluster(load_cluster(cluster_file()), pretended("dp=4", 1)[1].devices)


def test_what_is_too_large_or_too_slow_is_left_out_with_a_line(host):
    options = CollectiveGrid(mesh="dp=4,ep=2", only="all_gather,ragged_all_to_all", repeats=1, row_limit=1e-9)
    todo = [CollectiveCase(host, name, size) for name in options.collectives for size in (1024, 1 << 20, 1 << 50)]
    found = timed(todo, options)
    assert [(row.case.collective, row.case.size, row.verdict) for row in found.rows] == [("all_gather", 1024, None)]
    reasons = ["--row-limit", "GB are free", *["GPUs and TPUs only"] * 3]
    assert all(said in reason for said, (_, reason) in zip(reasons, found.skipped, strict=True))


@pytest.mark.parametrize(("us", "code", "said"), [(1e9, 0, "as expected"), (1e-3, 3, "warning"), (1e-9, 4, "failing")])
def test_the_exit_code_is_the_verdict(cluster_file, tmp_path, us, code, said, monkeypatch):
    def seconds_of(run, applications):
        return run(applications) or 1e-4 + 1e-6 * applications

    monkeypatch.setattr("dsjax.bench.modules.timing.seconds_of", seconds_of)
    limits = "[acceptance]\nwarning = 1\nfailing = 1e12\n" if us == 1e-3 else ""
    where = tmp_path / "n.json"
    arguments = ["--mesh", "dp=2", "--sizes", "64", "--repeats", "2", "--only", "all_to_all", "--no-progress"]
    arguments += ["--cluster", str(cluster_file(limits + OWN.format(us=us))), "--json", str(where)]
    result = CliRunner().invoke(app, ["bench", "network", *arguments])
    assert result.exit_code == code, result.output
    body = json.loads(where.read_text())
    (row,) = body["rows"]
    assert (body["verdict"], row["ranks"], row["correct"], len(row["samples_s"])) == (said, 2, True, 2)
    assert read_network(where).curves["all_to_all", False][0].ranks == 2


def test_a_run_that_timed_nothing_has_no_verdict(cluster_file, monkeypatch):
    monkeypatch.setattr("dsjax.bench.modules.timing.seconds_of", lambda run, applications: 0.05)
    arguments = ["--mesh", "dp=2", "--sizes", "64", "--only", "all_to_all", "--cluster", str(cluster_file())]
    result = CliRunner().invoke(app, ["bench", "network", *arguments])
    assert "something else keeps this machine busy" in " ".join(result.output.split())
    assert "no collective was timed" in str(result.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": "1Q"}, "--sizes is '1Q'"),
        ({"pair_sizes": "0"}, "--pair-sizes is '0'"),
        ({"only": "broadcast"}, "--only names broadcast"),
        ({"only": ""}, "--only names ''"),
        ({"repeats": 0}, "--repeats is 0"),
    ],
)
def test_wrong_options_say_so(options, message):
    with pytest.raises(OptionError, match=message):
        CollectiveGrid(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "dp=2", "--json", ""], "--json is '', where no file"),
        (["--mesh", "dp=2", "--cluster", ""], "no cluster ''"),
        ([], "--mesh dp=1 is one device"),  # which sends nothing
    ],
)
def test_an_empty_name_and_one_device_are_refused_before_anything_is_timed(options, message, monkeypatch):
    monkeypatch.setattr("dsjax.bench.network.run.run_cases", lambda *args: pytest.fail("it was timed"))
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["bench", "network", *options], catch_exceptions=False)
