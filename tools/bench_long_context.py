"""Decode and prefill of the demo model and of its sparse twin at long contexts, by turns; and the sparse one held to its plain form.

    python tools/bench_long_context.py                                  # 4,096, 16,384 and 32,768 tokens of context
    python tools/bench_long_context.py --contexts 4096 --rows 1
    python tools/bench_long_context.py --check --contexts 32768         # native kernels against the plain form, instead of speed

Both models have 2,048 positions. Here their positions are scaled, as their configuration allows, by the YaRN factor that the longest
context needs: text becomes worse, and what is computed is the same. Prompts are held-out files, each context the beginning of the next, so
that the prefix cache computes every token once. Times are of the processor, the least of the steps: rows decode together, the two
models take turns, and a step of one is followed by a step of the other. Prompts of the sparse model are computed in A_CC_ME, which
gathers what is chosen, those of the dense one in CC.

``--check`` makes greedy tokens after the longest context twice and exits 1 if they differ, or if log-probabilities do beyond rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PJRT_NPROC", "1")

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dsjax import LLM, SamplingParams
from dsjax.engine.device.buckets import Buckets, Rectangle
from tools.demo.corpus import read_corpus

MODELS = ROOT / "configs" / "models"
FORMS = {"demo": "CC", "demo-sparse": "A_CC_ME"}
CHUNK, PAGE, SPARE = 256, 16, 64
CHECKED_TOKENS = 16
LOGPROB_ROUNDING = 1e-3


def main() -> None:
    """Measure, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 16384, 32768], help="tokens, ascending")
    parser.add_argument("--rows", type=int, default=4, help="requests that decode together")
    parser.add_argument("--steps", type=int, default=12, help="timed decode steps of each model at each context")
    parser.add_argument("--check", action="store_true", help="hold the sparse model to its plain form")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    contexts = sorted(args.contexts)
    with tempfile.TemporaryDirectory(prefix="long-context-") as folder:
        if args.check:
            sys.exit(check(Path(folder), contexts[-1]))
        found = measure(Path(folder), contexts, args.rows, args.steps)
    table = Table(title=f"{args.rows} rows, processor milliseconds")
    for column in ("context", "model", "decode step", "ratio", "prefill, a token"):
        table.add_column(column, justify="right")
    for context in contexts:
        dense, sparse = (found[name][context] for name in FORMS)
        for name, (step, prefill) in zip(FORMS, (dense, sparse), strict=True):
            ratio = f"{step / dense[0]:.2f}"
            table.add_row(f"{context:,}", name, f"{1e3 * step:.2f}", ratio, f"{1e3 * prefill:.3f}")
    Console(width=110).print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def stretched(folder: Path, name: str, positions: int) -> Path:
    """A folder with a bundled model whose positions reach so far: its YaRN factor is raised as far as it must."""
    made = folder / f"{name}-{positions}"
    if made.exists():
        return made
    made.mkdir()
    for file in (MODELS / name).iterdir():
        (made / file.name).symlink_to(file)
    config = json.loads((MODELS / name / "config.json").read_text())
    scaling = config["rope_scaling"]
    scaling["factor"] = max(scaling["factor"], -(-positions // scaling["original_max_position_embeddings"]))
    config["max_position_embeddings"] = positions
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps(config))
    return made


def make_engine(folder: Path, name: str, context: int, rows: int, **options) -> LLM:
    """An engine with room for ``rows`` requests that share a context, and two programs."""
    positions = context + SPARE
    llm = LLM(
        str(stretched(folder, name, positions)),
        dtype="float32",
        max_model_len=positions,
        max_num_seqs=rows,
        max_num_batched_tokens=CHUNK,
        prefill_chunk=CHUNK,
        page_size=PAGE,
        cache_tokens=positions + 2 * rows * SPARE,
        mla_prefill=FORMS[name],
        async_scheduling=False,
        **options,
    )
    llm.executor.buckets = Buckets(decode=(rows,), prefill=(Rectangle(1, CHUNK),), mixed=False)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": [3] * (CHUNK + 1)}], params)  # compiles both
    return llm


def text_of(llm: LLM, tokens: int) -> list[int]:
    """The beginning of the held-out files, in the order of their paths."""
    found: list[int] = []
    for file in read_corpus()[1]:
        found += llm.tokenizer.encode(file.content.decode())
        if len(found) >= tokens:
            return found[:tokens]
    raise SystemExit(f"the held-out files have {len(found):,} tokens, fewer than the {tokens:,} of the longest context")


class Rows:
    """Requests with one prompt that decode together in an engine."""

    def __init__(self, llm: LLM, prompt: list[int], rows: int):
        self.llm, self.prompt, self.number = llm, prompt, 0
        self.names = [f"{len(prompt)}-{row}" for row in range(rows)]

    def prefill(self) -> float:
        """Compute the prompt, up to the first token of every row; processor seconds."""
        began, waiting = time.process_time(), set(self.names)
        self._add(self.names[0])
        self._until(waiting, {self.names[0]})
        took = time.process_time() - began
        for name in self.names[1:]:
            self._add(name)
        self._until(waiting, set(self.names[1:]))
        return took

    def _add(self, name: str) -> None:
        params = SamplingParams(temperature=0, max_tokens=SPARE - 1, ignore_eos=True, detokenize=False)
        self.llm.engine.add_request(name, {"prompt_token_ids": self.prompt}, params)

    def _until(self, waiting: set[str], have: set[str]) -> None:
        while waiting & have:
            waiting -= {output.request_id for output in self.llm.engine.step()}

    def step(self) -> float:
        """Processor seconds of one step of all rows."""
        began = time.process_time()
        made = self.llm.engine.step()
        took = time.process_time() - began
        assert len(made) == len(self.names), f"{len(made)} of {len(self.names)} rows made a token"
        return took

    def end(self) -> None:
        """Give the slots back; the prompt's pages stay in the prefix cache."""
        for name in self.names:
            self.llm.engine.abort(name)
        while self.llm.engine.has_unfinished():
            self.llm.engine.step()


def measure(folder: Path, contexts: list[int], rows: int, steps: int) -> dict[str, dict[int, tuple[float, float]]]:
    """Give each model's processor seconds at each context: of a decode step, and of a prompt token since the context before it."""
    engines = {name: make_engine(folder, name, contexts[-1], rows) for name in FORMS}
    text = text_of(engines["demo"], contexts[-1])
    found: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in FORMS}
    before = 0
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("contexts", total=len(contexts))
        for context in contexts:
            waiting = {name: Rows(llm, text[:context], rows) for name, llm in engines.items()}
            prefill = {name: own.prefill() / (context - before) for name, own in waiting.items()}
            times: dict[str, list[float]] = {name: [] for name in FORMS}
            for _ in range(steps):
                for name, own in waiting.items():
                    times[name].append(own.step())
            for name, own in waiting.items():
                found[name][context] = (min(times[name]), prefill[name])
                own.end()
                step, prompt = (f"{1e3 * value:.2f} ms" for value in found[name][context])
                progress.console.print(f"{name} at {context:,}: {step} a decode step, {prompt} a prompt token")
            before = context
            progress.advance(task)
    for llm in engines.values():
        llm.shutdown()
    return found


