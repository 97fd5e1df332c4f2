"""`dsjax accept` as a user meets it, against a plain OpenAI-compatible server: verdicts, exit statuses, reports, going on."""

import asyncio
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from commands import run

from dsjax.bench.accept.command import typed
from dsjax.bench.accept.criteria import Checklist, Criterion
from dsjax.bench.accept.kinds.kind import Measured
from dsjax.bench.accept.kinds.ttft import TtftMeasurement
from dsjax.bench.accept.options import TestBedOptions
from dsjax.bench.accept.report import Report
from dsjax.bench.accept.results import Result, Results
from dsjax.bench.accept.run import run_measurements
from dsjax.bench.serve.options import ServerOptions
from dsjax.bench.serve.server_facts import ServerFacts

CRITERIA = """
name = "small"
description = "Promises of a small server"

[measurements.server]
kind = "server"
title = "The server"

[measurements.ttft]
kind = "ttft"
title = "TTFT of 6 tokens"
input_tokens = 6
requests = 5

[measurements.load]
kind = "load"
title = "Two sessions"
sessions = 2
seconds = 1.2
input_tokens = 6
output_tokens = 4
spread = 0.0
windows = 3

[measurements.rate]
kind = "load"
title = "Twenty requests a second"
request_rate = 20
seconds = 0.5
input_tokens = 6
output_tokens = 4
spread = 0.0
"""
CRITERION = """
[[criteria]]
id = "{id}"
measurement = "{measurement}"
value = "{value}"
{bound}
source = "§{id}"
"""
FAULT = """
[measurements.fault]
kind = "fault"
title = "Slow"
hook = "slow"
value = "dp=1"
sessions = 4
settle = 0.2
before = 1.5
hold = 1.5
watch = 10
input_tokens = 6
output_tokens = 4
spread = 0.0
"""


@pytest.fixture
def accept(tmp_path):
    """Runs the command with criteria given as (id, measurement, value, bound); its end, and the JSON that it wrote."""

    def invoke(url, *options, criteria=(), text=CRITERIA):
        path = tmp_path / "criteria.toml"
        names = ("id", "measurement", "value", "bound")
        path.write_text(text + "".join(CRITERION.format(**dict(zip(names, one, strict=True))) for one in criteria))
        arguments = [
            "--base-url",
            url,
            "--criteria",
            str(path),
            "--results",
            str(tmp_path / "out"),
            "--vocab-size",
            "50",
        ]
        ended = run("dsjax", "accept", *arguments, *options)
        report = tmp_path / "out" / "report.json"
        return ended, json.loads(report.read_text()) if report.exists() else None

    return invoke


def verdicts(body):
    return {one["id"]: one["verdict"] for one in body["criteria"]}


MET = ("quick", "ttft", "ttft_p99", "below = 60")
MISSED = ("impossible", "ttft", "ttft_p50", "below = 1e-6\nwarning = 1e-5\nfailing = 1e-4")
UNTESTED = ("memory", "load", "memory_share", "below = 0.9")


@pytest.mark.parametrize(
    ("criteria", "only", "status", "verdict"),
    [
        ([MET], "ttft", 0, "met"),
        ([MET, UNTESTED], "ttft,load", 4, "not tested"),
        ([MET, UNTESTED, MISSED], "ttft,load", 3, "missed"),
        ([MET, UNTESTED, MISSED], "quick", 0, "met"),  # what is left out does not count
    ],
)
def test_the_exit_status_is_the_worst_verdict(start_fake, accept, criteria, only, status, verdict):
    ended, body = accept(start_fake(first=0.001).url, "--only", only, criteria=criteria)
    assert ended.returncode == status, ended.stderr
    assert (body["verdict"], body["exit_status"], body["partial"]) == (verdict, status, False)


