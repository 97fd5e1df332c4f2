"""Kimi-K2's `tiktoken.model`: converts tiktoken's byte-pair ranks to a tokenizer of the tokenizers library.

The file has one line per token: its bytes in base64, and its rank, which is also its id. Kimi's own code (`tokenization_kimi.py`)
adds the pattern that splits text into words, and 256 special tokens after the ranks; `tokenizer_config.json` names some of them.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

FILE_NAME = "tiktoken.model"
NUM_SPECIAL = 256
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Matches one word of a text. Byte pairs are merged only within a word."""


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read the tokens' bytes and ranks. Raise ValueError for a line without them, or ranks other than 0, 1, 2, …"""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.read_bytes().splitlines())}
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the {len(ranks)} ranks are not 0 to {len(ranks) - 1}, each once")
    return ranks


def read_tiktoken(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return a tokenizer for a `tiktoken.model` and its `tokenizer_config.json`.

    tiktoken merges the pair whose result has the lowest rank; ties go to the first pair. Here each way to split a token into two becomes
    a merge, ordered by rank and, within a token, by the longest left part first.

    Raises:
        ValueError: the file has another format.
    """
    ranks = read_ranks(path)
    letters = byte_letters()
    written = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (written[token[:cut]], written[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    vocabulary = {written[token]: rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    words = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
    backend.decoder = decoders.ByteLevel()
    named = config.get("added_tokens_decoder") or {}
    backend.add_tokens(
        [
            tokenizers.AddedToken(token["content"], special=bool(token.get("special")), normalized=False)
            for token_id in range(len(ranks), len(ranks) + NUM_SPECIAL)
            for token in [named.get(str(token_id), {"content": f"<|reserved_token_{token_id}|>", "special": True})]
        ]
    )
    return backend


def byte_letters() -> list[str]:
    """Return GPT-2's printable characters for the 256 bytes, as in byte-level BPE vocabularies."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
