"""Experts in a process of their own: they may go and come back, and no token changes.

These are also the tests of `afd/remote_experts.py`, `afd/expert_link.py` and `afd/messages.py`. All sides are
in this process, each with its own devices' arrays, and speak over the loopback interface.
"""

import socket
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from layouts import write_checkpoint
from processes import free_port
from waits import until

from dsjax import LLM, SamplingParams
from dsjax.engine.afd import remote_experts
from dsjax.engine.afd.layer_programs import OnHost
from dsjax.engine.afd.messages import ExpertLinks
from dsjax.engine.expert_process import load_experts
from dsjax.engine.setup import loading
from dsjax.engine.setup.args import EngineArgs
from dsjax.errors import UserError

SIZES = {
    "max_num_seqs": 1,  # several would be another program for decodes
    "cache_tokens": 256,
    "max_num_batched_tokens": 16,
    "prefill_chunk": 16,
    "page_size": 4,
    "max_model_len": 64,
    "mla_prefill": "A_CC_ME",
}
"""Prompts in the form of decodes, so that what stands in the cache has one value, whichever of the two computed it."""
MESHES = {"attention_mesh": "dp=2", "expert_mesh": "ep=4", "dtype": "float32"}
EPLB = {"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0}
SHARED = {"expert_mesh": "ep=6", "enable_eplb": True, "eplb_config": EPLB}
"""What three processes share, which have two devices each, and between which experts move."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([5, 9, 33, 2, 71], [8, 8, 60], list(range(2, 30)))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Without a dense layer, which no process with experts hears of."""
    return write_checkpoint(tmp_path_factory.mktemp("experts"), mtp=True, first_k_dense_replace=0)


def free_address():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def experts(checkpoint, request):
    """``experts(address, **options)`` starts a process with experts, and ends it after the test."""

    def started(address, **options):
        options = {"afd_role": "expert", "afd_address": address} | MESHES | SIZES | options
        process = load_experts(EngineArgs(model=str(checkpoint), **options))
        request.addfinalizer(process.close)
        return process

    return started


@pytest.fixture
def attention(checkpoint, experts, request):
    """``attention(address, **options)`` starts an engine whose experts are there, and ends it after the test."""

    def started(address, **options):
        llm = LLM(str(checkpoint), **{"afd_role": "attention", "afd_address": address} | MESHES | SIZES | options)
        request.addfinalizer(llm.shutdown)
        return llm

    return started


def made(llm):
    return [
        (one.outputs[0].token_ids, [next(iter(p.values())).logprob for p in one.outputs[0].logprobs])
        for one in llm.generate(PROMPTS, GREEDY)
    ]


def of_one_device(checkpoint, **options):
    with LLM(str(checkpoint), mesh="dp=1", dtype="float32", **SIZES, **options) as one:
        return made(one)


@pytest.fixture(scope="module")
def expected(checkpoint):
    return of_one_device(checkpoint)


def test_a_model_that_cannot_be_loaded_leaves_no_connection_to_the_experts_open(experts, attention, monkeypatch):
    process = experts(address := free_address())
    monkeypatch.setattr(loading, "load", Mock(side_effect=UserError("the weights cannot be read")))
    with pytest.raises(UserError, match="the weights cannot be read") as kept:
        attention(address)
    until(lambda: not process.num_connections)
    assert kept.value  # with all that it holds


def test_what_the_attention_side_says_of_its_dense_mlps_keeps_no_experts_from_starting(experts):
    experts(free_address(), attention_mesh="dp=1,tp=2", moe_dense_tp_size=2)


def test_a_further_round_sends_the_cells_that_are_left_alone(monkeypatch):
    """A sender has three rows for the first of two devices, each with room for two in a round, and one for the second."""
    monkeypatch.setattr(remote_experts, "own_parts", list)
    wire = SimpleNamespace(row_words=1, word=np.int32, width=1, dtype=np.float32)
    between = SimpleNamespace(part_devices=2, capacity=2, senders=1, columns=1, tokens=4, wire=wire)
    way = remote_experts.WayToProcesses(None, "moe_layers", between, np.array([0]))
    rows, counts = np.arange(4).reshape(1, 4, 1), OnHost(np.array([[3, 1]]))
    calls = [remote_experts._CallOfPart(way, 0, 0, r, 0, rows, counts) for r in range(2)]
    assert [call.prepare()[1][:, 0].tolist() for call in calls] == [[0, 1, 2], [0]]


@pytest.mark.slow  # compiles two engines and loads five processes' experts
def test_three_processes_share_fp8_experts_and_each_may_go_by_itself(
    checkpoint, experts, attention, kernels, monkeypatch
):
    """Products quantise what the wire does, in the same blocks: one device, which sends nothing, has the same numbers."""
    products = {"weights": "fp8", "activation_scheme": "dynamic"}
    expected, options = of_one_device(checkpoint, **products), SHARED | products | {"dispatch_wire": "fp8"}
    several = ",".join(free_address() for _ in range(3))
    start = lambda rank: experts(several, **options, afd_server_rank=rank)  # noqa: E731
    processes = [start(rank) for rank in range(3)]
    llm = attention(several, **options)
    assert llm.executor.model.is_exact
    places = [process._writer.placement.copy() for process in processes]
    assert made(llm) == expected
    assert all((process._writer.placement != rows).any() for process, rows in zip(processes, places, strict=True))
    held = [process.side.params["moe_layers.moe.experts.down.weight"].shape[1] for process in processes]
    assert held == [12, 12, 12]
    counts = llm.executor.extension(ExpertLinks).counts
    row_bytes = processes[0]._exchange.wire.row_bytes
    assert [one.sent / row_bytes for one in counts] == [process.num_rows for process in processes]
    assert all(one.sent < one.received / 2 for one in counts), "rows are FP8, and answers a float32 for each choice"
    for rank in (1, 2):
        monkeypatch.setattr(processes[rank], "_compute", lambda *_, rank=rank: processes[rank].close())
    comers, stop = [], threading.Event()
    coming = threading.Thread(target=lambda: comers.extend(come_back(processes[1:], start, stop)))
    coming.start()
    try:
        assert made(llm) == expected
    finally:
        stop.set()
        coming.join()
    assert [counts.losses > 0 for counts in llm.executor.extension(ExpertLinks).counts] == [False, True, True]
    assert len(comers) == 2
    for comer in comers:  # experts are where they are now
        np.testing.assert_array_equal(comer._writer.placement, processes[0]._writer.placement)


def come_back(processes, start, stop):
    """Start each process anew as soon as it has been closed."""
    waiting = dict(enumerate(processes, start=1))
    while waiting and not stop.is_set():
        for rank, process in list(waiting.items()):
            if process.endpoint._context.closed:
                del waiting[rank]
                yield start(rank)
        time.sleep(0.05)


@pytest.mark.slow  # compiles an engine twice
def test_another_side_with_more_devices_takes_over_and_the_cache_stays(experts, attention, expected):
    first, others = free_address(), [free_address(), free_address()]
    wider = {"expert_mesh": "ep=8"}
    old = experts(first)
    new = [experts(",".join(others), afd_server_rank=rank, **wider) for rank in range(2)]
    llm, last = attention(first), old
    assert made(llm) == expected
    with pytest.raises(UserError, match="ep=5 does not divide the 32 physical experts"):
        llm.scale(expert_mesh="ep=5", afd_address=others[0])
    with pytest.raises(UserError, match="at other addresses"):
        llm.scale(expert_mesh="ep=8", afd_address=f"{others[0]},{first}")
    with pytest.raises(UserError, match="differ in expert_mesh 'ep=8' here and 'ep=4' there"):
        llm.scale(afd_address=",".join(others))
    assert made(llm) == expected  # as it was
    llm.scale(expert_mesh="ep=8", afd_address=",".join(others))
    old.close()
    calls, tokens = [process.num_calls for process in new], [tokens for tokens, _ in expected]
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == tokens
    assert outputs[2].num_cached_tokens == 27  # all of its prompt but the last
    assert all(process.num_calls > before for process, before in zip(new, calls, strict=True))
    assert (llm.facts.expert_mesh, llm.facts.physical_experts_per_device) == ("ep=8", 4)
    assert len(llm.executor.extension(ExpertLinks).counts) == 2
    with pytest.raises(UserError, match="change one side and then the other"):
        llm.scale("dp=1", expert_mesh="ep=4")
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(index), prompt, GREEDY)
    assert not any(one.finished for _ in range(2) for one in llm.engine.step())
    llm.scale("tp=2")  # the attention side's own mesh, which finds the experts where they are now
    assert (llm.facts.mesh, llm.facts.expert_mesh) == ("tp=2", "ep=8")
    found = {}
    while llm.engine.has_unfinished():
        found |= {int(one.request_id): one.outputs[0].token_ids for one in llm.engine.step()}
    assert [found[index] for index in range(len(PROMPTS))] == tokens
    last = experts(third := free_address())
    llm.scale(expert_mesh="ep=4", afd_address=third)  # and then the other side again
    assert made(llm) == expected
    last.close()
    with pytest.raises(UserError, match=f"no expert process answers at {third} .*ask again when it is there"):
        llm.scale("dp=2")
    assert llm.facts.mesh == "tp=2"
    last = experts(third)
    assert made(llm) == expected


def test_an_address_that_is_taken_is_refused_before_anything_is_loaded(experts):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=r"cannot listen at 127.0.0.1 port \d+ \(.*\), where attention is to find"):
            experts(address)


def test_a_process_with_experts_alone_is_no_llm(checkpoint):
    with pytest.raises(UserError, match="load_experts"):
        LLM(str(checkpoint), afd_role="expert", afd_address=free_address(), **MESHES)