def test_every_criterion_has_value_bound_verdict_source_and_the_command_that_shows_it_alone(
    start_fake, accept, tmp_path
):
    server = start_fake(first=0.001, info={"num_devices": 4})
    criteria = [MET, MISSED, UNTESTED, ("length", "server", "max_model_len", "at_least = 4096")]
    _, body = accept(server.url, "--api-key", "secret-1", "--only", "server,ttft,load", criteria=criteria)
    assert verdicts(body) == {"quick": "met", "impossible": "missed", "memory": "not tested", "length": "met"}
    (missed,) = [one for one in body["criteria"] if one["id"] == "impossible"]
    assert (missed["grade"], missed["bound"], missed["source"]) == ("failing", "< 1e-06 s", "§impossible")
    assert missed["value"] == body["measurements"]["ttft"]["values"]["ttft_p50"]
    assert missed["command"].endswith("--only impossible --fresh")
    for name in ("report.md", "report.json", "report.xml"):
        text = (tmp_path / "out" / name).read_text()
        assert "secret-1" not in text
        assert "impossible" in text
    text = (tmp_path / "out" / "report.md").read_text()
    (shown,) = re.findall(r"\| `impossible` \| ([0-9.e-]+) s", text)
    assert float(shown) == pytest.approx(missed["value"], rel=0.05)
    assert "**missed** (beyond the plan's failing value) | §impossible |" in text
    assert "- `memory`: not tested: the server's /metrics has no dsjax_device_memory" in text
    again = run(*shlex.split(missed["command"]))
    assert again.returncode == 3
    assert "impossible" in again.stdout
    assert "length" not in again.stdout
    assert body["measurements"]["server"]["values"] == {"max_model_len": 4096, "devices": 4}


def test_the_junit_report_is_what_a_build_server_reads(start_fake, accept, tmp_path):
    accept(start_fake(first=0.001).url, "--only", "ttft,load", criteria=[MET, MISSED, UNTESTED])
    root = ElementTree.parse(tmp_path / "out" / "report.xml").getroot()
    assert {key: root.get(key) for key in ("tests", "failures", "skipped")} == {
        "tests": "3",
        "failures": "1",
        "skipped": "1",
    }
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert cases["quick"].get("classname") == "ttft"
    assert len(cases["quick"]) == 0
    assert cases["impossible"].find("failure").get("type") == "failing"
    assert "expected < 1e-06 s" in cases["impossible"].find("failure").get("message")
    assert "dsjax_device_memory" in cases["memory"].find("skipped").get("message")


def test_the_junit_report_is_xml_whatever_a_hook_has_said():
    criterion = Criterion("lost", "fault", "silence", "s", "below", 1.0, "§1")
    coloured = Result(
        "fault", "F", "f", "2026-11-26T00:00:00+00:00", 1.0, None, "--hook x ended with 1: \x1b[31mno\x00"
    )
    report = Report(
        Checklist("s", "d", {}, [criterion]), {"fault": coloured}, "http://a", "m", "s", False, "dsjax accept"
    )
    skipped = ElementTree.fromstring(report.junit()).find("testsuite/testcase/skipped")
    assert skipped.get("message") == "--hook x ended with 1: �[31mno�"


def test_what_is_done_is_not_measured_again_unless_it_changed(start_fake, accept):
    server = start_fake(first=0.001)
    _, first = accept(server.url, "--only", "quick", criteria=[MET, MISSED])
    sent = len(server.script.bodies)
    ended, second = accept(server.url, "--only", "ttft", criteria=[MET, MISSED])
    assert len(server.script.bodies) == sent
    assert "1 of 1 measurements are done already" in ended.stderr
    assert second["measurements"] == first["measurements"]
    assert verdicts(second) == {"quick": "met", "impossible": "missed"}, "a criterion of the same values"
    accept(server.url, "--only", "ttft", "--temperature", "0.5", criteria=[MET])
    assert server.script.bodies[-1]["temperature"] == 0.5, "asked otherwise"
    _, third = accept(
        server.url, "--only", "ttft", criteria=[MET], text=CRITERIA.replace("requests = 5", "requests = 3")
    )
    assert third["measurements"]["ttft"]["samples"] == 3
    _, fourth = accept(
        server.url, "--only", "ttft", "--fresh", criteria=[MET], text=CRITERIA.replace("requests = 5", "requests = 3")
    )
    assert fourth["measurements"]["ttft"]["started"] >= third["measurements"]["ttft"]["started"]
    assert len(server.script.bodies) > sent + 2 * 3
    prompts = [tuple(body["prompt"]) for body in server.script.bodies]
    assert len(set(prompts)) >= len(prompts) - 3, "no run finds its prompts in the server's prefix cache"


def test_devices_that_were_missing_are_taken_when_the_same_command_names_them(start_fake, accept):
    server, devices = start_fake(), ("devices", "server", "devices", "at_least = 4")
    ended, body = accept(server.url, "--only", "devices", criteria=[devices])
    assert ended.returncode == 4
    assert "give --devices" in body["criteria"][0]["reason"]
    ended, body = accept(server.url, "--only", "devices", "--devices", "4", criteria=[devices])
    assert (ended.returncode, verdicts(body)) == (0, {"devices": "met"})


