"""`dsjax bench serve` as a user meets it: what is printed, what is written, how it ends."""

import csv
import importlib.util
import itertools
import json
import re
import signal
import subprocess
import sys

import pytest
from commands import Ended, run
from typer.testing import CliRunner
from waits import until

from dsjax.bench.serve.statistics import draft_figures
from dsjax.cli import app
from dsjax.top.reading import Exposition

COMMON = ("--num-prompts", "8", "--random-input-len", "6", "--random-output-len", "4", "--vocab-size", "50")
BROKE = (500, "it broke")


def bench(url, *options, common=COMMON) -> Ended:
    return run("dsjax", "bench", "serve", "--base-url", url, *common, *options)


def test_it_prints_what_vllm_prints(start_fake):
    server = start_fake(info={"num_devices": 4})
    done = bench(server.url, "--max-concurrency", "2", "--goodput", "ttft:60000", "e2el:60000", "--num-warmups", "3")
    assert done.returncode == 0, done.stderr
    lines = dict(re.findall(r"^(.*?):? {2,}([\d.]+)$", done.stdout, re.MULTILINE))
    expected = {"Successful requests": "8", "Failed requests": "0", "Maximum request concurrency": "2"}
    expected |= {"Total input tokens": "48", "Total generated tokens": "32"}
    assert {name: lines[name] for name in expected} == expected
    assert lines["Request goodput (req/s)"] == lines["Request throughput (req/s)"]
    assert float(lines["Peak concurrent requests"]) <= 2
    rate, own = (float(lines[name]) for name in ("Output token throughput (tok/s)", "Output tok/s a device"))
    assert own == pytest.approx(rate / 4, abs=0.01)
    names = itertools.product(("Mean", "Median", "P90", "P95", "P99"), ("TTFT", "TPOT", "ITL", "E2EL"))
    assert {f"{name} {short} (ms)" for name, short in names} <= lines.keys()
    for title in ("Serving Benchmark Result", "Time to First Token", "Inter-token Latency"):
        assert title in done.stdout
    # a test request of two tokens, three to warm up, and the eight that count
    assert [body["max_tokens"] for body in server.script.bodies] == [2, *[4] * 11]
    prompts = [tuple(body["prompt"]) for body in server.script.bodies]
    assert not set(prompts[:4]) & set(prompts[4:]), "the warm-up must not fill a prefix cache for what is measured"


def drafting(answered: int) -> str:
    """vLLM's counters of two engines: each request brings 10 rows with 2 drafts, of which 7 and 4 are accepted; one has no position."""
    name = "vllm:spec_decode_num"
    lines = ["# TYPE vllm:generation_tokens counter", "vllm:generation_tokens_total 5.0"]
    for engine, share in (("0", answered - 1), ("1", 1)):
        labels = f'model_name="tiny",engine="{engine}"'
        for what, count in (("drafts", 10), ("draft_tokens", 20), ("accepted_tokens", 11)):
            lines += [f"# TYPE {name}_{what} counter"] if engine == "0" else []
            lines.append(f"{name}_{what}_total{{{labels}}} {count * share}")
        for position, count in ((0, 7), (1, 4), ("last", 1)):
            lines.append(f'{name}_accepted_tokens_per_pos_total{{{labels},position="{position}"}} {count * share}')
    return "\n".join(lines) + "\n"


