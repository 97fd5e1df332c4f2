"""A server whose attention side is two processes: its mesh changes, by request and by loss, and its experts stay where they are."""

import json
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from processes import Group, free_port
from worded_checkpoint import write_worded_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.engine.expert_process import load_experts
from dsjax.engine.setup.args import EngineArgs

pytestmark = pytest.mark.slow

SIZES = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "prefill_chunk": 8,
    "page_size": 4,
    "max_model_len": 64,
    "batch_invariant": True,
}
PROMPTS = ["the queue", "def main(", "a b c d e f", "x"]
KEY = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_worded_checkpoint(tmp_path_factory.mktemp("worded"))


@pytest.fixture(scope="module")
def alone(checkpoint, kernels):
    llm = LLM(str(checkpoint), **SIZES)
    try:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        return [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    finally:
        llm.shutdown()


class Served:
    """The two processes of the attention side, and one with experts in this process."""

    def __init__(self, checkpoint):
        sides = {"attention_mesh": "dp=4", "expert_mesh": "ep=4", "afd_address": f"127.0.0.1:{free_port()}"}
        self.checkpoint, self.sides = checkpoint, sides
        self.experts = self.start_experts()
        options = (
            {"model": checkpoint, "served_model_name": "tiny", "port": 0, "admin_api_key": "admin"} | sides | SIZES
        )
        del options["batch_invariant"]
        flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
        command = ["-m", "dsjax.serve", "--batch-invariant", "--afd-role", "attention", *flags]
        self.group = Group(command, 2, timeout=300, stuck=240)

    def start_experts(self, **other):
        """Start a process with experts; other: than those of now."""
        return load_experts(EngineArgs(model=str(self.checkpoint), afd_role="expert", **self.sides | other, **SIZES))

    def ready(self):
        self.group.wait_for(0, "serving tiny at", 300)
        self.url = re.search(r"serving tiny at (http://[\d.:]+)", self.group.output[0]).group(1)

    def complete(self) -> list[str]:
        body = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    def scale(self, **body) -> httpx.Response:
        return httpx.post(f"{self.url}/scale", json=body, headers=KEY, timeout=300)

    @property
    def mesh(self) -> str:
        return httpx.get(f"{self.url}/server_info", headers=KEY, timeout=60).json()["mesh"]

    def until(self, mesh: str, alone: list[str]) -> None:
        """Ask until the mesh is that one."""
        deadline = time.monotonic() + 180
        while self.mesh != mesh:
            assert self.complete() == alone
            assert time.monotonic() < deadline, self.group.last_words()


@pytest.fixture(scope="module")
def served(checkpoint, kernels):
    served = Served(checkpoint)
    try:
        served.ready()
        yield served
    finally:
        served.group.end()
        served.experts.close()


# The order of these tests is theirs.


def test_answers_are_those_of_one_device_and_nothing_is_compiled_while_serving(served, alone):
    assert served.complete() == alone
    text = httpx.get(f"{served.url}/metrics").text
    assert re.search(r"^dsjax_compilations_after_warm_up_total{.*} 0$", text, re.MULTILINE)
    assert re.search(r"^dsjax_expert_process_connected{.*} 1(\.0)?$", text, re.MULTILINE)


def test_experts_are_counted_over_all_attention_processes(served):
    assert httpx.post(f"{served.url}/start_expert_distribution_record", headers=KEY).status_code == 200
    served.complete()
    found = httpx.post(f"{served.url}/dump_expert_distribution_record", headers=KEY, timeout=60).json()
    httpx.post(f"{served.url}/stop_expert_distribution_record", headers=KEY)
    sums = [sum(layer) for layer in found["tokens_per_expert"]]
    assert sums[0] == sums[1] > 0
    assert len(found["rows_sent"]) == 4, json.dumps(found)[:300]


def test_another_side_of_experts_takes_over_on_all_attention_processes_while_answers_go_on(served, alone):
    """No generation is made, so that requests and caches stay; the old side can end. One that does not fit leaves all where they are."""
    other = {"expert_mesh": "ep=2", "afd_address": f"127.0.0.1:{free_port()}"}
    experts, over = served.start_experts(**other), threading.Event()

    def keep_asking():
        answers = [served.complete()]
        while not over.is_set():
            answers.append(served.complete())
        return answers

    try:
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(keep_asking)
            refused = served.scale(afd_address=other["afd_address"])
            assert refused.status_code == 400
            assert "differ in expert_mesh 'ep=2' here and 'ep=4' there" in refused.json()["error"]["message"]
            asked = served.experts.num_calls
            taken = served.scale(**other)
            over.set()
            assert all(answer == alone for answer in answers.result(240))
        assert taken.status_code == 200, taken.text
        assert (taken.json()["mesh"], taken.json()["expert_mesh"]) == ("dp=4", "ep=2")
        assert served.experts.num_calls > asked, "the old side was asked until the new one took over"
        served.experts.close()
        assert served.complete() == alone
        assert 0 < experts.num_products < experts.num_calls, "both attention processes call, and are computed together"
        text = httpx.get(f"{served.url}/metrics").text
        assert re.search(r"^dsjax_generation{.*} 0(\.0)?$", text, re.MULTILINE)
        assert re.search(r"^dsjax_compilations_after_warm_up_total{.*} 0$", text, re.MULTILINE)
    finally:
        served.experts.close()
        served.experts, served.sides = experts, served.sides | other


def test_attention_goes_to_another_mesh_and_back_where_its_experts_are_now(served, alone):
    for mesh in ("dp=2", "tp=4", "dp=4"):
        answer = served.scale(mesh=mesh)
        assert answer.status_code == 200, answer.text
        assert (served.mesh, served.complete()) == (mesh, alone)


def test_an_attention_process_that_is_killed_comes_back(served, alone):
    served.group.processes[1].send_signal(signal.SIGKILL)
    served.until("dp=2", alone)
    assert served.complete() == alone
    served.group.start_again(1)
    served.until("dp=4", alone)
    assert served.complete() == alone
    assert "Traceback" not in "".join(served.group.output)


def test_one_that_is_told_to_end_leaves_and_the_group_ends(served, alone):
    served.group.processes[1].send_signal(signal.SIGTERM)
    served.until("dp=2", alone)
    served.group.processes[0].send_signal(signal.SIGTERM)
    assert served.group.codes(120) == [0, 0], served.group.last_words()
