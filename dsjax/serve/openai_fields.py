"""`OpenAIFields`: what OpenAI's clients send that a server of one model has little or no use for."""

import logging
from typing import Annotated, Any, Literal

from pydantic import Field

from dsjax.serve import bounds
from dsjax.serve.bodies import StrictModel
from dsjax.serve.errors import ApiError

logger = logging.getLogger(__name__)

Name = Annotated[str, Field(max_length=bounds.MAX_NAME_CHARACTERS)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=bounds.MAX_METADATA),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]

# Values that ask for what happens anyway; others are answered with a warning.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "safety_identifier": (),
    "prompt_cache_retention": (),
    "prediction": (),
    "verbosity": ("medium",),
}
_told: set[str] = set()


class OpenAIFields(StrictModel):
    """Fields of OpenAI's API that are taken so that its clients work unmodified.

    Those that have no effect here are answered with a `Warning` header that names them, and logged once.
    """

    user: Name | None = Field(None, description="accepted; nothing depends on it")
    store: bool | None = Field(None, description="without effect: this server keeps no answers")
    metadata: Metadata | None = Field(None, description="without effect: this server keeps no answers")
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = Field(
        None, description="without effect: there is one tier, default"
    )
    safety_identifier: Name | None = Field(None, description="without effect")
    prompt_cache_key: Name | None = Field(None, description="as the header X-Session-Affinity, which wins")
    prompt_cache_retention: Literal["in-memory", "in_memory", "24h"] | None = Field(None, description="without effect")
    prediction: dict[str, Any] | None = Field(None, description="without effect: a hint for a faster answer")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="without effect")
    modalities: list[Literal["text", "audio"]] | None = Field(None, description="only text")
    audio: dict[str, Any] | None = Field(None, description="refused: text only")
    web_search_options: dict[str, Any] | None = Field(None, description="refused: this server searches nothing")

    def check_openai_fields(self) -> None:
        """Raise for what this server truly cannot do."""
        if "audio" in (self.modalities or ()) or self.audio is not None:
            field = "audio" if self.audio is not None else "modalities"
            raise ApiError(
                400, f'{field}: this model reads and writes text only; send modalities ["text"]', param=field
            )
        if self.web_search_options is not None:
            reason = "web_search_options: this server searches nothing; offer the model a search of your own as a tool"
            raise ApiError(400, reason, param="web_search_options")

    def without_effect(self) -> list[str]:
        """The fields that were given a value which changes nothing here."""
        given = ((name, getattr(self, name)) for name in _WITHOUT_EFFECT)
        return [name for name, value in given if value is not None and value not in _WITHOUT_EFFECT[name]]


def warning_headers(names: list[str]) -> dict[str, str]:
    """A `Warning` header for fields without effect; each of them is logged the first time."""
    if not names:
        return {}
    new = [name for name in names if name not in _told]
    if new:
        _told.update(new)
        logger.warning("requests have %s, without effect on this server; further ones are not logged", ", ".join(new))
    return {"Warning": f'299 dsjax "without effect on this server: {", ".join(names)}"'}
