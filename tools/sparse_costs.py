"""DeepSeek-V3 beside V3.2 over the context: what attention reads and computes for a token, and a step's time as the planner has it.

    python tools/sparse_costs.py
    python tools/sparse_costs.py --cluster h800-32 --mesh dp=32 --rows 16 --contexts 4096 131072

Bytes and operations are arithmetic (`dsjax/model/mla_costs.py`), of all layers and one device with all heads, form A_CC_ME, a bf16 cache.
Decode is one step of so many rows a DP rank; prefill is one step of `--prompt-tokens` at the end of such a context, by token. Both have the
planner's range. The last lines are the contexts from which V3.2 is faster.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dsjax.config import load_config
from dsjax.model.mla_costs import mla_cost
from dsjax.plan.cluster import load_cluster
from dsjax.plan.layout import parse_layout
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.step import StepModel

MODELS = ("deepseek-v3", "deepseek-v3.2")


def attention(config, context: int) -> tuple[float, float]:
    """(bytes read of the cache, operations of attention and of index scores) for one decoded token in all layers."""
    cost = mla_cost(config, "A_CC_ME", rows=1, chunk=1, context=context)
    layers = config.num_hidden_layers
    return cost.cache_read_bytes * layers, (cost.attention_flops + cost.index_flops) * layers


def crossing(seconds_of, contexts=range(512, 131_073, 512)) -> str:
    """The first context from which on the second model is faster."""
    slower = [context for context in contexts if seconds_of(MODELS[1], context) >= seconds_of(MODELS[0], context)]
    if not slower:
        return f"all from {contexts[0]:,} on"
    return "none" if slower[-1] == contexts[-1] else f"from {slower[-1] + contexts.step:,} on"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", default="h800-32")
    parser.add_argument("--mesh", default="dp=32")
    parser.add_argument("--rows", type=int, default=32, help="requests of a DP rank in a decode step")
    parser.add_argument("--prompt-tokens", type=int, default=4096, help="tokens of a DP rank in a prefill step")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131_072])
    args = parser.parse_args()
    configs = {name: load_config(name) for name in MODELS}
    cluster = load_cluster(args.cluster)
    steps = {
        name: StepModel(config, cluster, parse_layout(args.mesh, 0, config), PRECISIONS["fp8"])
        for name, config in configs.items()
    }

    def decode(name, context):
        return steps[name].decode(args.rows, context)

    def prefill(name, context):
        tokens = args.prompt_tokens
        return steps[name].prefill_device(tokens, prompt=tokens, cached=max(0, context - tokens))[0] * (1 / tokens)

    print("| context | model | read for a token | attention and index scores | decode step | prefill, a token |")
    print("|---|---|---|---|---|---|")
    for context in args.contexts:
        for name, config in configs.items():
            read, flops = attention(config, context)
            times = [
                f"{time.value * scale:.1f} {unit} ({time.low * scale:.1f} – {time.high * scale:.1f})"
                for time, scale, unit in ((decode(name, context), 1e3, "ms"), (prefill(name, context), 1e6, "µs"))
            ]
            print(f"| {context:,} | {name} | {read / 1e6:,.0f} MB | {flops / 1e9:,.0f} G | {' | '.join(times)} |")
    for what, time in (("decode", decode), ("prefill", prefill)):
        print(f"\n{what}: V3.2 is faster {crossing(lambda name, context, time=time: time(name, context).value)}")


if __name__ == "__main__":
    main()
