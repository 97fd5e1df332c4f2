"""The options of `dsjax bench serve`, by topic, with the names of `vllm bench serve` for the options it has."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsjax.bench.serve.statistics import LATENCIES, parse_goodput
from dsjax.options import Checked, OptionError, check_place, option

_UPPER_LIMIT = 10_000_000
"""Largest accepted number of requests, prompt tokens, seconds and temperature. A larger value is a typing error."""


@dataclass(frozen=True)
class ServerOptions(Checked):
    """Server and API."""

    base_url: str = option("http://127.0.0.1:8000", "Base URL of the server, with or without /v1.")
    endpoint: str = option("completions", "OpenAI endpoint to benchmark.", choices=("completions", "chat"))
    model: str | None = option(None, "Model name in requests. Default: the first model that the server lists.")
    api_key: str | None = option(None, "API key, sent as a bearer token.", envvar="OPENAI_API_KEY")
    tokenizer: str | None = option(None, "Directory, tokenizer.json or Hugging Face repository. Default: the model's.")
    prompt_form: str = option("auto", "auto: token ids if the server accepts them.", choices=("auto", "tokens", "text"))
    vocab_size: int | None = option(
        None, "Draw token ids below this. Default: the tokenizer's vocabulary size.", least=1
    )
    ignore_eos: bool = option(False, "Generate past the end-of-sequence token, up to the output length (a vLLM field).")
    temperature: float | None = option(0.0, "Sampling temperature of every request.", least=0, most=_UPPER_LIMIT)
    extra_body: str | None = option(None, "JSON object of additional fields for every request.")
    request_timeout: float = option(600.0, "Timeout of one request, in seconds.", above=0, most=_UPPER_LIMIT)
    ready_check_timeout_sec: float = option(0.0, "Maximum seconds to wait until the server is ready.", least=0)
    devices: int | None = option(None, "Number of devices of the server. Default: from its /server_info.", least=1)

    def __post_init__(self):
        super().__post_init__()
        self.extra_fields()

    def extra_fields(self) -> dict[str, Any]:
        """Return `--extra-body` as a mapping. Raises `OptionError` if it is not a JSON object."""
        try:
            body = json.loads(self.extra_body or "{}", parse_constant=_no_number)
        except ValueError as error:
            raise OptionError(f"--extra-body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise OptionError(f"--extra-body is {self.extra_body!r}, expected a JSON object")
        return body


@dataclass(frozen=True)
class WorkloadOptions(Checked):
    """Workload."""

    dataset_name: str = option("random", "Dataset.", choices=("random", "sharegpt", "prefix-repetition", "trace"))
    dataset_path: str | None = option(None, "Path of the sharegpt or trace file.")
    num_prompts: int | None = option(None, "Requests per point. Default: 1000; trace: all.", least=1, most=_UPPER_LIMIT)
    seed: int = option(0, "Random seed for lengths, prompts and arrivals.", least=0)
    random_input_len: int = option(1024, "Mean number of prompt tokens.", least=1, most=_UPPER_LIMIT)
    random_output_len: int = option(128, "Mean number of output tokens.", least=1)
    random_range_ratio: float = option(0.0, "Draw lengths from [mean × (1 − ratio), mean × (1 + ratio)].", least=0)
    random_prefix_len: int = option(0, "Number of prefix tokens that all prompts share.", least=0, most=_UPPER_LIMIT)
    prefix_repetition_prefix_len: int = option(256, "Number of prefix tokens per request.", least=0, most=_UPPER_LIMIT)
    prefix_repetition_suffix_len: int = option(256, "Number of suffix tokens per request.", least=0, most=_UPPER_LIMIT)
    prefix_repetition_num_prefixes: int = option(10, "Number of distinct prefixes.", least=1, most=_UPPER_LIMIT)
    prefix_repetition_output_len: int = option(128, "Number of output tokens per request.", least=1)
    sharegpt_output_len: int | None = option(
        None, "Output tokens per request. Default: the dataset's answer length.", least=1
    )
    trace_speed: float = option(1.0, "Replay arrivals this many times as fast.", above=0)
    trace_length_scale: float = option(1.0, "Factor on prompt and output lengths, for small models.", above=0)

    def __post_init__(self):
        super().__post_init__()
        if self.dataset_name == "random" and not self.random_range_ratio < 1:
            raise OptionError(f"--random-range-ratio is {self.random_range_ratio}, expected at least 0 and less than 1")
        lengths = self.prefix_repetition_prefix_len + self.prefix_repetition_suffix_len
        if self.dataset_name == "prefix-repetition" and lengths < 1:
            raise OptionError("--prefix-repetition-prefix-len and -suffix-len are both 0, expected a prompt of 1 token")
        path = self.dataset_path
        reads = self.dataset_name in ("sharegpt", "trace")
        if reads and path is None:
            raise OptionError(f"--dataset-name {self.dataset_name} reads a file; name it with --dataset-path")
        if path is not None and not reads:
            raise OptionError(
                f"--dataset-path {path} is given, and --dataset-name {self.dataset_name} reads no file; give sharegpt or trace"
            )
        if path is not None and not Path(path).is_file():
            raise OptionError(
                f"--dataset-path is {path}, which is no file; give one as --dataset-name {self.dataset_name} expects"
            )


@dataclass(frozen=True)
class LoadOptions(Checked):
    """Load."""

    request_rate: float | None = option(None, "Number of requests per second. Default: send all at once.", above=0)
    burstiness: float = option(1.0, "Shape of the gamma-distributed gaps. 1: Poisson; less: burstier.", above=0)
    max_concurrency: int | None = option(None, "Maximum number of concurrent requests.", least=1)
    sweep_concurrency: str | None = option(None, "Measure a point for each concurrency, such as 1,8,64.")
    sweep_rate: str | None = option(None, "Measure a point for each request rate, such as 0.5,1,2,inf.")
    duration: float | None = option(
        None, "Send for this many seconds (or --num-prompts requests), then wait for running requests.", above=0
    )
    search: str | None = option(
        None,
        "Find the largest load that meets --goodput. --num-prompts and --duration apply to each point.",
        choices=("concurrency", "rate"),
    )
    goodput_share: float = option(0.95, "Share of requests that must meet --goodput.", above=0, most=1)
    num_warmups: int = option(0, "Number of warm-up requests, which are not counted.", least=0)

    def __post_init__(self):
        super().__post_init__()
        leave_out = "leave the first out"
        for one, other, names, advice in (
            (self.sweep_concurrency, self.sweep_rate, "--sweep-concurrency and --sweep-rate", "sweep one of them"),
            (self.max_concurrency, self.sweep_concurrency, "--max-concurrency and --sweep-concurrency", leave_out),
            (self.request_rate, self.sweep_rate, "--request-rate and --sweep-rate", leave_out),
            (self.search, self.sweep_concurrency or self.sweep_rate, "--search and a sweep", "the search chooses its points itself"),
            (self.max_concurrency, self.search == "concurrency", "--max-concurrency and --search concurrency", leave_out),
            (self.request_rate, self.search == "rate", "--request-rate and --search rate", leave_out),
        ):  # fmt: skip
            if one and other:
                raise OptionError(f"{names} are both given; {advice}")
        self.points()

    @property
    def swept(self) -> str | None:
        """The field that differs between points; None if there is only one point."""
        if self.sweep_concurrency or self.search == "concurrency":
            return "max_concurrency"
        return "request_rate" if self.sweep_rate or self.search == "rate" else None

    def point_of(self, load: float) -> tuple[float, int | None]:
        """Return the request rate and concurrency of a point that a search tries."""
        if self.search == "concurrency":
            return self.request_rate or math.inf, int(load)
        return load, self.max_concurrency

    def points(self) -> list[tuple[float, int | None]]:
        """Return the request rate (infinite: all at once) and concurrency of each point.

        Raises:
            OptionError: a value of a sweep is not a positive number.
        """
        rate = self.request_rate or math.inf
        if self.sweep_concurrency is not None:
            return [(rate, int(n)) for n in _numbers("--sweep-concurrency", self.sweep_concurrency, whole=True)]
        if self.sweep_rate is not None:
            return [(n, self.max_concurrency) for n in _numbers("--sweep-rate", self.sweep_rate)]
        return [(rate, self.max_concurrency)]


@dataclass(frozen=True)
class ReportOptions(Checked):
    """Results."""

    goodput: list[str] | None = option(None, "Objectives in ms: ttft:200 tpot:50 e2el:3000. tps:20 means tpot:50.")
    percentile_metrics: str = option("ttft,tpot,itl,e2el", "Latencies to print, separated by commas.")
    metric_percentiles: str = option("90,95,99", "Percentiles of the latencies, separated by commas.")
    json_file: str | None = option(None, "Write JSON to this file; - for standard output.", flag="--json")
    save_detailed: bool = option(False, "Add the lengths, times and text of each request to the JSON.")
    csv_points: str | None = option(None, "Write a CSV file with a line per point.")
    plot: str | None = option(None, "Plot tokens/s per user against tokens/s per device: .png, .svg or .pdf.")
    progress: bool = option(True, "Show a progress bar.")

    def __post_init__(self):
        super().__post_init__()
        _ = self.latencies, self.percentiles, self.objectives  # each raises if invalid
        for name in ("json_file", "csv_points", "plot"):
            check_place(f"--{name.removesuffix('_file').replace('_', '-')}", getattr(self, name))
        if self.plot and not self.plot.endswith((".png", ".svg", ".pdf")):
            raise OptionError(f"--plot is {self.plot!r}, expected a name that ends in .png, .svg or .pdf")

    @property
    def latencies(self) -> list[str]:
        """Names of the latencies to print."""
        names = self.percentile_metrics.replace(",", " ").split()
        unknown = [name for name in names if name not in LATENCIES]
        if unknown:
            raise OptionError(f"--percentile-metrics has {', '.join(unknown)}; there are {', '.join(LATENCIES)}")
        return names

    @property
    def percentiles(self) -> list[float]:
        """Percentiles of the latencies."""
        values = _numbers("--metric-percentiles", self.metric_percentiles)
        if max(values) > 100:
            raise OptionError(f"--metric-percentiles is {self.metric_percentiles}, expected numbers of at most 100")
        return values

    @property
    def objectives(self) -> dict[str, float]:
        """The objectives of `--goodput`; empty if not given."""
        return parse_goodput(self.goodput or ())


def _no_number(word: str) -> None:
    raise ValueError(f"it has no {word}")


def _numbers(flag: str, text: str, whole: bool = False) -> list[float]:
    words = text.replace(",", " ").split()
    try:
        values = [int(word) if whole else float(word) for word in words]
    except ValueError:
        values = []
    if not values or not all(value > 0 for value in values):
        kind = "positive integers" if whole else "positive numbers"
        raise OptionError(f"{flag} is {text!r}, expected {kind} with commas between")
    return values
