"""A model's text in pieces, as a stream brings it, and forms that a grammar takes."""

import itertools
from collections.abc import Callable, Iterable

from hypothesis import strategies as st

from dsjax.engine.contract.structured_params import StructuredOutputs
from dsjax.engine.text.structured import GrammarCompiler
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.message_parser import MessageParser
from dsjax.serve.tool_calls import MessagePiece

CUTS = st.lists(st.integers(0, 400), max_size=6)


def pushed(text: str, cuts: Iterable[int], push: Callable) -> list:
    """What a parser returns for each piece of a text that is cut at these places, and for its end."""
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [push(text[a:b]) for a, b in itertools.pairwise(places)] + [push("", finished=True)]


def message_of(parser: MessageParser, text: str, cuts: Iterable[int]) -> dict:
    """The message that the pieces make, without ids, which are new each time."""
    pieces = pushed(text, cuts, parser.push)
    whole = MessagePiece(
        reasoning="".join(piece.reasoning for piece in pieces),
        content="".join(piece.content for piece in pieces),
        tool_calls=[delta for piece in pieces for delta in piece.tool_calls],
    ).message()
    for call in whole.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return whole


def takes(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether a grammar takes every token of a text, and may then end."""
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    constraint = compiler.compile(StructuredOutputs(grammar=grammar))
    for token in tokenizer.encode(text, add_special_tokens=False):
        if constraint.complete or constraint.take(token) is not None:
            return False
    return constraint.take(tokenizer.eos_id) is None
