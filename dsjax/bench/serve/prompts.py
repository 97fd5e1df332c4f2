"""Prompts of a given length: token ids if the server accepts them, else text made of a tokenizer's words."""

import contextlib
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
    """Prompts cannot be generated with the known vocabulary or tokenizer."""


class TokenPrompts:
    """Prompts as token ids, with exact lengths."""

    def __init__(self, vocab_size: int, special_ids: frozenset[int] = frozenset()):
        self._allowed = np.array([i for i in range(vocab_size) if i not in special_ids])

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw ids uniformly from the whole vocabulary except special tokens."""
        return rng.choice(self._allowed, count).tolist()

    def assemble(self, ids: list[int]) -> tuple[list[int], int]:
        """Return the ids and their number."""
        return ids, len(ids)


class TextPrompts:
    """Prompts as text, for `/v1/chat/completions` and servers that accept only text.

    Draws tokens that are a space and an ASCII word, because tokenizers split text before such a word: the text has as many
    tokens as were drawn, and prompts with a common token prefix have a common text prefix. If a tokenizer has hardly any
    such tokens, draws from all tokens whose text encodes to one token, and the tokenizer counts the length.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        words = _words(tokenizer)
        self._texts = words if len(words) >= _FEWEST_WORDS else _single_tokens(tokenizer)
        if not self._texts:
            raise UnmakablePromptError(
                "the tokenizer has no token that could stand in a prompt; give another --tokenizer"
            )
        self._ids = np.array(sorted(self._texts))

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw word ids uniformly."""
        return rng.choice(self._ids, count).tolist()

    def assemble(self, ids: list[int]) -> tuple[str, int]:
        """Return the words' text and its number of tokens, without special tokens."""
        text = "".join(self._texts[i] for i in ids)
        return text, count_tokens(self._tokenizer, text)


PromptMaker = TokenPrompts | TextPrompts
"""`draw` returns token ids in both forms; `assemble` makes a prompt of the ids that were drawn, and counts its tokens."""


def count_tokens(tokenizer: tokenizers.Tokenizer, text: str) -> int:
    """Return the number of tokens of a text, without special tokens."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def read_tokenizer(where: str) -> tokenizers.Tokenizer:
    """Load a tokenizer from a tokenizer.json, a model's directory, a bundled model, or a Hugging Face repository.

    From a repository, downloads only the tokenizer.

    Raises:
        UnmakablePromptError: no tokenizer found.
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
    """Return ids (with text) that are a space and a word, and encode to the same id after another word."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    words = {token_id: f" {word[1]}" for piece, token_id in vocabulary.items() if (word := _WORD.fullmatch(piece))}
    if not words:
        return {}
    doubled = tokenizer.encode_batch([text * 2 for text in words.values()], add_special_tokens=False)
    return {i: text for (i, text), encoded in zip(words.items(), doubled, strict=True) if encoded.ids == [i, i]}


def _single_tokens(tokenizer: tokenizers.Tokenizer) -> dict[int, str]:
    """Return ids (with text) whose text encodes to one token."""
    texts = {i: tokenizer.decode([i]) for i in sorted(tokenizer.get_vocab(with_added_tokens=False).values())}
    return {i: text for i, text in texts.items() if text and count_tokens(tokenizer, text) == 1 and "�" not in text}


@dataclass(frozen=True)
class PromptSource:
    """Source of prompts."""

    tokenizer: tokenizers.Tokenizer | None  # None if none was found
    vocab_size: int | None  # upper bound of the ids to send; None if unknown

    @classmethod
    def find(cls, tokenizer: str | None, size: int | None, facts: ServerFacts) -> "PromptSource":
        """Find the named tokenizer, or else the tokenizer of the model that the server reports.

        Raises:
            UnmakablePromptError: the named tokenizer does not exist.
        """
        if tokenizer:
            return cls._with(read_tokenizer(tokenizer), size)
        for where in (facts.root, facts.model):
            if where:
                with contextlib.suppress(UnmakablePromptError):
                    return cls._with(read_tokenizer(where), size)
        return cls(None, size)

    @classmethod
    def _with(cls, tokenizer: tokenizers.Tokenizer, size: int | None) -> "PromptSource":
        """Create a source with a tokenizer. size: number of ids; None: the tokenizer's."""
        return cls(tokenizer, size or max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1)

    def forms(self, wanted: PromptForm, endpoint: OpenAIEndpoint) -> list[PromptMaker]:
        """Return the prompt forms to try, in this order. Raises `UnmakablePromptError` if there is none."""
        is_completions = endpoint == "completions"
        if wanted == "tokens" and not is_completions:
            raise UnmakablePromptError("--prompt-form is tokens, but chat takes text only; use --endpoint completions")
        makers: list[PromptMaker] = []
        if wanted != "text" and is_completions and self.vocab_size is not None:
            # Special tokens could end a random prompt, or start a chat turn.
            special = self.tokenizer.get_added_tokens_decoder() if self.tokenizer else ()
            makers.append(TokenPrompts(self.vocab_size, frozenset(special)))
        if wanted != "tokens" and self.tokenizer is not None:
            makers.append(TextPrompts(self.tokenizer))
        if not makers:
            raise UnmakablePromptError(
                "found no tokenizer for the server's model; name one with --tokenizer (a directory, a tokenizer.json or a "
                f"Hugging Face repository){', or --vocab-size to send token ids' if is_completions else ''}"
            )
        return makers

    @property
    def token_counter(self) -> Callable[[str], int] | None:
        """Function that counts the tokens of a text; None without a tokenizer."""
        return None if self.tokenizer is None else functools.partial(count_tokens, self.tokenizer)
