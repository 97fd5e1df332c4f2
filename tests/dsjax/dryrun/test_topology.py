"""Descriptions of machines that are not there: their shape, and with the compiler installed a program for them."""

import dataclasses
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from dsjax.dryrun.compilation import CompiledProgram, _compile_for_accelerator
from dsjax.dryrun.known_orders import KNOWN_ORDERS
from dsjax.dryrun.topology import cuda_shape, cuda_target, target_devices, torus
from dsjax.errors import UserError
from dsjax.hardware import load_hardware

HAS_TPU_COMPILER = importlib.util.find_spec("libtpu") is not None
HAS_CUDA_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None


def needs(has_compiler: bool, extra: str) -> Callable[[Callable], Callable]:
    """Mark a slow test that needs a compiler for accelerators, and no accelerator."""
    skip = pytest.mark.skipif(not has_compiler, reason=f"needs the extra [{extra}]")
    return lambda test: pytest.mark.slow(skip(test))


for_gpus, for_tpus = needs(HAS_CUDA_COMPILER, "cuda"), needs(HAS_TPU_COMPILER, "tpu")


# Tests that share what is compiled stay in one process (`pytest --dist loadgroup`).
TIMELINES, SUMS = (pytest.mark.xdist_group(name) for name in ("timelines", "sums"))


@pytest.mark.parametrize(
    ("name", "devices", "shape"),
    [("h200", 32, (4, 1, 8)), ("h200", 2, (1, 1, 2)), ("h200", 12, (2, 1, 8)), ("gb200", 36, (1, 9, 4)), ("gb200", 144, (2, 18, 4)),
     ("gb200", 3, (1, 1, 3))],
)  # fmt: skip
def test_domains_hosts_and_devices_hold_the_mesh(name, devices, shape):
    assert cuda_shape(load_hardware(name), devices) == shape


def test_a_torus_is_nearly_square_and_the_compiler_is_told_the_files_figures():
    assert [torus(count) for count in (1, 4, 8, 32, 72)] == [(1, 1), (2, 2), (2, 4), (4, 8), (8, 16)]
    text = cuda_target(load_hardware("b200"))
    for part in ("core_count: 148", "major: 10", "device_memory_size: 180000000000", "memory_bandwidth: 7672000000000"):
        assert part in text


@pytest.mark.parametrize(
    ("name", "xla", "reason"),
    [
        ("h200", {}, "has no [xla] section, which"),
        ("h200", {"device_name": "mine", "core_count": 1}, "has no clock_rate_ghz, l2_cache_bytes, compute_capability in its [xla]"),
        ("h200", {"compute_capability": 9}, "compute_capability in [xla] is '9', expected text such as"),
        ("tpu-v6e", {}, "has no [xla] section, which a dry run compiles by; see configs/hardware/tpu-v6e.toml"),
        ("tpu-v6e", {"chips": 1}, "has no generation in its [xla] section"),
    ],
)  # fmt: skip
def test_a_file_that_tells_the_compiler_too_little_is_named_with_what_it_lacks(name, xla, reason):
    whole = load_hardware(name)
    section = dict(whole.xla) | xla if "compute_capability" in xla else xla
    with pytest.raises(UserError, match=re.escape(f"hardware {name!r}") + ".*" + re.escape(reason)):
        target_devices(dataclasses.replace(whole, xla=section), 8)


