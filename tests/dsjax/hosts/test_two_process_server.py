"""A server over two processes: requests of every kind, the follower's own endpoints, and a follower that is killed."""

import json
import re
import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from processes import Group
from worded_checkpoint import write_worded_checkpoint

from dsjax import LLM, SamplingParams

OPTIONS = {
    "max_num_seqs": 1,  # few shapes to compile
    "max_num_batched_tokens": 8,
    "prefill_chunk": 8,
    "page_size": 4,
    "max_model_len": 96,
    "kernels": "plain",
}
PROMPTS = ["the queue", "def main(", "a b c d e f", "x"]
KEY = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_worded_checkpoint(tmp_path_factory.mktemp("worded"))


@pytest.fixture(scope="module")
def alone(checkpoint):
    llm = LLM(str(checkpoint), **OPTIONS)
    yield llm
    llm.shutdown()


class Served:
    """The group, and the addresses of both processes."""

    def __init__(self, checkpoint: Path):
        flags = [item for name, value in OPTIONS.items() for item in (f"--{name.replace('_', '-')}", str(value))]
        command = ["-m", "dsjax.serve", "--model", str(checkpoint), "--served-model-name", "tiny", "--port", "0"]
        self.group = Group([*command, "--mesh", "dp=4", "--admin-api-key", "admin", *flags], 2)
        self.group.wait_for(0, "serving tiny at", 300)
        self.leader = re.search(r"serving tiny at (http://[\d.:]+)", self.group.output[0]).group(1)
        self.follower = re.search(r"/metrics at (http://[\d.:]+)", self.group.output[1]).group(1)

    def complete(self, **body) -> httpx.Response:
        body = {"model": "tiny", "max_tokens": 6, "temperature": 0, **body}
        return httpx.post(f"{self.leader}/v1/completions", json=body, timeout=60)

    def count(self, name: str) -> float:
        text = httpx.get(f"{self.follower}/metrics").text
        return float(re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE).group(1))


@pytest.fixture(scope="module")
def served(checkpoint):
    served = Served(checkpoint)
    yield served
    served.group.end()


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
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-4)  # float32 sums in another order


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


def test_a_killed_follower_ends_the_stream_with_an_error_and_the_server_with_its_name(served):
    # The last test: the group does not survive it.
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 80, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.leader}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        killed = time.monotonic()
        served.group.processes[1].send_signal(signal.SIGKILL)
        events = [line for line in lines if line]
    assert "the engine has failed" in events[-2]
    assert served.group.codes(30) == [1, -signal.SIGKILL], served.group.last_words()
    assert time.monotonic() - killed < 30
    assert re.search(r"process 1 \(.*, pid \d+\) has gone away", served.group.output[0])
    assert "Traceback" not in served.group.output[0]
