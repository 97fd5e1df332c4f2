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
from unittest.mock import AsyncMock
from xml.etree import ElementTree

import pytest
from commands import run
from waits import until

from dsjax.bench.accept.criteria import Checklist, Criterion, predicted_checklist
from dsjax.bench.accept.kinds.kind import Measured
from dsjax.bench.accept.kinds.load import TtftMeasurement
from dsjax.bench.accept.options import TestBedOptions
from dsjax.bench.accept.report import Report
from dsjax.bench.accept.results import Result, run_measurements
from dsjax.bench.serve.options import ServerOptions
from dsjax.bench.serve.server_facts import ServerFacts
from dsjax.errors import UserError

CRITERIA = """
name = "small"
description = "Promises of a small server"

[measurements]
server = {kind = "server", title = "The server"}
ttft = {kind = "ttft", title = "TTFT of 6 tokens", input_tokens = 6, requests = 5}
rate = {kind = "load", title = "A rate", request_rate = 20, seconds = 0.5, input_tokens = 6, output_tokens = 4, spread = 0.0}
load = {kind = "load", title = "Two sessions", sessions = 2, seconds = 1.2, input_tokens = 6, output_tokens = 4, spread = 0.0, windows = 3}
"""
CRITERION = """
[[criteria]]
id = "{0}"
measurement = "{1}"
value = "{2}"
{3}
source = "§{0}"
"""
FAULT = (
    'fault = {kind = "fault", title = "Slow", hook = "slow", value = "dp=1", sessions = 4, settle = 0.2, before = 1.5, '
)
FAULT += "hold = 1.5, watch = 10, input_tokens = 6, output_tokens = 4, spread = 0.0}\n"
MET = ("quick", "ttft", "ttft_p99", "below = 60")
MISSED = ("impossible", "ttft", "ttft_p50", "below = 1e-6\nwarning = 1e-5\nfailing = 1e-4")
UNTESTED = ("memory", "load", "memory_share", "below = 0.9")
FAULT_CRITERIA = [
    ("loss", "fault", "throughput_loss", "at_most = 0.25"),
    ("back", "fault", "recovery", "at_most = 9.9"),
    ("whole", "fault", "error_share", "at_most = 0"),
]


def prepared(folder, url, criteria, text=CRITERIA):
    """Write a criteria file whose criteria are (id, measurement, value, bound), and return the options of a run by it."""
    path = folder / "criteria.toml"
    path.write_text(text + "".join(CRITERION.format(*one) for one in criteria))
    return f"--base-url {url} --criteria {path} --results {folder / 'out'} --vocab-size 50".split()


@pytest.fixture
def accept(tmp_path):
    """Run the command; return how it ended, and the JSON that it wrote."""

    def invoke(url, *options, criteria=(), **text):
        ended = run("dsjax", "accept", *prepared(tmp_path, url, criteria, **text), *options)
        report = tmp_path / "out" / "report.json"
        return ended, json.loads(report.read_text()) if report.exists() else None

    return invoke


def verdicts(body):
    return {one["id"]: one["verdict"] for one in body["criteria"]}


def test_every_criterion_has_value_bound_verdict_source_and_a_command_of_its_own(start_fake, accept, tmp_path):
    server = start_fake(first=0.001, gap=0.02, info={"num_devices": 4})
    criteria = [MET, MISSED, UNTESTED, ("length", "server", "max_model_len", "at_least = 4096")]
    words = ("--api-key", "secret-1", "--admin-api-key=secret-1", "--only", "server,ttft,load")
    ended, body = accept(server.url, *words, criteria=criteria)
    assert verdicts(body) == {"quick": "met", "impossible": "missed", "memory": "not tested", "length": "met"}
    assert (ended.returncode, body["exit_status"], body["verdict"], body["partial"]) == (3, 3, "missed", False)
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
    root = ElementTree.parse(tmp_path / "out" / "report.xml").getroot()
    assert [root.get(key) for key in ("tests", "failures", "skipped")] == ["4", "1", "1"]
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert (cases["quick"].get("classname"), len(cases["quick"])) == ("ttft", 0)
    failure = cases["impossible"].find("failure")
    assert (failure.get("type"), "expected < 1e-06 s" in failure.get("message")) == ("failing", True)
    assert "dsjax_device_memory" in cases["memory"].find("skipped").get("message")
    again = run(*shlex.split(missed["command"]))
    assert (again.returncode, "impossible" in again.stdout, "length" in again.stdout) == (3, True, False)
    assert body["measurements"]["server"]["values"] == {"max_model_len": 4096, "devices": 4}


