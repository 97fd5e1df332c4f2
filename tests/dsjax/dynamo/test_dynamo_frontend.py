"""Dynamo's real frontend and KV router before two dsjax workers: every answer is the engine's own, also when a worker is killed."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest
from demo_crowd import CLIENTS, NEW_TOKENS, one_device, options, prompt
from with_dynamo import WITH_DYNAMO

pytestmark = [
    pytest.mark.dynamo,
    WITH_DYNAMO,
    pytest.mark.slow,
]

SIZES = (*options(), "--mesh", "dp=2")
LONG = "".join(f"value_{i} = {i}\n" for i in range(20))


@pytest.fixture(scope="module")
def alone():
    """Prompts and parameters to the engine's own answers."""
    from dsjax import SamplingParams

    llm = one_device()

    def generate(prompts: list[str], params: list[dict]) -> list:
        # The frontend reads tokenizer.json alone, and puts no begin-of-sequence token before a text.
        ids = [{"prompt_token_ids": llm.tokenizer.encode(text, add_special_tokens=False)} for text in prompts]
        outputs = llm.generate(ids, [SamplingParams(**one) for one in params])
        return [output.outputs[0] for output in outputs]

    return generate


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    from deployment import Frontend, Worker, wait_until

    folder: Path = tmp_path_factory.mktemp("dynamo")
    processes = [Frontend(folder)]
    try:
        for index in range(2):  # one after the other: the second finds what the first has compiled
            processes.append(Worker(folder, f"worker-{index}", *SIZES))
            wait_until(lambda: processes[-1].is_ready, what="the worker is ready")
        wait_until(lambda: processes[0].num_workers() == 2, what="the frontend knows both")
        yield processes
    finally:
        for process in processes:
            process.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def client(deployment):
    return openai.OpenAI(base_url=f"{deployment[0].url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client, text: str, *, stream: bool = False, **params) -> str:
    answer = client.completions.create(model="demo", prompt=text, stream=stream, **params)
    return "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text


def test_64_clients_at_once_get_what_the_engine_alone_gives(alone, client):
    """Streamed and whole, greedy and sampled with a seed."""
    params = [
        {"max_tokens": NEW_TOKENS, "temperature": 0.0 if index % 4 < 2 else 1.0, "seed": index}
        for index in range(CLIENTS)
    ]
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = [
            pool.submit(ask, client, prompt(index), stream=index % 2 == 1, **params[index]) for index in range(CLIENTS)
        ]
        texts = [answer.result() for answer in answers]
    assert texts == [output.text for output in alone([prompt(index) for index in range(CLIENTS)], params)]


def test_log_probabilities_and_forms_and_stop_strings_are_the_engines(alone, client):
    answer = client.completions.create(model="demo", prompt="def main(", max_tokens=4, temperature=0, logprobs=2)
    (completion,) = alone(["def main("], [{"max_tokens": 4, "temperature": 0, "logprobs": 2}])
    expected = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    # Dynamo writes them as float32, in as few digits as tell one float32 from another.
    np.testing.assert_array_equal(np.float32(answer.choices[0].logprobs.token_logprobs), np.float32(expected))
    assert [len(top) for top in answer.choices[0].logprobs.top_logprobs] == [2] * 4
    digits = ask(client, "x = ", max_tokens=8, temperature=0, extra_body={"guided_regex": "[0-9]{3}"})
    assert digits.isdecimal()
    assert len(digits) == 3
    stopped = client.completions.create(model="demo", prompt="def main(", max_tokens=30, temperature=0, stop=[":"])
    assert (stopped.choices[0].finish_reason, ":" in stopped.choices[0].text) == ("stop", False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 5000}, "the maximum context length of this model is 256 tokens"),
        ({"n": 2, "temperature": 1}, "send several requests"),
        ({"extra_body": {"guided_regex": "[0-9"}}, "structured_outputs.regex"),
    ],
)
def test_a_request_that_cannot_be_is_a_400_that_says_why(client, changes, message):
    with pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(**{"model": "demo", "prompt": "def main(", "max_tokens": 4} | changes)


