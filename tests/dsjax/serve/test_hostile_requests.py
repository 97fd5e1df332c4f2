"""Requests that are wrong in every way that came to mind: each is answered as it should be, none with a 5xx, nothing stays behind.

A case is (what it tries, body, status class or status). Bodies are Python values, or bytes that are sent as they are.
"""

import contextlib
import json
import socket
import struct
import threading
import time

import httpx
import pytest
from live_server import LiveServer, wait_until

from dsjax.serve.options import ServeOptions

C, H, T, D = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def completion(**fields):
    return {"prompt": "ab", "max_tokens": 2, **fields}


def chat(**fields):
    return {"messages": MESSAGES, "max_tokens": 2, **fields}


def deep(levels: int) -> bytes:
    return b'{"prompt": ' + b"[" * levels + b"]" * levels + b"}"


def nested(levels: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


NOT_JSON = [
    ("nothing", b"", 422),
    ("half an object", b"{", 400),
    ("an array", b"[]", 422),
    ("a string", b'"prompt"', 422),
    ("a body that is null", b"null", 422),
    ("a body that is a number", b"5", 422),
    ("NaN", b"NaN", 400),
    ("NaN inside", b'{"prompt": "a", "temperature": NaN}', 400),
    ("Infinity inside", b'{"prompt": "a", "temperature": Infinity}', 400),
    ("-Infinity inside", b'{"prompt": "a", "top_p": -Infinity}', 400),
    ("a float beyond floats", b'{"prompt": "a", "temperature": 1e999}', 422),
    ("NaN in a schema", b'{"prompt": "a", "guided_json": {"minimum": NaN}}', 400),
    ("a float beyond floats in a schema", b'{"prompt": "a", "guided_json": {"minimum": 1e999}}', 400),
    ("5,000 digits", b'{"prompt": ' + b"9" * 5000 + b"}", 400),
    ("300 digits", b'{"prompt": "a", "seed": ' + b"9" * 300 + b"}", 400),
    ("200 levels", deep(199), 422),
    ("1,000 levels", deep(1000), 400),
    ("100,000 levels", deep(100_000), 400),
    ("100,000 levels of objects", b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400),
    ("levels that never close", b'{"prompt": ' + b"[" * 100_000, 400),
    ("UTF-16", json.dumps(completion()).encode("utf-16"), 400),
    ("UTF-16 without a mark", json.dumps(completion()).encode("utf-16-le"), 400),
    ("UTF-32", json.dumps(completion()).encode("utf-32"), 400),
    ("Latin-1", '{"prompt": "é"}'.encode("latin-1"), 400),
    ("an overlong encoding", b'{"prompt": "\xc0\xaf"}', 400),
    ("a byte order mark", b"\xef\xbb\xbf" + json.dumps(completion()).encode(), 400),
    ("half a surrogate pair", b'{"prompt": "\\ud800"}', 400),
    ("the other half", b'{"prompt": "\\udc00"}', 400),
    ("half a pair in a name", b'{"\\ud800": 1, "prompt": "a"}', 400),
    ("a control character in a string", b'{"prompt": "a\nb"}', 400),
    ("a trailing comma", b'{"prompt": "a",}', 400),
    ("a comment", b'{"prompt": "a"} // ok', 400),
    ("two objects", b'{"prompt": "a"}{"prompt": "b"}', 400),
    ("single quotes", b"{'prompt': 'a'}", 400),
    ("pickle", b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x08builtins\x8c\x04eval\x93.", 400),
    ("YAML", b"prompt: a\n", 400),
    ("XML", b'<?xml version="1.0"?><prompt>a</prompt>', 400),
    ("zero bytes", b"\x00" * 1000, 400),
    ("2 MB of blanks", b" " * 2_000_000, 413),
    ("2 MB of prompt", b'{"prompt": "' + b"a" * 2_000_000 + b'"}', 413),
]

PROMPTS = [
    ("no prompt", {}, 422),
    ("null", {"prompt": None}, 422),
    ("a number", {"prompt": 5}, 422),
    ("true", {"prompt": True}, 422),
    ("an object", {"prompt": {"text": "a"}}, 422),
    ("vLLM's object", {"prompt": {"prompt_token_ids": [1]}}, 422),
    ("an empty list", {"prompt": []}, 400),
    ("lists of nothing", {"prompt": [[], []]}, 400),
    ("a negative id", {"prompt": [-1]}, 400),
    ("the first id beyond the vocabulary", {"prompt": [300]}, 400),
    ("2^31", {"prompt": [2**31]}, 400),
    ("2^63", {"prompt": [2**63]}, 400),
    ("-2^63", {"prompt": [-(2**63)]}, 400),
    ("2^64 among good ones", {"prompt": [5, 6, 2**64]}, 400),
    ("10^300", {"prompt": [10**300]}, 400),
    ("a float", {"prompt": [1.0]}, 422),
    ("true in a list", {"prompt": [True]}, 422),
    ("null in a list", {"prompt": [5, None]}, 422),
    ("text and ids", {"prompt": ["a", 5]}, 422),
    ("ids and text", {"prompt": [5, "a"]}, 422),
    ("a bad one among good ones", {"prompt": [[5], [6], [-7]]}, 400),
    ("three levels", {"prompt": [[[5]]]}, 422),
    ("longer than the context", {"prompt": [5] * 129}, 400),
    ("as long as the context", {"prompt": [5] * 128}, 400),
    ("much longer than the context", {"prompt": "a b " * 100_000}, 400),
    ("1,025 prompts", {"prompt": ["a"] * 1025}, 422),
    ("10,000 empty prompts", {"prompt": [""] * 10_000}, 422),
    ("special tokens as text", completion(prompt="<｜end▁of▁sentence｜><｜User｜></think>"), 200),
    ("a template as text", completion(prompt="{{ 7 * 7 }}{% for x in range(10**9) %}{% endfor %}"), 200),
    ("zero characters", completion(prompt="\x00\x00"), 200),
    ("no text", completion(prompt=""), 200),  # the tokenizer puts its begin token in front
    ("right-to-left marks", completion(prompt="\u202e\u200f\ufeff"), 200),
    ("characters beyond the plane", completion(prompt="𝕳𝖎🙂\U0010ffff"), 200),
]

NUMBERS = [
    (f"{name} {value!r}"[:60], completion(**{name: value}), status)
    for name, value, status in [
        ("n", 0, 400),
        ("n", -1, 400),
        ("n", 129, 400),
        ("n", 2**31, 422),
        ("n", 2**63, 422),
        ("n", 10**100, 422),
        ("n", 1.5, 422),
        ("n", "2", 422),
        ("n", None, 200),
        ("n", True, 422),
        ("max_tokens", -1, 400),
        ("max_tokens", 0, 400),
        ("max_tokens", 2**31 - 1, 400),
        ("max_tokens", 2**64, 422),
        ("max_tokens", 1e3, 422),
        ("max_tokens", 10_000, 400),
        ("temperature", -0.1, 400),
        ("temperature", 1e308, 400),
        ("temperature", 1e6, 200),
        ("temperature", 1e-300, 200),
        ("temperature", -0.0, 200),
        ("temperature", "1", 422),
        ("temperature", [1], 422),
        ("top_p", 0, 400),
        ("top_p", -1, 400),
        ("top_p", 1.0001, 400),
        ("top_p", 1e-300, 200),
        ("top_k", -2, 400),
        ("top_k", 2**31 - 1, 200),
        ("top_k", 2**31, 422),
        ("top_k", 2.5, 422),
        ("min_p", -0.1, 400),
        ("min_p", 1.1, 400),
        ("seed", 2**63, 400),
        ("seed", -(2**63) - 1, 400),
        ("seed", 2**63 - 1, 200),
        ("seed", 0.5, 422),
        ("presence_penalty", 2.1, 400),
        ("frequency_penalty", -2.1, 400),
        ("repetition_penalty", 0, 400),
        ("repetition_penalty", -1, 400),
        ("repetition_penalty", 1e300, 400),
        ("repetition_penalty", 1e-300, 400),
        ("logprobs", -1, 400),
        ("logprobs", 21, 400),
        ("logprobs", 2**40, 422),
        ("logprobs", True, 422),
        ("prompt_logprobs", -1, 400),
        ("prompt_logprobs", 1000, 400),
        ("min_tokens", -1, 400),
        ("min_tokens", 3, 400),
        ("min_tokens", 2**63, 422),
        ("priority", 2**63, 422),
        ("priority", -5, 400),
        ("best_of", 5, 400),
        ("best_of", -1, 400),
    ]
]

LISTS = [
    (f"{name} {str(value)[:40]} of {len(str(value))}", completion(**{name: value}), status)
    for name, value, status in [
        ("stop", "", 400),
        ("stop", [""], 400),
        ("stop", ["a", None], 422),
        ("stop", [5], 422),
        ("stop", {"a": 1}, 422),
        ("stop", ["x"] * 65, 422),
        ("stop", ["x"] * 100_000, 422),
        ("stop", "x" * 1025, 422),
        ("stop", ["x" * 1024] * 64, 200),
        ("stop_token_ids", [-1], 400),
        ("stop_token_ids", [300], 400),
        ("stop_token_ids", [2**70], 400),
        ("stop_token_ids", [1.5], 422),
        ("stop_token_ids", 5, 422),
        ("stop_token_ids", [5] * 1025, 422),
        ("allowed_token_ids", [], 400),
        ("allowed_token_ids", [300], 400),
        ("allowed_token_ids", [-1], 400),
        ("allowed_token_ids", [2**63], 400),
        ("allowed_token_ids", "all", 422),
        ("bad_words", [""], 400),
        ("bad_words", ["  "], 400),
        ("bad_words", ["x"] * 1025, 422),
        ("bad_words", ["x" * 257], 422),
        ("bad_words", [5], 422),
        ("logit_bias", {"a": 1}, 400),
        ("logit_bias", {"-1": 1}, 400),
        ("logit_bias", {"300": 1}, 400),
        ("logit_bias", {"99999999999999999999": 1}, 400),
        ("logit_bias", {"５": 1}, 400),
        ("logit_bias", {"": 1}, 400),
        ("logit_bias", {"1.5": 1}, 400),
        ("logit_bias", {"5": 101}, 400),
        ("logit_bias", {"5": "1"}, 422),
        ("logit_bias", {"5": None}, 422),
        ("logit_bias", [[5, 1]], 422),
        ("logit_bias", {str(i): 1 for i in range(4097)}, 422),
        ("stream_options", {"include_usage": True}, 400),
        ("stream_options", {"include_everything": True}, 422),
        ("stream_options", [], 422),
    ]
]

NAMES = [
    ("an unknown field", completion(best_off=1), 422),
    ("many unknown fields", completion(**{f"field{i}": i for i in range(2000)}), 422),
    ("a field with a very long name", completion(**{"x" * 100_000: 1}), 422),
    ("a field of Python's", completion(__class__="x", __init__=1), 422),
    ("an unknown model", completion(model="gpt-4"), 404),
    ("a path as a model", completion(model="../../etc/passwd"), 404),
    ("a long model", completion(model="m" * 257), 422),
    ("a number as a model", completion(model=5), 422),
    ("a long user", completion(user="u" * 257), 422),
    ("a long salt", completion(cache_salt="s" * 257), 422),
    ("an empty salt", completion(cache_salt=""), 422),
    ("a number as a salt", completion(cache_salt=5), 422),
    ("a long id", completion(request_id="i" * 129), 422),
    ("an empty id", completion(request_id=""), 422),
    ("an id with a line break", completion(request_id="a\r\nSet-Cookie: b"), 422),
    ("an id that ends in a line break", completion(request_id="a\n"), 422),
    ("an id outside ASCII", completion(request_id="é"), 422),
    ("a suffix", completion(suffix="after"), 400),
    ("streams as text", completion(stream="true"), 422),
    ("echo as text", completion(echo="yes"), 422),
]

FORMS = [
    ("two forms", completion(guided_regex="a", guided_choice=["a"]), 400),
    ("two forms in one", completion(structured_outputs={"regex": "a", "choice": ["a"]}), 400),
    ("no form", completion(structured_outputs={}), 400),
    ("an unknown form", completion(structured_outputs={"yaml": "a"}), 422),
    ("a regex that is none", completion(guided_regex="(["), 400),
    ("a regex that looks behind", completion(guided_regex="(?<=a)b"), 400),
    ("a regex of great cost", completion(guided_regex="((a{1,1000}){1,1000}){1,1000}"), 400),
    ("a regex too long", completion(guided_regex="a" * 70_000), 422),
    ("a grammar that is none", completion(guided_grammar="start: ("), 400),
    ("a grammar without a start", completion(guided_grammar='a: "b"'), 400),
    ("a grammar too long", completion(guided_grammar="#" * 70_000), 422),
    ("no choice", completion(guided_choice=[]), 400),
    ("an empty choice", completion(guided_choice=[""]), 400),
    ("too many choices", completion(guided_choice=["a"] * 1025), 422),
    ("a schema of the wrong kind", completion(guided_json=5), 422),
    ("a schema that is no JSON", completion(guided_json="{"), 400),
    ("a schema with an unknown type", completion(guided_json={"type": "thing"}), 400),
    ("a schema that refers to nothing", completion(guided_json={"$ref": "#/nothing"}), 400),
    ("a schema from elsewhere", completion(guided_json={"$ref": "http://example.com/schema"}), 400),
    ("a deep schema", completion(guided_json=nested(90)), (200, 400)),
    ("a large schema", completion(guided_json={"enum": ["x" * 100] * 1000}), 400),
    ("an impossible schema", completion(guided_json={"type": "integer", "minimum": 5, "maximum": 3}), 400),
    ("a format without its schema", chat(response_format={"type": "json_schema"}), 400),
    ("a format of no kind", chat(response_format={}), 422),
    ("a format of another kind", chat(response_format={"type": "grammar"}), 422),
]

CHATS = [
    ("no messages", {}, 422),
    ("an empty conversation", chat(messages=[]), 422),
    ("messages as text", chat(messages="hi"), 422),
    ("messages as an object", chat(messages={"role": "user", "content": "hi"}), 422),
    ("null as a message", chat(messages=[None]), 422),
    ("a message without a role", chat(messages=[{"content": "hi"}]), 422),
    ("an unknown role", chat(messages=[{"role": "root", "content": "hi"}]), 422),
    ("no content", chat(messages=[{"role": "user", "content": None}]), 400),
    ("a number as content", chat(messages=[{"role": "user", "content": 5}]), 422),
    (
        "a picture",
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]),
        400,
    ),
    ("a part without text", chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), 422),
    ("1,025 parts", chat(messages=[{"role": "user", "content": [{"type": "text", "text": ""}] * 1025}]), 422),
    ("5,000 messages", chat(messages=MESSAGES * 5000), 422),
    ("an unknown field in a message", chat(messages=[{**MESSAGES[0], "secret": 1}]), 422),
    (
        "calls by a user",
        chat(messages=[{**MESSAGES[0], "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}]),
        400,
    ),
    ("reasoning by a user", chat(messages=[{**MESSAGES[0], "reasoning": "why"}]), 400),
    ("a call id by a user", chat(messages=[{**MESSAGES[0], "tool_call_id": "a"}]), 400),
    ("a template", chat(chat_template="{{ messages }}"), 422),
    ("a template among its variables", chat(chat_template_kwargs={"messages": []}), 400),
    (
        "a variable that breaks the template",
        chat(chat_template_kwargs={"range": 5, "namespace": None, "loop": []}),
        200,
    ),
    ("Jinja's own names as variables", chat(chat_template_kwargs={"self": 1, "caller": 2, "varargs": 3}), (200, 400)),
    ("variables that are no object", chat(chat_template_kwargs=[1]), 422),
    ("tools that are none", chat(tools=[{}]), 422),
    ("a tool of another kind", chat(tools=[{**TOOL, "type": "retrieval"}]), 422),
    ("a tool without a name", chat(tools=[{"type": "function", "function": {}}]), 422),
    ("a tool whose name is a grammar", chat(tools=[{"type": "function", "function": {"name": '"\nstart: /.*/'}}]), 422),
    ("a tool with a long name", chat(tools=[{"type": "function", "function": {"name": "f" * 65}}]), 422),
    ("two tools of one name", chat(tools=[TOOL, TOOL]), 400),
    ("129 tools", chat(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]), 422),
    (
        "a tool of 100 kB",
        chat(tools=[{"type": "function", "function": {"name": "f", "description": "x" * 100_000}}]),
        400,
    ),
    (
        "parameters that are no object",
        chat(tools=[{"type": "function", "function": {"name": "f", "parameters": []}}]),
        422,
    ),
    (
        "parameters that are no schema",
        chat(
            tools=[{"type": "function", "function": {"name": "f", "parameters": {"type": "thing"}}}],
            tool_choice="required",
        ),
        400,
    ),
    ("a choice of no tools", chat(tool_choice="required"), 400),
    ("a choice of another tool", chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "g"}}), 400),
    ("an unknown choice", chat(tools=[TOOL], tool_choice="maybe"), 422),
    ("a choice and a form", chat(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}), 400),
    ("two limits", chat(max_completion_tokens=5), 400),
    ("a limit of 0", chat(max_tokens=0), 400),
    ("top_logprobs alone", chat(top_logprobs=5), 400),
    ("too many top_logprobs", chat(logprobs=True, top_logprobs=21), 400),
    ("logprobs as a number", chat(logprobs=5), 422),
    ("both ways to go on", chat(continue_final_message=True, add_generation_prompt=True), 400),
    ("prompt_logprobs in a stream", chat(prompt_logprobs=1, stream=True), 400),
    ("longer than the context", chat(messages=[{"role": "user", "content": "a b " * 1000}]), 400),
]