def continuation(folder: Path, context: int, **options) -> tuple[list[int], list[float]]:
    """Greedy tokens of the sparse model after so much text, and their log-probabilities."""
    llm = make_engine(folder, "demo-sparse", context, 1, **options)
    try:
        params = SamplingParams(temperature=0, max_tokens=CHECKED_TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
        text = text_of(llm, context)
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task(f"kernels={options.get('kernels', 'native')}: the prompt's tokens", total=context)
            # Piece by piece: the prefix cache has what was computed before.
            for end in [*range(16 * CHUNK, context, 16 * CHUNK), context]:
                [made] = llm.generate([{"prompt_token_ids": text[:end]}], params)
                progress.update(task, completed=end)
        tokens = list(made.outputs[0].token_ids)
        return tokens, [entry[token].logprob for token, entry in zip(tokens, made.outputs[0].logprobs, strict=True)]
    finally:
        llm.shutdown()


def check(folder: Path, context: int) -> int:
    """1 if native kernels and the plain form give other tokens, or log-probabilities that differ beyond rounding."""
    native, plain = (continuation(folder, context, kernels=kernels) for kernels in ("native", "plain"))
    furthest = max(abs(a - b) for a, b in zip(native[1], plain[1], strict=True))
    same = native[0] == plain[0]
    print(
        f"{context:,} tokens of context, {CHECKED_TOKENS} greedy tokens: {'the same' if same else 'others'}; "
        f"log-probabilities within {furthest:.1e}"
    )
    return int(not same or furthest > LOGPROB_ROUNDING)


if __name__ == "__main__":
    main()
