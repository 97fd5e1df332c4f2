"""The client against a scripted server on a real socket.

Lower bounds are what the script sleeps (less 5 ms for the clocks' grain); upper bounds are so wide that only a hang fails them.
"""

import asyncio

import pytest

from dsjax.bench.serve import server_facts
from dsjax.bench.serve.client import Client, open_session
from dsjax.bench.serve.load import run_load
from dsjax.bench.serve.options import ServerOptions
from dsjax.bench.serve.records import BenchRequest
from dsjax.bench.serve.server_facts import ServerError, ask_server, server_url
from dsjax.options import OptionError

GRAIN, AGES = 0.005, 120.0


def send(url, *requests, **options):
    async def work():
        async with open_session("key") as session:
            client = Client(session, url, "tiny", ServerOptions(**{"request_timeout": AGES} | options))
            return await run_load(client, requests, [0.0] * len(requests), None)

    return asyncio.run(work()).records


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_times_are_those_of_the_script(start_fake, endpoint):
    server = start_fake(first=0.2, gap=0.05)
    (record,) = send(server.url, BenchRequest("hello", 3, 5), endpoint=endpoint)
    assert record.error is None
    assert (record.prompt_tokens, record.output_tokens, len(record.chunk_times)) == (7, 5, 5)
    assert record.text == " tok" * 5
    assert 0.2 - GRAIN <= record.ttft < AGES
    assert 0.4 - GRAIN <= record.latency < AGES
    assert sum(record.itls) == pytest.approx(record.latency - record.ttft)
    assert record.tpot == pytest.approx(sum(record.itls) / 4)


def test_what_is_sent(start_fake):
    server = start_fake()
    send(server.url, BenchRequest([1, 2], 2, 4), ignore_eos=True, extra_body='{"top_p": 0.5}')
    send(server.url, BenchRequest("hi", 1, 4), endpoint="chat", temperature=None)
    common = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}}
    completions = {"prompt": [1, 2], "max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "top_p": 0.5}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 4}
    assert server.script.bodies == [common | completions, common | chat]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"refuse": lambda body: (400, "prompt is\nempty")}, "HTTP 400: prompt is empty"),
        ({"fail_after": 2}, "error event: the engine failed"),
        ({"drop_after": 2}, "Client"),
        ({"hang": True}, "no end of the answer within 0.3 s"),
        ("closed", "Cannot connect"),
    ],
)
def test_every_way_to_fail_is_one_line_in_the_record(start_fake, script, message):
    server = start_fake(**({} if script == "closed" else script))
    if script == "closed":
        server.close()
    (record,) = send(server.url, BenchRequest("x", 1, 5), request_timeout=0.3 if "hang" in script else AGES)
    assert not record.succeeded
    assert message in record.error
    assert "\n" not in record.error


def facts_of(url, model=None, wait_seconds=0.0):
    async def work():
        async with open_session(None) as session:
            return await ask_server(session, server_url(url), model, wait_seconds)

    return asyncio.run(work())


def test_the_server_s_own_facts(start_fake):
    server = start_fake(info={"num_devices": 32}, root="demo", max_model_len=512)
    facts = facts_of(server.url + "/v1/")
    assert (facts.model, facts.root, facts.max_model_len, facts.num_devices) == ("tiny", "demo", 512, 32)
    assert facts_of(start_fake().url).num_devices is None
    for devices in (0, -3, "two", True, 1.5):
        assert facts_of(start_fake(info={"num_devices": devices}).url).num_devices is None
    with pytest.raises(ServerError, match=r"'big', but .* serves tiny"):
        facts_of(server.url, "big")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("localhost:8000", "does not begin with http://"),
        ("", "does not begin with http://"),
        ("http://", "has no host"),
        ("http://a b", "has a space"),
        ("http://127.0.0.1:99999", "Port out of range"),
        ("http://127.0.0.1:-1", "Port could not be cast"),
        ("http://127.0.0.1:abc", "Port could not be cast"),
        ("http://127.0.0.1:0/v1", "port 0"),
        ("http://[::1", "Invalid IPv6 URL"),
        ("https://999.1.1.1:80", "999.1.1.1 is no IPv4 address"),
    ],
)
def test_an_address_that_cannot_be_says_what_is_wrong_with_it(url, why):
    with pytest.raises(OptionError, match=r"^--base-url is .*; expected an address such as http://HOST:PORT$") as error:
        server_url(url)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("path", "first", "message"),
    [
        ("/ready", "503", "not ready yet"),
        ("/v1/models", "503", r"/v1/models answered 503"),  # a gateway's server starts
        ("/ready", "close", r"is not ready yet \(/ready: .*isconnected"),
    ],
)
def test_a_server_that_starts_is_waited_for_or_named(start_fake, path, first, message):
    assert facts_of(start_fake(starting={path: [first] * 2}).url, wait_seconds=AGES).model == "tiny"
    with pytest.raises(ServerError, match=message):
        facts_of(start_fake(starting={path: [first] * 99}).url)


def test_a_server_that_still_compiles_is_waited_for_but_not_for_ever(start_fake, monkeypatch):
    server = start_fake(starting={"/ready": ["compiling"] * 3})
    assert facts_of(server.url).model == "tiny"
    assert not server.script.starting["/ready"], "it was asked until it had compiled all"
    monkeypatch.setattr(server_facts, "_COMPILE_SECONDS", 0.1)
    assert facts_of(start_fake(starting={"/ready": ["compiling"] * 99}).url).model == "tiny"


@pytest.mark.parametrize("models", [{"data": ["tiny"]}, {"data": [{"name": "tiny"}]}, {"data": None}, [], "tiny"])
def test_models_that_are_not_listed_as_openai_s_are_no_server(start_fake, models):
    with pytest.raises(ServerError, match="no server at http"):
        facts_of(start_fake(models=models).url)