TOKENS = [
    (T, "nothing", {}, 422),
    (T, "a number", {"prompt": 5}, 422),
    (T, "both", {"prompt": "a", "messages": MESSAGES}, 422),
    (T, "another model", {"prompt": "a", "model": "b"}, 404),
    (T, "no messages", {"messages": []}, 422),
    (T, "240 kB", {"prompt": "a b " * 60_000}, 200),
    (D, "nothing", {}, 422),
    (D, "text", {"tokens": "a"}, 422),
    (D, "a negative id", {"tokens": [-1]}, 400),
    (D, "an id beyond the vocabulary", {"tokens": [10**6]}, 400),
    (D, "2^80", {"tokens": [2**80]}, 400),
    (D, "a float", {"tokens": [1.5]}, 422),
    (D, "no tokens", {"tokens": []}, 200),
]

CASES = [
    *[(C, *case) for case in NOT_JSON],
    *[(H, *case) for case in NOT_JSON if case[2] == 400 and not case[1].startswith(b'{"prompt": "a", ')],
    *[(C, *case) for case in PROMPTS],
    *[(C, *case) for case in NUMBERS],
    *[(C, *case) for case in LISTS],
    *[(C, *case) for case in NAMES],
    *[(H if "messages" in case[1] else C, *case) for case in FORMS],
    *[(H, *case) for case in CHATS],
    *TOKENS,
]


