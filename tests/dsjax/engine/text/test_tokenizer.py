"""Tokens to text and back: the tokenizer's files, and the real chat templates."""

import pytest
import tokenizers
from tiny_tokenizer import BOS, EOS, tiny_backend, tiny_tokenizer, write_tokenizer
from tokenizers import decoders, models

from dsjax.engine.text.tokenizer import ChatTemplate, ChatTemplateError, Tokenizer, TokenizerError


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
    assert text == f"{BOS}Be brief.<｜User｜>1+1?<｜Assistant｜>2{EOS}<｜User｜>2+2?<｜Assistant｜>"
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
    for hostile in ("{{ raise_exception('no') }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"):
        with pytest.raises(ChatTemplateError):
            ChatTemplate(hostile).render(messages)
    assert messages == [{"role": "user", "content": "<é>"}]
    with pytest.raises(ChatTemplateError, match="not a Jinja template"):
        ChatTemplate("{% if %}")
