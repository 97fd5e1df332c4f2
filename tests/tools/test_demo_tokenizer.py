"""The bundled tokenizer and chat template: lossless, DeepSeek's tokens, DeepSeek's format."""

import gzip
import itertools
import json
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer

from tools.demo.dialogues import load_template
from tools.demo.make_tokenizer import SPECIAL_TOKENS, THINK_TOKENS
from tools.demo.train import FOLDER

REFERENCE = Path(__file__).parents[2] / ".." / "shared" / "reference"
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello!"},
    {"role": "user", "content": "Bye"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def test_text_survives_a_round_trip(tokenizer):
    code = "def main(argv):\n    if argv[1:]:\n\t\treturn  0x1F\r\n"
    for text in (code, "naïve café — 你好 🙂 \x00\x7f", "   \n\n  trailing  ", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_prompt_ends_between_tokens_begins_with_bos_and_numbers_match_the_configuration(tokenizer):
    prompt = tokenizer.encode("def main(").ids
    assert tokenizer.encode("def main(argv=None):\n    pass").ids[: len(prompt)] == prompt
    config = json.loads((FOLDER / "config.json").read_text())
    assert tokenizer.encode("x").ids[0] == config["bos_token_id"]
    assert tokenizer.token_to_id("<｜end▁of▁sentence｜>") == config["eos_token_id"]
    assert tokenizer.get_vocab_size() == config["vocab_size"]


def test_thinking_is_visible_text_and_the_other_marks_are_not(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a<think>b</think><｜User｜>c").ids) == "a<think>b</think>c"
    assert len(tokenizer.encode("".join((*SPECIAL_TOKENS, *THINK_TOKENS)), add_special_tokens=False).ids) == 19


def test_chat_template_opens_or_skips_thinking():
    template = load_template(FOLDER)
    asked = template.render(messages=CONVERSATION, add_generation_prompt=True)
    assert asked == (
        "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>\n\nHello!<｜end▁of▁sentence｜>"
        "<｜User｜>Bye<｜Assistant｜><think>\n"
    )
    direct = template.render(messages=CONVERSATION, add_generation_prompt=True, thinking=False)
    assert direct == asked + "\n</think>\n\n"


def reference(name: str) -> bytes:
    if not REFERENCE.exists():
        pytest.skip("shared/reference is not beside the repository")
    return (REFERENCE / name).read_bytes()


def test_chat_template_gives_what_deepseek_r1s_gives():
    settings = json.loads(reference("deepseek-r1.tokenizer_config.json"))
    theirs = jinja2.Environment().from_string(settings["chat_template"])
    tokens = {"bos_token": settings["bos_token"]["content"], "eos_token": settings["eos_token"]["content"]}
    for length, ask in itertools.product(range(1, len(CONVERSATION) + 1), (False, True)):
        given = {"messages": CONVERSATION[:length], "add_generation_prompt": ask}
        # The bundled R1 template lets the model open its reasoning; later releases of it, and ours, open it.
        expected = theirs.render(**given, **tokens) + ("<think>\n" if ask else "")
        assert load_template(FOLDER).render(**given) == expected


def test_special_tokens_are_spelt_as_deepseeks():
    theirs = json.loads(gzip.decompress(reference("deepseek-r1.tokenizer.json.gz")))["added_tokens"]
    assert {*SPECIAL_TOKENS, *THINK_TOKENS} <= {token["content"] for token in theirs}