def test_what_was_measured_by_another_definition_is_in_no_report_of_a_run_that_was_ended(monkeypatch, tmp_path):
    async def interrupted(self, bed):
        raise KeyboardInterrupt

    monkeypatch.setattr(TtftMeasurement, "measure", interrupted)
    whole = TtftMeasurement(name="ttft", title="TTFT", input_tokens=6, requests=1000)
    criterion = Criterion("quick", "ttft", "ttft_p99", "s", "below", 60.0, "§1")
    short = Result("ttft", "TTFT", "of --quick", "2026-11-26T00:00:00+00:00", 1.0, Measured({"ttft_p99": 0.1}))
    other = dataclasses.replace(short, title="Another")
    results = Results({"ttft": short, "not asked for": other})
    checklist = Checklist("small", "d", {"ttft": whole}, [criterion])
    server = SimpleNamespace(options=ServerOptions(), url="http://here", facts=ServerFacts("tiny"))
    bed = SimpleNamespace(server=server, options=TestBedOptions())
    report = Report(checklist, results.by_name, "http://here", "tiny", "small", False, "dsjax accept")
    measuring = run_measurements(
        checklist, bed, results, fresh=False, say=lambda line: None, on_result=lambda: report.write(tmp_path)
    )
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(measuring)
    body = json.loads((tmp_path / "report.json").read_text())
    assert (body["verdict"], body["partial"], list(body["measurements"])) == ("not tested", True, ["not asked for"])


def test_a_folder_of_another_server_is_refused(start_fake, accept):
    accept(start_fake(first=0.001).url, "--only", "ttft", criteria=[MET])
    other = start_fake(first=0.001)
    ended, _ = accept(other.url, "--only", "ttft", criteria=[MET])
    assert ended.returncode == 2
    assert re.search(r"has results of http://.* give another --results, or --fresh", " ".join(ended.stderr.split()))
    assert other.script.bodies == []
    ended, body = accept(other.url, "--only", "ttft", "--fresh", criteria=[MET])
    assert (ended.returncode, body["base_url"]) == (0, other.url)


def test_a_load_counts_tokens_sessions_and_errors(start_fake, accept):
    refused = iter([None] * 6 + [(500, "the engine is ill")] + [None] * 10_000)
    server = start_fake(first=0.01, gap=0.01, refuse=lambda body: next(refused))
    criteria = [
        ("at-once", "load", "sessions_at_once", "at_least = 2"),
        ("errors", "load", "error_share", "at_most = 0.5"),
    ]
    criteria += [("up", "load", "outages", "at_most = 0"), ("again", "load", "restarts", "at_most = 0")]
    _, body = accept(server.url, "--only", "load", criteria=criteria)
    assert verdicts(body) == {"at-once": "met", "errors": "met", "up": "met", "again": "not tested"}
    found = body["measurements"]["load"]
    assert 0 < found["values"]["error_share"] < 0.5
    assert any("the engine is ill" in note for note in found["notes"])
    # Four chunks of 10 ms each, two sessions: at most 200 tokens a second.
    assert 0 < found["values"]["output_tokens_per_s"] <= 200
    assert server.script.most_at_once == 2
    assert found["by_hand"].startswith(f"dsjax bench serve --base-url {server.url}")


def test_the_command_by_hand_is_one_that_runs(start_fake, accept):
    _, body = accept(start_fake(first=0.001).url, "--only", "ttft,rate", criteria=[MET])
    for name in ("ttft", "rate"):
        ended = run(*shlex.split(body["measurements"][name]["by_hand"]))
        assert ended.returncode == 0, ended.stderr
        assert "Successful requests" in ended.stdout


def test_a_server_that_answers_nothing_is_missed_and_not_untested(start_fake, accept):
    asked = iter([None] * 2 + [(500, "dead")] * 10_000)
    server = start_fake(refuse=lambda body: next(asked))
    ended, body = accept(server.url, "--only", "ttft", criteria=[MET])
    assert ended.returncode == 3
    assert "none of 5 requests was answered: 5 × HTTP 500: dead" in body["criteria"][0]["reason"]


def test_prompts_that_are_too_long_for_the_server_are_not_tested(start_fake, accept):
    ended, body = accept(start_fake(max_model_len=6).url, "--only", "ttft", criteria=[MET])
    assert ended.returncode == 4
    assert "longer than the server's 6 tokens" in body["criteria"][0]["reason"]
    assert not body["measurements"]["ttft"]["tested"]
    ended, body = accept(start_fake().url, "--only", "ttft", "--fresh", criteria=[MET])
    assert ended.returncode == 0


