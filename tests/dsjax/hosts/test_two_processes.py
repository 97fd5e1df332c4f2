"""Two processes of two devices each compute what one process does, and end together."""

import json
import re

import pytest
from layouts import MODELS, write_checkpoint
from llm_process import OFFLOADING, generate, generate_alone, sample
from processes import outputs_of
from quick_compilation import FEW_SHAPES

from dsjax.checkpoint.shards import SafetensorsFolder

pytestmark = pytest.mark.slow

# Without any of these, and with gather, a server over two processes makes the tokens of one on dp=4: test_two_process_server.py.
EPLB = {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0}
OPTIONS = OFFLOADING | {"enable_eplb": True, "eplb_config": EPLB}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), mtp=True, **MODELS["v3.2"]))


@pytest.fixture(scope="module")
def outputs(checkpoint):
    return outputs_of({"model": checkpoint, **FEW_SHAPES, **OPTIONS}, "go", "others", "go", "sampled")


@pytest.fixture(scope="module")
def found(outputs):
    """What the first process found: of the prompts, of others that push out their pages, of the prompts again, and with samples."""
    return [json.loads(line) for line in outputs[0].splitlines() if line.startswith("{")]


def test_two_processes_make_the_tokens_of_one_device(found, checkpoint):
    greedy, sampled = generate_alone(checkpoint, lambda llm: (generate(llm), sample(llm)), **FEW_SHAPES)
    assert [one["tokens"] for one in (found[0], *found[2:])] == [greedy, greedy, sampled]


def test_drafts_balanced_experts_and_pages_in_host_memory_are_over_two_processes_what_they_are_in_one(found):
    assert found[-1]["rebalances"] > 0
    assert found[2]["fetched"] > found[0]["fetched"]


def test_each_process_reads_what_its_own_devices_hold_and_nothing_else(outputs, checkpoint):
    sizes = {name: spec.nbytes for name, spec in SafetensorsFolder(checkpoint).specs.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    for text in outputs:
        [(read, whole)] = re.findall(r"Read ([\d,]+) of the checkpoint's ([\d,]+) bytes", text)
        assert int(whole.replace(",", "")) == sum(sizes.values())
        # 36 slots for 32 experts: a process has half of the slots, and everything but experts.
        assert int(read.replace(",", "")) == sum(sizes.values()) - experts + experts * 18 // 32
