"""One process of a group behind `LLM`, for the one that started it: each line that process 0 reads has all prompts generated again.

With the line `record` the experts' loads of it are recorded.
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


def generate(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def record(llm: LLM) -> tuple[list[list[int]], list[list[int]]]:
    """What is made of the prompts without cached pages, and the experts' loads of that."""
    llm.engine.flush_prefix_cache()
    llm.executor.set_recording(True)
    try:
        return generate(llm), llm.executor.expert_counts().logical_load.tolist()
    finally:
        llm.executor.set_recording(False)


def generate_alone(model: str, makes: Callable[[LLM], Any] = generate, **sizes: object) -> Any:
    """What one device makes of the same prompts."""
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
        tokens, *loads = record(llm) if line.strip() == "record" else (generate(llm),)
        said = {"tokens": tokens, "mesh": llm.facts.mesh}
        if loads:
            said["loads"] = loads[0]
        balance = llm.engine.core.statistics().get("balance")  # None where experts stay where they are
        if balance is not None:
            said |= {"rebalances": balance.rebalances, "failures": balance.failures}
        host = llm.engine.core.loads()[0].tiers.get("host")  # None without host memory below the cache
        if host is not None:
            said["fetched"] = host.fetched
        print(json.dumps(said), flush=True)
    llm.shutdown()


if __name__ == "__main__":
    main()