def slowing(script):
    """What `/scale` does to a fake server: with one device it is slow."""
    asked = []

    def scale(body):
        asked.append(body)
        script[0].gap = 0.1 if body["mesh"] == "dp=1" else 0.01
        return 200, "{}"

    return asked, scale


FAULT_CRITERIA = [
    ("loss", "fault", "throughput_loss", "at_most = 0.25"),
    ("back", "fault", "recovery", "at_most = 9.9"),
    ("whole", "fault", "error_share", "at_most = 0"),
]


def test_a_fault_is_made_and_ended_under_load(start_fake, accept):
    held = []
    asked, scale = slowing(held)
    server = start_fake(first=0.01, gap=0.01, posts={"/scale": scale})
    held.append(server.script)
    hooks = ["--hook", "slow=scale:{value}", "--hook", "slow-end=scale:dp=4"]
    text = CRITERIA + FAULT
    ended, body = accept(server.url, *hooks, "--only", "fault", criteria=FAULT_CRITERIA, text=text)
    assert "needs --admin-api-key" in body["criteria"][0]["reason"]
    assert ended.returncode == 4
    ended, body = accept(
        server.url, *hooks, "--admin-api-key", "secret-2", "--only", "fault", criteria=FAULT_CRITERIA, text=text
    )
    assert [(one["mesh"], one["authorization"]) for one in asked] == [
        ("dp=1", "Bearer secret-2"),
        ("dp=4", "Bearer secret-2"),
    ]
    assert verdicts(body) == {"loss": "missed", "back": "met", "whole": "met"}
    found = body["measurements"]["fault"]["values"]
    assert 0.5 < found["throughput_loss"] < 1  # an answer of four tokens takes 0.31 in place of 0.04 seconds
    assert "secret-2" not in json.dumps(body)


def test_a_fault_without_hooks_is_not_tested_and_takes_no_time(start_fake, accept):
    server = start_fake()
    ended, body = accept(server.url, "--only", "fault", criteria=FAULT_CRITERIA, text=CRITERIA + FAULT)
    assert ended.returncode == 4
    assert "--hook slow=COMMAND and --hook slow-end=COMMAND are not given" in body["criteria"][0]["reason"]
    assert server.script.bodies == []
    assert "about 0 s" in ended.stderr


def test_the_list_says_what_would_be_measured_and_measures_nothing(start_fake, accept):
    server = start_fake()
    ended, body = accept(server.url, "--list", criteria=[MET])
    assert (ended.returncode, body) == (0, None)
    assert "small: about 8 s" in ended.stdout
    assert "ttft_p99 < 60 s" in ended.stdout
    assert "reported only" in ended.stdout
    assert server.script.bodies == []


def test_links_are_rows_of_the_network_s_measurement(start_fake, accept, tmp_path):
    network = tmp_path / "network.json"
    arguments = ["--mesh", "dp=2", "--only", "send_receive", "--pair-sizes", "64,4K", "--repeats", "2", "--no-progress"]
    assert run("dsjax", "bench", "network", *arguments, "--json", str(network)).returncode == 0
    text = CRITERIA + "".join(
        f'[measurements.{name}]\nkind = "link"\ntitle = "{name}"\ngroup = "pair"\ncollective = "send_receive"\n'
        f"between_hosts = {between}\nbytes = {size}\n"
        for name, between, size in (("near", "false", 64), ("far", "true", 64))
    )
    criteria = [
        ("near-latency", "near", "latency_us", "below = 1e9"),
        ("far-latency", "far", "latency_us", "below = 1e9"),
    ]
    url = start_fake().url
    _, body = accept(url, "--only", "near,far", criteria=criteria, text=text)
    assert verdicts(body) == {"near-latency": "not tested", "far-latency": "not tested"}
    _, body = accept(url, "--only", "near,far", "--network", str(network), criteria=criteria, text=text)
    assert verdicts(body) == {"near-latency": "met", "far-latency": "not tested"}
    measured = json.loads(network.read_text())["rows"][0]["median_s"]
    assert body["criteria"][0]["value"] == pytest.approx(measured * 1e6)
    assert "no send_receive over a group 'pair' between hosts" in body["criteria"][1]["reason"]


