"""Prompts of a wanted length: token ids where the server takes them, else text of words of a tokenizer."""

import functools
import importlib.resources
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers

from dsjax.bench.serve.client import OpenAIEndpoint
from dsjax.bench.serve.server_facts import ServerFacts
from dsjax.config import bundled_models
from dsjax.errors import UserError

_FEWEST_WORDS = 16

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WORD = re.compile(r"[Ġ▁]([A-Za-z]{2,})")
PromptForm = Literal["auto", "tokens", "text"]


class UnmakablePromptError(UserError):
    """Prompts that cannot be made from what is known of the server."""


class TokenPrompts:
    """Prompts as token ids: their lengths are exact."""

    def __init__(self, vocab_size: int, special_ids: frozenset[int] = frozenset()):
        self._allowed = np.array([i for i in range(vocab_size) if i not in special_ids])

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Ids of the whole vocabulary but its special tokens, all equally probable."""
        return rng.choice(self._allowed, count).tolist()

    def assemble(self, ids: list[int]) -> tuple[list[int], int]:
        """The ids themselves, and their number."""
        return ids, len(ids)


class TextPrompts:
    """Prompts as text, for servers (and `/v1/chat/completions`) that take nothing else.

    Tokens are drawn from those that are a space and an ASCII word, because tokenizers split text before such a word: the
    text has as many tokens as were drawn, and prompts that share a prefix of tokens share it as text. Where a tokenizer
    has hardly any such tokens, all that stand for themselves are drawn, and the length is what the tokenizer counts.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        words = _words(tokenizer)
        self._texts = words if len(words) >= _FEWEST_WORDS else _lone_tokens(tokenizer)
        if not self._texts:
            raise UnmakablePromptError(
                "the tokenizer has no token that could stand in a prompt; give another --tokenizer"
            )
        self._ids = np.array(sorted(self._texts))

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Ids of words, all equally probable."""
        return rng.choice(self._ids, count).tolist()

    def assemble(self, ids: list[int]) -> tuple[str, int]:
        """The words' text, and its number of tokens without special ones."""
        text = "".join(self._texts[i] for i in ids)
        return text, count_tokens(self._tokenizer, text)


PromptMaker = TokenPrompts | TextPrompts
"""Draws pieces of a prompt, which are token ids in both forms, and puts pieces together."""


def count_tokens(tokenizer: tokenizers.Tokenizer, text: str) -> int:
    """Tokens of a text, special ones not counted."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def read_tokenizer(where: str) -> tokenizers.Tokenizer:
    """A tokenizer from a tokenizer.json, a model's directory, a bundled model, or a Hugging Face repository.

    Of a repository only the tokenizer is downloaded.

    Raises:
        UnmakablePromptError: there is none.
    """
    path = Path(os.path.expanduser(where))
    if where in bundled_models():
        path = Path(str(importlib.resources.files("configs") / "models" / where))
    if path.is_dir():
        path = path / "tokenizer.json"
    try:
        if path.is_file():
            return tokenizers.Tokenizer.from_file(str(path))
        if _REPOSITORY.fullmatch(where):
            return tokenizers.Tokenizer.from_pretrained(where)
        reason = "no such file, directory or repository"
    except Exception as error:  # the library raises bare Exception
        reason = " ".join(str(error).split())[:200]
    raise UnmakablePromptError(f"found no tokenizer {where!r} ({reason})")


def _words(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    """Ids that are a space and a word, and stay so when the word follows another."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    words = {token_id: f" {word[1]}" for piece, token_id in vocabulary.items() if (word := _WORD.fullmatch(piece))}
    if not words:
        return {}
    twice = tokenizer.encode_batch([text * 2 for text in words.values()], add_special_tokens=False)
    return {i: text for (i, text), encoded in zip(words.items(), twice, strict=True) if encoded.ids == [i, i]}


def _lone_tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    """Ids whose text is the same token again."""
    texts = {i: tokenizer.decode([i]) for i in sorted(tokenizer.get_vocab(with_added_tokens=False).values())}
    return {i: text for i, text in texts.items() if text and count_tokens(tokenizer, text) == 1 and "�" not in text}


@dataclass(frozen=True)
class PromptSource:
    """What prompts can be made from. tokenizer: None where none was found. vocab_size: of the ids to send; None where nobody said."""

    tokenizer: tokenizers.Tokenizer | None
    vocab_size: int | None

    @classmethod
    def find(cls, tokenizer: str | None, size: int | None, facts: ServerFacts) -> "PromptSource":
        """The tokenizer that was named, or that of the model the server says it has.

        Raises:
            UnmakablePromptError: the named one does not exist.
        """
        for where in filter(None, (tokenizer,) if tokenizer is not None else (facts.root, facts.model)):
            try:
                read = read_tokenizer(where)
            except UnmakablePromptError:
                if tokenizer is not None:
                    raise
                continue
            return cls(read, size or max(read.get_vocab(with_added_tokens=True).values(), default=-1) + 1)
        return cls(None, size)

    def forms(self, wanted: PromptForm, endpoint: OpenAIEndpoint) -> list[PromptMaker]:
        """What to try, in this order. Raises `UnmakablePromptError`: nothing can be tried."""
        completions = endpoint == "completions"
        if wanted == "tokens" and not completions:
            raise UnmakablePromptError("--prompt-form is tokens, but chat takes text only; use --endpoint completions")
        makers: list[PromptMaker] = []
        if wanted != "text" and completions and self.vocab_size is not None:
            # Special tokens would end a random prompt, or open a conversation's turn.
            special = self.tokenizer.get_added_tokens_decoder() if self.tokenizer else ()
            makers.append(TokenPrompts(self.vocab_size, frozenset(special)))
        if wanted != "tokens" and self.tokenizer is not None:
            makers.append(TextPrompts(self.tokenizer))
        if not makers:
            raise UnmakablePromptError(
                "found no tokenizer for the server's model; name one with --tokenizer (a directory, a tokenizer.json or a "
                f"Hugging Face repository){', or --vocab-size to send token ids' if completions else ''}"
            )
        return makers

    @property
    def token_counter(self) -> Callable[[str], int] | None:
        """Count the tokens of a text; None without a tokenizer."""
        return None if self.tokenizer is None else functools.partial(count_tokens, self.tokenizer)
