"""`SamplingFields`: fields that completions and chat requests share, and their conversion to `SamplingParams`; `CompletionRequest`.

`SamplingFields` includes `GuidedFields` (structured outputs as OpenAI and vLLM request them) and `OpenAIFields` (fields that OpenAI's
clients send but that have little or no effect on a server with one model).
"""

import dataclasses
import logging
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from dsjax.engine.contract.sampling_params import (
    MAX_BAD_WORDS,
    OutputKind,
    SamplingError,
    SamplingParams,
    StructuredOutputs,
)
from dsjax.serve import bounds
from dsjax.serve.errors import ApiError

logger = logging.getLogger(__name__)

Count = Annotated[int, Field(le=bounds.MAX_INTEGER, ge=-bounds.MAX_INTEGER)]
Stop = Annotated[str, Field(max_length=bounds.MAX_STOP_CHARACTERS)]
BadWord = Annotated[str, Field(max_length=bounds.MAX_BAD_WORD_CHARACTERS)]
Integers = list[int]
GrammarText = Annotated[str, Field(max_length=bounds.MAX_GRAMMAR_BYTES)]
Choices = Annotated[
    list[Annotated[str, Field(max_length=bounds.MAX_GRAMMAR_BYTES)]], Field(max_length=bounds.MAX_CHOICES)
]
Schema = dict[str, Any] | GrammarText
Name = Annotated[str, Field(max_length=bounds.MAX_NAME_CHARACTERS)]
RequestId = Annotated[str, Field(pattern=rf"^[\x21-\x7e]{{1,{bounds.MAX_REQUEST_ID_CHARACTERS}}}$")]
"""A request id. It appears in a header and the log, so it is limited to the characters allowed in `X-Request-ID`."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=bounds.MAX_METADATA),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

# Values that request the default behaviour. Other values get a warning.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "safety_identifier": (),
    "prompt_cache_retention": (),
    "prediction": (),
    "verbosity": ("medium",),
}
_MOST_LOGGED = 256  # bounded, because clients choose some of the names
_logged: set[str] = set()


class StrictModel(BaseModel):
    """A request body or part of it. JSON types are not converted, and unknown fields are rejected."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class OpenAIFields(StrictModel):
    """OpenAI API fields that are accepted so that OpenAI clients work unmodified.

    Fields without effect are named in a `Warning` header, and logged once.
    """

    user: Name | None = Field(None, description="accepted; no effect")
    store: bool | None = Field(None, description="no effect: responses are not stored")
    metadata: Metadata | None = Field(None, description="no effect: responses are not stored")
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = Field(
        None, description="no effect: all requests use the tier default"
    )
    safety_identifier: Name | None = Field(None, description="no effect")
    prompt_cache_key: Name | None = Field(None, description="routing session, unless X-Session-Affinity is given")
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = Field(None, description="no effect")
    prediction: dict[str, Any] | None = Field(None, description="no effect: predicted outputs are not used")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="no effect")
    modalities: list[Literal["text", "audio"]] | None = Field(None, description="only text is supported")
    audio: dict[str, Any] | None = Field(None, description="rejected: only text is supported")
    web_search_options: dict[str, Any] | None = Field(None, description="rejected: the server has no web search")

    def check_openai_fields(self) -> None:
        """Raise `ApiError` for fields that this server cannot support."""
        if "audio" in (self.modalities or ()) or self.audio is not None:
            field = "audio" if self.audio is not None else "modalities"
            reason = f'{field}: this model reads and writes text only; send modalities ["text"]'
            raise ApiError(400, reason, param=field)
        if self.web_search_options is not None:
            reason = "web_search_options: this server searches nothing; offer the model a search of your own as a tool"
            raise ApiError(400, reason, param="web_search_options")

    def without_effect(self) -> list[str]:
        """Return the names of given fields that have no effect."""
        fields = ((name, getattr(self, name)) for name in _WITHOUT_EFFECT)
        return [name for name, value in fields if value is not None and value not in _WITHOUT_EFFECT[name]]


def safe_header_names(names: list[str]) -> list[str]:
    """Return at most 8 of the client's names that are short ASCII identifiers and so safe in a header."""
    return [name for name in names if len(name) <= 64 and name.isascii() and name.isidentifier()][:8]


def warning_headers(names: list[str]) -> dict[str, str]:
    """Return a `Warning` header for fields without effect. Log each field the first time."""
    if not names:
        return {}
    new = [name for name in names if name not in _logged and len(_logged) < _MOST_LOGGED]
    if new:
        _logged.update(new)
        logger.warning("requests have %s, without effect on this server; further ones are not logged", ", ".join(new))
    return {"Warning": f'299 dsjax "without effect on this server: {", ".join(names)}"'}


