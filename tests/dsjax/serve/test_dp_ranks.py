"""A server of four DP ranks spreads requests over them, shows each by its number, and lets clients name one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_server import LiveServer, wait_until
from prometheus_client.parser import text_string_to_metric_families
from scripted_executor import ScriptedExecutor, tool_tokenizer

from dsjax.serve.metrics import Metrics
from dsjax.serve.options import ServeOptions

ADMIN = {"Authorization": "Bearer root"}
SHORT = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    tokenizer = tool_tokenizer()
    live = LiveServer(
        tokenizer=tokenizer,
        executor=ScriptedExecutor(tokenizer, num_ranks=4),
        options=ServeOptions(admin_api_key="root"),
        metrics=Metrics("tiny", 4, 512),
    )
    yield live
    wait_until(lambda: live.pages_in_use == 0 and live.engine.num_unfinished == 0)
    live.signal()
    assert live.join() == 0
    assert live.executor.closed


def samples(server, name: str) -> dict[str, float]:
    """Read a metric's samples by their label `engine`."""
    return {
        sample.labels["engine"]: sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        if sample.name == name
    }


def complete(server, prompt, **fields):
    return server.post("/v1/completions", {**SHORT, "prompt": prompt, **fields})


def test_requests_spread_over_all_ranks(server):
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda i: complete(server, [30 + i] * 20, n=2, seed=i, temperature=1), range(24)))
    assert [answer.status_code for answer in answers] == [200] * 24
    made = samples(server, "vllm:generation_tokens_total")
    assert sorted(made) == ["0", "1", "2", "3"]
    assert sum(made.values()) == 24 * 2 * 4
    assert all(made.values())
    for path in ("/server_info", "/get_load"):
        assert [rank["rank"] for rank in server.get(path).json()["ranks"]] == [0, 1, 2, 3]
    assert sum(samples(server, "dsjax_rank_pages_cached").values()) > 0


def test_a_flush_empties_every_rank(server):
    for index in range(4):
        complete(server, [60 + index] * 30)
    assert server.post("/flush_cache", headers=ADMIN).json() == {"status": "flushed"}
    assert samples(server, "dsjax_rank_pages_cached") == {str(rank): 0 for rank in range(4)}


def test_a_shared_beginning_and_a_session_stay_with_the_rank_that_has_them(server):
    def cached(prompt, **options) -> int:
        answer = server.post("/v1/completions", {**SHORT, "prompt": prompt}, **options)
        return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    for index in range(4):
        assert cached([80 + index] * 40) == 0
    assert [cached([80 + index] * 40 + [7, 8]) for index in (2, 0, 3, 1)] == [40] * 4
    session = {"headers": {"X-Session-Affinity": "one"}}
    assert [cached(list(range(90, 90 + 20 * turn)), **session) for turn in (1, 2, 3)] == [0, 20, 40]


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
        ("/v1/responses", {"input": "a"}),
    ):
        refused = server.post(path, body, headers={"X-Data-Parallel-Rank": "4"})
        assert refused.status_code == 400
        assert "this server has 0 to 3" in refused.json()["error"]["message"]


def test_all_requests_are_aborted_wherever_they_are(server):
    server.executor.step_seconds = 0.05
    answers = []
    threads = [
        threading.Thread(
            target=lambda i=i: answers.append(complete(server, [i] * 9, max_tokens=200, request_id="mine")), daemon=True
        )
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(rank.running for rank in server.parts.core.scheduler.ranks))
    wait_until(lambda: server.engine.num_unfinished == 4)
    assert server.post("/abort_request", {"request_id": "mine"}, headers=ADMIN).json() == {"aborted": 4}
    for thread in threads:
        thread.join(60)
    assert [answer.status_code for answer in answers] == [503] * 4
    wait_until(lambda: server.pages_in_use == 0)