def dry_run(command: str) -> dict:
    """The JSON of a dry run in a process of its own, whose devices nobody has chosen yet."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, "-m", "dsjax", "dryrun", *command.split(), "--json", "-"],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3], timeout=900, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.skipif(HAS_CUDA_COMPILER, reason="the CUDA compiler is installed")
def test_without_the_compiler_the_message_says_what_to_install():
    with pytest.raises(UserError, match=r"--target h200.*pip install 'dsjax\[cuda\]'.*--target cpu"):
        target_devices(load_hardware("h200"), 8)


@pytest.fixture(scope="module")
def for_32_gpus(tmp_path_factory) -> Callable[..., tuple[dict, Path]]:
    """Dry runs of DeepSeek-V3 on 32 H200s, by their options: the report, and the folder of the timeline. Each is compiled once."""

    @functools.cache
    def run(options: str) -> tuple[dict, Path]:
        folder = tmp_path_factory.mktemp("timeline")
        command = f"--model deepseek-v3 --mesh dp=32 --target h200 {options} --timeline {folder}/t.json.gz"
        return dry_run(command), folder

    return run


WHOLE_DECODE = "--weights auto --step decode --dispatch padded"


@for_gpus
@TIMELINES
@pytest.mark.parametrize(
    ("step", "options"), [("decode", WHOLE_DECODE), ("prefill", "--weights fp8 --step prefill --dispatch ragged")]
)
def test_a_step_for_32_gpus_has_asynchronous_dispatch_and_fits(step, options, for_32_gpus):
    report, folder = for_32_gpus(options)
    memory = report["device_bytes"]
    assert report["platform"] == "gpu"
    assert memory["arguments"] == memory["weights_total"] + memory["cache"] + memory["state"] + memory["inputs"]
    assert memory["total"] < memory["memory"]
    layers = [c for c in report["collectives"] if c["times"] > 1]
    assert all(c["asynchronous"] and c["axes"] == ["ep"] and c["times"] == 58 for c in layers)
    assert len(report["collectives"]) - len(layers) <= 1  # the step's results, gathered for every host
    assert sum(c["kind"] in ("all-to-all", "ragged-all-to-all") for c in report["collectives"]) >= 2
    assert report["seconds"]["lower"] + report["seconds"]["compile"] < 300
    timeline = report["timeline"]
    assert timeline["step"]["low"] < timeline["step_seconds"] < timeline["step"]["high"]
    # Exchanges between four hosts take milliseconds, and little can be done meanwhile.
    assert 1e-3 < timeline["exposed_network"] < timeline["network"]["network between"] < timeline["step_seconds"]
    assert timeline["compute"] + timeline["exposed_network"] == pytest.approx(timeline["step_seconds"])
    assert sum(timeline["critical_path"]["by_bound"].values()) == pytest.approx(timeline["step_seconds"])
    # A layer of 58 alike, beside three dense ones and the head.
    assert 58 * timeline["layer_seconds"] < timeline["step_seconds"] < 66 * timeline["layer_seconds"]
    # The program computes about what even routing asks of the experts: tiles that are not full at most double it.
    scopes = timeline["by_scope"].items()
    experts = sum(part["flops"] for name, part in scopes if name.startswith("experts/dispatch/experts"))
    assert report["costs"]["expert_flops"] <= experts <= 2.05 * report["costs"]["expert_flops"]
    assert report["costs"]["uncounted"] == {}  # every kernel tells its cost
    if step == "decode":
        # The shared experts run beside the way back; they are all that does not depend on an exchange.
        assert any("pallas_call" in name or "gemm" in name for name in layers[-1]["beside"])
        assert report["costs"]["bytes"] <= 1.1 * (memory["weights_total"] + memory["cache"])
    assert (folder / "t.png").is_file()


@for_gpus
@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("b200", "--model deepseek-v3 --mesh dp=32"),
        ("gb300", "--model deepseek-v3.2 --mesh dp=32 --weights nvfp4 --step prefill"),
        ("rtx-4090", "--model demo --mesh dp=2 --weights mxfp4 --context 512"),
        ("gb200", "--model demo --mesh dp=2 --weights int4-bf16 --context 512"),
    ],
)
def test_a_step_compiles_for_gpus_other_than_hopper(target, options):
    report = dry_run(f"{options} --target {target}")
    assert report["platform"] == "gpu"
    plain = {operation for operation, name in report["kernels"].items() if name != "pallas"}
    assert plain == {"router", "hyper-connections"}
    assert report["costs"]["uncounted"] == {}


@for_gpus
@pytest.mark.parametrize(("target", "method"), [("h200", "hierarchical"), ("gb200", "padded")])
def test_tokens_go_in_two_stages_unasked_between_hosts_and_straight_where_nvlink_joins_them(target, method):
    report = dry_run(f"--model demo --mesh dp=16 --target {target} --batch 96 --context 512")
    assert report["dispatch"] == method
    sent = [(one["bytes_inside"], one["bytes_between"]) for one in report["collectives"] if one["kind"] == "all-to-all"]
    assert len(sent) >= (4 if method == "hierarchical" else 2)
    for inside, between in sent:  # of two stages each is of ranks of a host, or of one rank of each
        assert not between if method == "padded" else not (inside and between)


@for_gpus
@TIMELINES
def test_in_two_halves_every_exchange_has_something_computed_beside_it(for_32_gpus):
    report, _ = for_32_gpus("--enable-dbo")
    exchanges = [one for one in report["collectives"] if one["times"] == 58]
    assert [one["kind"] for one in exchanges] == ["all-to-all"] * 8  # of two halves, there and back, in two stages each
    for one in exchanges:
        kernels = [name for name in one["beside"] if name.startswith(("pallas_call", "gemm"))]
        assert kernels, f"{one['name']} starts and ends with {one['beside']} between"
        # Beside a crossing run the routed experts' kernels, or attention's with those that stand before or behind it.
        assert len(kernels) >= 3 or not one["bytes_between"], f"{one['name']} has only {one['beside']} between"
    timeline = report["timeline"]
    hidden = {one["name"]: one["hidden"] for one in timeline["exchanges"]}
    assert min(hidden[one["name"]] for one in exchanges) > 0.95, hidden
    assert timeline["exposed_network"] < 0.05 * timeline["step_seconds"]
    # A half's rows are in flight while the other computes, so that buffers of both live at once.
    whole, _ = for_32_gpus(WHOLE_DECODE)
    assert report["device_bytes"]["temporaries"] <= 1.5 * whole["device_bytes"]["temporaries"]


@for_tpus
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_a_step_for_tpus_counts_its_layers_and_its_products(step, tmp_path):
    options = f"--target tpu-v5e --step {step} --context 512 --timeline {tmp_path}/t.json"
    report = dry_run(f"--model demo --mesh dp=2,tp=2 {options}")
    layers = {one["times"] for one in report["collectives"] if "mla_output" in one["op_name"]}
    assert sum(layers) == 5  # one dense layer and four with experts, or all in one loop
    tokens = report["tokens_per_device"] * 2
    weights = sum(report["parameters"][part] for part in ("attention", "head")) / 2
    head = report["parameters"]["head"] / 2
    rows = report["batch"] if step == "prefill" else tokens  # the head sees each row's last token
    assert report["costs"]["flops"] > 2 * (tokens * (weights - head) + rows * head)
    assert 0 < report["timeline"]["step"]["low"] < report["timeline"]["step_seconds"]


@for_gpus
def test_the_exchange_of_experts_for_32_gpus_sends_three_and_keeps_one_layers_slots():
    balanced = "--redundant-experts 32 --enable-eplb"
    report = dry_run(f"--model deepseek-v3 --mesh dp=32 --weights fp8 --target h200 {balanced}")
    found, memory = report["rebalance"], report["device_bytes"]
    assert found["expert_bytes"] == 44_050_944
    assert found["sent_bytes"] == 3 * 44_050_944 <= found["max_bytes_per_step"]
    assert memory["staging"] == found["staging_bytes"] == 9 * 44_050_944
    # The rows that are sent are gathered first; nothing else is copied, and no stack of weights is.
    assert memory["moving"] < 1.01 * found["sent_bytes"]
    for rebalance in (found["first"], found["next"]):
        assert rebalance["steps"] == round(58 * (rebalance["exchanges"] + 1))
        assert 5e-3 < rebalance["layer_seconds"]["value"] < 50e-3


DRAFTS = """--speculative-config {"method":"mtp","num_speculative_tokens":1}"""


@functools.cache
def sums_of(command: str) -> dict:
    """The sums in a step's programs; the command fails where one could depend on the layout or the batch and is not explained."""
    return dry_run(f"{command} --reductions")["reductions"]


