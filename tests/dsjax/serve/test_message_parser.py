"""Reasoning and answer come apart in the same way, however the text is cut."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import tiny_tokenizer

from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.message_parser import ReasoningParser, ReasoningSplitter, Section


def split(text: str, start: Section, cuts=()) -> tuple[str, str]:
    splitter = ReasoningSplitter(start)
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [splitter.push(text[a:b]) for a, b in itertools.pairwise(places)]
    pieces.append(splitter.push("", finished=True))
    return "".join(piece.reasoning for piece in pieces), "".join(piece.content for piece in pieces)


@pytest.mark.parametrize(
    ("text", "start", "expected"),
    [
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
    ],
)
def test_tags_divide_the_text_and_breaks_beside_them_go(text, start, expected):
    assert split(text, start) == expected
    assert split(text, start, range(len(text))) == expected


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", "\n", "a", " b", "</thinks"])).map("".join),
    st.sampled_from(Section),
    st.lists(st.integers(0, 200), max_size=6),
)
def test_cuts_change_nothing(text, start, cuts):
    assert split(text, start, cuts) == split(text, start)


def parser(name: str, template: str | None) -> ReasoningParser | None:
    tokenizer = tiny_tokenizer()
    return ReasoningParser.choose(name, Tokenizer(tokenizer._backend, {"chat_template": template}))


def test_auto_needs_a_template_that_writes_the_closing_tag():
    assert parser("auto", "{{ '<think>' }}") is None
    assert parser("auto", None) is None
    assert parser("none", "{{ '</think>' }}") is None
    chosen = parser("auto", "{{ '</think>' }}")
    assert chosen.close_token_id == tiny_tokenizer().token_id("</think>") is not None
    assert parser("deepseek_r1", None) is not None


@pytest.mark.parametrize(
    ("prompt", "unfinished", "auto", "always"),
    [
        ("<｜Assistant｜><think>\n", None, Section.REASONING, Section.REASONING),
        ("<｜Assistant｜><think>\n\n</think>\n\n", None, Section.CONTENT, Section.CONTENT),
        ("a</think>b<｜Assistant｜>", None, Section.UNDECIDED, Section.REASONING),
        ("<｜Assistant｜>so", "so", Section.CONTENT, Section.CONTENT),
        ("<｜Assistant｜><think>so", "<think>so", Section.REASONING, Section.REASONING),
        ("<｜Assistant｜><think>a</think>so", "<think>a</think>so", Section.CONTENT, Section.CONTENT),
    ],
)
def test_the_prompt_s_end_says_where_the_answer_begins(prompt, unfinished, auto, always):
    assert ReasoningParser(5, always=False).start_of(prompt, unfinished) is auto
    assert ReasoningParser(5, always=True).start_of(prompt, unfinished) is always