class JsonSchema(StrictModel):
    """OpenAI's `json_schema`. The schema is always enforced, regardless of `strict`."""

    name: str = Field("", max_length=bounds.MAX_NAME_CHARACTERS)
    description: str | None = Field(None, max_length=bounds.MAX_GRAMMAR_BYTES)
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredFields(StrictModel):
    """vLLM's `structured_outputs`. Give exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    disable_any_whitespace: bool | None = Field(
        None, description="omit whitespace from JSON; default: --disable-any-whitespace"
    )


class GuidedFields(StrictModel):
    """Structured output fields. At most one may be given."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: Schema | None = Field(None, description="deprecated alias of structured_outputs.json")
    guided_regex: GrammarText | None = Field(None, description="deprecated alias of structured_outputs.regex")
    guided_choice: Choices | None = Field(None, description="deprecated alias of structured_outputs.choice")
    guided_grammar: GrammarText | None = Field(None, description="deprecated alias of structured_outputs.grammar")

    def output_form(self) -> dict[str, Any] | None:
        """Return the requested form as keyword arguments of `StructuredOutputs`; None: any text.

        Raises:
            ApiError: several forms, or one without its content.
        """
        forms = self._forms()
        if len(forms) > 1:
            (first, _), (second, _), *_ = forms
            raise ApiError(400, f"{first} and {second} both ask for a form; give one", param=second)
        return next((form for _, form in forms), None)

    def form_field(self) -> str | None:
        """Return the field that requests a form, if it is not `structured_outputs`."""
        return next((name for name, _ in self._forms() if name != "structured_outputs"), None)

    def _forms(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the fields that request a form, each with the form."""
        names = ("json", "regex", "choice", "grammar")
        fields = ((name, getattr(self, f"guided_{name}")) for name in names)
        wanted_forms = [(f"guided_{name}", {name: value}) for name, value in fields if value is not None]
        if self.structured_outputs is not None:
            given = self.structured_outputs
            forms = {"json": given.json_, "json_object": given.json_object or None, "regex": given.regex}
            forms |= {"choice": given.choice, "grammar": given.grammar}
            given_forms = {name: value for name, value in forms.items() if value is not None}
            StructuredOutputs(**given_forms)  # raises if none or several are given
            if given.disable_any_whitespace is not None:
                given_forms["disable_any_whitespace"] = given.disable_any_whitespace
            wanted_forms.append(("structured_outputs", given_forms))
        if self.response_format is not None and self.response_format.type != "text":
            wanted_forms.append(("response_format", self._response_form(self.response_format)))
        return wanted_forms

    @staticmethod
    def _response_form(response_format: ResponseFormat) -> dict[str, Any]:
        if response_format.type == "json_object":
            return {"json_object": True}
        if response_format.json_schema is None:
            raise ApiError(400, "response_format of type json_schema wants a json_schema", param="response_format")
        return {"json": response_format.json_schema.schema_}


class StreamOptions(StrictModel):
    """OpenAI's `stream_options`, with vLLM's extension."""

    include_usage: bool | None = Field(False, description="send a final chunk with the usage")
    include_obfuscation: bool | None = Field(None, description="no effect: chunks are not padded")
    continuous_usage_stats: bool | None = Field(False, description="include the usage so far in every chunk")


class DrawFields(StrictModel):
    """Sampling and stop fields shared by all OpenAI APIs."""

    temperature: float | None = 1.0
    top_p: float | None = 1.0
    top_k: Count | None = 0
    min_p: float | None = 0.0
    seed: int | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=bounds.MAX_STOPS)] | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = 1.0


class SamplingFields(DrawFields, GuidedFields, OpenAIFields):
    """Sampling fields of OpenAI's API and vLLM's extensions. No field is silently ignored."""

    model: Name | None = Field(None, description="a model name from /v1/models; default: the served model")
    n: Annotated[Count | None, AfterValidator(lambda n: 1 if n is None else n)] = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=bounds.MAX_BIASES)] | None = Field(
        None, description="token id → value that is added to its logit"
    )

    min_tokens: Count | None = 0
    thinking_token_budget: Count | None = Field(None, description="maximum number of reasoning tokens")
    stop_token_ids: Annotated[Integers, Field(max_length=bounds.MAX_STOP_TOKENS)] | None = None
    allowed_token_ids: Integers | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    prompt_logprobs: Count | None = None
    return_token_ids: bool | None = Field(False, description="also return the token ids of prompt and completion")
    priority: Count | None = Field(0, description="lower values run first, with --scheduling-policy priority")
    cache_salt: Annotated[str, Field(min_length=1, max_length=bounds.MAX_NAME_CHARACTERS)] | None = Field(
        None, description="requests share cached prefixes only if they have the same salt"
    )
    request_id: RequestId | None = Field(
        None, description="becomes part of the response id; the header X-Request-ID overrides it"
    )

    def check_stream_fields(self) -> None:
        """Raise `ApiError` for fields that contradict `stream` or that this server cannot support."""
        self.check_openai_fields()
        if not 1 <= self.n <= bounds.MAX_COMPLETIONS:  # checked before the completions count in the queue
            raise SamplingError("n", f"found {self.n}, expected 1 to {bounds.MAX_COMPLETIONS}")
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for stream=true", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(400, "prompt_logprobs is only for stream=false", param="prompt_logprobs")

    def sampling_params(
        self, *, form: dict[str, Any] | None = None, form_after: int | None = None, **given: Any
    ) -> SamplingParams:
        """Return the engine's parameters. A field that is null has the engine's default, as with OpenAI.

        Args:
            form: keyword arguments of `StructuredOutputs`; None: any text.
            form_after: token after which the form is enforced.
            given: additional, endpoint-specific parameters.

        Raises:
            SamplingError: a value out of range.
        """
        fields = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **fields,
            **given,
            logit_bias=self._logit_bias(),
            structured_outputs=None if form is None else StructuredOutputs(**form, structured_after=form_after),
            output_kind=OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY,
        )

    def _logit_bias(self) -> dict[int, float] | None:
        biases = {}
        for token, bias in (self.logit_bias or {}).items():
            if not (token.isascii() and token.isdecimal() and len(token) <= 10):
                raise SamplingError("logit_bias", f"found the key {token!r}, expected a token id")
            biases[int(token)] = bias
        return biases or None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


_SAMPLING = SamplingFields.model_fields.keys() & {field.name for field in dataclasses.fields(SamplingParams)}
_SAMPLING -= {"logit_bias", "prompt_logprobs", "structured_outputs"}
"""Fields that `SamplingParams` has with the same name, meaning and default."""


class CompletionRequest(SamplingFields):
    """Body of `/v1/completions`."""

    prompt: (
        str
        | Annotated[list[str], Field(max_length=bounds.MAX_PROMPTS)]
        | list[int]
        | Annotated[list[list[int]], Field(max_length=bounds.MAX_PROMPTS)]
    ) = Field(description="one or several prompts, as text or token ids")
    max_tokens: Count | None = Field(16, description="0 with echo returns only the prompt, with its log-probabilities")
    logprobs: Count | None = Field(None, description="number of most probable tokens to return per token, 0 to 20")
    echo: bool | None = Field(False, description="return the prompt too, with log-probabilities of its tokens")
    suffix: str | None = Field(None, description="not supported; must be empty")
    best_of: Count | None = Field(None, description="not supported; must equal n")

    def check(self) -> None:
        """Raise `ApiError` for fields that exclude each other or are not supported."""
        self.check_stream_fields()
        if self.suffix:
            reason = "suffix is not supported: chat models are not trained to fill in; leave it out"
            raise ApiError(400, reason, param="suffix")
        if self.best_of not in (None, self.n):
            reason = "best_of is not supported: it computes completions to throw them away; use n and choose yourself"
            raise ApiError(400, reason, param="best_of")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens is 0, which only echo=true gives a meaning", param="max_tokens")
        if len(self.prompts()) * max(self.n, 1) > bounds.MAX_SEQUENCES:
            raise ApiError(400, f"prompts times n is more than {bounds.MAX_SEQUENCES}", param="n")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list.

        Raises:
            ApiError: the list is empty.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt is an empty list, expected at least one prompt", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def params(self, form: dict[str, Any] | None) -> SamplingParams:
        """Return the engine's parameters. For `max_tokens: 0` the engine generates one token, which the answer leaves out.

        form: keyword arguments of `StructuredOutputs`; None: any text.

        Raises:
            SamplingError: a value out of range.
        """
        scored = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            scored = max(self.logprobs, scored or 0)
        return self.sampling_params(
            max_tokens=1 if self.max_tokens == 0 else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=scored,
            form=form,
        )
