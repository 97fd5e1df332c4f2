"""Tokens to text and back: byte-level decoding in pieces, stop strings in pieces, the real templates."""

import gzip
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import BOS, EOS, tiny_backend, tiny_tokenizer, write_tokenizer
from tokenizers import decoders, models

from dsjax.engine.text.output_processor import IncrementalDetokenizer, StopStrings
from dsjax.engine.text.tokenizer import ChatTemplate, ChatTemplateError, Tokenizer, TokenizerError

REFERENCE = Path(__file__).parents[4] / ".." / "shared" / "reference"


@pytest.fixture(scope="module")
def r1() -> Tokenizer:
    packed = REFERENCE / "deepseek-r1.tokenizer.json.gz"
    if not packed.exists():
        pytest.skip("the real tokenizer is not at hand")
    backend = tokenizers.Tokenizer.from_str(gzip.decompress(packed.read_bytes()).decode())
    return Tokenizer(backend, json.loads((REFERENCE / "deepseek-r1.tokenizer_config.json").read_text()))


def in_pieces(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return "".join(detokenizer.push(i) for i in ids) + detokenizer.flush()


@given(ids=st.lists(st.integers(0, 310), max_size=40), skip=st.booleans())
def test_pieces_are_the_whole_for_any_tokens(ids, skip):
    tokenizer = tiny_tokenizer()
    assert in_pieces(tokenizer, ids, skip) == tokenizer.decode(ids, skip)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 129279), max_size=40), skip=st.booleans())
def test_pieces_are_the_whole_with_the_real_vocabulary(r1, ids, skip):
    assert in_pieces(r1, ids, skip) == r1.decode(ids, skip)


@given(text=st.text(max_size=30))
def test_no_piece_ever_shows_half_a_character(text):
    tokenizer = tiny_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer)
    seen = ""
    for token in tokenizer.encode(text, add_special_tokens=False):
        seen += detokenizer.push(token)
        assert text.startswith(seen)
    assert seen == text


def naive_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: the meaning that pieces must not change."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    pieces=st.lists(st.text("ab.", max_size=5), max_size=12),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_how_the_text_is_cut(pieces, stops, include):
    checker = StopStrings(stops, include)
    seen = ""
    for piece in pieces:
        seen += checker.push(piece)
        if checker.matched is not None:
            break
    else:
        seen += checker.flush()
    assert (seen, checker.matched) == naive_stop("".join(pieces), stops, include)


def test_text_is_held_back_only_while_it_may_become_a_stop_string():
    checker = StopStrings(["</s>"])
    assert [checker.push(piece) for piece in ("a", "<", "/", "x", "<")] == ["a", "", "", "</x", ""]


def test_the_begin_of_sequence_token_is_added_once():
    tokenizer = tiny_tokenizer()
    assert tokenizer.encode("ab")[0] == tokenizer.bos_id
    assert tokenizer.encode("ab")[1:] == tokenizer.encode("ab", add_special_tokens=False)
    without = Tokenizer(tiny_backend(), {"bos_token": BOS, "add_bos_token": False})
    assert without.encode("ab") == without.encode("ab", add_special_tokens=False)


def test_a_directory_is_read_with_its_separate_template(tmp_path):
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] | upper }}")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.special_tokens["eos_token"]) == (0, 1, EOS)
    assert tokenizer.chat_template.render([{"role": "user", "content": "hi"}]) == "HI"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "found no tokenizer.json"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "is not a tokenizer"),
        (lambda d: (d / "tokenizer_config.json").write_text("{"), "is not JSON"),
        (lambda d: (d / "tokenizer_config.json").write_text('{"eos_token": "<nope>"}'), "'<nope>' as eos_token"),
    ],
)
def test_broken_tokenizer_files_are_named(tmp_path, spoil, message):
    write_tokenizer(tmp_path)
    spoil(tmp_path)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_directory(tmp_path)


def test_a_tokenizer_that_is_not_byte_level_is_refused():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.decoder = decoders.Metaspace()
    with pytest.raises(TokenizerError, match=r"\['Metaspace'\], expected ByteLevel"):
        Tokenizer(backend)


def test_deepseek_r1_s_own_template_renders(r1):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>easy</think>2"},
        {"role": "user", "content": "2+2?"},
    ]
    text = r1.chat_template.render(messages)
    assert text == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>1+1?<｜Assistant｜>2<｜end▁of▁sentence｜><｜User｜>2+2?<｜Assistant｜>"
    )
    ids = r1.encode(text, add_special_tokens=False)
    assert ids[0] == r1.bos_id == 0
    assert ids.count(r1.bos_id) == 1
    assert r1.decode(ids, skip_special_tokens=False) == text
    assert r1.encode("hi")[0] == 0, "its configuration asks for the begin-of-sequence token"


def test_templates_have_hugging_face_s_globals_in_an_immutable_sandbox():
    messages = [{"role": "user", "content": "<é>"}]
    assert ChatTemplate("{{ messages | tojson }}").render(messages) == '[{"role": "user", "content": "<é>"}]'
    assert len(ChatTemplate("{{ strftime_now('%Y') }}").render(messages)) == 4
    assert ChatTemplate("{{ thinking }}{{ tools is none }}").render(messages, thinking=True) == "TrueTrue"
    for hostile in (
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 + '' }}",
    ):
        with pytest.raises(ChatTemplateError):
            ChatTemplate(hostile).render(messages)
    assert messages == [{"role": "user", "content": "<é>"}]
    with pytest.raises(ChatTemplateError, match="not a Jinja template"):
        ChatTemplate("{% if %}")
