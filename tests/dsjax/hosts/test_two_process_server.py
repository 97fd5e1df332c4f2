"""A server over two processes: requests of every kind, the follower's own endpoints, and a mesh that changes under them: on purpose, and
because the follower is killed, comes back, and hangs.
"""

import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import httpx
import pytest
from listening_sockets import all_loopback, listening_addresses
from served_group import KEY, PROMPTS, SIZES, ServedGroup
from waits import until

from dsjax import LLM, SamplingParams
from dsjax.config import load_config
from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.model.parameter_table import abstract_parameters

pytestmark = pytest.mark.slow

OPTIONS = SIZES | {"link_monitor_interval": 1}
CLUSTER_KEY = "a-secret-that-nobody-may-be-shown-0123456789"


@pytest.fixture(scope="module")
def alone(worded, kernels):
    llm = LLM(str(worded), **OPTIONS)
    yield llm
    llm.shutdown()


class Served(ServedGroup):
    def __init__(self, checkpoint: Path):
        self.checkpoint = checkpoint
        with mock.patch.dict(os.environ, {"DSJAX_CLUSTER_KEY": CLUSTER_KEY}):
            # A process that hangs is waited for as long as a heartbeat's timeout.
            super().__init__({"model": checkpoint, "mesh": "dp=4"} | OPTIONS, heartbeat=20)
        self.wait_until_ready()
        self.find_follower()

    def find_follower(self) -> None:
        self.follower = re.search(r"/metrics at (http://[\d.:]+)", self.group.output[1]).group(1)

    def until_follower_is(self, status: str) -> None:
        """Wait: process 0 answers before its follower has got that far."""
        until(lambda: httpx.get(f"{self.follower}/ready").json() == {"status": status}, every=0.1, what=status)

    def until_devices_are(self, count: int) -> None:
        """Wait: on a busy machine streams may have come to their end before a process was lost."""
        until(lambda: self.metric("dsjax_generation_devices") == count, every=0.1, what=f"{count} devices")

    def read_bytes(self) -> float:
        """Bytes of weights that changed meshes have read from the checkpoint."""
        return self.metric("dsjax_generation_weight_bytes_total", 'source="read"')


@pytest.fixture(scope="module")
def served(worded, kernels):
    served = Served(worded)
    yield served
    served.group.end()


def test_a_group_on_loopback_listens_on_loopback_alone(served):
    for process in served.group.processes:
        addresses = listening_addresses(process.pid)
        # HTTP, links and gloo; process 0 has the rendezvous and JAX's coordination service too.
        assert len(addresses) >= 3
        assert all_loopback(addresses), addresses


def test_the_cluster_key_is_shown_nowhere(served):
    addresses = (served.url, served.follower)
    paths = {route for route in httpx.get(f"{addresses[0]}/openapi.json").json()["paths"] if "{" not in route}
    assert "/server_info" in paths
    for address in addresses:
        for path in {*paths, "/metrics"}:
            assert CLUSTER_KEY not in httpx.get(f"{address}{path}", headers=KEY, timeout=60).text
    for index, process in enumerate(served.group.processes):
        assert CLUSTER_KEY not in served.group.output[index]
        assert CLUSTER_KEY.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_each_process_shows_its_link_to_the_other(served):
    for address, labels in ((served.url, 'peer="1"'), (served.follower, 'process="1",peer="0"')):
        # The first look is after a second.
        until(lambda address=address: "\ndsjax_link_answer_seconds{" in httpx.get(f"{address}/metrics").text, every=0.1)
        assert served.metric("dsjax_link_answer_seconds", labels, address) > 0
        assert served.metric("dsjax_link_probes_total", labels, address) >= 1


def test_prompts_are_scored(served, alone):
    # The prompt's own tokens with their log-probabilities: another program, whose results are gathered apart.
    answer = served.complete(prompt=PROMPTS[2], max_tokens=0, echo=True, logprobs=1).json()["choices"][0]["logprobs"]
    assert answer["token_logprobs"][0] is None
    assert all(value < 0 for value in answer["token_logprobs"][1:])


def test_the_follower_says_that_it_follows(served):
    before = served.metric("dsjax_follower_commands_total", url=served.follower)
    served.complete(prompt="x")
    assert served.metric("dsjax_follower_commands_total", url=served.follower) > before
    served.until_follower_is("ready")
    assert served.metric("dsjax_follower_ready", url=served.follower) == 1
    assert httpx.get(f"{served.follower}/health").status_code == 200
    assert httpx.get(f"{served.follower}/v1/models").status_code == 404


def test_nothing_is_compiled_while_serving_and_pages_come_back(served):
    assert served.post("/flush_cache").status_code == 200
    assert served.metric("dsjax_compilations_after_warm_up_total") == 0


def test_experts_are_counted_over_all_processes(served):
    served.check_experts_are_counted()


# From here on the mesh changes: the order of these tests is theirs.