def at(found: dict, place: str) -> list[dict]:
    return [one for one in found["sums"] if one["place"] == place]


def gpu_sums(step: str, more: str = "--devices-per-host 32", drafts: str = DRAFTS) -> dict:
    """Give the sums of a step on 32 H200s, which are one host unless something else is said, so that rows are sent straight."""
    others = f"--against batch=1 --against mesh=dp=4,tp=8 {drafts if step == 'decode' else ''}"
    return sums_of(f"--model deepseek-v3 --mesh dp=32 --target h200 --step {step} {others} {more}")


def assert_explained(found: dict) -> None:
    """Some sums could depend on the layout or the batch, each is explained, and every kernel says in which chunks it adds."""
    assert found["unexplained"] == 0 < found["could_depend"] < len(found["sums"])
    assert "unknown" not in {one["carrier"] for one in found["sums"]}


@for_gpus
@SUMS
@pytest.mark.parametrize("step", ["decode", "prefill", "mixed"])
def test_each_sum_of_a_gpus_step_has_an_order_of_its_own_or_an_explanation(step):
    found = gpu_sums(step)
    assert_explained(found)
    assert {one["program"] for one in found["sums"]} == ({"step", "drafts"} if step == "decode" else {"step"})
    # The residual's sum goes from layer to layer and is the same always.
    assert [(one["depth"], one["could_depend"]) for one in at(found, "while")] == [(3, False), (58, False)]
    # One device has all of the depth, eight have parts of it. Of a mixed step XLA makes one collective of the two groups' sums.
    collectives = (one for one in found["sums"] if (one["carrier"], one["program"]) == ("collective", "step"))
    (partials,) = (one for one in collectives if one["place"].startswith("mla_output/"))
    assert (partials["times"], partials["axes"], list(partials["otherwise"])) == (0, ["tp"], ["mesh=dp=4,tp=8"])


