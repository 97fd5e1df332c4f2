"""What fewer bits cost: the demo's held-out text in bfloat16, in FP8 (weights, activations, cache, wire) and with FP4 and INT4 experts.

    python tools/check_accuracy.py                         # about 60 KB of text, dp=2
    python tools/check_accuracy.py --bytes 800000 --json accuracy.json
    python tools/check_accuracy.py --only "FP8 weights" "FP8 activations"
    python tools/check_accuracy.py --model demo-v4 --only "FP8 cache" "FP8 cache, FP4 index scores"

Every format reads the same text through the paged cache of a served engine. Told of each: bits a byte; the share of positions
at which the most likely token is float32's, and that share among the positions where float32's two largest logits
differ by more than a 32nd of the largest; the mean divergence of float32's distribution from it (Kullback and Leibler 1951, in
bits a token); bytes of cache a token. A format that is beyond its bounds (``FORMATS``) is named, and the exit status is 1.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.progress import track
from scipy.special import log_softmax

from dsjax import LLM
from dsjax.engine.device.cache import bytes_per_page
from dsjax.tables import table
from tools.demo.corpus import read_corpus


class Format(NamedTuple):
    """Options of an engine, and what they may cost.

    most_bits: bits a byte above float32's. least_same: share of the same token where it is clear. most_divergence: bits a token.
    """

    options: dict[str, str]
    most_bits: float
    least_same: float
    most_divergence: float


DYNAMIC = {"activation_scheme": "dynamic"}
FORMATS = {
    "float32": Format({}, 0.0, 1.0, 0.0),
    "bfloat16": Format({"dtype": "bfloat16"}, 0.003, 0.997, 0.005),
    "FP8 weights": Format({"weights": "fp8"}, 0.01, 0.99, 0.03),
    "FP8 activations": Format({"weights": "fp8"} | DYNAMIC, 0.02, 0.98, 0.06),
    "NVFP4 experts": Format({"weights": "nvfp4-bf16"}, 0.01, 0.99, 0.03),
    "MXFP4 experts": Format({"weights": "mxfp4-bf16"}, 0.02, 0.98, 0.04),
    "INT4 experts": Format({"weights": "int4-bf16"}, 0.02, 0.98, 0.04),
    "NVFP4 experts, others FP8": Format({"weights": "nvfp4"}, 0.02, 0.98, 0.06),
    "MXFP4 experts, others FP8": Format({"weights": "mxfp4"}, 0.02, 0.98, 0.06),
    "NVFP4 experts, FP8 activations": Format({"weights": "nvfp4-bf16"} | DYNAMIC, 0.02, 0.98, 0.06),
    "MXFP4 experts, FP8 activations": Format({"weights": "mxfp4-bf16"} | DYNAMIC, 0.02, 0.98, 0.06),
    "INT4 experts, FP8 activations": Format({"weights": "int4-bf16"} | DYNAMIC, 0.02, 0.98, 0.06),
    "NVFP4 experts, NVFP4 rows": Format({"weights": "nvfp4-bf16", "activation_scheme": "nvfp4"}, 0.03, 0.97, 0.08),
    "FP8 cache": Format({"kv_cache_dtype": "fp8"}, 0.005, 0.99, 0.01),
    "FP8 cache, FP4 index scores": Format({"kv_cache_dtype": "fp8", "index_scores": "fp4"}, 0.005, 0.99, 0.01),
    "FP8 wire": Format({"dispatch_wire": "fp8"}, 0.005, 0.99, 0.01),
    "all four FP8": Format(
        {"weights": "fp8", "kv_cache_dtype": "fp8", "dispatch_wire": "fp8"} | DYNAMIC, 0.02, 0.98, 0.06
    ),
}
"""Bounds are about three times what 62,789 bytes gave: text of a few thousand bytes varies by that. What is broken is far beyond: FP8
values without their scales, or scales of the wrong block, cost whole bits."""
COLUMNS = {
    "bits_a_byte": ("bits a byte", ".4f"),
    "same_token": ("same token", ".2%"),
    "same_token_where_clear": ("where it is clear", ".3%"),
    "divergence_bits": ("divergence, bits", ".5f"),
    "cache_bytes_a_token": ("cache bytes a token", ","),
}
WINDOW = 1024
"""Tokens read at once; the first of each window is given and not counted."""
CLEAR = 1 / 32


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name, form in FORMATS.items() if form.options and "index_scores" not in form.options]
    parser.add_argument("--model", default="demo", help="default: demo")
    parser.add_argument("--mesh", default="dp=2", help="one whose rows travel; default: dp=2")
    parser.add_argument("--bytes", type=int, default=60_000, help="of held-out text, whole files, at least")
    parser.add_argument(
        "--only", nargs="+", choices=[*FORMATS][1:], default=usual, help="these beside float32; default: what demo has"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    texts, size = [], 0
    for file in read_corpus()[1]:
        if size >= args.bytes:
            break
        texts.append(file.content.decode())
        size += len(file.content)
    reference, found = None, {}
    for name in dict.fromkeys(("float32", *args.only)):
        logits, tokens, bytes_a_token = read(args.mesh, texts, name, FORMATS[name].options, args.model)
        reference = logits if reference is None else reference
        found[name] = compare(logits, reference, tokens, size) | {"cache_bytes_a_token": bytes_a_token}
    rows = [(name, *(format(own[key], how) for key, (_, how) in COLUMNS.items())) for name, own in found.items()]
    names = ("<", *(words for words, _ in COLUMNS.values()))
    Console(width=120).print(table(f"{len(texts)} held-out files, {size:,} bytes, {args.mesh}", names, rows))
    if args.json:
        args.json.write_text(json.dumps({"mesh": args.mesh, "bytes": size, "formats": found}, indent=1) + "\n")
    beyond = [f"{name}: {reason}" for name in found if (reason := refusal(name, found[name], found["float32"]))]
    if beyond:
        sys.exit("\n".join(beyond))


def read(
    mesh: str, texts: list[str], name: str, options: dict, model: str = "demo"
) -> tuple[list[np.ndarray], list[np.ndarray], int]:
    """Logits ``[tokens - 1, vocab]`` of each window, the tokens that came, and bytes of cache a token (without window pages)."""
    llm = LLM(model, mesh=mesh, **({"dtype": "float32", "max_num_seqs": 4, "max_model_len": WINDOW} | options))
    logits, tokens = [], []
    windows = [ids[at : at + WINDOW] for ids in map(llm.tokenizer.encode, texts) for at in range(0, len(ids), WINDOW)]
    for window in track([w for w in windows if len(w) > 1], description=name):
        (scored,) = llm.logits([window])
        logits.append(scored[:-1])
        tokens.append(np.asarray(window[1:]))
    step = llm.executor.model
    return logits, tokens, bytes_per_page(step) // step.page_size


def compare(logits: list[np.ndarray], reference: list[np.ndarray], tokens: list[np.ndarray], size: int) -> dict:
    """The figures of one format."""
    bits = divergence = same = clear = same_clear = count = 0.0
    for own, exact, came in zip(logits, reference, tokens, strict=True):
        second, first = np.sort(exact, axis=1)[:, -2:].T
        certain = first - second > CLEAR * np.abs(exact).max(axis=1)
        own, exact = log_softmax(own.astype(np.float64), axis=1), log_softmax(exact.astype(np.float64), axis=1)
        bits -= own[np.arange(len(came)), came].sum() / math.log(2)
        divergence += (np.exp(exact) * (exact - own)).sum() / math.log(2)
        equal = own.argmax(axis=1) == exact.argmax(axis=1)
        same, count = same + equal.sum(), count + len(came)
        clear, same_clear = clear + certain.sum(), same_clear + (equal & certain).sum()
    return {
        "bits_a_byte": bits / size,
        "same_token": same / count,
        "same_token_where_clear": same_clear / clear,
        "divergence_bits": divergence / count,
    }


def refusal(name: str, found: dict, exact: dict) -> str | None:
    """Which bound a format's figures are beyond, or None."""
    _, more, same, divergence = FORMATS[name]
    if not found["bits_a_byte"] - exact["bits_a_byte"] <= more:
        return f"{found['bits_a_byte']:.4f} bits a byte are more than {more} above float32's {exact['bits_a_byte']:.4f}"
    if not found["same_token_where_clear"] >= same:
        return f"the same token where it is clear in {found['same_token_where_clear']:.2%}, less than {same:.2%}"
    if not found["divergence_bits"] <= divergence:
        return f"a divergence of {found['divergence_bits']:.4f} bits a token is more than {divergence}"
    return None


if __name__ == "__main__":
    main()
