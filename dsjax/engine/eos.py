"""Which tokens end a completion: what the model's files say, together."""

import json
from pathlib import Path

from dsjax.engine.tokenizer import Tokenizer, TokenizerError


def read_eos_token_ids(directory: str | Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """End-of-sequence ids, ascending: the tokenizer's, and those of `generation_config.json`, else of `config.json`.

    Raises:
        TokenizerError: one of the files is unreadable, or its `eos_token_id` is neither an integer nor a list of them.
    """
    found: set[int] = set() if tokenizer is None or tokenizer.eos_id is None else {tokenizer.eos_id}
    for name in ("generation_config.json", "config.json"):
        ids = _eos_field(Path(directory) / name)
        if ids:
            found |= ids
            break
    return tuple(sorted(found))


def _eos_field(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except ValueError as error:
        raise TokenizerError(f"{path} is not JSON: {error}") from error
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise TokenizerError(f"{path} has eos_token_id {value!r}, expected an integer of at least 0 or a list of them")
    return set(ids)