def test_the_junit_report_is_xml_whatever_a_hook_has_said():
    checklist = Checklist("s", "d", {}, [Criterion("lost", "fault", "silence", "s", "below", 1.0, "§1")])
    said = "--hook x ended with 1: \x1b[31mno\x00"
    results = {"fault": Result("fault", "F", "f", "2026-11-26T00:00:00+00:00", 1.0, None, said)}
    junit = Report(checklist, results, "http://a", "m", "s", False, "dsjax accept").junit()
    skipped = ElementTree.fromstring(junit).find("testsuite/testcase/skipped")
    assert skipped.get("message") == "--hook x ended with 1: �[31mno�"


def test_what_is_done_is_not_measured_again_unless_it_changed(start_fake, accept):
    server = start_fake(first=0.001)
    ended, first = accept(server.url, "--only", "quick", criteria=[MET, MISSED])
    assert ended.returncode == 0, "a criterion that is left out does not count"
    sent = len(server.script.bodies)
    ended, second = accept(server.url, "--only", "ttft", criteria=[MET, MISSED])
    assert len(server.script.bodies) == sent
    assert "1 of 1 measurements are done already" in ended.stderr
    assert second["measurements"] == first["measurements"]
    assert verdicts(second) == {"quick": "met", "impossible": "missed"}, "a criterion of the same values"
    accept(server.url, "--only", "ttft", "--temperature", "0.5", criteria=[MET])
    assert server.script.bodies[-1]["temperature"] == 0.5, "asked otherwise"
    shorter = {"criteria": [MET], "text": CRITERIA.replace("requests = 5", "requests = 3")}
    _, third = accept(server.url, "--only", "ttft", **shorter)
    assert third["measurements"]["ttft"]["samples"] == 3
    _, fourth = accept(server.url, "--only", "ttft", "--fresh", **shorter)
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
    monkeypatch.setattr(TtftMeasurement, "measure", AsyncMock(side_effect=KeyboardInterrupt))
    whole = TtftMeasurement(name="ttft", title="TTFT", input_tokens=6, requests=1000)
    criterion = Criterion("quick", "ttft", "ttft_p99", "s", "below", 60.0, "§1")
    short = Result("ttft", "TTFT", "of --quick", "2026-11-26T00:00:00+00:00", 1.0, Measured({"ttft_p99": 0.1}))
    results = {"ttft": short, "not asked for": dataclasses.replace(short, title="Another")}
    checklist = Checklist("small", "d", {"ttft": whole}, [criterion])
    server = SimpleNamespace(options=ServerOptions(), url="http://here", facts=ServerFacts("tiny"))
    bed = SimpleNamespace(server=server, options=TestBedOptions())
    report = Report(checklist, results, "http://here", "tiny", "small", False, "dsjax accept")
    how = {"fresh": False, "say": lambda line: None, "on_result": lambda: report.write(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(run_measurements(checklist, bed, results, **how))
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
    criteria = [("once", "load", "sessions_at_once", "at_least = 2"), ("up", "load", "outages", "at_most = 0")]
    longer = CRITERIA.replace("seconds = 1.2", "seconds = 3")  # a busy machine sends few
    _, body = accept(server.url, "--only", "load", criteria=criteria, text=longer)
    assert verdicts(body) == {"once": "met", "up": "met"}
    found = body["measurements"]["load"]
    assert 0 < found["values"]["error_share"] < 0.5
    assert any("the engine is ill" in note for note in found["notes"])
    # Four chunks of 10 ms each, two sessions: at most 200 tokens a second.
    assert 0 < found["values"]["output_tokens_per_s"] <= 200
    assert server.script.most_at_once == 2


@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        ({}, 3, "none of 5 requests was answered: 5 × HTTP 500: dead"),
        ({"max_model_len": 6}, 4, "longer than the server's 6 tokens"),
    ],
)
def test_a_dead_server_misses_latencies_and_too_long_a_prompt_is_not_tested(start_fake, accept, script, status, reason):
    asked = iter([None] * 2 + [(500, "dead")] * 10_000)
    server = start_fake(refuse=lambda body: next(asked), **script)
    ended, body = accept(server.url, "--only", "ttft", criteria=[MET])
    assert ended.returncode == status
    assert reason in body["criteria"][0]["reason"]


