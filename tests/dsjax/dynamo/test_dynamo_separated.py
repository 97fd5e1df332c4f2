"""Dynamo's frontend before prefill and decode workers, of one and of two processes: every answer is that of one engine."""

import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from waits import until
from with_dynamo import WITH_DYNAMO

pytestmark = [pytest.mark.dynamo, WITH_DYNAMO, pytest.mark.slow]

TRANSFER = ("--transfer-host", "127.0.0.1", "--local-prefill-tokens", "17", "--compile-ahead", "0")
BOOTSTRAP = (*TRANSFER, "--mesh", "tp=2", "--disaggregation-mode", "prefill", "--bootstrap")
CLIENTS = 16
PARAMS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


def prompts(first: int) -> list[str]:
    """A prompt for each client, whose numbers begin there: three pages at least."""
    return ["".join(f"value_{first + client} = {i}\n" for i in range(7 + client % 6)) for client in range(CLIENTS)]


@pytest.fixture(scope="module")
def deployment(alone, tmp_path_factory):
    """Prefill has two processes; `test_wide_sides.py` has two on both sides. The order of the tests is theirs."""
    from deployment import Group, Worker
    from tiny_deployment import Deployment

    with Deployment(tmp_path_factory.mktemp("dynamo")) as made:
        for side, kind in (("prefill", Group), ("decode", Worker)):
            made.start(side, *alone.options, *TRANSFER, "--mesh", "dp=2", "--disaggregation-mode", side, kind=kind)
        made.wait()
        yield made


def transfers(deployment) -> tuple[float, float]:
    decode = deployment.workers["decode"]
    return tuple(sum(decode.metric("dsjax_transfers_total", outcome=one)) for one in ("completed", "given_up"))


def test_prefill_first_then_decode_makes_the_tokens_of_one_engine(alone, deployment):
    """Pages go from each prefill process straight to the decode process."""
    assert min(len(alone.ids(text)) for text in prompts(0)) > 32
    assert deployment.ask_all(prompts(0), PARAMS) == alone.texts(prompts(0), PARAMS)
    assert transfers(deployment) == (CLIENTS, 0)
    prefill = deployment.workers["prefill"]
    ready = f"{prefill.follower.url}/ready"  # which the follower may say after its leader has answered
    until(lambda: httpx.get(ready).json()["status"] == "ready", every=0.1)
    assert sum(prefill.follower.metric("dsjax_follower_commands_total")) > 0
    assert sum(prefill.leader.metric("dsjax_prefill_engine_tokens_total")) > 32 * CLIENTS
    assert prefill.end() == [0, 0], prefill.last_words()


def test_both_at_once_under_one_room_makes_them_too(alone, deployment):
    """After a prefill worker that ended in order, with one of another mesh that advertises where it can be had."""
    deployment.drop("prefill")
    deployment.start("bootstrap", *alone.options, *BOOTSTRAP)
    deployment.wait()
    assert deployment.ask_all(prompts(100), PARAMS) == alone.texts(prompts(100), PARAMS)
    assert transfers(deployment) == (2 * CLIENTS, 0)


def test_a_prefill_worker_that_is_killed_costs_no_request_where_there_is_another(alone, deployment):
    """Last. What was asked of it is computed by the decode worker, within the transfer's time limit."""
    deployment.start("spare", *alone.options, *BOOTSTRAP)
    deployment.wait()
    expected = alone.texts(prompts(200), PARAMS)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(deployment.ask_all, prompts(200), PARAMS)
        deployment.workers["bootstrap"].end(signal.SIGKILL)
        assert answers.result() == expected
    decode = deployment.workers["decode"]
    assert decode.end() == 0, decode.log.read_text()[-4000:]
