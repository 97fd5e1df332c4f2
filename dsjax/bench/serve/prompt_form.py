"""Whether prompts go as token ids or as text, and with which tokenizer."""

from dataclasses import dataclass
from typing import Literal

import tokenizers

from dsjax.bench.serve.client import Endpoint
from dsjax.bench.serve.prompts import (
    PromptMaker,
    TextPrompts,
    TokenPrompts,
    UnmakablePromptError,
    read_tokenizer,
    special_ids,
    vocab_size,
)
from dsjax.bench.serve.server_facts import ServerFacts

PromptForm = Literal["auto", "tokens", "text"]


@dataclass(frozen=True)
class PromptSource:
    """What prompts can be made from.

    Attributes:
        tokenizer: None where none was found.
        vocab_size: of the ids to send; None where nobody said.
    """

    tokenizer: tokenizers.Tokenizer | None
    vocab_size: int | None

    @classmethod
    def find(cls, tokenizer: str | None, size: int | None, facts: ServerFacts) -> "PromptSource":
        """The tokenizer that was named, or that of the model the server says it has.

        Raises:
            PromptError: the named one does not exist.
        """
        if tokenizer is not None:
            found = read_tokenizer(tokenizer)
            return cls(found, size or vocab_size(found))
        for where in filter(None, (facts.root, facts.model)):
            try:
                found = read_tokenizer(where)
            except UnmakablePromptError:
                continue
            return cls(found, size or vocab_size(found))
        return cls(None, size)

    def forms(self, wanted: PromptForm, endpoint: Endpoint) -> list[PromptMaker]:
        """What to try, in this order.

        Raises:
            PromptError: nothing can be tried.
        """
        if wanted == "tokens" and endpoint == "chat":
            raise UnmakablePromptError("--prompt-form is tokens, but chat takes text only; use --endpoint completions")
        makers: list[PromptMaker] = []
        if wanted != "text" and endpoint == "completions" and self.vocab_size is not None:
            special = special_ids(self.tokenizer) if self.tokenizer else frozenset()
            makers.append(TokenPrompts(self.vocab_size, special))
        if wanted != "tokens" and self.tokenizer is not None:
            makers.append(TextPrompts(self.tokenizer))
        if not makers:
            also = ", or --vocab-size to send token ids" if endpoint == "completions" else ""
            raise UnmakablePromptError(
                "found no tokenizer for the server's model; name one with --tokenizer (a directory, a tokenizer.json or a "
                f"Hugging Face repository){also}"
            )
        return makers

    def need_tokenizer(self, dataset: str) -> tokenizers.Tokenizer:
        """The tokenizer.

        Raises:
            PromptError: there is none.
        """
        if self.tokenizer is None:
            raise UnmakablePromptError(
                f"--dataset-name {dataset} counts tokens with a tokenizer; name one with --tokenizer"
            )
        return self.tokenizer