def test_acceptance_of_drafts_is_that_of_the_point(start_fake, tmp_path):
    """The test request before the point is not in it."""
    done = bench(start_fake(metrics=drafting).url, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    body = json.loads((tmp_path / "out.json").read_text())
    found = {key: value for key, value in body.items() if key.startswith("spec_decode_")}
    assert found == {
        "spec_decode_acceptance_rate": pytest.approx(55.0),
        "spec_decode_acceptance_length": pytest.approx(2.1),
        "spec_decode_num_drafts": 80,
        "spec_decode_draft_tokens": 160,
        "spec_decode_accepted_tokens": 88,
        "spec_decode_per_position_acceptance_rates": pytest.approx([0.7, 0.4]),
    }
    endless = Exposition("vllm:spec_decode_num_draft_tokens_total +Inf\n")
    assert draft_figures(Exposition(""), endless) == dict.fromkeys(found)
    assert "Speculative Decoding" in done.stdout
    lines = dict(re.findall(r"^ *(.*?):? {2,}([\d.]+)$", done.stdout, re.MULTILINE))
    names = ("Acceptance rate (%)", "Acceptance length", "Position 0", "Position 1")
    assert [lines[name] for name in names] == ["55.00", "2.10", "70.00", "40.00"]


def test_json_on_standard_output_has_vllm_s_names(start_fake):
    server = start_fake(metrics=lambda answered: "# TYPE a counter\na_total 1.0\n")  # it drafts nothing
    done = bench(server.url, "--json", "-", "--save-detailed", "--metric-percentiles", "50,99.9")
    body = json.loads(done.stdout)
    assert "Serving Benchmark Result" in done.stderr
    assert (body["completed"], body["failed"], body["num_prompts"]) == (8, 0, 8)
    assert (body["request_rate"], body["max_concurrency"], body["interrupted"]) == ("inf", None, False)
    assert (body["total_input_tokens"], body["total_output_tokens"]) == (48, 32)
    assert body["output_throughput"] == pytest.approx(32 / body["duration"])
    assert body["p50_ttft_ms"] == pytest.approx(body["median_ttft_ms"])
    assert body["p99.9_e2el_ms"] >= body["median_e2el_ms"]
    assert (body["num_devices"], body["token_sources"], len(body["itls"][0])) == (None, {"usage": 8}, 3)
    assert (set(body["finish_reasons"]), body["output_lens"], body["cached_lens"]) == ({"length"}, [4] * 8, [None] * 8)
    names = {"goodput_verdict", "objective_shares", "goodput_share_wanted"}
    names |= {"total_cached_tokens", "cached_share", "cached_share_bound"}
    absent = [body[key] for key in body if key.startswith("spec_decode_") or key in names]
    assert absent == [None] * 12
    assert "Speculative" not in done.stderr


def test_the_prefix_cache_is_told_beside_its_bound(start_fake):
    sizes = {"prefix-len": 6, "suffix-len": 2, "num-prefixes": 2}
    lengths = [f"--prefix-repetition-{name}={size}" for name, size in sizes.items()]
    done = bench(start_fake(cached=3).url, "--dataset-name", "prefix-repetition", *lengths, "--json", "-")
    body = json.loads(done.stdout)
    assert (body["total_cached_tokens"], body["cached_share"], body["cached_share_bound"]) == (24, 24 / 64, 36 / 64)
    assert re.search(r"Cached share of input \(%\): +37.50\n", done.stderr)


def test_a_sweep_writes_points_and_draws_them(start_fake, tmp_path):
    pytest.importorskip("matplotlib")
    server = start_fake(gap=0.002, info={"num_devices": 2})
    files = {f"--{name}": tmp_path / name for name in ("json", "csv-points", "plot")}
    files["--plot"] = tmp_path / "plot.png"
    words = [str(word) for pair in files.items() for word in pair]
    done = bench(server.url, "--sweep-concurrency", "1,4", *words)
    assert done.returncode == 0, done.stderr
    body = json.loads(files["--json"].read_text())
    assert (body["swept"], [point["max_concurrency"] for point in body["points"]]) == ("max_concurrency", [1, 4])
    points = list(csv.DictReader(files["--csv-points"].open()))
    assert [float(p["output_throughput"]) for p in points] == [p["output_throughput"] for p in body["points"]]
    assert files["--plot"].read_bytes().startswith(b"\x89PNG")
    assert "at once" in done.stdout
    prompts = [tuple(body["prompt"]) for body in server.script.bodies[1:]]
    assert len(set(prompts)) == 16, "no point may find the one before in the prefix cache"


def test_a_server_that_takes_no_token_ids_gets_text(start_fake):
    refuse = lambda body: (400, "expected a string") if isinstance(body["prompt"], list) else None  # noqa: E731
    server = start_fake(refuse=refuse, root="demo")
    done = bench(server.url, "--json", "-", common=("--num-prompts", "2", "--random-output-len", "3"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 2
    assert [type(body["prompt"]) for body in server.script.bodies] == [list, str, str, str]


def test_where_nothing_was_answered_nothing_is_drawn_and_the_exit_status_says_so(start_fake, tmp_path):
    pytest.importorskip("matplotlib")
    answers = itertools.chain([None], itertools.repeat(BROKE))  # the test request is answered
    server = start_fake(refuse=lambda body: next(answers))
    done = bench(server.url, "--plot", str(tmp_path / "picture.png"), "--devices", "1")
    assert done.returncode == 1, done.stderr
    assert "no request was answered" in done.stderr
    assert not (tmp_path / "picture.png").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--request-rate", "0"), "--request-rate is 0.0, expected a number above 0"),
        (("--goodput", "itl:3"), "--goodput has 'itl:3'"),
        (
            ("--num-prompts", "10000001"),
            "--num-prompts is 10000001, expected an integer of at least 1 and of at most 10,000,000",
        ),
        (("--temperature", "inf"), "--temperature is inf, expected a number of at least 0 and of at most 10,000,000"),
        (("stray",), "found 'stray', which belongs to no option"),
        (("--sweep-concurrency", "1,x"), "--sweep-concurrency is '1,x', expected positive integers"),
        (("--sweep-concurrency", ""), "--sweep-concurrency is '', expected positive integers"),
        (("--sweep-rate", "1", "--sweep-concurrency", "1"), "sweep one of them"),
        (("--endpoint", "embed"), "--endpoint is 'embed', expected one of completions, chat"),
        (("--dataset-name", "trace", "--dataset-path", __file__, "--request-rate", "1"), "--trace-speed"),
        (("--plot", "x.gif"), ".png, .svg or .pdf"),
        (("--json", "no-such-folder/x.json"), "--json is 'no-such-folder/x.json', where no file can be written"),
        (("--csv-points", "/"), "--csv-points is '/', where no file can be written"),
        (("--extra-body", "[1]"), "expected a JSON object"),
        (("--extra-body", '{"top_p": NaN}'), "--extra-body is not JSON: it has no NaN"),
        ((), "no server at http://127.0.0.1:9"),
    ],
)
def test_a_user_s_mistake_is_one_line(options, message):
    done = bench("http://127.0.0.1:9", *options)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: ")
    assert message in done.stderr


def test_a_refused_test_request_says_what_the_server_said(start_fake):
    done = bench(start_fake(refuse=lambda body: (404, "no such model")).url)
    assert (done.returncode, done.stdout) == (2, "")
    assert "the server refuses a test request: HTTP 404: no such model" in done.stderr


@pytest.mark.slow
def test_ctrl_c_prints_what_is_done(start_fake, tmp_path):
    server = start_fake(first=0.05)
    out = tmp_path / "out.json"
    options = ("--num-prompts", "10000", "--max-concurrency", "1", "--json", str(out))
    command = [sys.executable, "-m", "dsjax", "bench", "serve", "--base-url", server.url, *COMMON, *options]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: len(server.script.bodies) >= 5)
    running.send_signal(signal.SIGINT)
    stdout, stderr = running.communicate(timeout=240)
    assert (running.returncode, "interrupted" in stderr) == (130, True), stderr
    body = json.loads(out.read_text())
    assert body["interrupted"]
    assert 3 <= body["completed"] < 10000
    assert f"Successful requests:                     {body['completed']}" in stdout


