"""The names that pages of the latent cache are found by: one hash for a page and everything before it."""

from array import array
from hashlib import sha256

from dsjax.engine.request import Request

_NO_SALT = bytes(32)


def extend_hashes(request: Request, page_size: int) -> list[bytes]:
    """Bring `request.page_hashes` up to the full pages of its tokens, and give it.

    A page's hash is sha256 of the hash of the page before it and its token ids (int32, host order); the first page's
    predecessor is the hash of the salt. Equal hashes so mean equal tokens at equal positions, from the first one on, under equal salts.
    """
    hashes, tokens = request.page_hashes, request.token_ids
    if len(hashes) < len(tokens) // page_size:
        parent = hashes[-1] if hashes else _root(request.cache_salt)
        for start in range(len(hashes) * page_size, len(tokens) - page_size + 1, page_size):
            parent = sha256(parent + array("i", tokens[start : start + page_size]).tobytes()).digest()
            hashes.append(parent)
    return hashes


def _root(salt: str | None) -> bytes:
    # JSON can hold half a surrogate pair, which strict UTF-8 cannot.
    return _NO_SALT if salt is None else sha256(salt.encode("utf-8", "surrogatepass")).digest()