def test_a_prompt_comes_back_to_the_rank_that_has_its_beginning(client, deployment):
    """The router counts what it expects to be cached, and the worker what was: pages of 16 tokens."""
    from deployment import metric, wait_until

    def routed() -> float:
        return sum(metric(deployment[0].url, "dynamo_component_router_kv_hit_rate_sum"))

    before = routed()
    client.completions.create(model="demo", prompt=LONG, max_tokens=2, temperature=0)

    def cached_tokens() -> int:
        usage = client.completions.create(model="demo", prompt=LONG, max_tokens=2, temperature=0).usage
        return usage.prompt_tokens_details.cached_tokens

    cached = []
    wait_until(lambda: cached.append(cached_tokens()) or len(cached) == 6, what="six answers")
    assert cached[1:] == [128] * 5  # of 140: the last full page, and what is behind it, is computed anew
    assert routed() - before > 3


def test_a_salt_shares_nothing_and_is_routed_by_its_own_pages(client):
    def cached_tokens(salt: str) -> int:
        extra = {"cache_salt": salt}
        answer = client.completions.create(model="demo", prompt=LONG, max_tokens=2, temperature=0, extra_body=extra)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached_tokens("one") == 0
    assert [cached_tokens("one") for _ in range(3)][-1] == 128
    assert cached_tokens("two") == 0


def test_a_stream_that_is_closed_gives_its_pages_back(client, deployment):
    from deployment import wait_until

    params = {"max_tokens": 200, "temperature": 0, "stream": True, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(model="demo", prompt="def main(", **params)
    next(iter(stream))
    stream.close()
    for worker in deployment[1:]:
        wait_until(lambda worker=worker: sum(worker.metric("vllm:num_requests_running")) == 0, what="nothing runs")
        wait_until(
            lambda worker=worker: sum(worker.metric("dynamo_component_gpu_cache_usage_percent")) == 0,
            what="no page is held",
        )


def under_load(alone, client, worker, end) -> float:
    """Have 16 streams run, and a worker ended in their middle; every one is the engine's to its end. Give how many that worker had."""
    prompts = [prompt(index) for index in range(16)]
    params = {"max_tokens": 100, "temperature": 0}
    expected = [output.text for output in alone(prompts, [{**params, "ignore_eos": True}] * 16)]
    all_run = threading.Barrier(17)

    def follow(text: str) -> str:
        answer = client.completions.create(
            model="demo", prompt=text, stream=True, **params, extra_body={"ignore_eos": True}
        )
        first_text = next(iter(answer)).choices[0].text
        all_run.wait(60)
        return first_text + "".join(chunk.choices[0].text for chunk in answer)

    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(follow, text) for text in prompts]
        all_run.wait(60)
        ran = sum(worker.metric("vllm:num_requests_running"))
        end()
        assert [answer.result() for answer in answers] == expected
    return ran


def test_a_worker_that_is_told_to_end_says_goodbye_and_loses_no_request(alone, client, deployment):
    from deployment import Worker, wait_until

    leaves = deployment[1]
    assert under_load(alone, client, leaves, lambda: leaves.process.send_signal(signal.SIGTERM)) > 0
    assert leaves.process.wait(60) == 0, leaves.log.read_text()[-4000:]
    wait_until(lambda: deployment[0].num_workers() == 1, what="the frontend knows that it has gone")
    deployment[1] = Worker(leaves.log.parent, "worker-again", *SIZES)
    wait_until(lambda: deployment[1].is_ready, what="the worker is ready")
    wait_until(lambda: deployment[0].num_workers() == 2, what="the frontend knows both")


def test_answers_are_the_engines_when_a_worker_is_killed_under_load(alone, client, deployment):
    """Last, since it leaves one worker: Dynamo's migration goes on with the other."""
    from deployment import wait_until

    killed, left = deployment[1:]
    assert under_load(alone, client, killed, lambda: killed.end(signal.SIGKILL)) > 0
    wait_until(lambda: sum(left.metric("vllm:num_requests_running")) == 0, what="nothing runs")
    assert left.end() == 0, left.log.read_text()[-4000:]