@pytest.fixture(scope="module")
def server():
    options = ServeOptions(max_body_bytes=1_500_000, request_timeout=1.0)
    live = LiveServer(num_ranks=4, max_rows_decode=8, max_chunk=16, pages_per_rank=257, options=options)
    before = answers(live)
    yield live
    nothing_is_left(live)
    assert answers(live) == before
    live.signal()
    assert live.join() == 0


def answers(live: LiveServer) -> list:
    """What the server says to a few good requests."""
    bodies = [(C, completion(temperature=0, max_tokens=20)), (H, chat(seed=3, max_tokens=20)), (T, {"prompt": "ab"})]
    answered = [live.post(path, body).json() for path, body in bodies]
    return [
        [c.get("text", c.get("message")) for c in each["choices"]] if "choices" in each else each for each in answered
    ]


def nothing_is_left(live: LiveServer) -> None:
    wait_until(lambda: live.pages_in_use == 0 and live.engine.num_unfinished == 0)
    assert live.get("/health").status_code == 200
    assert all(
        rank["used_pages"] == rank["running"] == rank["waiting"] == 0 for rank in live.get("/get_load").json()["ranks"]
    )


def check(answer: httpx.Response, status) -> None:
    assert answer.status_code in (status if isinstance(status, tuple) else (status,)), answer.text[:500]
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < 4000
        for internal in ("Traceback", ".py", "site-packages", "0x7f", "dsjax/"):
            assert internal not in error["message"]