@pytest.mark.parametrize(
    ("objectives", "options", "status", "verdict"),
    [
        (("ttft:60000", "tpot:60000"), (), 0, "met"),
        (("ttft:60000", "tpot:0.001"), (), 3, "missed"),
        (("ttft:0.001",), ("--goodput-share", "1e-9"), 3, "missed"),
        (("ttft:60000",), ("--sweep-concurrency", "1,2"), 0, "met"),
        (("ttft:0.001",), ("--sweep-concurrency", "1,2"), 3, "missed"),
    ],
)
def test_the_exit_status_says_whether_the_objectives_were_met(start_fake, objectives, options, status, verdict):
    done = bench(start_fake(gap=0.005).url, *options, "--json", "-", "--goodput", *objectives)
    assert done.returncode == status, done.stderr
    found = json.loads(done.stdout)
    for point in found.get("points", [found]):
        assert point["goodput_verdict"] == verdict
        assert point["good_share"] == min(point["objective_shares"].values())


def test_a_share_of_failed_requests_misses_the_objectives_unless_that_much_is_allowed(start_fake):
    def half_fail():
        answers = itertools.chain([None], itertools.cycle([None, BROKE]))
        return start_fake(refuse=lambda body: next(answers)).url

    done = bench(half_fail(), "--max-concurrency", "1", "--goodput", "e2el:60000")
    assert done.returncode == 3
    assert re.search(r"Failed requests: +4\n", done.stdout)
    assert done.stdout.count("it broke") == done.stdout.count("4 × HTTP 500: it broke") == 1
    assert re.search(r"e2el ≤ 60000 ms \(% of requests\): +50.00\n", done.stdout)
    assert re.search(r"All of them \(% of requests\): +50.00\n", done.stdout)
    assert re.search(r"Wanted: 0.95 of the requests +missed\n", done.stdout)
    done = bench(half_fail(), "--max-concurrency", "1", "--goodput-share", "0.5", "--goodput", "e2el:60000")
    assert done.returncode == 0, "the option's other name"
    assert bench(start_fake().url, "--goodput-share", "1.5").stderr.startswith("error: --goodput-share is 1.5")


