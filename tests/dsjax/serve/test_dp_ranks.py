"""A server of four DP ranks shows each by its number, and lets clients name one. `test_routing.py` spreads requests."""

import pytest
from live_server import LiveServer, wait_until
from scripted_executor import ScriptedExecutor, tool_tokenizer

from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions

ADMIN = {"Authorization": "Bearer root"}
SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    tokenizer = tool_tokenizer()
    executor, metrics = ScriptedExecutor(tokenizer, num_ranks=4), Metrics("tiny", 4, 512)
    options = ServeOptions(admin_api_key="root")
    with LiveServer(tokenizer=tokenizer, executor=executor, options=options, metrics=metrics) as live:
        yield live
    assert executor.closed


def samples(server, name: str) -> dict[str, float]:
    return {labels["engine"]: value for labels, value in server.samples(name)}


def test_a_flush_empties_every_rank(server):
    for rank in range(4):
        server.post("/v1/completions", {**SHORT, "prompt": [60] * 30}, headers={"X-Data-Parallel-Rank": f"{rank}"})
    assert any(samples(server, "dsjax_rank_pages_cached").values())
    assert server.post("/flush_cache", headers=ADMIN).json() == {"status": "flushed"}
    assert samples(server, "dsjax_rank_pages_cached") == {str(rank): 0 for rank in range(4)}


def test_a_router_outside_names_the_rank_by_its_number(server):
    for rank in (3, 1, 2):
        before = samples(server, "vllm:generation_tokens_total")
        answer = server.post(
            "/v1/completions",
            {**SHORT, "prompt": [99, rank]},
            headers={"X-Data-Parallel-Rank": f"{rank}", "X-Session-Affinity": "one"},
        )
        assert answer.status_code == 200
        after = samples(server, "vllm:generation_tokens_total")
        assert {name for name in after if after[name] != before[name]} == {f"{rank}"}
    for path, body in (
        ("/v1/completions", {"prompt": [1]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"model": "tiny", "input": "a"}),
    ):
        refused = server.post(path, body, headers={"X-Data-Parallel-Rank": "4"})
        assert refused.status_code == 400
        assert "this server has 0 to 3" in refused.json()["error"]["message"]


def test_all_requests_are_aborted_wherever_they_are(server):
    server.executor.step_seconds = 0.05
    bodies = [{**SHORT, "prompt": [i] * 9, "max_tokens": 200, "request_id": "mine"} for i in range(4)]
    answers = [server.post_later("/v1/completions", body) for body in bodies]
    wait_until(lambda: all(rank.running for rank in server.parts.core.scheduler.ranks))
    wait_until(lambda: server.engine.num_unfinished == 4)
    assert server.post("/abort_request", {"request_id": "mine"}, headers=ADMIN).json() == {"aborted": 4}
    assert [answer.result(60).status_code for answer in answers] == [503] * 4
    wait_until(lambda: server.pages_in_use == 0)
    server.executor.step_seconds = 0
