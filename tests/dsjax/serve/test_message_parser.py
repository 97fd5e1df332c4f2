"""Reasoning and answer come apart in the same way, however the text is cut."""

import pytest
from cut_text import CUTS, pushed
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.message_parser import ReasoningParser, ReasoningSplitter, Section
from dsjax.serve.tool_calls import CALL_BEGIN, CALLS_BEGIN

CALLS_ID, CALL_ID, CLOSE_ID = 90, 91, 92
OPENINGS = {CALLS_BEGIN: CALLS_ID, CALL_BEGIN: CALL_ID}


def split(text: str, start: Section, cuts=()) -> tuple[str, str]:
    pieces = pushed(text, cuts, ReasoningSplitter(start, None, OPENINGS).push)
    return "".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces)


@pytest.mark.parametrize(("text", "start", "expected"), [
    ("\nwhy\n\n</think>\n\nbecause\n", Section.REASONING, ("why", "because\n")),
    ("never ends\n", Section.REASONING, ("never ends\n", "")),
    ("</think>x", Section.REASONING, ("", "x")),
    ("<think>\nwhy</think>x", Section.UNDECIDED, ("why", "x")),
    ("  <think>why", Section.UNDECIDED, ("why", "")),
    ("\nplain <think> text", Section.UNDECIDED, ("", "\nplain <think> text")),
    ("<thin", Section.UNDECIDED, ("", "<thin")),
    ("a</think>b", Section.CONTENT, ("", "a</think>b")),
    ("a</think>b</think>c", Section.REASONING, ("a", "b</think>c")),
    ("", Section.REASONING, ("", "")),
    ("<think>\nwhy</think>x", Section.REASONING, ("why", "x")),
    ("\n <think>why", Section.REASONING, ("why", "")),
    ("<thin", Section.REASONING, ("<thin", "")),
    ("a<think>b</think>", Section.REASONING, ("a<think>b", "")),
    (f"why\n{CALLS_BEGIN}f", Section.REASONING, ("why", f"{CALLS_BEGIN}f")),
    (f"why{CALL_BEGIN}f\n", Section.REASONING, ("why", f"{CALL_BEGIN}f\n")),
    (f"<think>{CALL_BEGIN}f", Section.UNDECIDED, ("", f"{CALL_BEGIN}f")),
    (f"{CALLS_BEGIN}f</think>{CALLS_BEGIN}g", Section.REASONING, (f"{CALLS_BEGIN}f", f"{CALLS_BEGIN}g")),
    (f"why{CALLS_BEGIN}f\n</think>\nx", Section.REASONING, (f"why{CALLS_BEGIN}f", "x")),
])  # fmt: skip
def test_tags_divide_the_text_and_breaks_beside_them_go(text, start, expected):
    assert split(text, start) == expected
    assert split(text, start, range(len(text))) == expected


PIECES = ["<think>", "</think>", "<thi", "</", "\n", "a", " b", "</thinks", CALLS_BEGIN, "<｜tool"]


@given(st.lists(st.sampled_from(PIECES)).map("".join), st.sampled_from(Section), CUTS)
def test_cuts_change_nothing(text, start, cuts):
    assert split(text, start, cuts) == split(text, start)


@pytest.mark.parametrize("pieces", [1, 2, 7])
@pytest.mark.parametrize(("text", "ids", "reasoning"), [
    (f"ab{CALLS_BEGIN}{CALL_BEGIN}cd", [1, 2, CALLS_ID, CALL_ID, 3, 4], 2),
    (f"ab{CALLS_BEGIN}c</think>d", [1, 2, CALLS_ID, 3, CLOSE_ID, 4], 5),
    ("<think>ab", [5, 1, 2], 3),
    ("ab", [1, 2], 2),
])  # fmt: skip
def test_tokens_of_the_reasoning_end_with_its_closing_tag_or_before_the_call_that_ends_it(text, ids, reasoning, pieces):
    splitter = ReasoningSplitter(Section.REASONING, CLOSE_ID, OPENINGS)
    texts = {CALLS_ID: CALLS_BEGIN, CALL_ID: CALL_BEGIN, CLOSE_ID: "</think>", 5: "<think>"}
    for at in range(0, len(ids), pieces):
        part = ids[at : at + pieces]
        length = sum(len(texts.get(token, "a")) for token in part)
        splitter.push(text[:length], False, part)
        text = text[length:]
    splitter.push("", finished=True)
    assert (text, splitter.num_tokens) == ("", reasoning)


def parser(name: str, template: str | None) -> ReasoningParser | None:
    return ReasoningParser.choose(name, Tokenizer(tiny_tokenizer()._backend, {"chat_template": template}))


def test_auto_needs_a_template_that_writes_the_closing_tag():
    assert parser("auto", "{{ '<think>' }}") is None
    assert parser("auto", None) is None
    assert parser("none", "{{ '</think>' }}") is None
    chosen = parser("auto", "{{ '</think>' }}")
    assert chosen.close_token_id == tiny_tokenizer().token_id("</think>") is not None
    assert parser("deepseek_r1", None) is not None


@pytest.mark.parametrize(("prompt", "unfinished", "auto", "always"), [
    ("<｜Assistant｜><think>\n", None, Section.REASONING, Section.REASONING),
    # A model may open its reasoning by itself where the prompt has closed it, or goes on behind a tool's output.
    ("<｜Assistant｜><think>\n\n</think>\n\n", None, Section.UNDECIDED, Section.UNDECIDED),
    ("<｜tool▁output▁begin｜>5<｜tool▁output▁end｜>", None, Section.UNDECIDED, Section.UNDECIDED),
    ("<｜tool▁outputs▁begin｜>5<｜tool▁outputs▁end｜>\n", None, Section.UNDECIDED, Section.UNDECIDED),
    ("a</think>b<｜Assistant｜>", None, Section.UNDECIDED, Section.REASONING),
    ("<｜Assistant｜>so", "so", Section.CONTENT, Section.CONTENT),
    ("<｜Assistant｜><think>so", "<think>so", Section.REASONING, Section.REASONING),
    ("<｜Assistant｜><think>a</think>so", "<think>a</think>so", Section.CONTENT, Section.CONTENT),
])  # fmt: skip
def test_the_prompt_s_end_says_where_the_answer_begins(prompt, unfinished, auto, always):
    assert ReasoningParser(5, always=False).start_of(prompt, unfinished) is auto
    assert ReasoningParser(5, always=True).start_of(prompt, unfinished) is always
