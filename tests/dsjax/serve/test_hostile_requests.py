"""Requests that are wrong in every way that came to mind: each is answered as it should be, none with a 5xx, nothing stays behind.

A case is (what it tries, body, status class or status). Bodies are Python values, or bytes that are sent as they are.
"""

import contextlib
import json
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from live_server import LiveServer, wait_until
from request_bodies import CHAT as H
from request_bodies import COMPLETIONS as C
from request_bodies import HELD, MESSAGES, tool

from dsjax.serve.options import ServeOptions

T, D = "/tokenize", "/detokenize"
TOOL = tool(parameters={"type": "object"})


def completion(**fields):
    return {"prompt": "ab", "max_tokens": 2, **fields}


def chat(**fields):
    return {"messages": MESSAGES, "max_tokens": 2, **fields}


def says(content, **fields) -> dict:
    return chat(messages=[{"role": "user", "content": content, **fields}])


def deep(levels: int) -> bytes:
    return b'{"prompt": ' + b"[" * levels + b"]" * levels + b"}"


def nested(levels: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


NOT_JSON = {
    400: [
        *(b"{", b"NaN", b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "temperature": Infinity}'),
        b'{"prompt": "a", "top_p": -Infinity}',
        *(b'{"prompt": "a", "guided_json": {"minimum": NaN}}', b'{"prompt": "a", "guided_json": {"minimum": 1e999}}'),
        *(b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "seed": ' + b"9" * 300 + b"}"),
        *(deep(1000), deep(100_000), b'{"a":' * 100_000 + b"1" + b"}" * 100_000, b'{"prompt": ' + b"[" * 100_000),
        *(json.dumps(completion()).encode(encoding) for encoding in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig")),
        *('{"prompt": "é"}'.encode("latin-1"), b'{"prompt": "\xc0\xaf"}'),  # the latter an overlong encoding
        # Half a surrogate pair.
        *(b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00"}', b'{"\\ud800": 1, "prompt": "a"}'),
        *(b'{"prompt": "a\nb"}', b'{"prompt": "a",}', b'{"prompt": "a"} // ok', b'{"prompt": "a"}{"prompt": "b"}'),
        *(b"{'prompt': 'a'}", b"prompt: a\n", b'<?xml version="1.0"?><prompt>a</prompt>', b"\x00" * 1000),
        b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x8c\x04eval\x93.",  # pickle
    ],
    # Empty, or JSON whose fields are wrong for completions.
    (400,): [b"", b"[]", b'"prompt"', b"null", b"5", b'{"prompt": "a", "temperature": 1e999}', deep(199)],
    413: [b" " * 2_000_000, b'{"prompt": "' + b"a" * 2_000_000 + b'"}'],
}
BYTES = [(f"{body[:40]!r} of {len(body)}", body, status) for status, several in NOT_JSON.items() for body in several]


def by_field(values: dict[str, dict[int, list]], make=completion) -> list[tuple]:
    """A case for each value of a field, of which each status has several."""
    return [
        (f"{field[:40]} {str(value)[:40]!r} of {len(str(value))}", make(**{field: value}), status)
        for field, statuses in values.items()
        for status, several in statuses.items()
        for value in several
    ]


def refused(**values: list) -> dict[str, dict[int, list]]:
    """Fields of which all these values are answered with 400."""
    return {field: {400: several} for field, several in values.items()}


PROMPTS = {
    "prompt": {
        200: [
            *("<｜end▁of▁sentence｜><｜User｜></think>", "{{ 7 * 7 }}{% for x in range(10**9) %}{% endfor %}"),
            *("\x00\x00", "", "\u202e\u200f\ufeff", "𝕳𝖎🙂\U0010ffff"),  # "" is the begin token alone
        ],
        400: [
            *([], [[], []]),
            *([-1], [300], [2**31], [2**63], [-(2**63)], [5, 6, 2**64], [10**300], [[5], [6], [-7]]),
            *([5] * 129, [5] * 128, "a b " * 100_000),  # with what is to be made longer than the context
            *(None, 5, True, {"text": "a"}, {"prompt_token_ids": [1]}),
            *([1.0], [True], [5, None], ["a", 5], [5, "a"], [[[5]]]),
            *(["a"] * 1025, [""] * 10_000),
        ],
    }
}

NUMBERS = {
    "n": {200: [None], 400: [0, -1, 129, 2**31, 2**63, 10**100, 1.5, "2", True]},
    "max_tokens": {400: [-1, 0, 2**31 - 1, 10_000, 2**64, 1e3]},
    "temperature": {200: [1e6, 1e-300, -0.0], 400: [-0.1, 1e308, "1", [1]]},
    "top_p": {200: [1e-300], 400: [0, -1, 1.0001]},
    "top_k": {200: [2**31 - 1], 400: [-2, 2**31, 2.5]},
    "seed": {200: [2**63 - 1], 400: [2**63, -(2**63) - 1, 0.5]},
    **refused(
        min_p=[-0.1, 1.1], presence_penalty=[2.1], frequency_penalty=[-2.1], repetition_penalty=[0, -1, 1e300, 1e-300]
    ),
    **refused(
        logprobs=[-1, 21, 2**40, True], prompt_logprobs=[-1, 1000], min_tokens=[-1, 3, 2**63], priority=[-5, 2**63]
    ),
    **refused(best_of=[5, -1]),
}

MANY = dict.fromkeys(map(str, range(4097)), 1)
KEYS = ("a", "-1", "300", "99999999999999999999", "５", "", "1.5")
LISTS = {
    "stop": {
        200: [["x" * 1024] * 64],
        400: ["", [""], ["a", None], [5], {"a": 1}, ["x"] * 65, ["x"] * 100_000, "x" * 1025],
    },
    **refused(
        stop_token_ids=[[-1], [300], [2**70], [1.5], 5, [5] * 1025],
        allowed_token_ids=[[], [300], [-1], [2**63], "all"],
        bad_words=[[""], ["  "], ["x"] * 1025, ["x" * 257], [5]],
        logit_bias=[*({key: 1} for key in KEYS), {"5": 101}, {"5": "1"}, {"5": None}, [[5, 1]], MANY],
        stream_options=[{"include_usage": True}, {"include_everything": True}, []],
    ),
}

NAMES = {
    "model": {404: ["gpt-4", "../../etc/passwd"], 400: ["m" * 257, 5]},
    **refused(
        request_id=["i" * 129, "", "a\r\nSet-Cookie: b", "a\n", "é"], cache_salt=["s" * 257, "", 5], user=["u" * 257]
    ),
    **refused(suffix=["after"], stream=["true"], echo=["yes"], best_off=[1], __class__=["x"], **{"x" * 100_000: [1]}),
}

NO_SCHEMAS = ["{", 5, {"type": "thing"}, {"$ref": "#/nothing"}, {"$ref": "http://example.com/schema"}]
NO_SCHEMAS += [{"enum": ["x" * 100] * 1000}, {"type": "integer", "minimum": 5, "maximum": 3}]
FORMS = {
    "guided_json": {(200, 400): [nested(90)], 400: NO_SCHEMAS},
    **refused(
        structured_outputs=[{"regex": "a", "choice": ["a"]}, {}, {"yaml": "a"}],
        guided_regex=["([", "(?<=a)b", "((a{1,1000}){1,1000}){1,1000}", "a" * 70_000],
        guided_grammar=["start: (", 'a: "b"', "#" * 70_000],
        guided_choice=[[], [""], ["a"] * 1025],
    ),
}

CHAT_FIELDS = {
    "model": {404: ["gpt-4"]},
    "chat_template_kwargs": {
        200: [{"range": 5, "namespace": None, "loop": []}],
        (200, 400): [{"self": 1, "caller": 2, "varargs": 3}],  # Jinja's own names
        400: [{"messages": []}, [1]],
    },
    **refused(
        messages=[
            *([], "hi", {"role": "user", "content": "hi"}, [None], [{"content": "hi"}]),
            *([{"role": "root", "content": "hi"}], MESSAGES * 5000, [{**MESSAGES[0], "secret": 1}]),
        ],
        tools=[
            *([TOOL, TOOL], [tool(description="x" * 100_000)], [tool(name=f"f{i}") for i in range(129)]),
            *([{}], [{**TOOL, "type": "retrieval"}], [{"type": "function", "function": {}}]),
            *([tool(name='"\nstart: /.*/')], [tool(name="f" * 65)], [tool(parameters=[])]),
        ],
        response_format=[{"type": "json_schema"}, {}, {"type": "grammar"}],
        function_call=["auto", {"name": "f"}],
        audio=[{"voice": "a", "format": "wav"}],
    ),
    **refused(chat_template=["{{ messages }}"], tool_choice=["required"], functions=[[{"name": "f"}]], max_tokens=[0]),
    **refused(
        modalities=[["text", "audio"]],
        web_search_options=[{}],
        max_completion_tokens=[5],
        top_logprobs=[5],
        logprobs=[5],
    ),
}

WRONG_PARTS = (
    [{"type": "image_url", "image_url": {"url": "a"}}],
    [{"type": "text"}],
    [{"type": "text", "text": ""}] * 1025,
)
CONTENTS = {400: [None, 5, "a b " * 1000, *WRONG_PARTS]}

SEVERAL_FIELDS = [
    ("no prompt", {}, 400),
    ("many unknown fields", completion(**{f"field{i}": i for i in range(2000)}), 400),
    ("two forms", completion(guided_regex="a", guided_choice=["a"]), 400),
]

CHATS = [
    ("no messages", {}, 400),
    *by_field({"content": CONTENTS}, says),
    ("calls by a user", says("a", tool_calls=[{"function": {"name": "f", "arguments": ""}}]), 400),
    ("reasoning by a user", says("a", reasoning="why"), 400),
    ("a call id by a user", says("a", tool_call_id="a"), 400),
    ("parameters that are no schema", chat(tools=[tool(parameters={"type": "thing"})], tool_choice="required"), 400),
    ("a choice of another tool", chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), 400),
    ("an unknown choice", chat(tools=[TOOL], tool_choice="maybe"), 400),
    ("a limit of 0 of completions", {"messages": MESSAGES, "max_completion_tokens": 0}, 400),
    ("fewer top_logprobs than none", chat(logprobs=True, top_logprobs=-1), 400),
    ("too many top_logprobs", chat(logprobs=True, top_logprobs=21), 400),
    ("both ways to go on", chat(continue_final_message=True, add_generation_prompt=True), 400),
    ("prompt_logprobs in a stream", chat(prompt_logprobs=1, stream=True), 400),
]

TOKENS = [
    *(
        (T, name, body, 400)
        for name, body in {"nothing": {}, "a number": {"prompt": 5}, "no messages": {"messages": []}}.items()
    ),
    (T, "both", {"prompt": "a", "messages": MESSAGES}, 400),
    (T, "another model", {"prompt": "a", "model": "b"}, 404),
    (T, "240 kB", {"prompt": "a b " * 60_000}, 200),
    (D, "nothing", {}, 400),
    *((D, f"tokens {tokens}", {"tokens": tokens}, 400) for tokens in ("a", [-1], [10**6], [2**80], [1.5])),
    (D, "no tokens", {"tokens": []}, 200),
]

CASES = [
    *[(C, *case) for case in BYTES],
    *[(H, *case) for case in BYTES if case[2] == 400 and not case[1].startswith(b'{"prompt": "a", ')],
    *[(C, *case) for case in (*by_field(PROMPTS | NUMBERS | LISTS | NAMES | FORMS), *SEVERAL_FIELDS)],
    *[(H, *case) for case in (*by_field(CHAT_FIELDS, chat), *CHATS)],
    *TOKENS,
]


@pytest.fixture(scope="module")
def server():
    options = ServeOptions(max_body_bytes=1_500_000, request_timeout=5.0)
    with LiveServer(num_ranks=4, max_rows_decode=8, max_chunk=16, pages_per_rank=257, options=options) as live:
        before = answers(live)
        yield live
        nothing_is_left(live)
        assert answers(live) == before


def answers(live: LiveServer) -> list:
    """What the server says to a few good requests."""
    bodies = [(C, completion(temperature=0, max_tokens=20)), (H, chat(seed=3, max_tokens=20)), (T, {"prompt": "ab"})]
    answered = [live.post(path, body).json() for path, body in bodies]
    return [[one.get("text", one.get("message")) for one in each.get("choices", ())] or each for each in answered]


def nothing_is_left(live: LiveServer) -> None:
    wait_until(lambda: live.pages_in_use == 0 and live.engine.num_unfinished == 0)
    assert live.get("/health").status_code == 200
    for rank in live.get("/get_load").json()["ranks"]:
        assert rank["used_pages"] == rank["running"] == rank["waiting"] == 0


def check(answer: httpx.Response, status) -> dict:
    """Check the status, and give the error of an answer that has one."""
    assert answer.status_code in (status if isinstance(status, tuple) else (status,)), answer.text[:500]
    if answer.status_code < 400:
        return {}
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 4000
    for internal in ("Traceback", ".py", "site-packages", "0x7f", "dsjax/"):
        assert internal not in error["message"]
    return error


def is_to_blame(field: str | None, path: str, body) -> bool:
    """Whether an error of this body may name a field: one that the case changes, where it does not change all."""
    if isinstance(body, bytes):
        return field is None or field.encode() in body
    base = chat() if "messages" in body else completion()
    changed = [name for name in body if body[name] != base.get(name)] or ["prompt", "messages", "tokens"]
    changed += ["messages"] * (path == T)
    return field is not None and any(name.startswith(field) for name in changed)  # a very long name is cut off


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_a_hostile_body_is_answered_as_it_should_be_and_the_field_to_blame_is_named(server, number):
    """Every second request for tokens asks for a stream, which does not begin where there is an error."""
    path, _, body, status = CASES[number]
    if number % 2 and path in (C, H) and isinstance(body, dict) and not body.keys() & {"stream", "stream_options"}:
        body = {**body, "stream": True}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    error = check(httpx.post(server.url + path, content=content, headers=JSON, timeout=120), status)
    too_long = error.get("code") == "context_length_exceeded"  # by the prompt and the limit together
    assert not error or too_long or is_to_blame(error["param"], path, CASES[number][2]), error


GOOD = json.dumps(completion()).encode()
JSON = {"Content-Type": "application/json"}
UPGRADE = {"Upgrade": "websocket", "Connection": "Upgrade"}
WRONG_HEADERS = {
    "X-Request-ID": ("a" * 129, "a b"),
    "X-Session-Affinity": ("s" * 300, ""),
    "X-Data-Parallel-Rank": ("-1", "first", "9" * 40),
}
HEADERS = [
    *(("POST", C, {**JSON, name: value}, GOOD, 400) for name, values in WRONG_HEADERS.items() for value in values),
    ("POST", C, {"Content-Type": "text/plain"}, GOOD, 400),
    ("POST", C, {"Content-Type": "application/x-www-form-urlencoded"}, b"prompt=a", 400),
    ("POST", C, {"Content-Type": "application/json; charset=utf-16"}, GOOD, 200),
    ("POST", C, {}, GOOD, 400),
    ("POST", C, {**JSON, "Content-Encoding": "gzip"}, b"\x1f\x8b\x08" + b"\x00" * 30, 400),
    ("POST", C, {**JSON, **UPGRADE}, GOOD, 200),
    ("GET", "/health", UPGRADE, b"", 200),
    ("CONNECT", "/health", {}, b"", 400),
    ("GET", "/health", {"A": "a" * 100_000}, b"", 400),
    ("GET", C, {}, b"", 405),
    ("PUT", C, JSON, GOOD, 405),
    ("HEAD", C, {}, b"", 405),
    ("OPTIONS", C, {"Origin": "http://example.com", "Access-Control-Request-Method": "POST"}, b"", 204),
    ("BREW", "/health", {}, b"", 400),
    *(("GET", f"/v1/models/{name}", {}, b"", 404) for name in ("../../etc/passwd", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%00", "a" * 20_000)),
    ("GET", "/page/%2e%2e/app.py", {}, b"", 404),
    ("GET", "/health?" + "a=1&" * 5000, {}, b"", 200),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status"), HEADERS, ids=[f"{c[0]} {c[1][:40]} {str(c[2])[:60]}" for c in HEADERS]
)  # fmt: skip
def test_hostile_heads_are_answered_as_they_should_be(server, method, path, headers, content, status):
    answer = httpx.request(method, server.url + path, headers=headers, content=content, timeout=120)
    if method == "HEAD":
        assert answer.status_code == status
    else:
        check(answer, status)


def message(body: dict, extra: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {C} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{extra}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


LONG_STREAM = completion(max_tokens=110, stream=True, n=3)


GET, POST = b"GET /health HTTP/1.1\r\nHost: x\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: "


@pytest.mark.parametrize("sent", [
    *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\x00" * 100, b"GET\r\n\r\n"),
    *(GET + b"Content-Length: -5\r\n\r\n", GET + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n"),
    *(GET + b"A" + b"a" * 200_000, GET + b"A: b\r\n" * 100_000, b"GET /" + b"a" * 500_000),
    *(POST + b"chunked\r\n\r\nZZ\r\n", POST + b"gzip\r\n\r\n"),
    *(b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
])  # fmt: skip
def test_what_is_not_http_is_closed_and_never_a_5xx(server, sent):
    received = server.exchange(sent)
    assert not received or received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501")), received[:100]
    nothing_is_left(server)


STAGES = ["head", "end of head", "body", "whole", "first bytes", "events"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_goes_away_at_any_stage_leaves_nothing(server, at_full_speed, stage, stream):
    # Closed and reset: both with every stage, and with both kinds of answer.
    reset = stream ^ (STAGES.index(stage) % 2 == 0)
    server.executor.step_seconds = 0.05
    sent = message({**LONG_STREAM, "stream": stream})
    head = sent.index(b"\r\n\r\n") + 4
    cut = {"head": head // 2, "end of head": head, "body": len(sent) - 5}.get(stage, len(sent))
    steps = server.executor.steps
    connection = server.connect(sent[:cut])
    if cut == len(sent):
        wait_until(lambda: server.pages_in_use > 0)
    if stream and stage in ("first bytes", "events"):
        assert connection.recv(10 if stage == "first bytes" else 2000).startswith(b"HTTP/1.1 2")
    server.executor.step_seconds = HELD
    under_way = server.executor.steps
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    wait_until(lambda: server.engine.num_unfinished == 0)
    server.executor.step_seconds = 0.05
    wait_until(lambda: server.pages_in_use == 0)
    # One step runs while the disconnect arrives, then at most two; a head without its body computes nothing.
    begun = server.executor.steps - steps if cut < len(sent) else server.executor.steps - under_way
    assert begun <= 3, "it did not run to its end"
    nothing_is_left(server)


@pytest.fixture
def slow_reader(server):
    """Connects, with a small buffer, and sends a request for a stream."""
    with contextlib.ExitStack() as stack:

        def connect(sent: bytes) -> socket.socket:
            connection = stack.enter_context(server.connect())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            connection.sendall(sent)
            return connection

        yield connect
    nothing_is_left(server)


def test_a_reader_that_never_reads_holds_up_nobody(server, slow_reader):
    for _ in range(8):
        slow_reader(message({**LONG_STREAM, "logprobs": 20}))
    assert server.post(C, completion(max_tokens=20)).status_code == 200
    wait_until(lambda: server.pages_in_use == 0)


def test_a_reader_that_reads_slowly_gets_everything(slow_reader):
    asked = completion(max_tokens=60, stream=True, logprobs=20)
    connection = slow_reader(message(asked, "Connection: close\r\n"))
    received = b"".join(iter(lambda: time.sleep(0.001) or connection.recv(512), b""))
    assert received.rstrip(b"\r\n0").endswith(b"data: [DONE]")


def test_200_half_sent_requests_hold_up_nobody_and_are_given_up(server):
    sent = message(LONG_STREAM)
    connections = [server.connect(sent[: min(10 + index, len(sent) - 1)]) for index in range(200)]
    assert server.post(C, completion()).status_code == 200
    for connection in connections:
        while connection.recv(4096):
            pass
        connection.close()
    nothing_is_left(server)


def test_a_flood_of_every_kind_at_once_changes_no_answer(server):
    def good() -> list:
        return server.post(C, completion(temperature=0, max_tokens=20)).json()["choices"]

    def flood(offset: int) -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            for path, _, body, _ in CASES[offset::4]:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                if stop.is_set():
                    return
                if len(content) <= 50_000:  # others are slow to send
                    client.post(path, content=content, headers=JSON)

    expected, stop = good(), threading.Event()
    with ThreadPoolExecutor(4) as pool:
        floods = [pool.submit(flood, offset) for offset in range(4)]
        for _ in range(20):
            assert good() == expected
        stop.set()
        for each in floods:
            each.result(240)
    nothing_is_left(server)