def test_there_are_about_200_cases():
    assert len(CASES) + len(HEADERS) >= 200
    assert len({(path, name) for path, name, _, _ in CASES}) == len(CASES)


@pytest.mark.parametrize(("path", "name", "body", "status"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_a_hostile_body_is_answered_as_it_should_be(server, path, name, body, status):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    check(httpx.post(server.url + path, content=content, headers=headers, timeout=120), status)


GOOD = json.dumps(completion()).encode()
HEADERS = [
    ("POST", C, {"Content-Type": "text/plain"}, GOOD, 422),
    ("POST", C, {"Content-Type": "application/x-www-form-urlencoded"}, b"prompt=a", 422),
    ("POST", C, {"Content-Type": "multipart/form-data; boundary=x"}, b"--x--", 422),
    ("POST", C, {"Content-Type": "application/json; charset=utf-16"}, GOOD, 200),
    ("POST", C, {"Content-Type": "application/vnd.api+json"}, GOOD, 200),
    ("POST", C, {}, GOOD, 422),
    ("POST", C, {"Content-Type": "application/json", "Content-Encoding": "gzip"}, b"\x1f\x8b\x08" + b"\x00" * 30, 400),
    ("POST", C, {"Content-Type": "application/json", "X-Request-ID": "a" * 129}, GOOD, 400),
    ("POST", C, {"Content-Type": "application/json", "X-Request-ID": "a b"}, GOOD, 400),
    ("POST", C, {"Content-Type": "application/json", "X-Session-Affinity": "s" * 300}, GOOD, 422),
    ("POST", C, {"Content-Type": "application/json", "X-Session-Affinity": ""}, GOOD, 422),
    ("POST", C, {"Content-Type": "application/json", "X-Data-Parallel-Rank": "-1"}, GOOD, 422),
    ("POST", C, {"Content-Type": "application/json", "X-Data-Parallel-Rank": "first"}, GOOD, 422),
    ("POST", C, {"Content-Type": "application/json", "X-Data-Parallel-Rank": "9" * 40}, GOOD, 400),
    ("POST", C, {"Content-Type": "application/json", "Authorization": "Bearer x"}, GOOD, 200),
    ("POST", C, {"Content-Type": "application/json", "Accept": "text/html"}, GOOD, 200),
    ("POST", C, {"Content-Type": "application/json", "Upgrade": "websocket", "Connection": "Upgrade"}, GOOD, 200),
    (
        "POST",
        C,
        {"Content-Type": "application/json", "Upgrade": "h2c", "Connection": "Upgrade, HTTP2-Settings"},
        GOOD,
        200,
    ),
    ("GET", "/health", {"Upgrade": "websocket", "Connection": "Upgrade"}, b"", 200),
    ("CONNECT", "/health", {}, b"", 400),
    ("GET", "/health", {"A": "a" * 100_000}, b"", 400),
    ("GET", C, {}, b"", 405),
    ("PUT", C, {"Content-Type": "application/json"}, GOOD, 405),
    ("DELETE", "/v1/models/tiny", {}, b"", 405),
    ("HEAD", C, {}, b"", 405),
    ("OPTIONS", C, {"Origin": "http://example.com", "Access-Control-Request-Method": "POST"}, b"", 405),
    ("TRACE", "/health", {}, b"", 405),
    ("BREW", "/health", {}, b"", 400),
    ("GET", "/v1/models/../../etc/passwd", {}, b"", 404),
    ("GET", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", {}, b"", 404),
    ("GET", "/v1/models/%00", {}, b"", 404),
    ("GET", "/v1/models/%ff%fe", {}, b"", 404),
    ("GET", "/v1/models/" + "a" * 20_000, {}, b"", 404),
    ("GET", "/page/../app.py", {}, b"", 404),
    ("GET", "/page/%2e%2e/app.py", {}, b"", 404),
    ("GET", "/redoc", {}, b"", 404),
    ("GET", "/health?" + "a=1&" * 5000, {}, b"", 200),
    ("GET", "/health", {}, b"a body", 200),
    ("GET", "/health", {"Host": "example.com"}, b"", 200),
    ("GET", "/health", {"Cookie": "a=" + "b" * 10_000}, b"", 200),
    ("POST", "/flush_cache", {}, b"", 403),
    ("POST", "/abort_request", {"Content-Type": "application/json"}, b'{"abort_all": true}', 403),
]


@pytest.mark.parametrize(
    ("method", "path", "headers", "content", "status"),
    HEADERS,
    ids=[f"{c[0]} {c[1][:40]} {str(c[2])[:60]}" for c in HEADERS],
)
def test_hostile_heads_are_answered_as_they_should_be(server, method, path, headers, content, status):
    answer = httpx.request(method, server.url + path, headers=headers, content=content, timeout=120)
    if method == "HEAD":
        assert answer.status_code == status
    else:
        check(answer, status)


# On bare sockets.


def connect(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def message(body: dict, extra: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {C} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{extra}Content-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


LONG_STREAM = completion(max_tokens=110, stream=True, n=3)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 100,
        b"GET\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA" + b"a" * 200_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET /" + b"a" * 500_000,
        b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 100_000,
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_not_http_is_closed_and_never_a_5xx(server, sent):
    with connect(server) as connection:
        connection.sendall(sent)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
    assert not received or received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501")), received[:100]
    nothing_is_left(server)


STAGES = ["head", "end of head", "body", "whole", "first bytes", "events"]


@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_goes_away_at_any_stage_leaves_nothing(server, stage, stream, reset):
    server.executor.step_seconds = 0.01
    try:
        sent = message({**LONG_STREAM, "stream": stream})
        head = sent.index(b"\r\n\r\n") + 4
        cut = {"head": head // 2, "end of head": head, "body": len(sent) - 5}.get(stage, len(sent))
        steps = server.executor.steps
        connection = connect(server)
        connection.sendall(sent[:cut])
        if cut == len(sent):
            wait_until(lambda: server.pages_in_use > 0)
        if stream and stage in ("first bytes", "events"):
            assert connection.recv(10 if stage == "first bytes" else 2000).startswith(b"HTTP/1.1 2")
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        wait_until(lambda: server.pages_in_use == 0)
        assert server.executor.steps < steps + 60, "it did not run to its end"
    finally:
        server.executor.step_seconds = 0
    nothing_is_left(server)


def test_a_reader_that_never_reads_holds_up_nobody(server):
    connections = [connect(server) for _ in range(8)]
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(message({**LONG_STREAM, "logprobs": 20}))
    assert server.post(C, completion(max_tokens=20)).status_code == 200
    wait_until(lambda: server.pages_in_use == 0)
    for connection in connections:
        connection.close()
    nothing_is_left(server)


def test_a_reader_that_reads_slowly_gets_everything(server):
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(message({**completion(max_tokens=60, stream=True, logprobs=20)}, "Connection: close\r\n"))
        received = b""
        while part := connection.recv(512):
            received += part
            time.sleep(0.001)
    assert received.rstrip(b"\r\n0").endswith(b"data: [DONE]")
    nothing_is_left(server)


def test_200_half_sent_requests_hold_up_nobody_and_are_given_up(server):
    sent = message(LONG_STREAM)
    connections = [connect(server) for _ in range(200)]
    for index, connection in enumerate(connections):
        connection.sendall(sent[: min(10 + index, len(sent) - 1)])
    assert server.post(C, completion()).status_code == 200
    for connection in connections:
        while connection.recv(4096):
            pass
        connection.close()
    nothing_is_left(server)


def test_a_flood_of_every_kind_at_once_changes_no_answer(server):
    expected = server.post(C, completion(temperature=0, max_tokens=20)).json()["choices"]
    stop = threading.Event()

    def flood(offset: int) -> None:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            for path, _, body, _ in CASES[offset::4]:
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                if len(content) > 50_000:
                    continue  # slow to send
                if stop.is_set():
                    return
                client.post(path, content=content, headers={"Content-Type": "application/json"})

    threads = [threading.Thread(target=flood, args=(offset,), daemon=True) for offset in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        assert server.post(C, completion(temperature=0, max_tokens=20)).json()["choices"] == expected
    stop.set()
    for thread in threads:
        thread.join(60)
    nothing_is_left(server)
