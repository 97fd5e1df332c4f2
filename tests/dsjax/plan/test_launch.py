"""A plan in the commands of vLLM, SGLang and TensorRT-LLM: only flags that are documented, with the numbers that were priced."""

import json
import shlex
import subprocess

import pytest
from plan_words import plan

from dsjax.errors import UserError
from dsjax.hardware import load_hardware
from dsjax.plan.arguments import PlanArgs
from dsjax.plan.candidate import aggregated, with_intervals
from dsjax.plan.engine import find_engine
from dsjax.plan.launch import LAUNCHED, launch, unfit
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import named_precision
from dsjax.plan.recipe import check_recipe, launches, recipe
from dsjax.plan.search import instances, search
from dsjax.plan.workload import PlanOptions
from sharding.mesh import MeshSpec

# Mesh, redundant experts, cluster, options: whole and cut experts, copies, several hosts, drafts, FP4 with an FP8 cache.
CASES = {
    "tp=8,ep=1": (0, "h200-8", {}),
    "dp=8": (0, "h200-8", {"drafts": 2}),
    "dp=16": (32, "h100-32", {}),
    "dp=16,ep=8": (0, "h200-16", {}),
    "dp=4,tp=4": (32, "h100-32", {}),
    "tp=16,ep=1": (0, "h100-32", {}),
    "dp=4": (0, "b200-8", {"precision": named_precision("nvfp4")}),
}


@pytest.fixture
def candidate(instance):
    def make(mesh):
        redundant, cluster, others = CASES[mesh]
        made = instance(mesh, cluster, redundant, options=PlanOptions(engine=find_engine("published"), **others))
        return aggregated(made, 1, 32, 4096)

    return make


def words_of(line):
    """Flags of a command, with their values; `""` without one."""
    words, found = shlex.split(line), {}
    for word, after in zip(words, [*words[1:], "--end"], strict=True):
        if word.startswith("--"):
            found[word] = "" if after.startswith("--") else after
    return found