def test_a_server_with_balancing_is_compared_with_one_without(start_fake, accept):
    text = CRITERIA + (
        '[measurements.gain]\nkind = "eplb_gain"\ntitle = "Gain"\nsessions = 2\nseconds = 1\ninput_tokens = 6\n'
        "output_tokens = 8\nspread = 0.0\n"
    )
    criteria = [
        ("faster", "gain", "throughput_gain", "at_least = 0.5"),
        ("even", "gain", "generation_p99_reduction", "at_least = 0.1"),
    ]
    criteria += [("busy", "gain", "utilisation_gain", "at_least = 0.03")]
    fast, slow = start_fake(gap=0.005), start_fake(gap=0.2)
    _, body = accept(fast.url, "--only", "gain", "--without-eplb-url", slow.url, criteria=criteria, text=text)
    assert verdicts(body) == {"faster": "met", "even": "met", "busy": "not tested"}
    _, body = accept(
        slow.url, "--only", "gain", "--fresh", "--without-eplb-url", fast.url, criteria=criteria, text=text
    )
    assert verdicts(body)["faster"] == "missed"


def test_each_of_two_servers_has_its_own_devices_utilisation(start_fake, accept):
    text = CRITERIA + (
        '[measurements.gain]\nkind = "eplb_gain"\ntitle = "Gain"\nsessions = 2\nseconds = 1\ninput_tokens = 6\n'
        "output_tokens = 8\nspread = 0.0\n"
    )

    def exporter(percent):
        return start_fake(metrics=lambda answered: f'DCGM_FI_DEV_GPU_UTIL{{gpu="0",Hostname="a"}} {percent}\n').url

    server, other = start_fake(), start_fake()
    given = ["--only", "gain", "--without-eplb-url", other.url, "--device-metrics", f"{exporter(70)}/metrics"]
    criteria = [("busy", "gain", "utilisation_gain", "at_least = 0.03")]
    _, body = accept(server.url, *given, criteria=criteria, text=text)
    assert verdicts(body) == {"busy": "not tested"}, "nobody says how busy the other server's devices are"
    assert "--without-eplb-device-metrics" in body["criteria"][0]["reason"]
    given += ["--without-eplb-device-metrics", f"{exporter(60)}/metrics"]
    _, body = accept(server.url, *given, criteria=criteria, text=text)
    assert verdicts(body) == {"busy": "met"}
    assert body["criteria"][0]["value"] == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_the_fault_and_the_same_command_goes_on(number, start_fake, tmp_path):
    criteria, out, said = tmp_path / "c.toml", tmp_path / "out", tmp_path / "said"
    names = ("id", "measurement", "value", "bound")
    made = "".join(CRITERION.format(**dict(zip(names, one, strict=True))) for one in (MET, *FAULT_CRITERIA))
    criteria.write_text(CRITERIA + FAULT.replace("hold = 1.5", "hold = 600") + made)
    server = start_fake(first=0.001, gap=0.001)
    command = [
        sys.executable,
        "-m",
        "dsjax.accept",
        "--base-url",
        server.url,
        "--criteria",
        str(criteria),
        "--results",
        str(out),
    ]
    command += [
        "--vocab-size",
        "50",
        "--only",
        "ttft,fault",
        "--hook",
        f"slow=echo begun >> {said}",
        "--hook",
        f"slow-end=echo ended >> {said}",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    deadline = time.monotonic() + 60
    while not said.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "the same command goes on" in errors
    assert said.read_text() == "begun\nended\n"
    body = json.loads((out / "report.json").read_text())
    assert (list(body["measurements"]), body["partial"]) == (["ttft"], True)
    criteria.write_text(criteria.read_text().replace("hold = 600", "hold = 0.5"))
    ended = run("dsjax", "accept", *command[3:])
    assert "1 of 2 measurements are done already" in ended.stderr
    assert said.read_text() == "begun\nended\n" * 2
    assert not json.loads((out / "report.json").read_text())["partial"]


def test_commands_are_shown_without_keys():
    words = ["accept", "--api-key", "a", "--admin-api-key=b", "--only", "x", "--quick", "--fresh", "--hook", "n=c d"]
    assert typed(words) == "dsjax accept --quick --hook 'n=c d'"
    assert typed(["--quick"]) == "dsjax accept --quick"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device-metrics", "host:9400"], "expected an address such as http://HOST:PORT/metrics"),
        (["--dataset-path", "nowhere.json"], "which is no file"),
        (["--results", ""], "--results is '', which names no folder"),
        (["--without-eplb-url", "http://127.0.0.1:99999"], "--without-eplb-url is 'http://127.0.0.1:99999'"),
        (["--hook", "quake=true"], "is no hook of the criteria file"),
        (["--only", "nothing"], "names no criterion and no measurement"),
        (["--network", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_user_s_mistake_is_one_line(start_fake, accept, options, message):
    ended, body = accept(start_fake().url, *options, criteria=[MET])
    assert (ended.returncode, body) == (2, None)
    assert message in " ".join(ended.stderr.split())
