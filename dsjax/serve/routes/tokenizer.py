"""vLLM's tokenizer endpoints."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import Discriminator, Field, Tag

from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.serve.answers import token_name
from dsjax.serve.chat_fields import PromptFields
from dsjax.serve.chat_prompt import render_prompt
from dsjax.serve.errors import ApiError
from dsjax.serve.routing import StrictRoute
from dsjax.serve.sampling_fields import Name, StrictModel
from dsjax.serve.schemas import Text, TokenizerInfo, Tokens, errors
from dsjax.serve.serving import Serving


class TokenizeText(StrictModel):
    """Text to tokenize."""

    model: Name | None = None
    prompt: str
    add_special_tokens: bool | None = True
    return_token_strs: bool | None = False


class TokenizeMessages(PromptFields):
    """Conversation to tokenize, as `/v1/chat/completions` does."""

    model: Name | None = None
    add_special_tokens: bool | None = Field(False, description="add special tokens besides the chat template's")
    return_token_strs: bool | None = False


def _kind(body: Any) -> str:
    is_conversation = isinstance(body, dict) and "messages" in body and "prompt" not in body
    return "a conversation" if is_conversation else "a text"


TokenizeRequest = Annotated[
    Annotated[TokenizeText, Tag("a text")] | Annotated[TokenizeMessages, Tag("a conversation")],
    Discriminator(_kind),  # returns the tag of the class to validate
    Body(),
]


class DetokenizeRequest(StrictModel):
    """Token ids to detokenize. Special tokens are kept."""

    model: Name | None = None
    tokens: list[int]


def tokenizer_routes(serving: Serving) -> APIRouter:
    """Return the router of `/tokenize`, `/detokenize` and `/tokenizer_info`."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/tokenize", responses=errors())
    async def tokenize(body: TokenizeRequest) -> Tokens:
        """Convert text or messages to token ids."""
        serving.check_model(body.model)
        tokenizer = _needed(serving)
        ids = await asyncio.to_thread(_ids, serving, tokenizer, body)
        names = [token_name(tokenizer, token_id) for token_id in ids] if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": serving.max_model_len, "tokens": ids, "token_strs": names}

    @router.post("/detokenize", responses=errors())
    async def detokenize(body: DetokenizeRequest) -> Text:
        """Convert token ids to text."""
        serving.check_model(body.model)
        tokenizer = _needed(serving)
        for token_id in body.tokens:
            if not 0 <= token_id < tokenizer.vocab_size:
                reason = f"tokens: found {token_id}, expected 0 to {tokenizer.vocab_size - 1}"
                raise ApiError(400, reason, param="tokens")
        text = await asyncio.to_thread(tokenizer.decode, body.tokens, skip_special_tokens=False)
        return {"prompt": text}

    @router.get("/tokenizer_info", responses=errors())
    async def tokenizer_info() -> TokenizerInfo:
        """Describe the tokenizer."""
        tokenizer = _needed(serving)
        return {
            "vocab_size": tokenizer.vocab_size,
            "bos_token_id": tokenizer.bos_id,
            "eos_token_id": tokenizer.eos_id,
            "special_tokens": tokenizer.special_tokens,
            "chat_template": tokenizer.chat_template.source if tokenizer.chat_template else None,
        }

    return router


def _needed(serving: Serving) -> Tokenizer:
    if serving.engine.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    return serving.engine.tokenizer


def _ids(serving: Serving, tokenizer: Tokenizer, body: Any) -> list[int]:
    """Tokenize a text or a conversation. `prompt.token_ids` has no special tokens besides the chat template's."""
    if isinstance(body, TokenizeText):
        return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    body.check_prompt_fields()
    prompt = render_prompt(tokenizer, body, body.tool_dicts(), serving.tool_format)
    return tokenizer.encode(prompt.text) if body.add_special_tokens else prompt.token_ids
