"""Send a running server requests made from its own OpenAPI schema, valid and not, and see that it stays what it was.

    dsjax serve --mesh dp=8 --port 8000 &
    python tools/fuzz_server.py --url http://127.0.0.1:8000 --cases 5000

schemathesis makes the requests (`pip install schemathesis`). Every answer must have a documented status, its content type and
shape, come in time, and be no 5xx; a stream must have its end, and no error that is the server's; afterwards no page may be in use and a
few good requests must be answered as before, to the bit. Exits with 1 if anything was otherwise, and prints what. One seed sends the
same requests again.

With `--changing` the server's mesh changes meanwhile, and others use it too, as in `tools/lab.py hosts`: then 503 is right
where it says that the mesh is being changed (`changing_mesh`), and of `/ready`; pages are not looked at.
"""

import argparse
import collections
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
# Where most can go wrong gets the most cases; the rest is shared evenly.
_SHARES = {"/v1/completions": 0.35, "/v1/chat/completions": 0.35, "/tokenize": 0.08, "/detokenize": 0.05}
# A valid request may ask for a whole context 128 times over. That is work, not an attack on the schema.
_MOST_TOKENS, _MOST_COMPLETIONS = 8, 3


@dataclass
class Findings:
    """What was sent, and what was wrong."""

    statuses: collections.Counter = field(default_factory=collections.Counter)
    cases: collections.Counter = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    changing: int = 0
    """Answers that said rightly that the mesh is being changed."""

    @property
    def count(self) -> int:
        """Requests sent."""
        return sum(self.cases.values())


def fuzz(
    url: str,
    cases: int,
    *,
    api_key: str | None = None,
    start: int = 0,
    timeout: float = 60.0,
    changing: bool = False,
    told: Callable[[str], None] = print,
) -> Findings:
    """Send about `cases` requests, never fewer, and give what was found. changing: the mesh changes meanwhile, and others use it too."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    findings = Findings()
    with httpx.Client(base_url=url, headers=headers, timeout=timeout) as client:
        before = _good_answers(client)
        vocab_size = client.get("/tokenizer_info").raise_for_status().json()["vocab_size"]
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        schema.config.update(base_url=url)
        operations = {
            f"{op.method.upper()} {op.path}": op for result in schema.get_all_operations() if (op := result.ok())
        }
        order = list(zip(operations.items(), _shares(operations), strict=True))
        if changing:  # in another order, so that changes do not meet the first operations most
            random.Random(start).shuffle(order)
        for (name, operation), share in order:
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                count = max(1, int(cases * share / 2))
                _send(operation, mode, count, start, headers, timeout, findings, vocab_size, changing)
            told(f"{findings.count:6d} requests, {len(findings.wrong)} wrong, after {name}")
        # Some endpoints have few possible requests; what they left goes to the richest one.
        richest = operations["POST /v1/chat/completions"]
        while findings.count < cases:
            start += 1
            count = cases - findings.count
            _send(richest, GenerationMode.NEGATIVE, count, start, headers, timeout, findings, vocab_size, changing)
        if not changing:
            findings.wrong += _left_behind(client)
        if _good_answers(client) != before:
            findings.wrong.append("good requests are answered otherwise than before")
    return findings


def _shares(operations: dict[str, Any]) -> Iterator[float]:
    rest = (1 - sum(_SHARES.values())) / max(1, len(operations) - len(_SHARES))
    for operation in operations.values():
        yield _SHARES.get(operation.path, rest)


def _send(
    operation: Any,
    mode: GenerationMode,
    count: int,
    start: int,
    headers: dict,
    timeout: float,
    findings: Findings,
    vocab_size: int,
    changing: bool,
) -> None:
    try:
        strategy = operation.as_strategy(generation_mode=mode)
        strategy.validate()
    except Exception as error:  # an operation without parameters has no invalid request
        if mode is GenerationMode.NEGATIVE:
            return
        raise RuntimeError(f"no request can be made for {operation.label}") from error

    @seed(start)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def one(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            _thin(case.body)
            _make_plausible(case.body, vocab_size)
        _bound(case.body)
        begun = time.monotonic()
        try:
            response = case.call(headers=headers, timeout=timeout)
        except Exception as error:
            findings.wrong.append(f"{operation.label}: no answer: {type(error).__name__}: {str(error)[:200]}")
            findings.cases[operation.label] += 1
            return
        findings.slowest = max(findings.slowest, time.monotonic() - begun)
        findings.cases[operation.label] += 1
        findings.statuses[response.status_code] += 1
        expected = changing and says_changing(operation.path, response.status_code, response.text)
        findings.changing += expected
        try:
            case.validate_response(response, checks=CHECKS[1:] if expected else CHECKS)
            broken = "event-stream" in response.headers.get("content-type", [""])[0] and broken_stream(response.text)
            assert not broken, broken
        except (AssertionError, BaseExceptionGroup) as error:  # one failed check, or several
            parts = getattr(error, "exceptions", (error,))
            text = "; ".join(f"{type(each).__name__}: {str(each)[:300]}" for each in parts)
            findings.wrong.append(f"{operation.label}: {text} … {case.as_curl_command()[:600]}")

    try:
        one()
    except Exception as error:
        if mode is GenerationMode.POSITIVE or "Unsatisfiable" not in type(error).__name__:
            raise


def says_changing(path: str, status: int, text: str) -> bool:
    """Whether an answer is what is documented while the mesh is changed."""
    if status != 503:
        return False
    try:
        code = json.loads(text)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return False
    return code == "changing_mesh" or (path == "/ready" and code == "not_ready")


def broken_stream(text: str) -> str | None:
    """What is wrong with the events of an answer: no end, or an error that is not the request's; None: nothing."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(one) for one in data if one != "[DONE]"]
    for event in events:
        error = event.get("error") or (event if event.get("type") == "error" else None)
        if error and error.get("type") != "invalid_request_error":
            return f"an error in a stream: {json.dumps(error)[:300]}"
    ends = ("response.completed", "response.incomplete", "response.failed", "message_stop")
    ended = "[DONE]" in data[-1:] or (events and events[-1].get("type") in ends)
    return None if ended else f"a stream has no end: {data[-1:]}"


