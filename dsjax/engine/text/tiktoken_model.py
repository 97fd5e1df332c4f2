"""Kimi-K2's `tiktoken.model`: byte-pair ranks in the form of the package tiktoken, read into the tokenizers library's form.

The file has a line for each token: its bytes in base64, and its rank, which is also its id. Kimi's own code (`tokenization_kimi.py`)
adds the pattern that cuts a text into words, and 256 special tokens behind the ranks, of which `tokenizer_config.json` names some.
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
"""Matches one word of a text; byte pairs are merged within a word."""


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read tokens' bytes and ranks. Raises a ValueError for a line that has none, or ranks that are not 0, 1, 2, …"""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, path.read_bytes().splitlines())}
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"the {len(ranks)} ranks are not 0 to {len(ranks) - 1}, each once")
    return ranks


def read_tiktoken(path: Path, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Make a tokenizer of a `tiktoken.model` and its `tokenizer_config.json`.

    tiktoken merges the pair whose result has the lowest rank, the first of them where several have. Here every way to put a token together
    is a merge, in the order of ranks; of one token's, the longest left part comes first.

    Raises:
        ValueError: the file is not of that form.
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
    """GPT-2's printable stand-ins for the 256 bytes, as byte-level BPE writes its vocabulary."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
