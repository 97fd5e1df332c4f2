"""Facts that a server reports: its models, maximum request length, number of devices (dsjax only) and speculative decoding counters."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import aiohttp

from dsjax.bench.serve.statistics import DRAFT_COUNTERS
from dsjax.errors import UserError
from dsjax.options import check_url
from dsjax.top.reading import Exposition

_TIMEOUT = aiohttp.ClientTimeout(total=10)
_STARTING = (502, 503, 504)
"""HTTP statuses that a gateway returns while its server starts."""
_COMPILE_SECONDS = 300.0
"""Time limit for a server that compiles while it serves."""


class ServerError(UserError):
    """No server is reachable, or it does not implement OpenAI's API."""


@dataclass(frozen=True)
class ServerFacts:
    """Facts that a server reports about itself; None if it does not report one."""

    model: str  # the model name for requests
    root: str | None = None  # the model's source (path or repository) as the server names it
    max_model_len: int | None = None  # maximum tokens of prompt + output
    num_devices: int | None = None  # from dsjax's `/server_info`


def server_url(base_url: str) -> str:
    """Return a base URL without trailing slash and `/v1`, so that both spellings work. Raises `OptionError`: not a valid URL."""
    check_url("--base-url", base_url)
    return base_url.rstrip("/").removesuffix("/v1")


async def ask_server(
    session: aiohttp.ClientSession, url: str, model: str | None, wait_seconds: float = 0.0
) -> ServerFacts:
    """Query `/v1/models` and `/server_info`.

    session: with the API key, if the server needs one. url: from `server_url`. model: the model name; None for the first one served.
    wait_seconds: how long to wait for a server that is not up yet.

    Raises:
        ServerError: the server does not answer, refuses the key, is still warming up, or does not serve the model.
    """
    deadline = time.monotonic() + wait_seconds
    cards = await _models(session, url, model, deadline)
    await _wait_until_ready(session, url, deadline)
    if model is None and not cards:
        raise ServerError(f"{url}/v1/models lists no model; name one with --model")
    card: dict[str, Any] = next((c for c in cards if c["id"] == model), {}) if model else cards[0]
    if cards and not card:
        raise ServerError(f"--model is {model!r}, but {url} serves {', '.join(c['id'] for c in cards)}")
    info = await _optional(session, f"{url}/server_info")
    length, devices = _count(card, "max_model_len"), _count(info, "num_devices")
    return ServerFacts(model or card["id"], card.get("root"), length, devices)


async def _models(session: aiohttp.ClientSession, url: str, model: str | None, deadline: float) -> list[dict[str, Any]]:
    """Return the model cards; empty if a model was named and the server lists none. Waits for a server that is not up."""
    while True:
        try:
            async with session.get(f"{url}/v1/models", timeout=_TIMEOUT) as response:
                status = response.status
                if status == 200:
                    cards = (await response.json(content_type=None))["data"]
                    return [card | {"id": str(card["id"])} for card in cards]
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() >= deadline:
                raise ServerError(f"no server at {url}: {_reason(error)}; start one, or give its --base-url") from error
        else:
            if status in (401, 403):
                raise ServerError(f"{url} refuses the key ({status}); give --api-key or set OPENAI_API_KEY")
            if status not in _STARTING or time.monotonic() >= deadline:
                if model is not None:
                    return []
                raise ServerError(f"{url}/v1/models answered {status}; name the model with --model")
        await asyncio.sleep(0.5)


async def _wait_until_ready(session: aiohttp.ClientSession, url: str, deadline: float) -> None:
    """Wait while `/ready` returns 503, then while dsjax compiles in the background. A server without that path counts as ready."""
    while True:
        why = ""
        try:
            async with session.get(f"{url}/ready", timeout=_TIMEOUT) as response:
                if response.status != 503:
                    break
        except (aiohttp.ClientError, OSError) as error:  # the server has just begun to restart
            why = f" (/ready: {_reason(error)})"
        if time.monotonic() >= deadline:
            raise ServerError(f"the server at {url} is not ready yet{why}; wait for it with --ready-check-timeout-sec")
        await asyncio.sleep(0.5)
    end = time.monotonic() + _COMPILE_SECONDS
    while time.monotonic() < end and (await _optional(session, f"{url}/ready")).get("compiling") is True:
        await asyncio.sleep(0.5)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


async def _optional(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """Return the URL's JSON object; empty if the server has no such path."""
    try:
        async with session.get(url, timeout=_TIMEOUT) as response:
            body = await response.json(content_type=None) if response.status == 200 else {}
            return body if isinstance(body, dict) else {}
    except (aiohttp.ClientError, OSError, ValueError):
        return {}


def _count(body: Any, name: str) -> int | None:
    """Return a field if it is a positive integer, else None."""
    value = body.get(name) if isinstance(body, dict) else None
    return value if type(value) is int and value > 0 else None


async def scrape(session: aiohttp.ClientSession, url: str, names: Iterable[str] = DRAFT_COUNTERS) -> Exposition | None:
    """Return a server's metrics; None if it has none or does not answer.

    dsjax returns only `names`, since a large server has thousands of samples; other servers return all metrics.
    """
    params = [("name[]", name) for name in names]
    try:
        async with session.get(url, params=params, timeout=_TIMEOUT) as response:
            return Exposition(await response.text()) if response.status == 200 else None
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        return None
