"""Generate the prompts below in one process of a group; `test_two_processes.py` starts two."""

import argparse
import json
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from quick_compilation import FEW_SHAPES

from dsjax import SamplingParams
from dsjax.engine.elastic.joining import host_options, join_group
from dsjax.engine.engine import EngineParts, LLMEngine
from dsjax.engine.setup.args import EngineArgs

PROMPTS = [[5, 6, 7], [11] * 9, [30, 2, 77, 12, 60], [3], [90, 80, 70, 60, 50, 40]]
OTHERS = [[40 + i] * 20 for i in range(8)]
"""As many as push the pages of `PROMPTS` out of a small cache."""
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, detokenize=False)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=4, ignore_eos=True, detokenize=False, logprobs=1)


def continuations(engine: LLMEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{params.temperature}-{index}", {"prompt_token_ids": prompt}, params)
    found: dict[str, list[int]] = {}
    while engine.has_unfinished():
        found |= {output.request_id: output.outputs[0] for output in engine.step() if output.finished}
    if params.logprobs:
        assert all(len(output.logprobs) == len(output.token_ids) for output in found.values())
    return [found[f"{params.temperature}-{index}"].token_ids for index in range(len(prompts))]


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser()
    for name in ("coordinator-address", "num-processes", "process-id", "start-timeout", "heartbeat-timeout"):
        parser.add_argument(f"--{name}", type=str if name == "coordinator-address" else int)
    parser.add_argument("--options", type=json.loads)
    given = vars(parser.parse_args())
    args = EngineArgs(**FEW_SHAPES | given.pop("options"), **given)
    group = join_group(args, host_options(args))
    from dsjax.engine.elastic.follower import Follower
    from dsjax.engine.setup.loading import load_model

    loaded = load_model(args, group)
    if group.is_leader:
        config = args.scheduler_config(loaded.executor.limits)
        engine = LLMEngine(EngineParts(loaded.executor, None, config, args))
        found = {
            "greedy": [continuations(engine, prompts, GREEDY) for prompts in (PROMPTS, OTHERS, PROMPTS)],
            "sampled": continuations(engine, PROMPTS[:2], SAMPLED),
            "rebalances": engine.core.statistics()["balance"].rebalances,
            "fetched": [load.tiers["host"].fetched for load in engine.core.loads()],
        }
        group.end()
        loaded.executor.inner.shutdown()
        print("found", json.dumps(found), flush=True)
    else:
        Follower(group).follow(loaded.executor)
    group.leave()


if __name__ == "__main__":
    sys.exit(main())