def test_a_search_says_the_largest_load_that_meets_the_objectives(start_fake):
    done = bench(start_fake().url, "--search", "concurrency", "--goodput", "ttft:0.001", "tps:1", "--json", "-")
    assert done.returncode == 3, "no point met the objectives"
    assert "no concurrency was found at which 95% of the requests have ttft ≤ 0.001 ms tpot ≤ 1000 ms" in done.stderr
    found = json.loads(done.stdout)
    assert (found["swept"], [point["good_share"] for point in found["points"]]) == ("max_concurrency", [0.0])
    assert bench(start_fake().url, "--search", "rate").stderr.startswith("error: --search wants objectives")


@pytest.mark.parametrize(("package", "options"), [("aiohttp", []), ("matplotlib", ["--plot", "a.png"])])
def test_a_package_that_a_server_does_not_need_is_asked_for_by_its_extra(monkeypatch, package, options):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    done = CliRunner().invoke(app, ["bench", "serve", *options])
    assert f"needs {package}, which is not installed: pip install 'dsjax[bench]'" in str(done.exception)


def test_the_options_are_shown_without_the_extra():
    code = "import sys; sys.modules['aiohttp'] = sys.modules['matplotlib'] = None; from dsjax.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "bench", "serve", "--help"], capture_output=True, text=True)
    assert "--random-input-len" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("options", "was_there", "mode"),
    [(["--save-detailed"], False, 0o600), (["--save-detailed"], True, 0o600), ([], True, 0o644)],
)
def test_a_result_with_the_texts_of_answers_is_for_its_owner_alone(start_fake, tmp_path, options, was_there, mode):
    path = tmp_path / "result.json"
    if was_there:
        path.touch()
        path.chmod(0o644)
    done = bench(start_fake().url, "--json", str(path), *options)
    assert done.returncode == 0, done.stderr
    assert ("generated_texts" in json.loads(path.read_text())) == bool(options)
    assert path.stat().st_mode & 0o777 == mode
