"""`SamplingParams`: the sampling parameters of one request, with vLLM's names and meanings."""

import contextlib
import copy
import dataclasses
import enum
import math
import numbers
from collections.abc import Mapping, Sequence, Set
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from dsjax.engine.contract.structured_params import SamplingError, StructuredOutputs

MAX_LOGPROBS = 20
MAX_BIAS = 100.0
MAX_TEMPERATURE = 1e6
"""At this temperature all tokens are equally probable. Beyond float32's range, masked logits would be -∞ ÷ ∞."""
MAX_BAD_WORDS = 1_024
GREEDY_TEMPERATURE = 1e-5
"""Lower temperatures count as 0."""
_NUMBERS = {  # field → (least, most); None: no limit
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-6, 1e6),  # below the smallest float32, the device would divide by 0
}
_INTEGERS = {  # likewise
    "n": (1, None),
    "top_k": (-1, None),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, None),
    "min_tokens": (0, None),
    "thinking_token_budget": (0, None),
}
_INTEGERS |= dict.fromkeys(("logprobs", "prompt_logprobs"), (0, MAX_LOGPROBS))


class OutputKind(enum.Enum):
    """What each `RequestOutput` of a request contains."""

    CUMULATIVE = "cumulative"  # after each step, everything so far
    DELTA = "delta"  # after each step, only the new tokens and text
    FINAL_ONLY = "final_only"  # one output, when all completions of the request are finished


