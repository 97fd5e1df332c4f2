"""The trained DeepSeek-V4, served: one device's text on other meshes, and with drafts, of which many are accepted."""

import dataclasses

import pytest
from watched_drafts import Watch

from dsjax import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["def main(", "import os\nimport sys\n\n\nclass Queue:\n", "# " + "value = 1\n" * 40]
SIZES = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "prefill_chunk": 32, "max_model_len": 256, "dtype": "float32"}

pytestmark = pytest.mark.slow


def texts(llm: LLM) -> list[list[int]]:
    llm.executor.buckets = dataclasses.replace(llm.executor.buckets, decode=(4,))  # one program of decodes
    with llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return texts(LLM("demo-v4", mesh="dp=1", **SIZES))


@pytest.mark.parametrize("mesh", ["dp=8", "tp=4"])
def test_greedy_text_is_one_devices(mesh, expected):
    assert texts(LLM("demo-v4", mesh=mesh, **SIZES)) == expected


def test_half_of_the_drafts_are_accepted_and_change_nothing(expected, monkeypatch):
    llm = LLM("demo-v4", mesh="dp=1", speculative_config={"method": "mtp", "num_speculative_tokens": 1}, **SIZES)
    watch = Watch(llm, monkeypatch)
    assert texts(llm) == expected
    assert sum(watch.accepted.values()) > 0.5 * sum(watch.verified.values())
