"""`InputProcessor`: validates prompts and parameters, and turns them into requests and logit rules."""

import copy
import random
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from dsjax.engine.contract.sampling_params import SamplingError, SamplingParams, plain
from dsjax.engine.schedule.pages import extend_hashes
from dsjax.engine.schedule.request import DEFAULT_OPTIONS, Request, RequestOptions
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.text.logit_rules import LogitRules, ThinkingBudget, TokenRun
from dsjax.engine.text.prompt_encoder import THINK, THINK_END
from dsjax.engine.text.structured import GrammarCompiler
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.errors import UserError


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt encoded by the model's tokenizer. Its ids are not copied, and checked only if the tokenizer has more ids than the model."""

    token_ids: list[int]


Prompt = str | Sequence[int] | Mapping[str, Any] | EncodedPrompt
"""Text, token ids, or vLLM's `{"prompt": text}` / `{"prompt_token_ids": ids}`."""


class PromptError(UserError):
    """An invalid prompt."""


@dataclass(frozen=True)
class PreparedRequest:
    """A validated request, with one `Request` for each of its `n` completions, in the order of their indices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[Request]


class InputProcessor:
    """Creates requests. Mutable state: the scheduler config, and a random generator of seeds for requests that have none.

    seed: of that generator. compiles_grammars: False in a front end, because the engine's process compiles them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        scheduler_config: SchedulerConfig,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        *,
        compiles_grammars: bool = True,
    ):
        self._tokenizer, self.config = tokenizer, scheduler_config
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self._tokenizer_ids_fit = tokenizer is not None and tokenizer.vocab_size <= vocab_size
        self._seeds = random.Random(seed)
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids) if compiles_grammars else None

    def draw_seed(self) -> int:
        """Return a uint32 seed, for a request without one or for another process's processor."""
        return self._seeds.getrandbits(32)

    def change(self, scheduler_config: SchedulerConfig) -> None:
        """Use another scheduler's sizes from now on."""
        self.config = scheduler_config

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        arrival_time: float = 0.0,
        seed: int | None = None,
    ) -> PreparedRequest:
        """Validate a request and hash its pages, to keep this work out of the engine's thread.

        seed: used if `params` has none. None: draw one here, which is not thread-safe (the caller may use `draw_seed`).

        Raises:
            PromptError: an empty prompt, a token id outside the vocabulary, text without a tokenizer.
            SamplingError: a token id outside the vocabulary, an invalid grammar, or an option that needs a missing tokenizer.
            AdmissionError: more tokens than the model or cache can hold.
        """
        text, token_ids = self._tokens(prompt)
        params = copy.copy(params)  # the caller may change them
        if params.stop and self._tokenizer is None:
            raise SamplingError("stop", "this model has no tokenizer, so there is no text to look for stop strings in")
        stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else self.eos_token_ids)
        max_tokens = params.max_tokens
        if max_tokens is None:
            self.config.check_fits(len(token_ids), max(1, params.min_tokens), is_explicit=False)
            max_tokens = self.config.max_request_len - len(token_ids)
        else:
            self.config.check_fits(len(token_ids), max_tokens)
        rules = self.make_rules(params, stop_ids, token_ids)
        if params.seed is not None:
            seed = params.seed
        base_seed = self.draw_seed() if seed is None else seed
        other_options = options
        if params.n > 1 and options.prefill is not None:  # only the first completion gets the transfer in progress
            other_options = replace(options, prefill={**options.prefill, "transfer": None})
        completions = [
            Request(
                request_id=request_id if params.n == 1 else f"{index}_{request_id}",
                token_ids=list(token_ids),
                num_prompt_tokens=len(token_ids),
                params=params,
                max_tokens=max_tokens,
                seed=(base_seed + index) % 2**64,
                stop_ids=stop_ids,
                arrival_time=arrival_time,
                options=options if index == 0 else other_options,
                rules=rules[index],
            )
            for index in range(params.n)
        ]
        if self.config.prefix_caching:
            hashes = extend_hashes(completions[0], self.config.page_size)
            for other in completions[1:]:
                other.page_hashes = list(hashes)
        return PreparedRequest(request_id, text, token_ids, params, completions)

    def make_rules(
        self, params: SamplingParams, stop_ids: frozenset[int] = frozenset(), prompt: Sequence[int] = ()
    ) -> list[LogitRules | None]:
        """Return the logit rules of each of the `n` completions; None if only seed, temperature and truncation matter.

        Thread-safe. Compiling a grammar takes up to about 20 ms, so a server calls this outside its event loop. Errors: see `prepare`.

        stop_ids: tokens masked until the output has `min_tokens` tokens. prompt: its token ids, which may end inside the reasoning.
        """
        _check_token_ids(params, self.vocab_size)
        structured = params.structured_outputs
        needs_no_rules = not (params.penalises or params.logit_bias or params.bad_words or params.min_tokens)
        needs_no_rules = needs_no_rules and params.allowed_token_ids is None and params.thinking_token_budget is None
        if needs_no_rules and structured is None:
            return [None] * params.n
        bad_words = bad_word_runs(params.bad_words, self._tokenizer)
        compiler = self._grammars
        return [
            LogitRules(
                params,
                self.vocab_size,
                stop_ids,
                bad_words,
                None if structured is None or compiler is None else compiler.compile(structured),
                self._thinking_budget(params.thinking_token_budget, prompt),
            )
            for _ in range(params.n)
        ]

    def _thinking_budget(self, budget: int | None, prompt: Sequence[int]) -> ThinkingBudget | None:
        if budget is None:
            return None
        begin, end = (self._tokenizer and self._tokenizer.token_id(tag) for tag in (THINK, THINK_END))
        if end is None:
            raise SamplingError("thinking_token_budget", f"this model has no token {THINK_END}, so it does not reason")
        return ThinkingBudget(budget, (begin, end), prompt)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        text: str | None = None
        is_own_encoding = False
        if isinstance(prompt, Mapping):
            prompt_keys = {"prompt", "prompt_token_ids"} & prompt.keys()
            if len(prompt_keys) != 1 or len(prompt) != 1:
                raise PromptError(
                    f"the prompt has the keys {sorted(map(str, prompt))}, expected prompt or prompt_token_ids, one of them"
                )
            (key,) = prompt_keys
            prompt = prompt[key]
            if key == "prompt_token_ids" and isinstance(prompt, str):
                raise PromptError(f"prompt_token_ids is {prompt!r}, expected token ids; text is {{'prompt': text}}")
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise PromptError("the prompt is text, but this model has no tokenizer; give prompt_token_ids")
            text = prompt
            token_ids = self._tokenizer.encode(prompt)
            is_own_encoding = True
        elif isinstance(prompt, EncodedPrompt):
            token_ids = prompt.token_ids
            is_own_encoding = True
        elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes | bytearray | Mapping | Set):
            token_ids = list(prompt)
        else:
            raise PromptError(f"the prompt is {prompt!r}, expected text, token ids, or a mapping with one of them")
        for position, token_id in enumerate(() if is_own_encoding and self._tokenizer_ids_fit else token_ids):
            if type(token_id) is not int:
                token_id = token_ids[position] = plain(token_id)
            # Check here: a device would silently clamp an invalid id.
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise PromptError(
                    f"the prompt's token {position} is {token_id!r}, expected an integer from 0 to {self.vocab_size - 1}"
                )
        if not token_ids:
            raise PromptError("the prompt is empty, expected at least one token")
        return text, token_ids


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Check the token ids of all fields against the vocabulary; a device would silently clamp an invalid one."""
    fields = {
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias or (),
        "allowed_token_ids": params.allowed_token_ids or (),
    }
    if params.structured_outputs is not None and params.structured_outputs.structured_after is not None:
        fields["structured_outputs.structured_after"] = (params.structured_outputs.structured_after,)
    for name, token_ids in fields.items():
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise SamplingError(name, f"found {token_id}, expected 0 to {vocab_size - 1}")


def bad_word_runs(words: Iterable[str], tokenizer: Tokenizer | None) -> tuple[TokenRun, ...]:
    """Return the token sequences of the bad words, which an output must not complete.

    As in vLLM, a word is tokenized as at the start of a text, and also with a leading space if that gives the same number of tokens. A word
    bans at most two sequences; other tokenizations of the same text stay possible. Raises `SamplingError` without a tokenizer.
    """
    runs: list[TokenRun] = []
    for word in words:
        if tokenizer is None:
            raise SamplingError("bad_words", "this model has no tokenizer; use logit_bias with token ids")
        bare = tuple(tokenizer.encode(word.lstrip(), add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        runs.append(bare)
        if spaced[0] != bare[0] and len(spaced) == len(bare):
            runs.append(spaced)
    return tuple(dict.fromkeys(runs))
