"""`StatusReading`: a server's state at one moment, from `/metrics`, `/server_info` and `/get_load`."""

import math
import time
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from dsjax.errors import UserError
from dsjax.options import check_url

HISTOGRAMS = {
    "time_to_first_token": "vllm:time_to_first_token_seconds",
    "inter_token": "vllm:inter_token_latency_seconds",
    "time_per_output_token": "vllm:request_time_per_output_token_seconds",
    "end_to_end": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
    "step": "dsjax_step_seconds",
}
"""Name in the view to name in the exposition."""

_OTHER_METRICS = (
    "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total", "vllm:corrupted_requests_total", "dsjax_rank_host_pages",
    "dsjax_rank_host_pages_used", "dsjax_rank_host_pages_stored_total", "dsjax_rank_host_pages_fetched_total", "dsjax_disk_pages",
    "dsjax_disk_pages_used", "dsjax_disk_pages_stored_total", "dsjax_disk_pages_fetched_total", "dsjax_disk_failures_total",
    "dsjax_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total", "dsjax_cache_fetch_seconds_bucket",
    "dsjax_cache_fetch_seconds_sum", "dsjax_step_tokens_total", "dsjax_host_seconds_total", "dsjax_compilations_after_warm_up_total",
    "dsjax_requests_rejected_total", "vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_per_pos_total", "dsjax_expert_tokens_total",
    "dsjax_expert_balancedness", "dsjax_eplb_balancedness", "dsjax_eplb_rebalances_total", "dsjax_eplb_experts_moved_total",
    "dsjax_eplb_moved_bytes_total", "dsjax_eplb_exchanges_total", "dsjax_eplb_exchange_seconds_total", "dsjax_eplb_layers_left",
    "dsjax_expert_process_connected", "dsjax_expert_process_losses_total", "dsjax_expert_process_last_gap_seconds",
    "dsjax_expert_process_sent_bytes_total", "dsjax_expert_process_received_bytes_total", "dsjax_generation",
    "dsjax_generation_devices", "dsjax_generation_devices_wanted", "dsjax_generation_changing", "dsjax_requests_waiting_for_mesh",
)  # fmt: skip
_NAMES = (*(f"{name}_{part}" for name in HISTOGRAMS.values() for part in ("bucket", "sum", "count")), *_OTHER_METRICS)


class NoAnswerError(UserError):
    """The server cannot be reached, or answers with an error."""


class Exposition:
    """Samples of a scrape. Values that are not finite are skipped, because they carry no information."""

    def __init__(self, text: str):
        """Parse the text format.

        Raises:
            ValueError: the text is not in the exposition format.
        """
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in filter(lambda sample: math.isfinite(sample.value), family.samples):
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a name's samples that have these labels; 0 if there are none."""
        return sum(
            value for sample_labels, value in self._samples.get(name, ()) if labels.items() <= sample_labels.items()
        )

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return a name's sums, grouped by the values of these labels."""
        sums: dict[tuple[str, ...], float] = {}
        for sample_labels, value in self._samples.get(name, ()):
            key = tuple(sample_labels.get(label, "") for label in labels)
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def growth(self, before: "Exposition", name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """Return how much the sums of `by` grew. A sum that fell was reset by a restart, and grew from 0."""
        old = before.by(name, *labels)
        return {key: counter_growth(old.get(key, 0.0), value) for key, value in self.by(name, *labels).items()}

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram over all samples that have these labels: upper bound → cumulative count."""
        sums: dict[str, float] = {}
        for sample_labels, value in self._samples.get(f"{name}_bucket", ()):
            if labels.items() <= sample_labels.items():
                sums[sample_labels["le"]] = sums.get(sample_labels["le"], 0.0) + value
        return {float(bound): count for bound, count in sorted(sums.items())}


def counter_growth(before: float, after: float) -> float:
    """Return how much a counter grew; a restart of the server may have reset it to 0 in between."""
    return after - before if after >= before else after


@dataclass(frozen=True)
class StatusReading:
    """One reading. `time` is the client's monotonic clock; `info` and `loads` are the server's JSON."""

    time: float
    metrics: Exposition
    info: dict[str, Any]
    loads: list[dict[str, Any]]


class StatusClient:
    """Client of one server, over one connection."""

    def __init__(self, url: str, api_key: str | None = None):
        """url: with or without `/v1`; api_key: if the server requires one.

        Raises:
            OptionError: `url` cannot be a server's URL. NoAnswerError: the URL or the key is not valid in an HTTP request.
        """
        check_url("--url", url)
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=10.0)
        except httpx.InvalidURL as error:
            raise NoAnswerError(f"--url is {url!r}, expected http://HOST:PORT ({error})") from error
        except UnicodeEncodeError as error:
            raise NoAnswerError("--api-key has characters outside ASCII, which HTTP headers cannot contain") from error

    def read(self) -> StatusReading:
        """Query all three endpoints.

        Raises:
            NoAnswerError: no server answers, or its answers are not those of dsjax.
        """
        try:
            metrics = Exposition(self._get("/metrics", params={"name[]": list(_NAMES)}).text)
            info, load = self._get("/server_info").json(), self._get("/get_load").json()
            return StatusReading(time.monotonic(), metrics, dict(info), list(load["ranks"]))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, UserError):
                raise
            raise NoAnswerError(
                f"{self.url} does not answer as dsjax serve does; give the address of one as --url"
            ) from error

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _get(self, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.get(path, **options)
        except httpx.HTTPError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise NoAnswerError(
                f"no server answers at {self.url}: {reason}; start one with dsjax serve, or give --url"
            ) from error
        if response.status_code in (401, 403):
            raise NoAnswerError(f"{self.url} requires an API key ({response.status_code}); give it with --api-key")
        if response.status_code == 503:
            raise NoAnswerError(f"{self.url} is not ready yet ({path} answered 503); wait until it has warmed up")
        if response.status_code != 200:
            raise NoAnswerError(f"{self.url}{path} answered {response.status_code}, expected 200; is it dsjax serve?")
        return response
