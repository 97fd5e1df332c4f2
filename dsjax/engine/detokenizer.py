"""`IncrementalDetokenizer`: tokens to text, one at a time, never half a character."""

import codecs

from dsjax.engine.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns a stream of tokens into text pieces whose concatenation is `tokenizer.decode` of all of them.

    A byte-level token is a run of bytes, which may end inside a character; such bytes are held back until the character is
    whole, or certain never to be (then it is U+FFFD).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._within_character = False

    def push(self, token_id: int) -> str:
        """The text that is certain after this token."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return ""
        piece = self._tokenizer.token_bytes(token_id)
        if not self._within_character and piece.isascii():
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        self._within_character = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """The text of bytes still held back: U+FFFD, or nothing. The stream has ended."""
        return self._decoder.decode(b"", final=True)
