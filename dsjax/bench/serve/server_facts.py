"""What the server itself says: its models, the longest request, its devices where it is dsjax, and its counters of drafts."""

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
"""What a gateway answers while the server behind it starts."""


class ServerError(UserError):
    """No server, or one that does not answer as OpenAI's does."""


@dataclass(frozen=True)
class ServerFacts:
    """A server, as far as it tells; None: it does not say."""

    model: str  # the name to ask for
    root: str | None = None  # what the server calls the model's source (a path, or a repository)
    max_model_len: int | None = None  # longest prompt + output
    num_devices: int | None = None  # from `/server_info`, which dsjax has


def server_url(base_url: str) -> str:
    """A base URL without trailing slash and `/v1`, so that both ways to write it work. Raises `OptionError`: it cannot be a server's."""
    check_url("--base-url", base_url)
    return base_url.rstrip("/").removesuffix("/v1")


async def ask_server(
    session: aiohttp.ClientSession, url: str, model: str | None, wait_seconds: float = 0.0
) -> ServerFacts:
    """Ask `/v1/models` and `/server_info`.

    session: with the key, where one is needed. url: as `server_url` gives it. model: the name to ask for; None for the first one served.
    wait_seconds: how long to wait for a server that is not up yet.

    Raises:
        ServerError: nobody answers, the key is refused, the server still warms up, or there is no such model.
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
    """The models' cards; none where a named model's server does not list any. Waits for a server that is not up."""
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
    """Wait while `/ready` says 503, and then while dsjax compiles beside its steps; a server that has no such path is ready."""
    while True:
        why = ""
        try:
            async with session.get(f"{url}/ready", timeout=_TIMEOUT) as response:
                if response.status != 503:
                    break
        except (aiohttp.ClientError, OSError) as error:  # a server that has just begun to start again
            why = f" (/ready: {_reason(error)})"
        if time.monotonic() >= deadline:
            raise ServerError(f"the server at {url} is not ready yet{why}; wait for it with --ready-check-timeout-sec")
        await asyncio.sleep(0.5)
    while (await _optional(session, f"{url}/ready")).get("compiling") is True:
        await asyncio.sleep(0.5)


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


async def _optional(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    """A JSON object, or an empty one from a server that has no such path."""
    try:
        async with session.get(url, timeout=_TIMEOUT) as response:
            body = await response.json(content_type=None) if response.status == 200 else {}
            return body if isinstance(body, dict) else {}
    except (aiohttp.ClientError, OSError, ValueError):
        return {}


def _count(body: Any, name: str) -> int | None:
    """A whole number above 0; None for anything else."""
    value = body.get(name) if isinstance(body, dict) else None
    return value if type(value) is int and value > 0 else None


async def scrape(session: aiohttp.ClientSession, url: str, names: Iterable[str] = DRAFT_COUNTERS) -> Exposition | None:
    """Metrics of a server, those of `names` where it takes names; None where it has none, or does not answer.

    A large server of dsjax has thousands of samples; other servers give all.
    """
    params = [("name[]", name) for name in names]
    try:
        async with session.get(url, params=params, timeout=_TIMEOUT) as response:
            return Exposition(await response.text()) if response.status == 200 else None
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
        return None
