"""`SamplingParams`: how one request is continued. Names and meanings are vLLM's."""

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
"""All tokens are then equally probable; beyond float32 masked ones would be -∞ ÷ ∞."""
MAX_BAD_WORDS = 1_024
GREEDY_TEMPERATURE = 1e-5
_NUMBERS = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, None),
}
_INTEGERS = {
    "n": (1, None),
    "top_k": (-1, None),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, None),
    "min_tokens": (0, None),
    "thinking_token_budget": (0, None),
}
_INTEGERS |= dict.fromkeys(("logprobs", "prompt_logprobs"), (0, MAX_LOGPROBS))


class OutputKind(enum.Enum):
    """What each `RequestOutput` of a request holds."""

    CUMULATIVE = "cumulative"  # everything so far, with each step
    DELTA = "delta"  # what this step added
    FINAL_ONLY = "final_only"  # one output, when all completions of the request are finished


@dataclass
class SamplingParams:
    """How to continue a prompt. Checked when made and when changed; an unknown field is a `TypeError`, never silently dropped.

    Positional arguments are in vLLM's order. Numbers and lists may be NumPy's. A request keeps a copy.

    ::

        SamplingParams(temperature=0, max_tokens=32, stop=["\\n\\n"])

    Attributes:
        n: completions of the prompt; with a seed, completion i samples with seed + i.
        temperature: logits are divided by it; 0 is greedy.
        top_p: the smallest set of most probable tokens whose probabilities reach this sum is kept. In (0, 1].
        top_k: as many most probable tokens are kept; 0 and -1 keep all.
        min_p: tokens less probable than this share of the most probable one's probability are dropped. In [0, 1].
        presence_penalty: subtracted from the logit of every token that the output holds. In [-2, 2].
        frequency_penalty: subtracted once for each time that the output holds the token. In [-2, 2].
        repetition_penalty: logits of tokens that prompt or output hold are divided by it where positive, else multiplied.
        logit_bias: token id to a number, in [-100, 100], added to its logit.
        allowed_token_ids: only these tokens may be taken; None: all.
        bad_words: strings whose tokens are never made in a row: the last is held back after the others.
        seed: same seed and prompt, same text, whatever else runs; different prompts with one seed share their noise. None and -1: one is
            drawn from the engine's seed.
        stop: strings that end the text, wherever token boundaries lie.
        stop_token_ids: tokens that end the text, beside the model's end-of-sequence tokens.
        ignore_eos: continue past the model's end-of-sequence tokens.
        max_tokens: most tokens to produce; None: as many as model and cache hold.
        min_tokens: before this many tokens no end-of-sequence token, stop token or stop string counts.
        thinking_token_budget: most tokens between `<think>` and `</think>`, which then follows; None: as many as the model makes.
        logprobs: for each token its log-probability and that of so many most probable ones (0 to 20); None: none.
        prompt_logprobs: the same for each token of the prompt but the first.
        structured_outputs: the form that the text must have; None: any.
        detokenize: whether to make text; stop strings need it.
        skip_special_tokens: leave the tokenizer's special tokens out of the text.
        include_stop_str_in_output: keep the stop string, or the stop token's text, at the end of the text.
        output_kind: what each output holds: all so far, this step's addition, or the finished result alone.
        kept_special_tokens: special tokens that stay in the text where others are left out: markers that a parser of the text reads.
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
            if unknown := [str(name) for name in self.structured_outputs if name not in known]:
                reason = f"found the unknown field {unknown[0]}; the fields are {', '.join(known)}"
                raise SamplingError("structured_outputs", reason)
            fields["structured_outputs"] = StructuredOutputs(**self.structured_outputs)
        if self.seed == -1:
            fields["seed"] = None
        self._check_ranges()
        self._check_stops()
        self._check_tokens()
        fields["_is_checked"] = True

    def __setattr__(self, name: str, value: object):
        """Change a field, or raise as the constructor does and change nothing."""
        if "_is_checked" in self.__dict__:
            self.__dict__.update(vars(replace(self, **{name: value})))
        else:  # the constructor's
            self.__dict__[name] = value

    def clone(self) -> "SamplingParams":
        """Make a copy that can be changed by itself."""
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
            if getattr(self, name) is not None or name in ("n", "top_k", "min_tokens"):
                _check_integer(name, getattr(self, name), *bounds)
        if self.top_p == 0:
            raise SamplingError("top_p", "found 0, expected a number above 0 and at most 1")
        # Below the smallest float32 the device would divide by 0.
        if not 1e-6 <= self.repetition_penalty <= 1e6:
            raise SamplingError(
                "repetition_penalty", f"found {self.repetition_penalty}, expected a number above 0 (1e-6 to 1e6)"
            )
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
    """Make a number of NumPy's one of Python's; anything else stays as it is."""
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