@pytest.mark.slow
def test_a_fault_is_made_and_ended_under_load(start_fake, accept):
    asked = []

    def scale(body):
        asked.append((body["mesh"], body["authorization"]))
        server.script.gap = 0.5 if body["mesh"] == "dp=1" else 0.05
        return 200, "{}"

    server = start_fake(first=0.01, gap=0.05, posts={"/scale": scale})
    given, hooks = [server.url, "--only", "fault"], ["--hook", "slow=scale:{value}", "--hook", "slow-end=scale:dp=4"]
    wanted = {"criteria": FAULT_CRITERIA, "text": CRITERIA + FAULT}
    ended, body = accept(*given, **wanted)
    assert "--hook slow=COMMAND and --hook slow-end=COMMAND are not given" in body["criteria"][0]["reason"]
    assert (ended.returncode, server.script.bodies) == (4, [])
    assert "about 0 s" in ended.stderr
    ended, body = accept(*given, *hooks, **wanted)
    assert "needs --admin-api-key" in body["criteria"][0]["reason"]
    assert ended.returncode == 4
    ended, body = accept(*given, *hooks, "--admin-api-key", "secret-2", **wanted)
    assert asked == [("dp=1", "Bearer secret-2"), ("dp=4", "Bearer secret-2")]
    assert verdicts(body) == {"loss": "missed", "back": "met", "whole": "met"}
    found = body["measurements"]["fault"]["values"]
    assert 0.5 < found["throughput_loss"] < 1  # an answer of four tokens takes 1.51 in place of 0.16 seconds
    assert "secret-2" not in json.dumps(body)


def test_the_list_says_what_would_be_measured_and_measures_nothing(start_fake, accept):
    server = start_fake()
    ended, body = accept(server.url, "--list", criteria=[MET])
    assert (ended.returncode, body, server.script.bodies) == (0, None, [])
    for said in ("small: about 8 s", "ttft_p99 < 60 s", "reported only"):
        assert said in ended.stdout


def test_a_link_is_a_row_of_the_network_s_measurement(start_fake, accept, tmp_path):
    network = tmp_path / "network.json"
    arguments = ["--mesh", "dp=2", "--only", "send_receive", "--pair-sizes", "64,4K", "--repeats", "2", "--no-progress"]
    assert run("dsjax", "bench", "network", *arguments, "--json", str(network)).returncode == 0
    link = 'kind = "link"\ntitle = "near"\ngroup = "pair"\ncollective = "send_receive"\nbetween_hosts = false\nbytes = 64\n'
    given = [start_fake().url, "--only", "near"]
    criterion = ("latency", "near", "latency_us", "below = 1e9")
    wanted = {"criteria": [criterion], "text": f"{CRITERIA}[measurements.near]\n{link}"}
    _, body = accept(*given, **wanted)
    assert verdicts(body) == {"latency": "not tested"}
    _, body = accept(*given, "--network", str(network), **wanted)
    assert verdicts(body) == {"latency": "met"}
    measured = json.loads(network.read_text())["rows"][0]["median_s"]
    assert body["criteria"][0]["value"] == pytest.approx(measured * 1e6)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_the_fault_and_the_same_command_goes_on(number, start_fake, tmp_path):
    said, criteria, report = (tmp_path / name for name in ("said", "criteria.toml", "out/report.json"))
    url, text = start_fake(first=0.001, gap=0.02).url, CRITERIA + FAULT.replace("hold = 1.5", "hold = 600")
    options = [*prepared(tmp_path, url, (MET, *FAULT_CRITERIA), text), "--only", "ttft,fault"]
    options += ["--hook", f"slow=echo begun >> {said}", "--hook", f"slow-end=echo ended >> {said}"]
    command = [sys.executable, "-m", "dsjax.accept", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    until(lambda: said.exists() or process.poll() is not None, every=0.05)
    assert said.exists(), process.stderr.read()
    time.sleep(0.2)
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "the same command resumes" in errors
    assert said.read_text() == "begun\nended\n"
    body = json.loads(report.read_text())
    assert (list(body["measurements"]), body["partial"]) == (["ttft"], True)
    criteria.write_text(criteria.read_text().replace("hold = 600", "hold = 0.5"))
    ended = run("dsjax", "accept", *options)
    assert "1 of 2 measurements are done already" in ended.stderr
    assert said.read_text() == "begun\nended\n" * 2
    assert not json.loads(report.read_text())["partial"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device-metrics", "host:9400"], "expected an address such as http://HOST:PORT/metrics"),
        (["--dataset-path", "nowhere.json"], "which is no file"),
        (["--results", ""], "--results is '', which names no folder"),
        (["--hook", "quake=true"], "is no hook of the criteria file"),
        (["--only", "nothing"], "names no criterion and no measurement"),
        (["--network", "nowhere.json"], "nowhere.json"),
    ],
)
def test_a_user_s_mistake_is_one_line(start_fake, accept, options, message):
    ended, body = accept(start_fake().url, *options, criteria=[MET])
    assert (ended.returncode, body) == (2, None)
    assert message in " ".join(ended.stderr.split())


