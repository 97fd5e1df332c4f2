"""Dynamo's frontend before a prefill and a decode worker on meshes of different shapes: every answer is that of one engine."""

import signal
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

TRANSFER = ("--transfer-host", "127.0.0.1", "--local-prefill-tokens", "17")
PREFILL = (*options(), *TRANSFER, "--mesh", "tp=2", "--disaggregation-mode", "prefill")
DECODE = (*options(), *TRANSFER, "--mesh", "dp=2", "--disaggregation-mode", "decode")
CLIENTS = 16
PARAMS = {"max_tokens": 12, "temperature": 0}


def prompt(number: int) -> str:
    """A client's prompt. It has 48 to 143 tokens, which take three pages at least."""
    return "".join(f"value_{number} = {i}\n" for i in range(7 + number % 12))


@pytest.fixture(scope="module")
def alone():
    from dsjax import SamplingParams

    llm = one_device()

    def generate(prompts: list[str]) -> list[str]:
        ids = [{"prompt_token_ids": llm.tokenizer.encode(text, add_special_tokens=False)} for text in prompts]
        return [output.outputs[0].text for output in llm.generate(ids, SamplingParams(**PARAMS))]

    return generate


class Deployment:
    """The frontend, one decode worker, and the prefill worker of the moment."""

    def __init__(self, folder):
        from deployment import Frontend, Worker, wait_until

        self.folder, self.frontend = folder, Frontend(folder)
        self.prefill, self.decode = Worker(folder, "prefill", *PREFILL), Worker(folder, "decode", *DECODE)
        wait_until(lambda: self.prefill.is_ready and self.decode.is_ready, what="the workers are ready")
        wait_until(lambda: self.frontend.num_workers() == 2, what="the frontend knows both")
        wait_until(lambda: self.frontend.serves("demo"), what="the frontend serves their model")

    def replace_prefill(self, name: str, *options: str) -> None:
        from deployment import Worker, wait_until

        self.prefill.end(signal.SIGKILL)  # where a test before has failed
        wait_until(lambda: self.frontend.num_workers() == 1, what="the one before is gone")
        self.prefill = Worker(self.folder, name, *PREFILL, *options)
        wait_until(lambda: self.prefill.is_ready and self.frontend.num_workers() == 2, what="the new one is known")

    def ask(self, numbers) -> list[str]:
        """All at once, every second one streamed."""
        client = openai.OpenAI(base_url=f"{self.frontend.url}/v1", api_key="none", max_retries=0, timeout=120)

        def one(number: int) -> str:
            stream = number % 2 == 1
            answer = client.completions.create(model="demo", prompt=prompt(number), stream=stream, **PARAMS)
            return "".join(chunk.choices[0].text for chunk in answer) if stream else answer.choices[0].text

        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(one, numbers))

    def transfers(self, outcome: str) -> float:
        return sum(self.decode.metric("dsjax_transfers_total", outcome=outcome))

    def end(self) -> None:
        for process in (self.frontend, self.prefill, self.decode):
            process.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    made = None
    try:
        made = Deployment(tmp_path_factory.mktemp("dynamo"))
        yield made
    finally:
        if made is not None:
            made.end()


def test_prefill_first_then_decode_makes_the_tokens_of_one_engine(alone, deployment):
    numbers = range(CLIENTS)
    assert deployment.ask(numbers) == alone([prompt(number) for number in numbers])
    assert (deployment.transfers("completed"), deployment.transfers("given_up")) == (CLIENTS, 0)
    assert sum(deployment.prefill.metric("dsjax_prefill_engine_tokens_total")) > 32 * CLIENTS
    assert deployment.prefill.end() == 0, deployment.prefill.log.read_text()[-4000:]


def test_both_at_once_under_one_room_makes_them_too(alone, deployment):
    """After a prefill worker that ended in order, with one that advertises where it can be had."""
    deployment.replace_prefill("bootstrap", "--bootstrap")
    numbers = range(100, 100 + CLIENTS)
    assert deployment.ask(numbers) == alone([prompt(number) for number in numbers])
    assert (deployment.transfers("completed"), deployment.transfers("given_up")) == (2 * CLIENTS, 0)


def test_a_prefill_worker_that_is_killed_costs_no_request_where_there_is_another(alone, deployment):
    """Last. What was asked of it is computed by the decode worker, within the transfer's time limit."""
    from deployment import Worker, wait_until

    spare = Worker(deployment.folder, "spare", *PREFILL, "--bootstrap")
    try:
        wait_until(lambda: spare.is_ready and deployment.frontend.num_workers() == 3, what="the spare one is known")
        numbers = range(200, 200 + CLIENTS)
        with ThreadPoolExecutor(1) as pool:
            answers = pool.submit(deployment.ask, numbers)
            deployment.prefill.end(signal.SIGKILL)
            assert answers.result() == alone([prompt(number) for number in numbers])
    finally:
        spare.end(signal.SIGKILL)
    assert deployment.decode.end() == 0, deployment.decode.log.read_text()[-4000:]
