"""A server with two attention processes and AFD: experts fail over, and an attention process is lost, returns and leaves."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest
from llm_process import generate_alone
from processes import free_port
from served_group import KEY, PROMPTS, SIZES, ServedGroup
from waits import until

from dsjax import SamplingParams
from dsjax.engine.expert_process import load_experts
from dsjax.engine.setup.args import EngineArgs

pytestmark = pytest.mark.slow

TOKENS = 8
EPLB = '{"num_redundant_experts": 4, "window_size": 4, "step_interval": 4, "payback": 0}'
MOVING = {"enable_dbo": True, "dbo_prefill_token_threshold": 4, "enable_eplb": True, "eplb_config": EPLB}


@pytest.fixture(scope="module")
def alone(worded, kernels):
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    outputs = generate_alone(str(worded), lambda llm: llm.generate(PROMPTS, params), **SIZES)
    return [output.outputs[0].text for output in outputs]


class Served(ServedGroup):
    """The two processes of the attention side, and one with experts in this process."""

    def __init__(self, checkpoint):
        sides = {"attention_mesh": "dp=4", "expert_mesh": "ep=4", "afd_address": f"127.0.0.1:{free_port()}"}
        self.checkpoint, self.sides = checkpoint, sides
        self.experts = self.start_experts()
        options = {"model": checkpoint, "afd_role": "attention"} | sides | SIZES | MOVING
        super().__init__(options, timeout=300)

    def start_experts(self, **other):
        """Start a process with experts; other: than those of now."""
        options = self.sides | other | SIZES | MOVING
        return load_experts(EngineArgs(model=str(self.checkpoint), afd_role="expert", **options))

    def texts(self) -> list[str]:
        answer = self.complete(prompt=PROMPTS, max_tokens=TOKENS, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        return [choice["text"] for choice in answer.json()["choices"]]

    @contextlib.contextmanager
    def asked_again_and_again(self, pool: ThreadPoolExecutor) -> Iterator[Future[list[list[str]]]]:
        """Ask for `texts` one time after the other in a thread until the end of the block; give all of them."""
        over = threading.Event()

        def keep_asking():
            answers = [self.texts()]
            while not over.is_set():
                answers.append(self.texts())
            return answers

        answers = pool.submit(keep_asking)
        try:
            yield answers
        finally:
            over.set()

    @property
    def mesh(self) -> str:
        return httpx.get(f"{self.url}/server_info", headers=KEY, timeout=60).json()["mesh"]

    def until(self, mesh: str, alone: list[str]) -> None:
        """Ask now and then until the mesh is that one, and once more."""

        def is_there():
            assert self.texts() == alone
            return self.mesh == mesh

        until(is_there, 300, every=1, what=f"the mesh is {mesh}")
        assert self.texts() == alone


@pytest.fixture(scope="module")
def served(worded, kernels):
    served = Served(worded)
    try:
        served.wait_until_ready()
        yield served
    finally:
        served.group.end()
        served.experts.close()


# The order of these tests is theirs.


def test_answers_are_those_of_one_device_and_nothing_is_compiled_while_serving(served, alone):
    assert served.texts() == alone
    assert served.metric("dsjax_compilations_after_warm_up_total") == 0
    assert served.metric("dsjax_expert_process_connected") == 1


def test_experts_are_counted_over_all_attention_processes(served):
    served.check_experts_are_counted()


def test_another_side_of_experts_takes_over_on_all_attention_processes_while_answers_go_on(served, alone):
    """No generation is made, so that requests and caches stay; the old side can end. One that does not fit leaves all where they are."""
    other = {"expert_mesh": "ep=2", "afd_address": f"127.0.0.1:{free_port()}"}
    experts = served.start_experts(**other)
    try:
        with ThreadPoolExecutor(1) as pool, served.asked_again_and_again(pool) as answers:
            refused = served.post("/scale", afd_address=other["afd_address"])
            assert refused.status_code == 400
            assert "differ in expert_mesh 'ep=2' here and 'ep=4' there" in refused.json()["error"]["message"]
            asked = served.experts.num_calls
            taken = served.post("/scale", **other)
        assert all(answer == alone for answer in answers.result(240))
        assert taken.status_code == 200, taken.text
        assert (taken.json()["mesh"], taken.json()["expert_mesh"]) == ("dp=4", "ep=2")
        assert served.experts.num_calls > asked, "the old side was asked until the new one took over"
        served.experts.close()
        assert served.texts() == alone
        assert 0 < experts.num_products < experts.num_calls, "both attention processes call, and are computed together"
        assert served.metric("dsjax_generation") == 0
        assert served.metric("dsjax_eplb_rebalances_total") > 0
        assert served.metric("dsjax_compilations_after_warm_up_total") == 0
    finally:
        served.experts.close()
        served.experts, served.sides = experts, served.sides | other


def test_an_attention_process_that_is_killed_while_experts_are_waited_for_costs_nothing_and_comes_back(served, alone):
    begun = served.experts.num_calls
    with ThreadPoolExecutor(1) as pool, served.asked_again_and_again(pool) as answers:
        until(lambda: served.experts.num_calls > begun + 4)
        served.experts.close()
        until(lambda: "it is waited for" in "".join(served.group.output))  # of one: the other may have its answer
        served.group.processes[1].send_signal(signal.SIGKILL)
        served.group.wait_for(0, "Generation 1 begins")
        served.experts = served.start_experts()
    assert all(answer == alone for answer in answers.result(240))
    served.until("dp=2", alone)
    served.group.start_again(1)
    served.until("dp=4", alone)
    assert "Traceback" not in "".join(served.group.output)


def test_one_that_is_told_to_end_leaves_and_the_group_ends(served, alone):
    printed = len(served.group.output[0])
    served.group.processes[1].send_signal(signal.SIGTERM)
    served.until("dp=2", alone)
    assert served.group.processes[1].wait(240) == 0, served.group.last_words()
    for reason in ("leave", "loss"):
        assert served.metric("dsjax_generation_changes_total", f'reason="{reason}"') == 1
    until(lambda: "leaves, as it was told to end" in served.group.output[0][printed:])
    assert "has gone away" not in served.group.output[0][printed:]
    served.group.processes[0].send_signal(signal.SIGTERM)
    assert served.group.codes(240) == [0, 0], served.group.last_words()