@for_gpus
def test_each_sum_of_rows_that_go_in_two_stages_has_an_explanation_too():
    assert_explained(gpu_sums("decode", "", drafts=""))  # other tests have drafts


V4_SUMS = "--model deepseek-v4-flash --mesh dp=8 --target h200 --weights mxfp4 --batch 32 --against batch=1"


@for_gpus
@SUMS
def test_each_sum_of_v4s_decode_step_has_an_explanation():
    assert_explained(sums_of(V4_SUMS))


@for_tpus
@SUMS
@pytest.mark.parametrize("step", ["decode", "prefill", "mixed"])
def test_each_sum_of_a_tpus_step_has_an_order_of_its_own_or_an_explanation(step, small_model):
    found = tpu_sums(step, small_model)
    assert_explained(found)
    scattered = at(found, "experts/dispatch/experts/scatter-add")
    assert {(one["carrier"], one["known"]) for one in scattered} == {("scatter", "expert-scatter")}


def tpu_sums(step: str, model: str) -> dict:
    others = f"--against batch=1 {DRAFTS if step == 'decode' else ''}"
    return sums_of(f"--model {model} --mesh dp=2,tp=2 --context 512 --target tpu-v6e --step {step} {others}")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory) -> str:
    """V3's structure in widths that the TPU's kernels take, so that its compiler needs seconds."""
    folder = tmp_path_factory.mktemp("model")
    config = json.loads((Path(__file__).parents[3] / "configs/models/deepseek-v3/config.json").read_text())
    widths = {
        "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 128, "vocab_size": 1024, "num_attention_heads": 8,
        "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 256, "n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 4,
        "topk_group": 2, "num_hidden_layers": 4, "first_k_dense_replace": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | widths))
    return str(folder)


@pytest.mark.slow
@SUMS
@pytest.mark.skipif(not (HAS_CUDA_COMPILER and HAS_TPU_COMPILER), reason="needs the extras [cuda] and [tpu]")
def test_no_entry_of_the_list_is_left_from_what_is_gone(small_model):
    steps = ("decode", "prefill", "mixed")
    runs = [gpu_sums(step) for step in steps] + [tpu_sums(step, small_model) for step in steps] + [sums_of(V4_SUMS)]
    used = {one["known"] for run in runs for one in run["sums"] if one["could_depend"]}
    assert used - {None} == {entry.name for entry in KNOWN_ORDERS}


class Refused:
    """What a compiler gives that fails when it compiles, or whose program cannot be read."""

    def compile(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile a kernel.\nits program")

    def as_text(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: 1 operands but sees 4\nmore")


def test_what_a_compiler_refuses_is_one_message_that_says_what_to_do():
    with pytest.raises(UserError, match=r"the step for tpu-v6e: INTERNAL: Mosaic failed .* a kernel\. --kernels plain"):
        _compile_for_accelerator(Refused(), "tpu-v6e")
    with pytest.raises(UserError, match=r"jaxlib .* cannot read .*but sees 4\); .*pip install -U 'dsjax\[tpu\]'"):
        CompiledProgram(Refused(), None, 0.0, 0.0).text()
