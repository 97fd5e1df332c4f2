"""Scores of `lm-eval`, unmodified, over a running server, beside those that `LLM.logits` gives for the same tokens.

    dsjax serve --mesh dp=32 &
    python tools/check_lm_eval.py --lm-eval .venv-eval/bin/lm-eval --url http://127.0.0.1:8000

`lm-eval` (`pip install 'lm_eval[api]'`, in an environment of its own) runs a task of multiple-choice log-likelihoods through its
`local-completions` model and its remote tokenizer: prompts echoed with log-probabilities, `/tokenize`, `/tokenizer_info`. The task is
made here, from the running Python's library, because no dataset may be at hand. Exits with 1 where a score differs by more than
`--tolerance`, or a greedy flag differs.
"""

import argparse
import inspect
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax import LLM

TASK = """
task: dsjax_library
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
"""


def main() -> int:
    """Run lm-eval, score the same continuations here, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default=os.environ.get("DSJAX_API_KEY", "none"))
    parser.add_argument(
        "--model", default="demo", help="bundled name or directory that the server serves under this name"
    )
    parser.add_argument("--lm-eval", default="lm-eval", help="the executable")
    parser.add_argument("--documents", type=int, default=24)
    parser.add_argument("--tolerance", type=float, default=1e-3, help="of a log-likelihood, in nats")
    args = parser.parse_args()
    documents = make_documents(args.documents)
    with tempfile.TemporaryDirectory() as folder:
        found = evaluate(args, documents, Path(folder))
    llm = LLM(args.model, dtype="float32", max_num_seqs=1)
    worst, wrong = 0.0, 0
    for document, scores in zip(documents, found, strict=True):
        for choice, (theirs, greedy) in zip(document["choices"], scores, strict=True):
            ours, ours_greedy = score(llm, document["context"], choice)
            worst = max(worst, abs(ours - theirs))
            wrong += greedy != ours_greedy
    count = sum(len(scores) for scores in found)
    print(
        f"{count} scores: largest difference {worst:.2e} nats (allowed {args.tolerance:g}), {wrong} greedy flags differ"
    )
    return 0 if worst <= args.tolerance and not wrong else 1


def make_documents(count: int) -> list[dict]:
    """Beginnings of library functions, each with its true next lines and those of two others."""
    modules = [argparse, inspect, json.decoder, random, subprocess, tempfile, textwrap]
    functions = [f for m in modules for _, f in inspect.getmembers(m, inspect.isfunction) if f.__module__ == m.__name__]
    sources = [source for f in functions if (source := inspect.getsource(f)).count("\n") > 6]
    chosen = random.Random(0).sample(sources, min(count, len(sources)))
    halves = [("".join(s.splitlines(True)[:4]), "".join(s.splitlines(True)[4:6])) for s in chosen]
    others = [end for _, end in halves]
    return [
        {"context": begin, "choices": [end, others[i - 1], others[i - 2]], "label": 0}
        for i, (begin, end) in enumerate(halves)
    ]


def evaluate(args: argparse.Namespace, documents: list[dict], folder: Path) -> list[list[tuple[float, bool]]]:
    """Log-likelihood and greedy flag of each document's choices, as lm-eval logs them."""
    (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "dsjax_library.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
    model = f"model={args.model},base_url={args.url}/v1/completions,tokenizer_backend=remote,num_concurrent=8"
    model += f",auth_token={args.api_key}"
    command = [args.lm_eval, "run", "--model", "local-completions", "--model_args", model, "--tasks", "dsjax_library"]
    command += ["--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    environment = os.environ | {"OPENAI_API_KEY": args.api_key, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"}
    if code := subprocess.run(command, env=environment, check=False).returncode:
        sys.exit(f"lm-eval ended with code {code}")
    (log,) = (folder / "out").rglob("samples_dsjax_library_*.jsonl")
    samples = sorted((json.loads(line) for line in log.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    return [[(float(value), greedy in (True, "True")) for ((value, greedy),) in sample["resps"]] for sample in samples]


def score(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """The same from our logits, of the tokens that lm-eval sends: those of the context, without the white space at its end, and of
    the whole text's those behind as many.
    """
    kept = llm.tokenizer.encode(context.rstrip(), add_special_tokens=False)
    ids = kept + llm.tokenizer.encode(context + continuation, add_special_tokens=False)[len(kept) :]
    start = len(kept)
    logits = llm.logits([ids])[0][start - 1 : -1].astype(np.float64)
    taken = logits[np.arange(len(logits)), ids[start:]]
    largest = logits.max(axis=-1)
    logsumexp = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=-1))
    return float((taken - logsumexp).sum()), bool((logits.argmax(axis=-1) == ids[start:]).all())


if __name__ == "__main__":
    sys.exit(main())
