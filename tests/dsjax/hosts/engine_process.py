"""One process of a group that computes several layouts, one after the other: `test_two_processes.py` starts two of these.

A layout is a generation: the processes stay, and the executors on top of them are new.
"""

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
    parser.add_argument("--layouts", type=json.loads)
    given = vars(parser.parse_args())
    layouts = [EngineArgs(**FEW_SHAPES | layout, **given) for layout in given.pop("layouts")]
    first = layouts[0]
    group = join_group(first, host_options(first))
    from dsjax.engine.elastic.follower import Follower
    from dsjax.engine.setup.loading import load_model
    from dsjax.engine.stream.leader import EndMessage

    found = []
    for generation, args in enumerate(layouts):
        group.generation = generation
        loaded = load_model(args, group)
        if not group.is_leader:
            Follower(group).follow(loaded.executor)
            continue
        config = args.scheduler_config(loaded.executor.limits)
        engine = LLMEngine(EngineParts(loaded.executor, None, config, eplb=args.eplb))
        found.append(
            {
                "greedy": [
                    continuations(engine, each, GREEDY)
                    for each in ([PROMPTS, OTHERS, PROMPTS] if args.host_cache_bytes else [PROMPTS])
                ],
                "sampled": continuations(engine, PROMPTS[:2], SAMPLED),
                "rebalances": getattr(engine.core.statistics().get("balance"), "rebalances", None),
                "fetched": [
                    load.tiers["host"].fetched if "host" in load.tiers else None for load in engine.core.loads()
                ],
            }
        )
        loaded.executor._put(EndMessage())
        loaded.executor.inner.shutdown()
    if group.is_leader:
        print("found", json.dumps(found), flush=True)
    group.leave()


if __name__ == "__main__":
    sys.exit(main())
