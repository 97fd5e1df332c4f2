"""Records a mixed workload on the demo model, so that `dsjax replay` has every kind of row to compare.

    python tools/record_mixed.py steps.dsjax
    dsjax replay steps.dsjax

Requests are greedy and sampled, with penalties, biases, banned words and allowed tokens, log-probabilities of outputs and
prompts, structured outputs, stop strings, several completions, shared prefixes; some are aborted in the middle. They arrive
while others run. At the end one sequence is scored whole, the cache is flushed, and a few more requests run. What it prints ends with
how many commands of each kind the recording has.

Host memory below the cache, drafts and experts that move are recorded, and replayed, with

    python tools/record_mixed.py steps.dsjax --requests 80 --options '{"cache_tokens": 336, "page_size": 8,
        "host_cache_bytes": 4000000, "enable_eplb": true, "eplb_config": {"window_size": 8, "step_interval": 16, "payback": 0},
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 8, 1]]}}'

An engine refuses to record with a disk or with separated sides: the recording would lack what their pages held. The commands of those are
recorded on a virtual clock, by `tools/record_commands.py`.
"""

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax import LLM, SamplingParams, StructuredOutputs
from dsjax.engine.stream.step_record import Launched, StepRecording

PREFIXES = (
    '"""Tools for reading and writing files."""\n\nimport os\nimport sys\nfrom pathlib import Path\n\n\n',
    "class Node:\n    def __init__(self, value, left=None, right=None):\n        self.value = value\n        self.left = left\n",
    "def parse(text):\n    tokens = text.split()\n    stack = []\n    for token in tokens:\n        ",
)
ENDINGS = ("def main(", "    return ", "class A", "import ", "for i in range(", "if x == ", "try:\n    ", "# The ")
SCHEMA = (
    '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a", "b"]}'
)
KINDS = (
    "greedy",
    "sampled",
    "penalised",
    "biased",
    "logprobs",
    "prompt_logprobs",
    "structured",
    "stop",
    "several",
    "aborted",
)


def parameters(kind: str, rng: random.Random) -> SamplingParams:
    """What a request of this kind asks for; seeds are given, so that a workload is the same each time."""
    seed, tokens = rng.randrange(2**31), rng.randrange(4, 28)
    sampled = {"temperature": rng.choice((0.6, 1.0)), "seed": seed, "max_tokens": tokens}
    structured = (
        StructuredOutputs(regex=r"[0-9]{3}-[0-9]{4}"),
        StructuredOutputs(json=SCHEMA),
        StructuredOutputs(choice=("yes", "no", "perhaps")),
    )
    given = {
        "greedy": {"temperature": 0, "max_tokens": tokens},
        "sampled": {**sampled, "top_p": 0.9, "top_k": rng.choice((0, 20)), "min_p": rng.choice((0.0, 0.02))},
        "penalised": {**sampled, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
        "biased": {
            **sampled,
            "logit_bias": {5: 3.0, 9: -100.0},
            "bad_words": ["self", "return x"],
            "min_tokens": 3,
            "allowed_token_ids": list(range(300)) if rng.random() < 0.5 else None,
        },
        "logprobs": {**sampled, "logprobs": rng.randrange(4)},
        "prompt_logprobs": {"temperature": 0, "max_tokens": tokens, "prompt_logprobs": 2},
        "structured": {**sampled, "max_tokens": 40, "structured_outputs": rng.choice(structured)},
        "stop": {"temperature": 0, "max_tokens": 48, "stop": ["\n\n", "(self", ":"]},
        "several": {**sampled, "n": rng.choice((2, 3))},
        "aborted": {"temperature": 0, "max_tokens": 64, "ignore_eos": True},
    }
    return SamplingParams(**given[kind])


def run(llm: LLM, count: int, seed: int) -> Counter:
    """Run `count` requests, at most 32 at a time; give how many there were of each kind, and how each ended."""
    rng, engine = random.Random(seed), llm.engine
    found: Counter = Counter()
    waiting = [(f"{index}-{KINDS[index % len(KINDS)]}", KINDS[index % len(KINDS)]) for index in range(count)]
    to_abort: dict[str, int] = {}
    running = 0
    while waiting or engine.has_unfinished():
        for _ in range(min(len(waiting), 32 - running, rng.randrange(5))):
            name, kind = waiting.pop()
            prompt = rng.choice(PREFIXES) * rng.randrange(3) + rng.choice(ENDINGS)
            engine.add_request(name, prompt, parameters(kind, rng))
            found[kind] += 1
            running += 1
            if kind == "aborted":
                to_abort[name] = rng.randrange(2, 12)
        for output in engine.step():
            if output.finished:
                running -= 1
                to_abort.pop(output.request_id, None)
                found.update(f"ended by {one.finish_reason}" for one in output.outputs)
        for name in list(to_abort):
            to_abort[name] -= 1
            if to_abort[name] == 0:
                engine.abort(name)
                del to_abort[name]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="the recording to be written; must not exist")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--options", type=json.loads, default={}, help='further engine options as JSON, such as {"page_size": 8}'
    )
    parser.add_argument(
        "--no-warm-up", action="store_true", help="compile programs at first use; times then include it"
    )
    arguments = parser.parse_args()
    options = {"max_model_len": 320, "max_num_seqs": 8, "prefill_chunk": 64, "cache_tokens": 768, **arguments.options}
    llm = LLM(model=arguments.model, mesh=arguments.mesh, record_steps=arguments.file, **options)
    if not arguments.no_warm_up:
        llm.warm_up()
    found = run(llm, arguments.requests, arguments.seed)
    llm.logits([llm.tokenizer.encode(PREFIXES[0])])
    llm.engine.flush_prefix_cache()
    found += run(llm, 10, arguments.seed + 1)
    loads = llm.engine.core.scheduler.ranks
    found["preemptions"] = sum(rank.num_preemptions for rank in loads)
    found["prompt tokens from the cache"] = sum(sum(rank.hits.values()) for rank in loads)
    llm.shutdown()
    record = StepRecording(arguments.file)
    found.update(f"{type(frame.command).__name__} commands" for frame in record if isinstance(frame, Launched))
    print("Recorded: " + ", ".join(f"{count} {name}" for name, count in found.items()))


if __name__ == "__main__":
    main()
