"""`ReadyServer`: a running server whose model and accepted prompt form are known."""

from dataclasses import dataclass, replace

import aiohttp

from dsjax.bench.serve.client import Client
from dsjax.bench.serve.datasets import Dataset
from dsjax.bench.serve.options import ServerOptions, WorkloadOptions
from dsjax.bench.serve.prompts import PromptSource
from dsjax.bench.serve.server_facts import ServerError, ServerFacts, ask_server, server_url

WARM_UP_DRAW = 0
"""The workload's random draw for test requests and warm-up."""


@dataclass(frozen=True)
class ReadyServer:
    """A server that answers requests."""

    options: ServerOptions  # how to send requests
    session: aiohttp.ClientSession  # open, with the API key
    url: str  # without `/v1`
    facts: ServerFacts  # reported by the server
    source: PromptSource  # makes prompts for the server
    client: Client  # sends requests to it

    @classmethod
    async def connect(cls, session: aiohttp.ClientSession, options: ServerOptions) -> "ReadyServer":
        """Query a server for its model. Raises `UserError`: no server, key refused, model not served, or named tokenizer not found."""
        o = options
        url = server_url(options.base_url)
        facts = await ask_server(session, url, o.model, o.ready_check_timeout_sec)
        source = PromptSource.find(o.tokenizer, o.vocab_size, facts)
        return cls(o, session, url, facts, source, Client(session, url, facts.model, o, source.token_counter))

    async def dataset(self, workload: WorkloadOptions) -> Dataset:
        """Return the workload's prompts, in the first form for which the server answers a two-token test request.

        Raises:
            UserError: every request is too long for the server, or it refuses the test request in every form.
        """
        refused = ""
        for prompts in self.source.forms(self.options.prompt_form, self.options.endpoint):
            dataset = Dataset(workload, prompts, self.source)
            requests, _ = dataset.fitting_requests(WARM_UP_DRAW, self.facts.max_model_len)
            record = await self.client.send(replace(requests[0], output_tokens=min(2, requests[0].output_tokens)))
            if record.succeeded:
                return dataset
            refused = record.error or ""
            if not refused.startswith(("HTTP 400", "HTTP 422")):
                break
        raise ServerError(f"the server refuses a test request: {refused}")
