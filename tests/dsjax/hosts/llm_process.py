"""One process of a group behind `LLM`, for the one that started it: each line that process 0 reads has all prompts generated again.

With the line `record` the experts' loads of it are recorded. With `others` it is other prompts, and with `sampled` tokens are drawn.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable
from typing import Any

from dsjax import LLM, SamplingParams

PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([5, 6, 7], [11] * 9, [30, 2, 77, 12, 60], [3])]
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
OFFLOADING = {
    "mesh": "dp=2,tp=2",
    "dispatch": "ragged",
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 2},
    "cache_tokens": 32,
    "host_cache_bytes": 400_000,
}
"""Options of an engine of two processes that drafts, and that keeps pages in host memory."""
OTHERS = [{"prompt_token_ids": [40 + i] * 16} for i in range(8)]
"""As many as push the pages of `PROMPTS` out of a small cache."""
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=1)


def generate(llm: LLM, prompts: list[dict] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, PARAMS)]


def sample(llm: LLM) -> list[list[int]]:
    completions = [output.outputs[0] for output in llm.generate(PROMPTS, SAMPLED)]
    assert all(len(one.logprobs) == len(one.token_ids) for one in completions)
    return [one.token_ids for one in completions]


def record(llm: LLM) -> tuple[list[list[int]], list[list[int]]]:
    """What is made of the prompts without cached pages, and the experts' loads of that."""
    llm.engine.flush_prefix_cache()
    llm.executor.set_recording(True)
    made = generate(llm), llm.executor.expert_counts().logical_load.tolist()
    llm.executor.set_recording(False)
    return made


def generate_alone(model: str, makes: Callable[[LLM], Any] = generate, **sizes: object) -> Any:
    llm = LLM(model, **sizes)
    try:
        return makes(llm)
    finally:
        llm.shutdown()


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser()
    parser.add_argument("--options", type=json.loads)
    for name in ("coordinator-address", "num-processes", "process-id", "start-timeout", "heartbeat-timeout"):
        parser.add_argument(f"--{name}", type=str if name == "coordinator-address" else int)
    given = vars(parser.parse_args())
    llm = LLM(**given.pop("options"), **given)  # returns in process 0 alone
    print("ready", flush=True)
    for line in sys.stdin:
        said = {"mesh": llm.facts.mesh}
        if line.strip() == "record":
            said["tokens"], said["loads"] = record(llm)
        else:
            make = {"others": lambda llm: generate(llm, OTHERS), "sampled": sample}.get(line.strip(), generate)
            said["tokens"] = make(llm)
        balance = llm.engine.core.statistics().get("balance")  # None where experts stay where they are
        if balance is not None:
            said |= {"rebalances": balance.rebalances, "failures": balance.failures}
        loads = llm.engine.core.loads()
        if "host" in loads[0].tiers:  # host memory below the cache
            said["fetched"] = sum(load.tiers["host"].fetched for load in loads)
        print(json.dumps(said), flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
