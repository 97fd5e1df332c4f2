"""The README's first command: the demo model on 32 devices answers 64 clients as one device answers each alone."""

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from demo_crowd import CLIENTS, NEW_TOKENS, one_device, options, prompt
from openai import OpenAI

from dsjax import SamplingParams

DEMO = Path(__file__).parents[3] / "configs" / "models" / "demo"
pytestmark = pytest.mark.skipif(not any(DEMO.glob("*.safetensors")), reason="the demo model's weights are not here")


class Command:
    """``python -m dsjax.serve`` in a process of its own; reads its address from what it prints."""

    def __init__(self, *options: str):
        command = [sys.executable, "-m", "dsjax.serve", "--port", "0", *options]
        environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.output = ""
        self.url = self._wait_for_address()
        self._drain = threading.Thread(target=self._read, daemon=True)
        self._drain.start()

    def _wait_for_address(self) -> str:
        deadline = threading.Timer(300, self.process.kill)
        deadline.start()
        try:
            for line in self.process.stdout:
                self.output += line
                if match := re.search(r"serving demo at (http://127\.0\.0\.1:\d+)", line):
                    return match.group(1)
        finally:
            deadline.cancel()
        raise AssertionError(f"the server ended with {self.process.wait()}:\n{self.output}")

    def _read(self) -> None:
        for line in self.process.stdout:
            self.output += line

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(timeout=240)


@pytest.fixture(scope="module")
def server():
    command = Command("--mesh", "dp=32", *options())
    yield command
    assert command.stop() == 0, command.output


@pytest.fixture(scope="module")
def alone():
    """Each prompt's continuation by one device, one prompt at a time."""
    llm = one_device()
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=1)
    answers = [llm.generate(prompt(client), params)[0].outputs[0] for client in range(CLIENTS)]
    llm.shutdown()
    return answers


def ask(client: OpenAI, number: int) -> str:
    """Odd clients stream."""
    asked = {"model": "demo", "prompt": prompt(number), "max_tokens": NEW_TOKENS, "temperature": 0}
    if number % 2:
        return "".join(part.choices[0].text for part in client.completions.create(**asked, stream=True))
    return client.completions.create(**asked).choices[0].text


@pytest.mark.slow
def test_64_concurrent_clients_each_get_what_one_device_gives_alone(server, alone):
    client = OpenAI(base_url=server.url + "/v1", api_key="none", timeout=300, max_retries=0)
    with ThreadPoolExecutor(CLIENTS) as pool:
        texts = list(pool.map(lambda number: ask(client, number), range(CLIENTS)))
    assert texts == [answer.text for answer in alone]


def test_chat_answers_streamed_and_whole_alike(server):
    client = OpenAI(base_url=server.url + "/v1", api_key="none", timeout=300, max_retries=0)
    asked = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is a list?"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = text_of(client.chat.completions.create(**asked).choices[0].message)
    parts = [text_of(part.choices[0].delta) for part in client.chat.completions.create(**asked, stream=True)]
    assert whole == tuple(map("".join, zip(*parts, strict=True)))
    assert any(whole)


def text_of(message) -> tuple[str, str]:
    """Reasoning and answer of a message, or of a piece of one."""
    return getattr(message, "reasoning_content", None) or "", message.content or ""


def test_start_up_tells_mesh_bytes_capacity_and_address(server):
    for wanted in ("dp=32", "32", "tokens", server.url):
        assert wanted in server.output