@pytest.mark.parametrize("mesh", CASES)
def test_a_command_starts_the_layout_and_the_batch_that_were_priced(candidate, mesh):
    made = candidate(mesh)
    unit = made.decode.layout.unit.mesh
    theirs = [launches(engine, "deepseek-v3", made)[0] for engine in LAUNCHED]
    assert {one.instances for one in theirs} == {MeshSpec.parse(mesh).expert_copies}
    vllm, sglang, tensorrt = (words_of(one.commands()[0]) for one in theirs)
    assert int(vllm["--tensor-parallel-size"]) * int(vllm.get("--data-parallel-size", 1)) == unit.num_devices
    assert ("--enable-expert-parallel" in vllm) == (unit.ep_size > 1)
    assert int(sglang["--tp-size"]) == int(tensorrt["--tp_size"]) == unit.num_devices
    assert int(sglang.get("--ep-size", 1)) == int(tensorrt["--ep_size"]) == unit.ep_size
    assert int(vllm["--max-num-seqs"]) == int(tensorrt["--max_batch_size"]) == 32
    assert int(sglang["--max-running-requests"]) == 32 * unit.dp_size
    assert int(sglang["--chunked-prefill-size"]) == 4096 * unit.dp_size
    assert int(vllm["--max-num-batched-tokens"]) >= 4096 + 32
    hosts = -(-unit.num_devices // made.decode.cluster.devices_per_host)
    assert [len(one.commands()) for one in theirs[:2]] == [hosts, hosts]


def test_hosts_of_an_instance_share_out_its_replicas(candidate):
    first, second = launches("vllm", "deepseek-v3", candidate("dp=16"))[0].commands()
    assert words_of(first)["--data-parallel-size-local"] == words_of(second)["--data-parallel-start-rank"] == "8"
    assert ("--headless" in first, "--headless" in second) == (False, True)
    slurm = launches("tensorrt-llm", "deepseek-v3", candidate("tp=16,ep=1"))[0].commands()
    assert [line.split(" trtllm")[0] for line in slurm] == ["srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --mpi=pmix"]


def test_what_an_engine_cannot_say_stands_in_the_recipe(ask, candidate, v3):
    made = with_intervals(candidate("dp=4,tp=4"))
    every = recipe("deepseek-v3", ask("h100-32"), made)["services"][0]["launches"]
    assert set(every) == set(LAUNCHED)
    assert "attention is data parallel over all devices" in every["tensorrt-llm"]["not_expressed"][0]
    hybrid = parse_layout("dp=6,tp=4,ep=3", 2, v3)
    assert "not both" in unfit("vllm", hybrid, 8, load_hardware("h100"), named_precision("fp8"))
    assert unfit("sglang", hybrid, 8, load_hardware("h100"), named_precision("fp8")) is None


def test_sglang_is_told_the_kernel_of_its_fp8_products_that_was_priced():
    asked = {"cluster": "b200-8", "engine": "sglang", "mode": "aggregated", "mesh": "dp=8", "max_concurrency": 64}
    backends = ({}, {"fp8_gemm_backend": "flashinfer_trtllm"})
    usual, slower = (search(PlanArgs(**asked, **backend).question()).winner for backend in backends)
    command = words_of(launches("sglang", "deepseek-v3", slower)[0].commands()[0])
    assert command["--fp8-gemm-backend"] == "flashinfer_trtllm"
    assert slower.ttft > usual.ttft


def test_a_plan_for_an_engine_has_only_layouts_that_it_can_run(ask):
    engine = find_engine("tensorrt-llm")
    question = ask("h200-16", options=PlanOptions(engine=engine))
    found, _, _ = instances(question)
    assert found
    assert all(min(one.unit.mesh.dp_size, one.unit.mesh.tp_size) == 1 and not one.redundant for one in found)
    with pytest.raises(UserError, match=r"cannot run dp=2,tp=8: attention is data parallel over all devices"):
        instances(ask("h200-16", options=PlanOptions(engine=engine, mesh=MeshSpec.parse("dp=2,tp=8"))))
    with pytest.raises(UserError, match="tensorrt-llm does not overlap two half batches"):
        PlanOptions(engine=engine, overlap="on").check(question.config, question.workload)


@pytest.mark.parametrize("engine", LAUNCHED)
def test_the_script_of_a_recipe_is_one_that_a_shell_reads(engine, tmp_path):
    script, body = tmp_path / "run.sh", tmp_path / "run.json"
    base = ["--cluster", "h200-16", "--mode", "separated", "--prefill-mesh", "dp=8", "--decode-mesh", "dp=8"]
    for path in (script, body):
        plan("recipe", path, *base, "--engine", engine, "--redundant-experts", "0")
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    usage = subprocess.run(["sh", script], check=False, capture_output=True, text=True)
    assert (usage.returncode, "prefill [HOST] | decode [HOST]" in usage.stderr) == (2, True)
    for service in json.loads(body.read_text())["services"]:
        assert service["command"] in script.read_text()


def test_a_recipe_of_the_wrong_kind_is_refused(tmp_path):
    with pytest.raises(UserError, match="would hold the commands of one engine, and --engine is dsjax"):
        check_recipe(tmp_path / "run.sh", "dsjax")
    with pytest.raises(UserError, match="would be a deployment of dsjax, and --engine is vllm"):
        check_recipe(tmp_path / "graph.yaml", "vllm")


def test_sglang_is_not_told_what_the_checkpoint_says_nor_what_it_would_switch_off(instance):
    def launched(drafts):
        options = PlanOptions(engine=find_engine("sglang"), precision=named_precision("int8"), drafts=drafts)
        return launch("sglang", "x", instance("dp=8", options=options), 32, 4096, "prefill and decode", 1)

    made = launched(1)
    # meituan/DeepSeek-R1-Block-INT8 is blockwise_int8 by its own config.json; w8a8_int8 is the format of weights scaled by channel.
    assert "--quantization" not in made.flags[0]
    assert "--enable-mixed-chunk" not in made.flags[0]
    assert any("switches --enable-mixed-chunk off" in text for text in made.lacks)
    assert "--enable-mixed-chunk" in launched(0).flags[0]
