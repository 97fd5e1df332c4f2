"""Structured output: grammars compiled by llguidance and applied token by token. See ``docs/sampling.md``."""

import functools
import json
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from dsjax.engine.contract.structured_params import SamplingError, StructuredOutputs
from dsjax.engine.text.json_schema import enforceable, explained
from dsjax.engine.text.tokenizer import Tokenizer

KEPT_GRAMMARS = 64
"""Number of compiled grammars in the cache."""

COMPILE_STACK = 256 * 2**20
"""Stack size of the compiling thread, in bytes. llguidance recurses once per rule: 7,500 chained rules, which `MAX_GRAMMAR_CHARS` allows,
overflowed the usual 8 MB and killed the process; 64 MB sufficed. Stack that is not used takes no memory."""

JSON_OPTIONS: dict[str, Any] = {"whitespace_pattern": r"( |\n[ \t]{0,16})?"}
"""Allow one space, or a line break and an indentation, between JSON tokens: both common styles, but no unbounded whitespace."""

COMPACT_JSON_OPTIONS: dict[str, Any] = {"whitespace_flexible": False}
"""Allow no whitespace between JSON tokens, for `disable_any_whitespace`."""


def parser_limits() -> LLParserLimits:
    """Return limits on the cost of a grammar: about 20 ms to compile and 5 ms per token, by llguidance's figures."""
    return LLParserLimits(
        max_items_in_row=1_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=50_000,  # up to 2 kB each
        max_grammar_size=100_000,
        verbose_errors=False,
    )


class Constraint:
    """Grammar state of one completion. active: whether the next token is constrained; it is free up to and including `structured_after`."""

    def __init__(self, matcher: LLMatcher, after: int | None):
        self._matcher, self._after = matcher, after
        self.active = after is None

    @property
    def complete(self) -> bool:
        """Whether only an end-of-sequence token may follow."""
        return self.active and self._matcher.is_stopped()

    def preview(self, drafts: Sequence[int], words: int) -> tuple[np.ndarray, str | None]:
        """Return bit masks `[1 + usable, words]`, int32: row i has the tokens allowed after the first i drafts.

        A draft is usable if the grammar allows it and all drafts before it. Bit `t % 32` of word `t // 32` stands for token t. Also return
        the error if the grammar cannot continue. Without an error, the state of the constraint does not change.
        """
        masks = np.full((1 + len(drafts), words), -1, np.int32)
        is_active = self.active
        num_consumed = 0  # by the matcher, which is rolled back below
        num_usable = 0
        for index in range(1 + len(drafts)):
            if is_active:
                self._matcher.unsafe_compute_mask_ptr(masks[index].ctypes.data, masks[index].nbytes)
                if self._matcher.is_error():
                    break
            if index == len(drafts):
                break
            draft = drafts[index]
            if not is_active:
                is_active = draft == self._after
            elif masks[index, draft // 32] >> (draft % 32) & 1 and not self._matcher.is_stopped():
                self._matcher.consume_token(draft)
                num_consumed += 1
                if self._matcher.is_stopped():  # after an end-of-sequence token there is no further mask
                    break
            else:
                break
            num_usable += 1
        error = self._error()
        if num_consumed and error is None:
            self._matcher.rollback(num_consumed)
        return masks[: 1 + num_usable], error

    def take(self, token_id: int) -> str | None:
        """Advance by one token. Return the error if the grammar cannot continue."""
        if not self.active:
            self.active = token_id == self._after
            return None
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token_id)
        return self._error()

    def _error(self) -> str | None:
        if not self._matcher.is_error():
            return None
        reason = _first_line(self._matcher.get_error())
        return f"structured output cannot go on ({self._matcher.stop_reason()}): {reason}"


