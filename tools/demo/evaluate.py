"""Measure the demo model on the held-out files, beside `xz -9` on the same files.

    python -m tools.demo.evaluate                      # print the figures
    python -m tools.demo.evaluate --run RUN_FOLDER     # and write configs/models/demo/training.json
    python -m tools.demo.evaluate --folder configs/models/demo-sparse --bytes 100000

Bits are those of every token of a file and of its end, each predicted from at least `OVERLAP` tokens before it (or
all there are); bytes are the file's. No token is dropped: the experts are the product that serving uses on a CPU.
"""

import argparse
import hashlib
import json
import lzma
import math
import platform
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from dsjax.model.expert_dispatch import stored
from dsjax.model.experts import ExpertProduct
from dsjax.model.parameters import ParameterTable
from dsjax.model.transformer import XlaProducts
from tools.demo.checkpoint import read_model
from tools.demo.corpus import MANIFESTS, SourceFile, describe_differences, read_corpus
from tools.demo.train import FOLDER

CONTEXT, OVERLAP = 2048, 512


@dataclass
class Tally:
    """Sums over held-out tokens."""

    bits: float = 0.0
    content_bytes: int = 0
    tokens: int = 0
    right: int = 0
    drafts: int = 0
    accepted: int = 0
    loads: np.ndarray = field(default_factory=lambda: np.zeros(1))

    def figures(self) -> dict[str, float]:
        """What the sums say; `max_violation` and `balancedness` of the main model's layers, over all tokens."""
        mean, most = self.loads.mean(axis=-1), self.loads.max(axis=-1)
        return {
            "bytes": self.content_bytes,
            "tokens": self.tokens,
            "bits_per_byte": round(self.bits / self.content_bytes, 4),
            "top1_accuracy": round(self.right / self.tokens, 4),
            "mtp_acceptance": round(self.accepted / self.drafts, 4),
            "max_violation": round(float(np.mean(most / mean - 1)), 4),
            "balancedness": round(float(np.mean(mean / most)), 4),
        }


class Evaluator:
    """The model of a folder, in float32, on one device."""

    def __init__(self, folder: Path = FOLDER):
        self.config, table, self.params = read_model(folder)
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._measure = jax.jit(lambda params, tokens: _measure(params, table, tokens))

    def add(self, tally: Tally, file: SourceFile) -> None:
        """Evaluate one file into `tally`, in windows of `CONTEXT` tokens."""
        tokens = np.array([*self.tokenizer.encode(file.content.decode()).ids, self.config.eos_token_id[0]])
        tally.content_bytes += len(file.content)
        start, scored = 0, 0  # `scored`: tokens before this position were counted
        while scored < len(tokens) - 1:
            window = tokens[start : start + CONTEXT + 1]
            padded = np.full(min(CONTEXT, _bucket(len(window) - 1)) + 1, self.config.eos_token_id[0])
            padded[: len(window)] = window
            result = jax.device_get(self._measure(self.params, jnp.asarray(padded[None])))
            new = slice(scored - start, len(window) - 1)
            tally.bits += float(result["nats"][new].sum()) / math.log(2)
            tally.right += int(result["right"][new].sum())
            tally.tokens += new.stop - new.start
            drafts = slice(new.start, new.stop - 1)  # the last token's draft has nothing to be compared with
            tally.accepted += int(result["accepted"][drafts].sum())
            tally.drafts += drafts.stop - drafts.start
            tally.loads = tally.loads + _loads(result["ids"][:, new], self.config.n_routed_experts)
            scored = start + len(window) - 1
            start += CONTEXT - OVERLAP


def _bucket(length: int) -> int:
    return max(256, 1 << (length - 1).bit_length())


def _measure(params, table: ParameterTable, tokens):
    product, model = ExpertProduct("tiles"), table.bind(params)
    products = XlaProducts(lambda weights, *rows: product(stored(weights), *rows))
    main = model(tokens[:, :-1], products=products)
    further = model.predict_further(main.passed, tokens[:, 1:], products)
    choice = jnp.argmax(main.logits[0], axis=-1)
    picked = jnp.take_along_axis(main.logits[0], tokens[0, 1:, None], axis=-1)[:, 0]
    draft = jnp.argmax(further.logits[0], axis=-1)
    return {
        "nats": jax.nn.logsumexp(main.logits[0], axis=-1) - picked,
        "right": choice == tokens[0, 1:],
        "accepted": draft == jnp.append(choice[1:], -1),
        "ids": main.routing.ids[:, 0],
    }


def _loads(ids: np.ndarray, experts: int) -> np.ndarray:
    return np.stack([np.bincount(layer.reshape(-1), minlength=experts) for layer in ids])


def xz_bits_per_byte(files: Iterable[SourceFile]) -> dict[str, float]:
    """What `xz -9` needs: for each file alone, and for all of them in one archive."""
    contents = [file.content for file in files]
    size = sum(map(len, contents))
    return {
        "xz_each_bits_per_byte": round(8 * sum(len(lzma.compress(c, preset=9)) for c in contents) / size, 4),
        "xz_together_bits_per_byte": round(8 * len(lzma.compress(b"".join(contents), preset=9)) / size, 4),
    }


def describe_run(run: Path) -> dict:
    """Where the weights come from: the run's recipe and cost."""
    recipe = json.loads((run / "recipe.json").read_text())
    last = json.loads((run / "log.jsonl").read_text().splitlines()[-1])
    digests = {split: hashlib.sha256(path.read_bytes()).hexdigest() for split, path in MANIFESTS.items()}
    return recipe | {
        "tokens": last["tokens"],
        "processor_hours": round(last["processor_seconds"] / 3600, 2),
        "python": platform.python_version(),
        "jax": jax.__version__,
        **{f"{split}_manifest_sha256": digest for split, digest in digests.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="with config, tokenizer and model.safetensors")
    parser.add_argument("--run", type=Path, help="run folder; writes training.json into the model's folder")
    parser.add_argument("--bytes", type=int, help="the first files by path, of at least so many bytes; default: all")
    arguments = parser.parse_args()
    train, heldout = read_corpus()
    if difference := describe_differences(train, heldout):
        print(f"note: {difference}")
    if arguments.bytes:
        ends = np.cumsum([len(file.content) for file in heldout])
        heldout = heldout[: int(np.searchsorted(ends, arguments.bytes)) + 1]
    evaluator, tally = Evaluator(arguments.folder), Tally()
    for index, file in enumerate(heldout):
        evaluator.add(tally, file)
        print(f"{index + 1}/{len(heldout)} {tally.bits / tally.content_bytes:.3f} bits/byte", end="\r", flush=True)
    figures = {"files": len(heldout)} | tally.figures() | xz_bits_per_byte(heldout)
    print(json.dumps(figures, indent=2))
    if arguments.run:
        report = {"training": describe_run(arguments.run), "heldout": figures}
        (arguments.folder / "training.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
