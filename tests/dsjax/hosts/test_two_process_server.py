"""A server over two processes: requests of every kind, the follower's own endpoints, and a mesh that changes under them: on purpose, and
because the follower is killed, comes back, and hangs.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from listening_sockets import all_loopback, listening_addresses
from processes import Group
from worded_checkpoint import write_worded_checkpoint

from dsjax import LLM, SamplingParams
from dsjax.config import load_config
from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.model.transformer import abstract_parameters

pytestmark = pytest.mark.slow

OPTIONS = {
    "max_num_seqs": 1,  # few shapes to compile
    "max_num_batched_tokens": 8,
    "prefill_chunk": 8,
    "page_size": 4,
    "max_model_len": 96,
    "link_monitor_interval": 1,
}
PROMPTS = ["the queue", "def main(", "a b c d e f", "x"]
CLUSTER_KEY = "a-secret-that-nobody-may-be-shown-0123456789"
KEY = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_worded_checkpoint(tmp_path_factory.mktemp("worded"))


@pytest.fixture(scope="module")
def alone(checkpoint, kernels):
    llm = LLM(str(checkpoint), batch_invariant=True, **OPTIONS)
    yield llm
    llm.shutdown()


class Served:
    """The group, and the addresses of both processes."""

    def __init__(self, checkpoint: Path):
        self.checkpoint = checkpoint
        flags = [item for name, value in OPTIONS.items() for item in (f"--{name.replace('_', '-')}", str(value))]
        command = ["-m", "dsjax.serve", "--model", str(checkpoint), "--served-model-name", "tiny", "--port", "0"]
        with mock.patch.dict(os.environ, {"DSJAX_CLUSTER_KEY": CLUSTER_KEY}):
            command += ["--mesh", "dp=4", "--batch-invariant", "--admin-api-key", "admin"]
            self.group = Group([*command, *flags], 2, heartbeat=20)  # for which a process that hangs is waited for
        self.group.wait_for(0, "serving tiny at", 300)
        self.leader = re.search(r"serving tiny at (http://[\d.:]+)", self.group.output[0]).group(1)
        self.follower = re.search(r"/metrics at (http://[\d.:]+)", self.group.output[1]).group(1)

    def complete(self, **body) -> httpx.Response:
        body = {"model": "tiny", "max_tokens": 6, "temperature": 0, **body}
        return httpx.post(f"{self.leader}/v1/completions", json=body, timeout=240)

    def count(self, name: str) -> float:
        text = httpx.get(f"{self.follower}/metrics").text
        return float(re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE).group(1))


@pytest.fixture(scope="module")
def served(checkpoint, kernels):
    served = Served(checkpoint)
    yield served
    served.group.end()


def test_a_group_on_loopback_listens_on_loopback_alone(served):
    for process in served.group.processes:
        addresses = listening_addresses(process.pid)
        assert (
            len(addresses) >= 3
        )  # HTTP, links and gloo; process 0 has the rendezvous and JAX's coordination service too
        assert all_loopback(addresses), addresses


def test_the_cluster_key_is_shown_nowhere(served):
    addresses = (served.leader.removesuffix("/v1"), served.follower)
    paths = {route for route in httpx.get(f"{addresses[0]}/openapi.json").json()["paths"] if "{" not in route}
    assert "/server_info" in paths
    for address in addresses:
        for path in {*paths, "/metrics"}:
            assert CLUSTER_KEY not in httpx.get(f"{address}{path}", headers=KEY, timeout=60).text
    for index, process in enumerate(served.group.processes):
        assert CLUSTER_KEY not in served.group.output[index]
        assert CLUSTER_KEY.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes()


def test_each_process_shows_its_link_to_the_other(served):
    for address, labels in ((served.leader.removesuffix("/v1"), 'peer="1"'), (served.follower, 'process="1",peer="0"')):
        deadline, found = time.monotonic() + 60, []
        while not found:  # the first look is after a second
            assert time.monotonic() < deadline
            text = httpx.get(f"{address}/metrics").text
            found = re.findall(rf"^dsjax_link_answer_seconds{{.*{labels}}} (\S+)$", text, re.MULTILINE)
            time.sleep(0.1)
        assert float(found[0]) > 0
        assert re.search(rf"^dsjax_link_probes_total{{.*{labels}}} [1-9]", text, re.MULTILINE)


def test_completions_are_those_of_one_process(served, alone):
    expected = alone.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6))
    answer = served.complete(prompt=PROMPTS)
    assert answer.status_code == 200, answer.text
    assert [choice["text"] for choice in answer.json()["choices"]] == [e.outputs[0].text for e in expected]


def test_seeded_samples_with_their_log_probabilities_are_those_of_one_process(served, alone):
    params = SamplingParams(temperature=1, seed=5, max_tokens=5, logprobs=2, n=2)
    expected = alone.generate(PROMPTS[0], params)[0].outputs
    choices = served.complete(prompt=PROMPTS[0], temperature=1, seed=5, max_tokens=5, logprobs=2, n=2).json()["choices"]
    assert [choice["text"] for choice in choices] == [output.text for output in expected]
    for choice, output in zip(choices, expected, strict=True):
        own = [found[token].logprob for token, found in zip(output.token_ids, output.logprobs, strict=True)]
        assert choice["logprobs"]["token_logprobs"] == own


def test_prompts_are_scored(served, alone):
    # The prompt's own tokens with their log-probabilities: another program, whose results are gathered apart.
    answer = served.complete(prompt=PROMPTS[2], max_tokens=0, echo=True, logprobs=1).json()["choices"][0]["logprobs"]
    assert answer["token_logprobs"][0] is None
    assert all(value < 0 for value in answer["token_logprobs"][1:])


def test_grammars_are_kept(served):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = served.complete(
        prompt="x", max_tokens=40, structured_outputs={"json": schema, "disable_any_whitespace": True}
    )
    assert isinstance(json.loads(answer.json()["choices"][0]["text"])["a"], bool)


def test_streams_say_what_whole_answers_say(served):
    whole = served.complete(prompt=PROMPTS[1]).json()["choices"][0]["text"]
    body = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 6, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{served.leader}/v1/completions", json=body, timeout=60) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == whole


def test_experts_are_counted_over_all_processes(served):
    assert httpx.post(f"{served.leader}/start_expert_distribution_record", headers=KEY).status_code == 200
    served.complete(prompt=PROMPTS)
    found = httpx.post(f"{served.leader}/dump_expert_distribution_record", headers=KEY).json()
    httpx.post(f"{served.leader}/stop_expert_distribution_record", headers=KEY)
    sums = [sum(layer) for layer in found["tokens_per_expert"]]
    assert sums[0] == sums[1] > 0
    assert len(found["rows_sent"]) == 4


def test_the_follower_says_that_it_follows(served):
    before = served.count("dsjax_follower_commands_total")
    served.complete(prompt="x")
    assert served.count("dsjax_follower_commands_total") > before
    assert served.count("dsjax_follower_ready") == 1
    assert httpx.get(f"{served.follower}/health").status_code == 200
    assert httpx.get(f"{served.follower}/ready").json() == {"status": "ready"}
    assert httpx.get(f"{served.follower}/v1/models").status_code == 404


def test_nothing_is_compiled_while_serving_and_pages_come_back(served):
    assert httpx.post(f"{served.leader}/flush_cache", headers=KEY).status_code == 200
    text = httpx.get(f"{served.leader}/metrics").text
    assert re.search(r"^dsjax_compilations_after_warm_up_total{.*} 0$", text, re.MULTILINE)


# From here on the mesh changes: the order of these tests is theirs.

MIXED = [
    {"prompt": PROMPTS[0]},
    {"prompt": PROMPTS[1], "temperature": 1, "seed": 5},
    {"prompt": PROMPTS[2], "repetition_penalty": 1.3, "presence_penalty": 0.4},
    {"prompt": PROMPTS[3], "structured_outputs": {"regex": "[a-z ]{60,80}"}, "temperature": 0.7, "seed": 9},
]


COMMON = {"max_tokens": 80, "temperature": 0, "ignore_eos": True, "logprobs": 0}


class Streams:
    """Requests of several kinds, each streamed to its end by a thread: text, and the log-probability of each token."""

    def __init__(self, served: Served, requests: list[dict]):
        self.served, self.first = served, threading.Event()
        self.texts, self.logprobs = [""] * len(requests), [[] for _ in requests]
        self.errors: list[str] = []
        self.threads = [
            threading.Thread(target=self._read, args=(index, request), daemon=True)
            for index, request in enumerate(requests)
        ]
        for thread in self.threads:
            thread.start()

    def _read(self, index: int, request: dict) -> None:
        body = {"model": "tiny", "stream": True, **COMMON, **request}
        with httpx.stream("POST", f"{self.served.leader}/v1/completions", json=body, timeout=300) as answer:
            for line in answer.iter_lines():
                if not line or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.errors.append(str(event))
                    return
                (choice,) = event["choices"]
                self.texts[index] += choice["text"]
                self.logprobs[index] += (choice["logprobs"] or {}).get("token_logprobs", [])
                self.first.set()

    def join(self) -> list[tuple[str, list[float]]]:
        """What each said, to its end, and the log-probabilities of it."""
        for thread in self.threads:
            thread.join(300)
            assert not thread.is_alive(), self.served.group.last_words()
        assert not self.errors
        return list(zip(self.texts, self.logprobs, strict=True))


@pytest.fixture(scope="module")
def undisturbed(alone):
    """What one device alone gives for each of ``MIXED``."""

    def made(request):
        request = COMMON | request
        prompt = request.pop("prompt")
        if "structured_outputs" in request:
            request["structured_outputs"] = StructuredOutputs(**request["structured_outputs"])
        (output,) = alone.generate(prompt, SamplingParams(**request))[0].outputs
        chosen = zip(output.token_ids, output.logprobs, strict=True)
        return output.text, [found[token].logprob for token, found in chosen]

    return [made(request) for request in MIXED]


def metric(served, name: str) -> float:
    text = httpx.get(f"{served.leader}/metrics").text
    return float(re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE).group(1))


def changes(served, reason: str) -> float:
    text = httpx.get(f"{served.leader}/metrics").text
    return float(
        re.search(rf'^dsjax_generation_changes_total{{.*reason="{reason}".*}} (\S+)$', text, re.MULTILINE).group(1)
    )


def scale(served, mesh: str) -> httpx.Response:
    return httpx.post(f"{served.leader}/scale", json={"mesh": mesh}, headers=KEY, timeout=300)


def weight_bytes(served) -> dict[str, float]:
    """Where the weights of changed meshes have come from."""
    text = httpx.get(f"{served.leader}/metrics").text
    found = re.findall(r'^dsjax_generation_weight_bytes_total{.*source="(\w+)".*} (\S+)$', text, re.MULTILINE)
    return {source: float(counted) for source, counted in found}


def expert_bytes(served) -> int:
    """Bytes of all routed experts, as they lie on the devices."""
    config = load_config(served.checkpoint)
    infos = abstract_parameters(config, weights="f32", platform="cpu", mtp=False)
    return sum(info.nbytes for path, info in infos.items() if ".experts." in path)


def test_a_mesh_that_cannot_be_is_refused_and_changes_nothing(served):
    for mesh, message in (
        ("dp=5", "mesh dp=5 wants 5 devices, and this server has 4"),
        ("tp=3", "heads are not divisible by tp=3"),
        ("4", "expected axis=size"),
    ):
        answer = scale(served, mesh)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]
    assert httpx.post(f"{served.leader}/scale", json={"mesh": "dp=2"}).status_code == 401
    assert metric(served, "dsjax_generation") == 0


def test_streams_stay_open_and_are_those_of_one_device_to_the_bit_while_the_mesh_shrinks_and_grows(served, undisturbed):
    streams = Streams(served, MIXED)
    streams.first.wait(240)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(scale(served, "dp=2")))
    asking.start()
    while httpx.get(f"{served.leader}/ready").status_code != 503:
        assert asking.is_alive()
    assert "not ready: " in httpx.get(f"{served.leader}/ready").text
    assert scale(served, "dp=4").status_code == 409
    late = Streams(served, MIXED[:1])  # comes while nothing computes
    asking.join(300)
    assert answers[0].status_code == 200, answers[0].text
    found = answers[0].json()
    assert [found[name] for name in ("mesh", "devices", "processes", "generation")] == ["dp=2", 2, 1, 1]
    assert httpx.get(f"{served.follower}/ready").json() == {"status": "standing by"}
    answer = scale(served, "dp=4")
    assert answer.status_code == 200, answer.text
    assert streams.join() == undisturbed
    assert late.join() == undisturbed[:1]
    info = httpx.get(f"{served.leader}/server_info").json()
    assert [info["mesh"], info["num_processes"], len(info["ranks"])] == ["dp=4", 2, 4]
    assert metric(served, "dsjax_generation") == 2
    assert weight_bytes(served)["read"] == 0  # who left gave its experts, and got them back
    assert weight_bytes(served)["received"] > 0


def test_a_follower_killed_in_a_step_costs_nobody_a_token(served, undisturbed):
    streams = Streams(served, MIXED)
    streams.first.wait(240)
    served.group.processes[1].send_signal(signal.SIGKILL)
    assert streams.join() == undisturbed
    assert metric(served, "dsjax_generation_devices") == 2
    assert metric(served, "dsjax_generation_devices_wanted") == 4
    assert weight_bytes(served)["read"] == expert_bytes(served) // 2  # those of its devices, which nobody else had
    assert re.search(r"process 1 \(.*, pid \d+\) has gone away", served.group.output[0])
    assert "Traceback" not in served.group.output[0]


def test_a_follower_that_is_started_again_joins_under_its_id(served, undisturbed):
    comes_back(served, undisturbed)


def comes_back(served, undisturbed) -> None:
    read = weight_bytes(served)["read"]
    served.group.start_again(1)
    deadline = time.monotonic() + 300
    while metric(served, "dsjax_generation_devices") < 4:
        assert Streams(served, MIXED).join() == undisturbed
        assert time.monotonic() < deadline, served.group.last_words()
    assert Streams(served, MIXED).join() == undisturbed
    assert weight_bytes(served)["read"] == read  # the others have all that it needs
    served.group.wait_for(1, "/metrics at ")
    served.follower = re.search(r"/metrics at (http://[\d.:]+)", served.group.output[1]).group(1)
    assert httpx.get(f"{served.follower}/ready").json() == {"status": "ready"}


def test_a_follower_that_is_told_to_end_leaves_when_the_others_go_on_without_it(served, undisturbed):
    losses, printed = changes(served, "loss"), len(served.group.output[0])
    read = weight_bytes(served)["read"]
    streams = Streams(served, MIXED)
    streams.first.wait(240)
    served.group.processes[1].send_signal(signal.SIGTERM)
    assert streams.join() == undisturbed
    assert served.group.processes[1].wait(120) == 0, served.group.last_words()
    assert metric(served, "dsjax_generation_devices") == 2
    assert (changes(served, "leave"), changes(served, "loss")) == (1, losses)
    assert "leaves, as it was told to end" in served.group.output[0][printed:]
    assert "has gone away" not in served.group.output[0][printed:]
    assert weight_bytes(served)["read"] == read, "it gave its weights before it went"
    assert Streams(served, MIXED).join() == undisturbed
    comes_back(served, undisturbed)


def test_a_follower_that_hangs_is_given_up_and_ends_when_it_goes_on(served, undisturbed):
    streams = Streams(served, MIXED)
    streams.first.wait(240)
    served.group.processes[1].send_signal(signal.SIGSTOP)
    assert streams.join() == undisturbed
    assert metric(served, "dsjax_generation_devices") == 2
    served.group.processes[1].send_signal(signal.SIGCONT)
    assert served.group.processes[1].wait(120) == 1
    assert "was aborted" in served.group.output[1]


def test_the_group_ends_as_it_should_though_a_member_is_missing(served):
    pages = {load["used_pages"] for load in httpx.get(f"{served.leader}/get_load").json()["ranks"]}
    assert pages == {0}
    served.group.processes[0].send_signal(signal.SIGTERM)
    assert served.group.codes(120) == [0, 1], served.group.last_words()