class GrammarCompiler:
    """Compiles constraints for one model's tokens. Thread-safe.

    The token table is built for the first request that needs it, which takes about half a second with 129,280 tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = list(eos_token_ids)
        self._tokens: LLTokenizer | None = None
        self._matcher = functools.lru_cache(KEPT_GRAMMARS)(self._compile_in_deep_stack)  # copied per use
        self._lock = threading.Lock()

    def compile(self, outputs: StructuredOutputs) -> Constraint:
        """Return a constraint in its initial state. Raise `SamplingError` for an invalid, unsatisfiable or too costly grammar."""
        param = f"structured_outputs.{outputs.form}"
        if self._tokenizer is None or not self._eos:
            missing = "tokenizer" if self._tokenizer is None else "end-of-sequence token"
            raise SamplingError(param, f"this model has no {missing}, which structured output needs")
        try:
            matcher = self._matcher(grammar_text(outputs))
        except ValueError as error:
            raise SamplingError(param, explained(_first_line(str(error)))) from error
        except RecursionError as error:
            raise SamplingError(param, "the schema is nested too deeply") from error
        return Constraint(matcher.deep_copy(), outputs.structured_after)

    def _compile_in_deep_stack(self, grammar: str) -> LLMatcher:
        with self._lock:  # the stack size is process-wide: it applies to all threads started until it is reset
            if self._tokens is None:
                table = _TokenTable(self._tokenizer, self._vocab_size, self._eos)
                self._tokens = LLTokenizer(TokenizerWrapper(table), eos_token=self._eos)
            previous_size = threading.stack_size(COMPILE_STACK)
            try:
                executor = ThreadPoolExecutor(1, "dsjax-grammar")
                compiled = executor.submit(self._compile, grammar)
            finally:
                threading.stack_size(previous_size)
        with executor:
            return compiled.result()

    def _compile(self, grammar: str) -> LLMatcher:
        """Return a matcher in its initial state. Also compute one mask with a copy, since some unsatisfiable grammars fail only then."""
        matcher = LLMatcher(self._tokens, grammar, log_level=0, limits=parser_limits())
        trial = matcher.deep_copy()
        if not matcher.is_error():
            mask = np.zeros(-(-self._vocab_size // 32), np.int32)
            trial.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if trial.is_error():
            reason = _first_line(trial.get_error())
            raise ValueError("no text has this form" if reason.startswith("NoExtension") else reason)
        return matcher


class _TokenTable:
    """The tokenizer in the interface that llguidance expects. Ids that only pad the vocabulary have no bytes and never match."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_id
        token_ids = range(min(vocab_size, tokenizer.vocab_size))
        self.tokens = [tokenizer.token_bytes(i) for i in token_ids] + [b""] * (vocab_size - len(token_ids))
        self.special_token_ids = sorted({i for i in token_ids if tokenizer.is_special(i)} | set(eos_token_ids))
        special_texts = [self.tokens[i].decode("utf-8", "replace") for i in self.special_token_ids if i in token_ids]
        self._special = re.compile("|".join(map(re.escape, filter(None, special_texts))) or "(?!)")

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the ordinary tokens of a text. Text that looks like a special token stays text: it is split after its first character."""
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        token_ids: list[int] = []
        while (special := self._special.search(text)) is not None:
            cut = special.start() + 1
            token_ids += self._tokenizer.encode(text[:cut], add_special_tokens=False)
            text = text[cut:]
        return token_ids + self._tokenizer.encode(text, add_special_tokens=False)


def grammar_text(outputs: StructuredOutputs) -> str:
    """Return the grammar in llguidance's format."""
    options = COMPACT_JSON_OPTIONS if outputs.disable_any_whitespace else JSON_OPTIONS
    if outputs.json is not None:
        return LLMatcher.grammar_from_json_schema(json.dumps(enforceable(json.loads(outputs.json))), overrides=options)
    if outputs.json_object:
        return LLMatcher.grammar_from_json_schema('{"type":"object"}', overrides=options)
    if outputs.regex is not None:
        return LLMatcher.grammar_from_regex(outputs.regex)
    if outputs.choice is not None:
        return "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in outputs.choice)
    return LLMatcher.grammar_from_lark(outputs.grammar)


def lark_text(outputs: StructuredOutputs) -> str:
    """Return the grammar in llguidance's Lark dialect, for embedding in a larger one."""
    text = grammar_text(outputs)
    if not text.startswith("{"):
        return text
    (grammar,) = json.loads(text)["grammars"]
    return grammar["lark_grammar"] or f"start: %json {json.dumps(grammar['json_schema'])}"


def _first_line(message: str) -> str:
    """Return llguidance's message in one line. For a regex, the reason is in a later line, after the expression with the place marked."""
    lines = message.strip().splitlines() or ["unknown reason"]
    reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if not (lines[0].endswith("regex parse error:") and reasons):
        return lines[0][:300]
    location = f", in {lines[1].strip()}" if len(lines) > 2 and set(lines[2].strip()) == {"^"} else ""
    return f"{reasons[0]}{location}"[:300]
