"""`SamplingFields`: what completions and chat requests have in common, and how it becomes `SamplingParams`."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dsjax.engine.sampling_params import OutputKind, SamplingError, SamplingParams
from dsjax.serve.errors import ApiError

MAX_COMPLETIONS = 128
"""Largest `n`, as OpenAI's."""


class StrictModel(BaseModel):
    """JSON types are taken as they are, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(StrictModel):
    """OpenAI's `stream_options`."""

    include_usage: bool = Field(False, description="send a last chunk with the usage")


class SamplingFields(StrictModel):
    """Fields of OpenAI's API, and vLLM's extras, that say how to continue.

    Fields of theirs that are not supported are accepted with the value that changes nothing, and refused with any other:
    none is silently ignored.
    """

    model: str | None = Field(None, description="one of /v1/models; default: the one that is served")
    n: int = 1
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="accepted; nothing depends on it")

    top_k: int = 0
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    presence_penalty: float | None = Field(None, description="not supported; only 0")
    frequency_penalty: float | None = Field(None, description="not supported; only 0")
    repetition_penalty: float | None = Field(None, description="not supported; only 1")
    min_p: float | None = Field(None, description="not supported; only 0")
    logit_bias: dict[str, float] | None = Field(None, description="not supported; only empty")

    def refuse_unsupported(self, neutral: dict[str, tuple[Any, ...]] | None = None) -> None:
        """Raise for the first field whose value would have to change something; `neutral` adds fields to look at."""
        known = {
            "presence_penalty": (0,),
            "frequency_penalty": (0,),
            "repetition_penalty": (1,),
            "min_p": (0,),
            "logit_bias": ({},),
            **(neutral or {}),
        }
        for name, values in known.items():
            value = getattr(self, name)
            if value is not None and value not in values:
                raise ApiError(400, f"{name} is not supported by this server; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options is only for stream=true", param="stream_options")

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters.

        Raises:
            SamplingError: a value out of range.
        """
        if self.n > MAX_COMPLETIONS:
            raise SamplingError("n", f"found {self.n}, expected 1 to {MAX_COMPLETIONS}")
        return SamplingParams(
            n=self.n,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            logprobs=logprobs,
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
            output_kind=OutputKind.DELTA if self.stream else OutputKind.FINAL_ONLY,
        )

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return bool(self.stream_options and self.stream_options.include_usage)