@pytest.mark.parametrize("given", [[], ["--criteria", "h20-32", "--recipe", "plan.json"]])
def test_criteria_or_a_recipe_are_asked_for(start_fake, given):
    ended = run("dsjax", "accept", "--base-url", start_fake().url, *given)
    assert ended.returncode == 2
    assert "or --recipe (JSON of dsjax plan recipe), one of the two" in " ".join(ended.stderr.split())


def recipe(**load):
    """What `dsjax plan recipe` writes, as far as `accept` reads it: four replicas with 8 requests each."""
    figures = {"ttft_s": {"value": 0.5, "low": 0.2, "high": 1.5}, "tpot_s": {"value": 0.05, "low": 0.04, "high": 0.07}}
    blind = {"predictions": 106, "by": "rate, several hosts"}
    rate, tpot = {"low": 100.0, "high": 200.0, **blind}, {"low": 0.035, "high": 0.08, **blind}
    work = {"input_tokens": 6.0, "output_tokens": 4.0, "concurrency": None, "requests_per_s": None, "prefix_hit": 0.0}
    expected = {"mesh": "dp=2", "instances": 2, "batch_per_dp_rank": 8, **figures}
    found = {"expected": expected, "calibrated": {"output_tokens_per_s": rate, "tpot_s": tpot}}
    return found | {"model": "demo", "cluster": "h20-32", "services": [], "workload": work | {"classes": []} | load}


def test_a_recipe_s_predictions_are_criteria_with_its_intervals_and_its_load():
    found = predicted_checklist(recipe())
    load = found.measurements["load"]
    assert (load.sessions, load.request_rate, load.input_tokens, load.output_tokens, load.spread) == (32, 0.0, 6, 4, 0)
    rate, tpot, ttft, errors = found.criteria
    assert (rate.bound, tpot.bound, ttft.bound) == ((100.0, 200.0), (0.035, 0.08), (0.2, 1.5))
    assert all(one.value_name in load.UNITS for one in found.criteria)
    assert [rate.is_met_by(value) for value in (99, 100, 200, 201)] == [False, True, True, False]
    assert (errors.is_met_by(0.0), errors.is_met_by(0.01)) == (True, False)
    assert "106 blind predictions" in rate.source
    assert predicted_checklist(recipe(concurrency=5.0)).measurements["load"].sessions == 5
    offered = predicted_checklist(recipe(requests_per_s=3.0))
    assert (offered.measurements["load"].request_rate, offered.measurements["load"].sessions) == (3.0, 0)
    assert (offered.criteria[0].kind, offered.criteria[0].bound) == ("at_least", pytest.approx(0.9 * 3 * 4))
    with pytest.raises(UserError, match="prefix hits or classes"):
        predicted_checklist(recipe(prefix_hit=0.5))


def test_a_recipe_that_plan_wrote_is_held_to_a_server(start_fake, tmp_path):
    path = str(tmp_path / "recipe.json")
    words = "--cluster h200-8 --model demo --mesh dp=2 --input 6 --output 4 --mode aggregated --max-concurrency 4"
    assert run("dsjax", "plan", "recipe", path, *words.split()).returncode == 0
    options = ["--base-url", start_fake().url, "--vocab-size", "50", "--results", str(tmp_path / "out"), "--quick"]
    ended = run("dsjax", "accept", "--recipe", path, *options, "--list")
    assert ended.returncode == 0, ended.stderr
    for said in ("4 sessions at once", "output_tokens_per_s", "tpot_p50", "ttft_mean"):
        assert said in " ".join(ended.stdout.split())