@dataclass
class SamplingParams:
    """Sampling parameters of a request. Checked at creation and at every change; an unknown field is a `TypeError`.

    Positional arguments are in vLLM's order. Numbers and lists may be NumPy values. A request keeps a copy.

    ::

        SamplingParams(temperature=0, max_tokens=32, stop=["\\n\\n"])

    Attributes:
        n: completions of the prompt; with a seed, completion i samples with seed + i.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the smallest set of most probable tokens whose probabilities reach this sum. In (0, 1].
        top_k: keep this many most probable tokens; 0 and -1 keep all.
        min_p: drop tokens less probable than this fraction of the most probable token's probability. In [0, 1].
        presence_penalty: subtracted from the logit of every token in the output. In [-2, 2].
        frequency_penalty: subtracted once for each occurrence of the token in the output. In [-2, 2].
        repetition_penalty: divides the positive logits of tokens in the prompt or the output, and multiplies the others.
        logit_bias: token id → number in [-100, 100] added to the token's logit.
        allowed_token_ids: only these tokens may be sampled; None: all.
        bad_words: strings never to generate: once the output ends with all tokens of such a string but the last, the last one is masked.
        seed: the same seed and prompt give the same text, whatever else runs. Different prompts with one seed get the same random numbers.
            None and -1: draw a seed from the engine's generator.
        stop: strings that end the text, regardless of token boundaries.
        stop_token_ids: tokens that end the text, in addition to the model's end-of-sequence tokens.
        ignore_eos: continue past the model's end-of-sequence tokens.
        max_tokens: maximum number of tokens to generate; None: as many as the model and the cache can hold.
        min_tokens: end-of-sequence tokens, stop tokens and stop strings have no effect before this many tokens.
        thinking_token_budget: maximum number of tokens after `<think>`; `</think>` is forced after that many. None: no limit.
        logprobs: return the log-probabilities of each token and of this many most probable ones (0 to 20); None: none.
        prompt_logprobs: the same for each prompt token except the first.
        structured_outputs: the format that the text must have; None: any.
        detokenize: whether to produce text; stop strings need it.
        skip_special_tokens: omit the tokenizer's special tokens from the text.
        include_stop_str_in_output: keep the stop string, or the stop token's text, at the end of the text.
        output_kind: see `OutputKind`.
        kept_special_tokens: special tokens that `skip_special_tokens` does not omit, because a parser of the text needs them.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] | str | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    _: KW_ONLY
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputs | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = field(default=OutputKind.CUMULATIVE)
    kept_special_tokens: Sequence[int] = ()

    def __post_init__(self):
        fields = vars(self)
        if isinstance(self.stop, str):
            fields["stop"] = (self.stop,)
        for name in ("stop", "stop_token_ids", "bad_words", "kept_special_tokens"):
            fields[name] = () if fields[name] is None else _as_tuple(name, fields[name])
        if self.allowed_token_ids is not None:
            fields["allowed_token_ids"] = _as_tuple("allowed_token_ids", self.allowed_token_ids)
        for name in (*_NUMBERS, *_INTEGERS):
            fields[name] = plain(fields[name])
        if isinstance(self.logit_bias, dict):
            fields["logit_bias"] = {plain(token): plain(bias) for token, bias in self.logit_bias.items()}
        if isinstance(self.structured_outputs, Mapping):
            known = [field.name for field in dataclasses.fields(StructuredOutputs)]
            for name in self.structured_outputs:
                if name not in known:
                    reason = f"found the unknown field {name}; the fields are {', '.join(known)}"
                    raise SamplingError("structured_outputs", reason)
            fields["structured_outputs"] = StructuredOutputs(**self.structured_outputs)
        if self.seed == -1:
            fields["seed"] = None
        self._check_ranges()
        self._check_stops()
        self._check_tokens()
        fields["_is_checked"] = True

    def __setattr__(self, name: str, value: object):
        """Change a field. On an invalid value, raise as the constructor does and change nothing."""
        if "_is_checked" in vars(self):
            vars(self).update(vars(replace(self, **{name: value})))  # `replace` checks all fields
        else:  # called by the constructor
            vars(self)[name] = value

    def clone(self) -> "SamplingParams":
        """Return an independent copy."""
        return copy.deepcopy(self)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """Whether any of the three penalties changes anything."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    def _check_ranges(self) -> None:
        for name, bounds in _NUMBERS.items():
            _check_number(name, getattr(self, name), *bounds)
        for name, bounds in _INTEGERS.items():
            if getattr(self, name) is not None or name in ("n", "top_k", "min_tokens"):  # the others may be None
                _check_integer(name, getattr(self, name), *bounds)
        if self.top_p == 0:
            raise SamplingError("top_p", "found 0, expected a number above 0 and at most 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingError("min_tokens", f"found {self.min_tokens}, expected at most max_tokens={self.max_tokens}")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise SamplingError(name, f"found {getattr(self, name)!r}, expected true or false")
        if not isinstance(self.output_kind, OutputKind):
            raise SamplingError("output_kind", f"found {self.output_kind!r}, expected an OutputKind")

    def _check_stops(self) -> None:
        for stop in self.stop:
            if not isinstance(stop, str) or not stop:
                raise SamplingError("stop", f"found {stop!r}, expected strings of at least one character")
        if self.stop and not self.detokenize:
            raise SamplingError("stop", "stop strings are looked for in the text; leave detokenize=True to use them")
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, None)

    def _check_tokens(self) -> None:
        if self.logit_bias is not None and not isinstance(self.logit_bias, dict):
            raise SamplingError("logit_bias", f"found {self.logit_bias!r}, expected token ids with numbers")
        for token_id, bias in (self.logit_bias or {}).items():
            _check_integer("logit_bias", token_id, 0, None)
            _check_number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise SamplingError(
                    "allowed_token_ids", "found no token, expected at least one; leave it out to allow all"
                )
            for token_id in self.allowed_token_ids:
                _check_integer("allowed_token_ids", token_id, 0, None)
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise SamplingError("bad_words", f"found {len(self.bad_words)} strings, expected at most {MAX_BAD_WORDS}")
        for word in self.bad_words:
            if not isinstance(word, str) or not word.strip():
                raise SamplingError("bad_words", f"found {word!r}, expected strings that are not blank")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise SamplingError("structured_outputs", f"found {self.structured_outputs!r}, expected StructuredOutputs")


def plain(value: Any) -> Any:
    """Convert a NumPy number to a Python number; return anything else unchanged."""
    if value is None or type(value) in (int, float, str, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _as_tuple(name: str, value: object) -> tuple:
    if not isinstance(value, str | bytes | Mapping | Set):
        with contextlib.suppress(TypeError):
            return tuple(map(plain, value))
    raise SamplingError(name, f"found {value!r}, expected a list")


def _check_integer(name: str, value: object, least: int, most: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SamplingError(name, f"found {value!r}, expected an integer")
    _check_bounds(name, value, least, most)


def _check_number(name: str, value: object, least: float, most: float | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SamplingError(name, f"found {value!r}, expected a finite number")
    _check_bounds(name, value, least, most)


def _check_bounds(name: str, value: float, least: float, most: float | None) -> None:
    if value < least or (most is not None and value > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise SamplingError(name, f"found {value}, expected {expected}")