def _thin(body: Any) -> None:
    """Leave a valid request few of its optional fields: with all forty of them some two always exclude each other."""
    if not isinstance(body, dict):
        return
    optional = sorted(body.keys() - {"prompt", "messages", "tokens"})
    chance = random.Random(repr(body))
    for name in chance.sample(optional, max(0, len(optional) - chance.randrange(6))):
        del body[name]


def _make_plausible(body: Any, vocab_size: int) -> None:
    """Give three of four valid requests what the schema cannot ask for, so that they get as far as the device.

    Token ids that there are, messages whose fields go with their roles, the model that is served.
    """
    if not isinstance(body, dict) or random.Random(repr(body)).random() < 0.25:
        return
    body.pop("model", None)
    if isinstance(body.get("prompt"), list):
        body["prompt"] = [_known(one, vocab_size) for one in body["prompt"]] or "x"
    for name in ("allowed_token_ids", "stop_token_ids", "tokens"):
        if isinstance(body.get(name), list):
            body[name] = [_known(one, vocab_size) for one in body[name]] or [1]
    if isinstance(body.get("messages"), list):
        roles = [one.get("role") for one in body["messages"] if isinstance(one, dict)]
        texts = [one.get("content") for one in body["messages"] if isinstance(one, dict)]
        body["messages"] = [
            {"role": role if role in ("system", "user", "assistant") else "user", "content": text or "x"}
            for role, text in zip(roles, texts, strict=True)
        ] or [{"role": "user", "content": "x"}]


def _known(token_ids: Any, vocab_size: int) -> Any:
    """Token ids within the vocabulary; anything else as it is."""
    if isinstance(token_ids, list):
        return [_known(one, vocab_size) for one in token_ids] or [1]
    return token_ids % vocab_size if type(token_ids) is int else token_ids


def _bound(body: Any) -> None:
    """Keep the work of a valid request small."""
    if not isinstance(body, dict) or not ("prompt" in body or "messages" in body):
        return
    if "messages" in body and not (body.get("max_tokens") or body.get("max_completion_tokens")):
        body["max_tokens"] = _MOST_TOKENS
    for name, most in (("max_tokens", _MOST_TOKENS), ("max_completion_tokens", _MOST_TOKENS), ("n", _MOST_COMPLETIONS)):
        if type(body.get(name)) is int and most < body[name] < 10**6:
            body[name] = most


def _good_answers(client: httpx.Client) -> list[Any]:
    """Greedy and seeded answers, without what is new each time."""
    asked = [
        ("/v1/completions", {"prompt": "def main(", "max_tokens": 24, "temperature": 0}),
        ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 16, "seed": 3, "logprobs": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 24, "temperature": 0}),
        ("/tokenize", {"prompt": "def main("}),
    ]
    answers = [client.post(path, json=body).raise_for_status().json() for path, body in asked]
    return [answer.get("choices", answer) for answer in answers]


def _left_behind(client: httpx.Client, seconds: float = 30.0) -> list[str]:
    """What is still in use once nobody waits for anything."""
    deadline = time.monotonic() + seconds
    while True:
        ranks = client.get("/get_load").raise_for_status().json()["ranks"]
        used = [rank for rank in ranks if rank["used_pages"] or rank["running"] or rank["waiting"]]
        if not used:
            return []
        if time.monotonic() > deadline:
            return [f"after {seconds:g} s without requests there is still in use: {used}"]
        time.sleep(0.2)


def main() -> int:
    """Fuzz, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, without /v1")
    parser.add_argument("--cases", type=int, default=5000, help="least number of requests")
    parser.add_argument("--api-key", help="where the server wants one; the admin's to reach its endpoints too")
    parser.add_argument("--seed", type=int, default=0, help="of the requests")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds after which a request counts as hanging")
    parser.add_argument("--changing", action="store_true", help="the mesh changes, and others use the server too")
    parser.add_argument("--json", type=Path, help="file for the findings, which are printed too")
    args = parser.parse_args()
    begun = time.monotonic()
    findings = fuzz(
        args.url, args.cases, api_key=args.api_key, start=args.seed, timeout=args.timeout, changing=args.changing
    )
    summary = {
        "cases": findings.count,
        "seconds": round(time.monotonic() - begun, 1),
        "statuses": {str(status): count for status, count in sorted(findings.statuses.items())},
        "by_operation": dict(findings.cases),
        "changing": findings.changing,
        "slowest_seconds": round(findings.slowest, 3),
        "wrong": findings.wrong,
    }
    text = json.dumps(summary, indent=2, ensure_ascii=False)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
