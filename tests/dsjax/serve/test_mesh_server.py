"""The README's first command: the demo model on 32 devices answers 64 clients as one device answers each alone."""

import re
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from demo_crowd import CLIENTS, NEW_TOKENS, one_device, options, prompt
from processes import Processes

from dsjax import SamplingParams

DEMO = Path(__file__).parents[3] / "configs" / "models" / "demo"
pytestmark = pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo model's weights are not here")


@pytest.fixture(scope="module")
def server():
    """The address of `python -m dsjax.serve` in a process of its own, which Ctrl-C ends cleanly once it is idle."""
    command = [sys.executable, "-m", "dsjax.serve", "--port", "0", "--mesh", "dp=32", *options()]
    served = Processes([command])
    try:
        served.wait_for(0, "serving demo at", 300)
        yield re.search(r"serving demo at (http://[\d.:]+)", served.output[0]).group(1)
        served.processes[0].send_signal(signal.SIGINT)
        assert served.codes(240) == [0], served.last_words()
    finally:
        served.end()


@pytest.fixture(scope="module")
def alone():
    """Each prompt's continuation by one device, one prompt at a time."""
    llm = one_device()
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=1)
    answers = [llm.generate(prompt(client), params)[0].outputs[0] for client in range(CLIENTS)]
    llm.shutdown()
    return answers


def ask(client, number: int) -> str:
    """Odd clients stream."""
    asked = {"model": "demo", "prompt": prompt(number), "max_tokens": NEW_TOKENS, "temperature": 0}
    if number % 2:
        return "".join(part.choices[0].text for part in client.completions.create(**asked, stream=True))
    return client.completions.create(**asked).choices[0].text


@pytest.mark.slow
def test_64_concurrent_clients_each_get_what_one_device_gives_alone(server, alone):
    from openai import OpenAI

    client = OpenAI(base_url=server + "/v1", api_key="none", timeout=300, max_retries=0)
    with ThreadPoolExecutor(CLIENTS) as pool:
        texts = list(pool.map(lambda number: ask(client, number), range(CLIENTS)))
    assert texts == [answer.text for answer in alone]
