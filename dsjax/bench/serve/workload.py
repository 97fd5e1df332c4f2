"""The workload that options ask for, and the requests of it that the server can take."""

from pathlib import Path

from dsjax.bench.serve.datasets import Dataset, DatasetError
from dsjax.bench.serve.datasets.prefix_repetition import PrefixRepetition
from dsjax.bench.serve.datasets.random_lengths import RandomLengths
from dsjax.bench.serve.datasets.sharegpt import ShareGpt
from dsjax.bench.serve.datasets.trace import Trace
from dsjax.bench.serve.options import WorkloadOptions
from dsjax.bench.serve.prompt_form import PromptSource
from dsjax.bench.serve.prompts import PromptMaker
from dsjax.bench.serve.records import BenchRequest

_DEFAULT_COUNT = 1000
_WHOLE_FILE = 10**9


def make_dataset(options: WorkloadOptions, prompts: PromptMaker, source: PromptSource) -> Dataset:
    """The dataset of that name.

    Raises:
        DatasetError: lengths that cannot be, or no file.
    """
    o = options
    if o.dataset_name == "random":
        lengths = (o.random_input_len, o.random_output_len, o.random_range_ratio, o.random_prefix_len)
        return RandomLengths(prompts, *lengths, seed=o.seed)
    if o.dataset_name == "prefix-repetition":
        return PrefixRepetition(
            prompts,
            o.prefix_repetition_prefix_len,
            o.prefix_repetition_suffix_len,
            o.prefix_repetition_num_prefixes,
            o.prefix_repetition_output_len,
            seed=o.seed,
        )
    path = Path(o.dataset_path)
    if o.dataset_name == "trace":
        return Trace(path, prompts, o.trace_speed, o.trace_length_scale, o.seed)
    return ShareGpt(path, source.need_tokenizer(o.dataset_name), o.sharegpt_output_len, o.seed)


def draw_requests(
    dataset: Dataset, options: WorkloadOptions, draw: int, max_model_len: int | None
) -> tuple[list[BenchRequest], int]:
    """A draw's requests, and how many more there were that are too long for the server.

    Raises:
        DatasetError: none is left.
    """
    count = options.num_prompts or (_WHOLE_FILE if options.dataset_name == "trace" else _DEFAULT_COUNT)
    requests = dataset.requests(count, draw)
    kept = [r for r in requests if max_model_len is None or r.prompt_tokens + r.output_tokens <= max_model_len]
    if not kept:
        if requests:
            shortest = min(r.prompt_tokens + r.output_tokens for r in requests)
            raise DatasetError(
                f"every request is longer than the server's {max_model_len:,} tokens: the shortest has {shortest:,} "
                f"(prompt and answer); choose shorter lengths{_how_to_shorten(options.dataset_name)}"
            )
        raise DatasetError(f"--dataset-name {options.dataset_name} has no request that can be used")
    return kept, len(requests) - len(kept)


def _how_to_shorten(dataset: str) -> str:
    return {
        "random": ": --random-input-len, --random-output-len",
        "prefix-repetition": ": --prefix-repetition-prefix-len, -suffix-len, -output-len",
        "trace": ": --trace-length-scale",
    }.get(dataset, "")