MIXED = [
    {"prompt": PROMPTS[0]},
    {"prompt": PROMPTS[1], "temperature": 1, "seed": 5},
    {"prompt": PROMPTS[2], "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"prompt": PROMPTS[3], "structured_outputs": {"regex": "[a-z ]{40,48}"}, "temperature": 0.7, "seed": 9},
]


COMMON = {"max_tokens": 48, "temperature": 0, "ignore_eos": True, "logprobs": 0}


class Streams:
    """Requests of several kinds, each streamed to its end by a thread."""

    def __init__(self, served: Served, requests: list[dict]):
        self._url, self.first = served.url, threading.Event()
        self._answers = [ThreadPoolExecutor().submit(self._read, request) for request in requests]

    def _read(self, request: dict) -> tuple[str, list[float]]:
        text, logprobs = "", []
        body = {"model": "tiny", "stream": True, **COMMON, **request}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                if line and line != "data: [DONE]":
                    event = json.loads(line.removeprefix("data: "))
                    assert "error" not in event, event
                    (choice,) = event["choices"]
                    text += choice["text"]
                    logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
                    self.first.set()
        return text, logprobs

    def join(self) -> list[tuple[str, list[float]]]:
        """What each said, to its end, and the log-probability of each token."""
        return [answer.result(300) for answer in self._answers]


@pytest.fixture(scope="module")
def undisturbed(alone):
    """What one device alone gives for each of ``MIXED``."""

    def made(request):
        request = COMMON | request
        prompt, structured = request.pop("prompt"), request.pop("structured_outputs", None)
        params = SamplingParams(**request, structured_outputs=structured and StructuredOutputs(**structured))
        (output,) = alone.generate(prompt, params)[0].outputs
        chosen = zip(output.token_ids, output.logprobs, strict=True)
        return output.text, [found[token].logprob for token, found in chosen]

    return [made(request) for request in MIXED]


def all_bytes(served, of: str = "") -> int:
    """Bytes of the parameters whose path contains `of`. On the mesh of both, each process has all but half of the experts."""
    infos = abstract_parameters(load_config(served.checkpoint), weights="f32", mtp=False)
    return sum(info.nbytes for path, info in infos.items() if of in path)


def test_a_mesh_that_cannot_be_is_refused_and_changes_nothing(served):
    answer = served.post("/scale", mesh="dp=5")
    assert answer.status_code == 400, answer.text
    assert "mesh dp=5 wants 5 devices, and this server has 4" in answer.json()["error"]["message"]
    assert served.metric("dsjax_generation") == 0


def test_streams_stay_open_and_are_those_of_one_device_to_the_bit_while_the_mesh_shrinks_and_grows(served, undisturbed):
    streams = Streams(served, MIXED)
    streams.first.wait(240)
    asking = ThreadPoolExecutor().submit(served.post, "/scale", mesh="dp=2")
    while (ready := httpx.get(f"{served.url}/ready")).status_code != 503:
        assert not asking.done()
    assert served.post("/scale", mesh="dp=4").status_code == 409
    assert "not ready: " in ready.text
    late = Streams(served, MIXED[:1])  # comes while nothing computes
    answer = asking.result(300)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [found[name] for name in ("mesh", "devices", "processes", "generation")] == ["dp=2", 2, 1, 1]
    served.until_follower_is("standing by")
    answer = served.post("/scale", mesh="dp=4")
    assert answer.status_code == 200, answer.text
    assert streams.join() == undisturbed
    assert late.join() == undisturbed[:1]
    info = httpx.get(f"{served.url}/server_info").json()
    assert [info["mesh"], info["num_processes"], len(info["ranks"])] == ["dp=4", 2, 4]
    assert served.metric("dsjax_generation") == 2
    # Process 0 has read the other half of the experts, and process 1 has read all that it has.
    assert served.read_bytes() == all_bytes(served)


def test_a_follower_killed_in_a_step_costs_nobody_a_token_and_joins_again_under_its_id(served, undisturbed):
    before = served.read_bytes()
    streams = Streams(served, MIXED)
    streams.first.wait(240)
    served.group.processes[1].send_signal(signal.SIGKILL)
    assert streams.join() == undisturbed
    served.until_devices_are(2)
    assert served.metric("dsjax_generation_devices_wanted") == 4
    read = served.read_bytes()
    half = all_bytes(served, ".experts.") // 2
    assert read == before + half  # those of its devices
    served.group.wait_for(0, "has gone away")
    assert re.search(r"process 1 \(.*, pid \d+\) has gone away", served.group.output[0])
    assert "Traceback" not in served.group.output[0]
    served.group.start_again(1)

    def is_whole():
        assert Streams(served, MIXED[:1]).join() == undisturbed[:1]
        return served.metric("dsjax_generation_devices") == 4

    until(is_whole, 300, every=1, what="the mesh has both processes again")
    assert Streams(served, MIXED).join() == undisturbed
    assert served.read_bytes() == read + all_bytes(served) - half  # what it has
    served.group.wait_for(1, "/metrics at ")
    served.find_follower()
    served.until_follower_is("ready")


def test_a_follower_that_hangs_is_given_up_and_ends_when_it_goes_on(served, undisturbed):
    streams = Streams(served, MIXED)
    streams.first.wait(240)
    served.group.processes[1].send_signal(signal.SIGSTOP)
    assert streams.join() == undisturbed
    served.until_devices_are(2)
    served.group.processes[1].send_signal(signal.SIGCONT)
    assert served.group.processes[1].wait(240) == 1
    served.group.wait_for(1, "goes on without this process")


def test_the_group_ends_as_it_should_though_a_member_is_missing(served):
    pages = {load["used_pages"] for load in httpx.get(f"{served.url}/get_load").json()["ranks"]}
    assert pages == {0}
    served.group.processes[0].send_signal(signal.SIGTERM)
    assert served.group.codes(240) == [0, 1], served.group.last_words()
