"""A stage a process: what two processes make, each with one stage of two devices, is what one device makes.

These are the tests of `pipeline/stages_of_process.py` too.
"""

import json
import signal
from types import SimpleNamespace

import numpy as np
import pytest
from layouts import write_checkpoint
from llm_process import generate_alone, record, sample
from processes import Group
from quick_compilation import FEW_SHAPES

from dsjax.engine.setup.stages import check_shares, owner_of
from dsjax.errors import UserError
from sharding import MeshError, MeshSpec

pytestmark = pytest.mark.slow


def test_two_processes_with_a_stage_each_make_the_tokens_of_one_device_and_end_together(tmp_path):
    """With drafts, redundant experts, and so few pages on the devices that those of earlier prompts come back from host memory."""
    checkpoint = str(write_checkpoint(tmp_path, mtp=True))
    drafting = FEW_SHAPES | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
    (tokens, loads), sampled = generate_alone(checkpoint, lambda llm: (record(llm), sample(llm)), **drafting)
    # One DP rank, so that prompts push out each other's pages.
    options = drafting | {"model": checkpoint, "mesh": "pp=2,tp=2", "redundant_experts": 2}
    options |= {"cache_tokens": 36, "host_cache_bytes": 400_000}
    group = Group(["tests/dsjax/hosts/llm_process.py", "--options", json.dumps(options)], 2)
    try:
        group.wait_for(0, "ready")
        group.write(0, "go\n")
        group.wait_for(0, "tokens")
        group.processes[1].send_signal(signal.SIGTERM)  # as where a whole group is deleted: requests are finished
        group.wait_for(1, "goes on until process 0 ends")
        group.write(0, "go\n")  # from pages of the cache, in part
        group.write(0, "record\nsampled\n")
        group.processes[0].stdin.close()
        assert group.codes(240) == [0, 0], group.last_words()
        lines = [json.loads(line) for line in group.output[0].splitlines() if line.startswith("{")]
        assert [line["tokens"] for line in lines] == [tokens, tokens, tokens, sampled]
        assert lines[2]["loads"] == loads
        assert lines[0]["mesh"] == "pp=2,tp=2"
        assert lines[1]["fetched"] > lines[0]["fetched"]
    finally:
        group.end()


def test_a_stage_is_of_one_process():
    devices = [SimpleNamespace(process_index=index) for index in (0, 0, 1, 1, 2, 2)]
    first, second = (SimpleNamespace(devices=np.array(some)) for some in (devices[:3], devices[3:]))
    for mesh, owners in ((first, "0, 1"), (second, "1, 2")):
        with pytest.raises(MeshError, match=f"the devices of a stage are of processes {owners}, expected one"):
            owner_of("a stage", mesh)
    assert owner_of("a stage", SimpleNamespace(devices=np.array(devices[2:4]))) == 1


def test_a_process_without_a_stage_is_refused_by_name():
    group = SimpleNamespace(members=[SimpleNamespace(process_id=k, name=f"host-{k}") for k in range(3)])
    with pytest.raises(UserError, match="has 2 stages, none of them of host-1; start 2 processes"):
        check_shares(MeshSpec.parse("pp=2,dp=2"), [0, 2], group)
