"""Answers read at known times, wherever the network cut them, give figures that can be computed in the head."""

import csv
import itertools
import json
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dsjax.bench.serve.records import AnswerError, AnswerReader, EventParser, EventStreamError, RequestRecord
from dsjax.bench.serve.report import render, write_points_csv
from dsjax.bench.serve.statistics import GoodputError, draft_figures, figures, meets_objectives, parse_goodput
from dsjax.top.reading import Exposition

ASKED = dict.fromkeys(("max_concurrency", "request_rate", "cached_share_bound", "output_throughput_per_device"))
STREAM = (
    '\ufeffdata: {"text": "héllo 🙂"}\n\n'
    ": a comment\r\n\r\nevent: x\r\nid: 1\r\ndata: two\r\ndata:  lines\r\n\r\n"
    "data:no space\r\rdata\n\nretry: 5\n\ndata: [DONE]\n\ndata: never ended\n"
).encode()
EVENTS = ['{"text": "héllo 🙂"}'.encode(), b"two\n lines", b"no space", b"", b"[DONE]"]


def event(body) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def choice(finish: str | None = None, **fields) -> bytes:
    return event({"choices": [{"index": 0, "finish_reason": finish} | fields]})


def text(piece: str, finish: str | None = None) -> bytes:
    return choice(finish, text=piece)


def delta(finish: str | None = None, **fields) -> bytes:
    return choice(finish, delta=fields)


def usage(prompt: int, completion: int, **more) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion, **more}})


DONE = event(b"[DONE]")


def found_in(records, seconds, percentiles=(50,), objectives=None):
    return figures(records, seconds, percentiles, objectives or {}, 0.95)


def shown(found) -> str:
    return render(ASKED | found | draft_figures(None, None), ["ttft"], [99])


def read(start: float, *pieces: tuple[float, bytes], count_tokens=None) -> RequestRecord:
    record = RequestRecord(arrival=start, start=start, prompt_tokens=5)
    reader = AnswerReader(record, count_tokens)
    for now, piece in pieces:
        reader.feed(piece, now)
    reader.close()
    return record


def test_the_definitions_on_one_answer_and_on_chunks_of_several_tokens():
    end = (12.0, usage(8, 3)), (12.0, DONE)
    record = read(10.0, (10.5, text("a")), (10.75, text("b")), (11.5, text("c", "length")), *end)
    # The answer ends with its last choice, not with the usage after it.
    assert (record.ttft, record.itls, record.latency, record.tpot) == (0.5, [0.25, 0.75], 1.5, 0.5)
    assert (record.prompt_tokens, record.output_tokens, record.token_source) == (8, 3, "usage")
    assert (record.text, record.finish_reason) == ("abc", "length")
    record = read(0.0, (1.0, text("abcd")), (2.0, text("efgh", "stop")), (2.0, usage(1, 8)), (2.0, DONE))
    assert (record.itls, record.tpot) == ([1.0], pytest.approx(1 / 7))
    found = found_in([record], 2.0)
    assert (found["tokens_per_chunk"], found["max_output_tokens_per_s"]) == (4, 4)


def test_chunks_without_a_token_carry_none_and_tokens_without_text_reasoning_and_tool_calls_count():
    first, end = delta(role="assistant", content=""), ((5.0, delta("stop")), (5.0, DONE))
    tokens = delta(reasoning_content="hm", reasoning="hm"), delta(content="a"), delta(tool_calls=[{"index": 0}])
    record = read(0.0, (1.0, first), *zip((2.0, 3.0, 4.0), tokens, strict=True), *end)
    assert record.chunk_times == [2.0, 3.0, 4.0]
    assert (record.text, record.latency) == ("hma", 5.0)
    assert read(0.0, (1.0, text("")), (2.0, text("é", "stop")), (2.0, DONE)).chunk_times == [1.0, 2.0]
    at_once = read(0.0, (1.0, text("", "stop")), (1.0, usage(3, 1)), (1.0, DONE))
    assert (at_once.ttft, at_once.itls, at_once.tpot, at_once.output_tokens) == (1.0, [], None, 1)


def test_without_usage_the_tokenizer_counts_and_without_that_chunks_do():
    pieces = ((1.0, text("one two")), (2.0, text(" three", "stop")), (2.0, DONE))
    assert read(0.0, *pieces, count_tokens=lambda s: len(s.split())).output_tokens == 3
    record = read(0.0, *pieces)
    assert (record.output_tokens, record.token_source) == (2, "chunks")
    assert "1 requests were counted as chunks" in shown(found_in([record], 2.0, [99]))


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([text("a")], "without \\[DONE\\]"),
        ([], "without \\[DONE\\]"),
        ([DONE], "no choice"),
        ([text("a"), event({"error": {"message": "the engine\nfailed"}})], "error event: the engine failed"),
        ([event(b"<html>")], "not JSON"),
        ([event(b"[1]")], "not a JSON object"),
        ([event({"choices": ["a"]})], "not of OpenAI's shape"),
        ([event({"choices": [{"text": 5}]})], "not of OpenAI's shape"),
        *(([usage(1, count)], "expected a number of tokens") for count in ("5", -5, 10**400, math.nan)),
        ([usage("a", 5)], "expected a number of tokens"),
        ([usage(1, 5, prompt_tokens_details={"cached_tokens": "x"})], "expected a number of tokens"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(pieces, message):
    with pytest.raises(AnswerError, match=message):
        read(0.0, *((1.0, piece) for piece in pieces))


def answer(start: float, *chunk_times: float, tokens: int | None = None, prompt: int = 10) -> RequestRecord:
    record = RequestRecord(start, start, prompt, list(chunk_times), chunk_times[-1])
    record.output_tokens, record.token_source = tokens or len(chunk_times), "usage"
    return record


def test_throughputs_count_whole_answers_only():
    failed = RequestRecord(0.0, 0.0, 99, [0.1], error="HTTP 500: no")
    records = [answer(0.0, 1.0, 2.0), answer(1.0, 2.0, 3.0, 4.0), failed]
    found = found_in(records, 5.0)
    assert (found["completed"], found["failed"]) == (2, 1)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 5)
    assert [found[f"{name}_throughput"] for name in ("request", "output", "total_token")] == [0.4, 1.0, 5.0]
    assert found["error_counts"] == {"HTTP 500: no": 1}


