"""Dynamo's real frontend and KV router before two dsjax workers, one of two processes: each answer is one engine's, whoever leaves."""

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from demo_crowd import CLIENTS, NEW_TOKENS, prompt
from with_dynamo import WITH_DYNAMO

pytestmark = [pytest.mark.dynamo, WITH_DYNAMO, pytest.mark.slow]

MESH = ("--mesh", "dp=2", "--compile-ahead", "0")
LONG = "".join(f"value_{i} = {i}\n" for i in range(12))
GREEDY = {"temperature": 0, "ignore_eos": True}
LONG_ANSWER = {"max_tokens": 160, **GREEDY}


@pytest.fixture(scope="module")
def deployment(alone, tmp_path_factory):
    """A worker of two processes and one of one. The order of the tests is theirs."""
    from deployment import Group
    from tiny_deployment import Deployment

    with Deployment(tmp_path_factory.mktemp("dynamo")) as made:
        made.start("group", *alone.options, *MESH, kind=Group)
        made.start("worker", *alone.options, *MESH)
        made.wait()
        yield made


def test_64_clients_at_once_get_what_the_engine_alone_gives(alone, deployment):
    """Streamed and whole, greedy and sampled with a seed."""
    temperatures = [0.0, 0.0, 1.0, 1.0] * (CLIENTS // 4)
    params = [{"max_tokens": NEW_TOKENS, "temperature": t, "seed": client} for client, t in enumerate(temperatures)]
    prompts = [prompt(client) for client in range(CLIENTS)]
    assert deployment.ask_all(prompts, params) == alone.texts(prompts, params)


def test_log_probabilities_and_forms_and_stop_strings_are_the_engines(alone, deployment):
    answer = deployment.complete("def main(", max_tokens=20, logprobs=2, **GREEDY)
    (completion,) = alone.answers(["def main("], {"max_tokens": 20, "logprobs": 2, **GREEDY})
    expected = [entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)]
    # Dynamo writes them as float32, in as few digits as tell one float32 from another.
    np.testing.assert_array_equal(np.float32(answer.choices[0].logprobs.token_logprobs), np.float32(expected))
    assert [len(top) for top in answer.choices[0].logprobs.top_logprobs] == [2] * 20
    digits = deployment.complete("x = ", max_tokens=8, temperature=0, guided_regex="[0-9]{3}").choices[0].text
    assert digits.isdecimal()
    assert len(digits) == 3
    texts = [alone.engine.tokenizer.decode([token]) for token in completion.token_ids]
    stop = next(text for text in texts[5:] if text.strip())  # the frontend finds no string over two tokens
    stopped = deployment.complete("def main(", max_tokens=20, stop=[stop], temperature=0).choices[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", completion.text.partition(stop)[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 5000}, "the maximum context length of this model is 256 tokens"),
        ({"n": 2, "temperature": 1}, "send several requests"),
        ({"guided_regex": "[0-9"}, "structured_outputs.regex"),
    ],
)
def test_a_request_that_cannot_be_is_a_400_that_says_why(deployment, changes, message):
    import openai

    with pytest.raises(openai.BadRequestError, match=message):
        deployment.complete("def main(", **{"max_tokens": 4} | changes)


def test_a_prompt_comes_back_to_the_rank_that_has_its_beginning_and_salts_share_nothing(alone, deployment):
    """The router counts what it expects to be cached, and the worker what was: pages of 16 tokens."""

    def routed() -> float:
        return sum(deployment.frontend.metric("dynamo_component_router_kv_hit_rate_sum"))

    def cached_tokens(**salt: str) -> int:
        answer = deployment.complete(LONG, max_tokens=2, temperature=0, **salt)
        return answer.usage.prompt_tokens_details.cached_tokens

    before, whole = routed(), (len(alone.ids(LONG)) - 1) // 16 * 16  # the last page is computed anew
    cached_tokens()
    assert [cached_tokens() for _ in range(6)][1:] == [whole] * 5
    assert routed() - before > 3
    assert cached_tokens(cache_salt="one") == 0
    assert [cached_tokens(cache_salt="one") for _ in range(3)][-1] == whole
    assert cached_tokens(cache_salt="two") == 0


def test_a_stream_that_is_closed_gives_its_pages_back(deployment):
    from deployment import wait_until

    processes = [deployment.workers["group"].leader, deployment.workers["worker"]]
    stream = deployment.complete("def main(", max_tokens=200, stream=True, **GREEDY)
    next(iter(stream))
    stream.close()
    for name in ("vllm:num_requests_running", "dynamo_component_gpu_cache_usage_percent"):
        wait_until(lambda name=name: not any(sum(one.metric(name)) for one in processes), what=f"{name} is 0")


@pytest.fixture(scope="module")
def long_answers(alone) -> dict[str, str]:
    """By its prompt, what the engine alone says of each of 12 clients."""
    prompts = [prompt(client) for client in range(12)]
    return dict(zip(prompts, alone.texts(prompts, LONG_ANSWER), strict=True))


def under_load(deployment, long_answers, process, end) -> float:
    """Have 12 streams run, and a process ended in their middle; every one is the engine's to its end. Give how many `process` had.

    Streams that have ended before the process was asked how many it has, on a busy machine, are begun again.
    """
    all_run, ran = threading.Barrier(13), 0.0

    def follow(text: str) -> str:
        answer = deployment.complete(text, stream=True, **LONG_ANSWER)
        first_text = next(iter(answer)).choices[0].text
        all_run.wait(240)
        return first_text + "".join(chunk.choices[0].text for chunk in answer)

    with ThreadPoolExecutor(12) as pool:
        for _ in range(10):
            answers = [pool.submit(follow, text) for text in long_answers]
            all_run.wait(240)
            if ran := sum(process.metric("vllm:num_requests_running")):
                end()
            assert [answer.result() for answer in answers] == [*long_answers.values()]
            if ran:
                break
    return ran


def test_a_process_of_a_worker_that_is_told_to_end_leaves_in_order_and_loses_no_request(deployment, long_answers):
    """The mesh goes on without its devices."""
    group = deployment.workers["group"]
    follower = group.follower
    assert under_load(deployment, long_answers, group.leader, lambda: follower.process.send_signal(signal.SIGTERM)) > 0
    assert follower.process.wait(240) == 0, group.last_words()
    assert "the others go on without this process" in follower.log.read_text()
    assert "has gone away" not in group.leader.log.read_text()


def test_answers_are_the_engines_when_a_worker_is_killed_under_load(deployment, long_answers):
    """The process that the group has left: Dynamo's migration goes on with the other worker."""
    killed = deployment.workers["group"].leader
    assert under_load(deployment, long_answers, killed, lambda: killed.end(signal.SIGKILL)) > 0
    deployment.drop("group")


def test_a_worker_that_is_told_to_end_says_goodbye_and_loses_no_request(deployment, long_answers):
    """Last, since nobody is left who could go on with a request."""
    leaves = deployment.workers["worker"]
    assert under_load(deployment, long_answers, leaves, lambda: leaves.process.send_signal(signal.SIGTERM)) > 0
    assert leaves.process.wait(240) == 0, leaves.log.read_text()[-4000:]
