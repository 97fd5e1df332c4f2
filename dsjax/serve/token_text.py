"""Tokens as text where each stands alone: in log-probabilities and in `/tokenize`."""

from dsjax.engine.tokenizer import Tokenizer


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; `bytes:\\xe2\\x80` where it is no whole characters, as OpenAI writes it, so that two are never taken for one."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
