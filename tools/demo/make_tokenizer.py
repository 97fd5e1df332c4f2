"""Train the demo model's tokenizer: byte-level BPE with DeepSeek's special tokens, in Hugging Face's files.

    python -m tools.demo.make_tokenizer configs/models/demo

The training is deterministic: the same library gives the same `tokenizer.json`, to the byte.
"""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.demo.corpus import read_corpus

VOCAB_SIZE = 4096
BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
SPECIAL_TOKENS = (
    *(BOS, EOS, PAD, USER, ASSISTANT),
    *("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
    "<｜tool▁sep｜>",
)
# As in DeepSeek-R1's tokenizer these two are single tokens, but not special ones: they stay visible in decoded text.
THINK_TOKENS = ("<think>", "</think>")

# DeepSeek-V3's splitting (digits by three, punctuation glued to the word after it, line ends glued to the punctuation
# before them), with one change: nothing is glued to the right of an opening bracket, so that a prompt which stops at
# one, `def main(`, ends where tokens of the training text end too.
DIGITS = r"\p{N}{1,3}"
CODE = "|".join(
    (
        r"""[!"#$%&')*+,\-./:;<=>?@\\\]^_`|}~][A-Za-z]+""",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
        r" ?[\p{P}\p{S}&&[^(\[{]]*[(\[{]+[\r\n]*",
        r" ?[\p{P}\p{S}&&[^(\[{]]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Our own writing of the format that R1's template produces. `thinking` (default true) opens the reasoning after
# `<｜Assistant｜>`; with `thinking=false` it is opened and closed at once, and the model answers directly.
# Reasoning of earlier turns is dropped, as R1 does.
CHAT_TEMPLATE = """\
{%- set thinking = thinking if thinking is defined else true -%}
{{- bos_token -}}
{%- for message in messages if message.role == 'system' -%}
{{- message.content if loop.first else '\\n\\n' + message.content -}}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<｜User｜>' + message.content -}}
{%- elif message.role == 'assistant' -%}
{{- '<｜Assistant｜>' + (message.content or '').split('</think>')[-1] + eos_token -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<｜Assistant｜><think>\\n' if thinking else '<｜Assistant｜><think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
"""


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocab_size` tokens whose encoding begins with `BOS`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(DIGITS), "isolated"),
            pre_tokenizers.Split(Regex(CODE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (*SPECIAL_TOKENS, *THINK_TOKENS)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer = _unmark_special(tokenizer, THINK_TOKENS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the text gave {tokenizer.get_vocab_size()} tokens, expected {vocab_size}: use more text")
    return tokenizer


def _unmark_special(tokenizer: Tokenizer, tokens: tuple[str, ...]) -> Tokenizer:
    """The same tokenizer with `tokens` no longer special: the trainer knows no other way to give them low numbers."""
    description = json.loads(tokenizer.to_str())
    for token in description["added_tokens"]:
        token["special"] = token["special"] and token["content"] not in tokens
    return Tokenizer.from_str(json.dumps(description))


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and `generation_config.json` as Hugging Face's loaders want them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {
        "_from_model_config": True,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "pad_token_id": tokenizer.token_to_id(PAD),
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.95,
    }
    for name, content in (("tokenizer_config.json", settings), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where to write, beside config.json")
    folder = parser.parse_args().folder
    train, _ = read_corpus()
    tokenizer = train_tokenizer([file.content.decode() for file in train])
    maximum = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
    write_tokenizer(tokenizer, folder, maximum)


if __name__ == "__main__":
    main()