@pytest.mark.parametrize(
    ("meant", "counted", "differ"), [(20, 80, False), (1000, 1100, False), (7140, 35921, True), (35921, 7140, True)]
)
def test_prompts_of_other_lengths_than_were_meant_are_named(meant, counted, differ):
    records = [answer(0.0, 1.0, prompt=meant) for _ in range(3)]
    for record in records:
        record.prompt_tokens = counted
    found = found_in(records, 2.0, [99])
    assert (found["meant_input_tokens"], found["total_input_tokens"]) == (3 * meant, 3 * counted)
    assert (f"counted {counted:,} tokens a prompt where {meant:,} were meant" in shown(found)) == differ


def test_distributions_are_milliseconds_with_linear_percentiles():
    records = [answer(0.0, 0.1 * n, 0.1 * n + 0.5) for n in range(1, 12)]
    found = found_in(records, 1.0, [0, 25, 50, 90, 100])
    ttft = {name.removesuffix("_ttft_ms"): value for name, value in found.items() if name.endswith("_ttft_ms")}
    percentiles = {"p0": 100, "p25": 350, "p50": 600, "p90": 1000, "p100": 1100}
    assert ttft == pytest.approx({"mean": 600, "median": 600, "std": 100 * 10**0.5} | percentiles)


def test_the_best_second_and_the_peak_of_concurrency():
    records = [answer(0.0, 0.5, 1.25, 1.5, 1.75), answer(1.0, 1.9, 3.0, tokens=4), answer(3.0, 3.5)]
    found = found_in(records, 4.0)
    # second 1 has three tokens of the first request, and one of the second's two chunks, of two tokens each
    assert found["max_output_tokens_per_s"] == 5
    # the third starts at the moment the second ends, which is not at once
    assert found["max_concurrent_requests"] == 2


def test_goodput_counts_requests_that_meet_every_objective():
    fast, slow, single = answer(0.0, 0.1, 0.2), answer(0.0, 0.1, 0.9), answer(0.0, 0.1)
    limits = parse_goodput(["ttft:200", "tpot:150"])
    assert [meets_objectives(r, limits) for r in (fast, slow, single)] == [True, False, True]
    assert found_in([fast, slow, single], 2.0, objectives=limits)["request_goodput"] == 1.0
    assert found_in([fast], 2.0)["request_goodput"] is None
    assert parse_goodput(["ttft:200,e2el:3e3 tpot:1"]) == {"ttft": 200, "e2el": 3000, "tpot": 1}
    for wrong in ("itl:5", "ttft", "ttft:-1", "ttft:nan", "ttft:x"):
        with pytest.raises(GoodputError, match="METRIC:MILLISECONDS"):
            parse_goodput([wrong])


def test_points_with_drafts_and_answers_and_without_are_lines_of_one_table(tmp_path):
    def point(record, *metrics):
        return found_in([record], 1.0, [99], {"ttft": 1e6}) | draft_figures(*metrics)

    drafted = Exposition("vllm:spec_decode_num_drafts_total 2\nvllm:spec_decode_num_draft_tokens_total 4\n")
    answered, silent = (answer(0.0, 0.1), Exposition(""), drafted), (RequestRecord(0, 0, 1, error="no"), None, None)
    path = tmp_path / "points.csv"
    write_points_csv(path, [point(*answered), point(*silent)])
    rows = list(csv.DictReader(path.open()))
    assert [row["completed"] for row in rows] == ["1", "0"]
    assert [row["spec_decode_num_drafts"] for row in rows] == ["2", ""]
    assert not {"objective_shares", "spec_decode_per_position_acceptance_rates"} & set(rows[0])


def parse(pieces) -> list[bytes]:
    parser = EventParser()
    return [event for piece in pieces for event in parser.feed(piece)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
@example(range(len(STREAM)))
def test_any_cuts(cuts):
    assert all(parse([STREAM[:at], STREAM[at:]]) == EVENTS for at in cuts)
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parse(STREAM[a:b] for a, b in itertools.pairwise(edges)) == EVENTS


def test_an_event_is_given_as_soon_as_its_blank_line_is_there_and_an_endless_one_is_an_error():
    parser = EventParser()
    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\ndata: b") == [b"a"]
    assert parser.feed(b"\n\n") == [b"b"]
    parser = EventParser()
    with pytest.raises(EventStreamError, match="16 MiB"):
        list(map(parser.feed, [b"x" * 2**20] * 40))
