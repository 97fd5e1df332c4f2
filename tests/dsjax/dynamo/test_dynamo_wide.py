"""Dynamo's frontend before workers whose meshes span two processes: aggregated, and a prefill and a decode side."""

import contextlib
import json
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from demo_crowd import one_device, options
from with_dynamo import WITH_DYNAMO

pytestmark = [
    pytest.mark.dynamo,
    WITH_DYNAMO,
    pytest.mark.slow,
]

MESH = ("--mesh", "dp=2", "--compile-ahead", "0")
TRANSFER = ("--transfer-host", "127.0.0.1", "--local-prefill-tokens", "17")
CLIENTS = 16
PARAMS = {"max_tokens": 12, "temperature": 0}
PROMPTS = ["".join(f"value_{number} = {i}\n" for i in range(7 + number % 12)) for number in range(CLIENTS)]
"""Each has 48 to 143 tokens, which take three pages at least."""


@pytest.fixture(scope="module")
def expected():
    from dsjax import SamplingParams

    llm = one_device()
    ids = [{"prompt_token_ids": llm.tokenizer.encode(text, add_special_tokens=False)} for text in PROMPTS]
    return [output.outputs[0].text for output in llm.generate(ids, SamplingParams(**PARAMS))]


@contextlib.contextmanager
def deployed(folder, **workers: tuple[str, ...]):
    """The frontend and workers, each of two processes, which it knows."""
    from deployment import Frontend, Group, wait_until

    started = [Frontend(folder)]
    try:
        groups = [Group(folder, name, *options(), *MESH, *side) for name, side in workers.items()]
        started.extend(groups)
        wait_until(lambda: all(group.is_ready for group in groups), what="the workers are ready")
        wait_until(lambda: started[0].num_workers() == len(groups), what="the frontend knows them")
        wait_until(lambda: started[0].serves("demo"), what="it serves")
        yield started
    finally:
        for one in started:
            one.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def aggregated(tmp_path_factory):
    """The frontend and one worker: the order of the tests that take it is theirs."""
    with deployed(tmp_path_factory.mktemp("aggregated"), worker=()) as started:
        yield started


def ask_all(url: str) -> list[str]:
    """All at once, every second one streamed."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)

    def one(number: int) -> str:
        stream = number % 2 == 1
        answer = client.completions.create(model="demo", prompt=PROMPTS[number], stream=stream, **PARAMS)
        return "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text

    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(one, range(CLIENTS)))


def phase(worker) -> str:
    """What a process that follows says at `/ready`."""
    with urllib.request.urlopen(f"http://127.0.0.1:{worker.port}/ready", timeout=60) as answer:
        return json.load(answer)["status"]


def test_a_prefill_and_a_decode_side_of_two_processes_each_make_the_tokens_of_one_engine(expected, tmp_path):
    """Pages go from each prefill process straight to the decode process that has the rank."""
    sides = {side: (*TRANSFER, "--disaggregation-mode", side) for side in ("prefill", "decode")}
    with deployed(tmp_path, **sides) as (frontend, prefill, decode):
        assert ask_all(frontend.url) == expected
        done, given_up = (
            sum(decode.leader.metric("dsjax_transfers_total", outcome=outcome)) for outcome in ("completed", "given_up")
        )
        assert (done, given_up) == (CLIENTS, 0)
        assert [phase(group.follower) for group in (prefill, decode)] == ["ready", "ready"]
        for group in (prefill, decode):
            assert sum(group.follower.metric("dsjax_follower_commands_total")) > 0
            assert group.end() == [0, 0], group.last_words()


def test_an_aggregated_worker_of_two_processes_makes_them_too(expected, aggregated):
    frontend, worker = aggregated
    assert ask_all(frontend.url) == expected
    assert phase(worker.follower) == "ready"


def test_a_process_of_a_worker_that_is_told_to_end_leaves_in_order_and_loses_no_request(expected, aggregated):
    """The mesh goes on without its devices; the worker itself says goodbye in `test_dynamo_frontend.py`."""
    from deployment import wait_until

    frontend, worker = aggregated
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(ask_all, frontend.url)
        wait_until(lambda: sum(worker.leader.metric("vllm:num_requests_running")) > 0, what="requests run", every=0.01)
        worker.follower.process.send_signal(signal.SIGTERM)
        assert answers.result() == expected
    assert worker.follower.process.wait(60) == 0, worker.last_words()
    assert "the others go on without this process" in worker.follower.log.read_text()
    assert "has gone away" not in worker.leader.log.read_text()
    assert ask_all(frontend.url) == expected
    assert worker.leader.end() == 0, worker.last_words()


def test_a_signal_while_it_compiles_ends_all_processes_of_a_worker(tmp_path):
    from deployment import Group, wait_until

    group = Group(tmp_path, "worker", *options(), *MESH)
    try:
        wait_until(lambda: "compiling shapes" in group.leader.log.read_text(), what="it compiles")
        assert group.end() == [0, 0], group.last_words()
    finally:
        group.end(signal.SIGKILL)
    assert "SIGTERM before this worker was ready" in group.leader.log.read_text()
    # By its own signal, or by process 0's word, whichever comes first.
    last_words = group.follower.log.read_text()
    assert "SIGTERM while warming up: this process ends now" in last_words or "this process ends too" in last_words
