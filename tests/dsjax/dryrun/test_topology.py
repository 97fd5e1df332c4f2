"""Descriptions of machines that are not there: their shape, and with the compiler installed a program for them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from dsjax.dryrun.compilation import CompiledProgram, _compile_for_accelerator
from dsjax.dryrun.topology import cuda_shape, cuda_target, target_devices, torus
from dsjax.errors import UserError
from dsjax.hardware import load_hardware

HAS_TPU_COMPILER = importlib.util.find_spec("libtpu") is not None
HAS_CUDA_COMPILER = importlib.util.find_spec("jax_cuda13_plugin") is not None


@pytest.mark.parametrize(
    ("name", "devices", "shape"),
    [
        ("h200", 32, (4, 1, 8)),
        ("h200", 2, (1, 1, 2)),
        ("h200", 12, (2, 1, 8)),
        ("gb200", 36, (1, 9, 4)),
        ("gb200", 144, (2, 18, 4)),
        ("gb200", 3, (1, 1, 3)),
    ],
)
def test_domains_hosts_and_devices_hold_the_mesh(name, devices, shape):
    assert cuda_shape(load_hardware(name), devices) == shape


def test_a_torus_is_as_square_as_powers_of_two_allow():
    assert [torus(count) for count in (1, 4, 8, 32, 72)] == [(1, 1), (2, 2), (2, 4), (4, 8), (8, 16)]


def test_the_compiler_is_told_the_files_figures():
    text = cuda_target(load_hardware("b200"))
    for part in ("core_count: 148", "major: 10", "device_memory_size: 180000000000", "memory_bandwidth: 8000000000000"):
        assert part in text


def dry_run(command: str) -> dict:
    """The JSON of a dry run in a process of its own, whose devices nobody has chosen yet."""
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC")}
    done = subprocess.run(
        [sys.executable, "-m", "dsjax", *command.split()],
        capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[3], timeout=600, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.skipif(HAS_CUDA_COMPILER, reason="the CUDA compiler is installed")
def test_without_the_compiler_the_message_says_what_to_install():
    with pytest.raises(UserError, match=r"--target h200.*pip install 'dsjax\[cuda\]'.*--target cpu"):
        target_devices(load_hardware("h200"), 8)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_CUDA_COMPILER, reason="needs the extra [cuda], without a GPU")
@pytest.mark.parametrize(("step", "weights"), [("decode", "auto"), ("prefill", "fp8")])
def test_a_step_for_32_gpus_has_asynchronous_dispatch_and_fits(step, weights, tmp_path):
    command = (
        f"dryrun --model deepseek-v3 --mesh dp=32 --weights {weights} --target h200 --step {step} --json - "
        f"--timeline {tmp_path}/t.json.gz"
    )
    report = dry_run(command)
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
        assert report["costs"]["bytes"] <= 1.1 * (memory["weights_total"] + memory["cache"])
    assert (tmp_path / "t.png").is_file()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TPU_COMPILER, reason="needs the extra [tpu], without a TPU")
@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_a_step_for_tpus_counts_its_layers_and_its_products(step, tmp_path):
    command = (
        f"dryrun --model demo --mesh dp=2,tp=2 --target tpu-v5e --step {step} --context 512 --json - "
        f"--timeline {tmp_path}/t.json"
    )
    report = dry_run(command)
    layers = {one["times"] for one in report["collectives"] if "mla_output" in one["op_name"]}
    assert sum(layers) == 5  # one dense layer and four with experts, or all in one loop
    tokens = report["tokens_per_device"] * 2
    weights = sum(report["parameters"][part] for part in ("attention", "head")) / 2
    head = report["parameters"]["head"] / 2
    rows = report["batch"] if step == "prefill" else tokens  # the head sees each row's last token
    assert report["costs"]["flops"] > 2 * (tokens * (weights - head) + rows * head)
    assert 0 < report["timeline"]["step"]["low"] < report["timeline"]["step_seconds"]


@pytest.mark.skipif(not HAS_CUDA_COMPILER, reason="needs the extra [cuda], without a GPU")
def test_the_exchange_of_experts_for_32_gpus_sends_three_and_keeps_one_layers_slots():
    report = dry_run(
        "dryrun --model deepseek-v3 --mesh dp=32 --weights fp8 --target h200 --redundant-experts 32 --enable-eplb --json -"
    )
    found, memory = report["rebalance"], report["device_bytes"]
    assert found["expert_bytes"] == 44_050_944
    assert found["sent_bytes"] == 3 * 44_050_944 <= found["max_bytes_per_step"]
    assert memory["staging"] == found["staging_bytes"] == 9 * 44_050_944
    # The rows that are sent are gathered first; nothing else is copied, and no stack of weights is.
    assert memory["moving"] < 1.01 * found["sent_bytes"]
    for rebalance in (found["first"], found["next"]):
        assert rebalance["steps"] == round(58 * (rebalance["exchanges"] + 1))
        assert 5e-3 < rebalance["layer_seconds"]["value"] < 50e-3


class Refused:
    """What a compiler gives that fails when it compiles, or whose program cannot be read."""

    def compile(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile a kernel.\nits program")

    def as_text(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: 1 operands but sees 4\nmore")


def test_what_a_compiler_refuses_is_one_message_that_says_what_to_do():
    with pytest.raises(
        UserError,
        match=r"compile the step for tpu-v6e: INTERNAL: Mosaic failed .* a kernel\. --kernels plain",
    ):
        _compile_for_accelerator(Refused(), "tpu-v6e")
    with pytest.raises(UserError, match=r"jaxlib .* cannot read .*but sees 4\); .*pip install -U 'dsjax\[tpu\]'"):
        CompiledProgram(Refused(), None, 0.0, 0.0).text()
