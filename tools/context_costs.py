"""Compare what long contexts cost several models: cache, operations, TPOT and users; and the context from which one is faster.

    python tools/context_costs.py --cluster h200-16 --hosts 4 --mesh dp=32 --batch 8

The planner gives the figures (`dsjax plan step --mode static_gen`), with each model's published precision and a bf16 cache. A model with
fewer positions than a context is priced as if it had them. Users a device: requests of that context that the caches hold.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))

from dsjax.config.layers import kinds_of
from dsjax.model.layer_costs import attention_cost, values_beside
from dsjax.model.parameter_counts import expert_parameters
from dsjax.plan.arguments import StepArgs
from dsjax.plan.instance import Instance
from dsjax.plan.search import instances
from dsjax.plan.static import static_results
from dsjax.tables import table

MODELS = ("deepseek-v3", "deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4-pro")
CONTEXTS = (4096, 131_072, 1_048_576)


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--contexts", nargs="+", type=int, default=CONTEXTS)
    parser.add_argument("--cluster", default="h200-16")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--mesh", default="dp=32")
    parser.add_argument("--batch", type=int, default=8, help="requests of a DP rank whose time between tokens is told")
    return parser.parse_args()


def planned(model: str, context: int, asked: argparse.Namespace) -> Instance:
    """The instance that decodes at this context. A model with fewer positions is given as many."""
    question = StepArgs(
        model=model, cluster=asked.cluster, hosts=asked.hosts, mesh=asked.mesh, mode="static_gen", context=context,
        kv_cache_dtype="bf16", redundant_experts=0,
    ).question()  # fmt: skip
    positions = max(context, question.config.max_position_embeddings)
    config = dataclasses.replace(question.config, max_position_embeddings=positions)
    _, fitting, too_large = instances(dataclasses.replace(question, config=config))
    return next(iter([*fitting, *too_large]))


def operations(instance: Instance) -> float:
    """Operations of a decoded token in the whole model."""
    config, context = instance.config, round(instance.workload.context)
    total = config.hidden_size * config.vocab_size
    for kind, count in kinds_of(config.layer_runs):
        cost = attention_cost(config, kind.attention, "A_CC_ME", rows=1, chunk=1, context=context)
        routed = config.num_experts_per_tok * expert_parameters(config) if kind.routed else 0
        total += count * (cost.flops / 2 + values_beside(config, kind) + routed)
    return 2.0 * total


def crossings(asked: argparse.Namespace) -> Iterator[str]:
    """For each pair of models, the context from which the other one is faster."""

    def seconds(model: str, context: int) -> float:
        return planned(model, context, asked).tpot(asked.batch)

    for pair in itertools.combinations(asked.models, 2):
        low, high = min(asked.contexts), max(asked.contexts)
        first, last = (min(pair, key=lambda model, at=at: seconds(model, at)) for at in (low, high))
        if first == last:
            yield f"{last} is faster than {' and '.join(set(pair) - {last})} at every context"
            continue
        while high - low > max(low // 64, 1):
            middle = (low + high) // 2
            low, high = (low, middle) if seconds(last, middle) < seconds(first, middle) else (middle, high)
        yield f"{last} is faster than {first} from about {high:,} tokens on"


def main() -> None:
    """Print the table and the crossing points."""
    asked, rows = parse(), []
    for context, model in itertools.product(asked.contexts, asked.models):
        instance = planned(model, context, asked)
        [result] = static_results([instance], "static_gen", min(asked.batch, instance.max_batch))[:1] or [None]
        cache, users = instance.memory.request_bytes(context), instance.max_batch * instance.replicas
        rows.append((
            f"{context:,}", model, f"{instance.memory.cache_per_token:,.0f}", f"{cache / 1e9:,.2f}",
            f"{operations(instance) / 1e9:,.0f}", result.tpot.text(1e3, 1) if result else "", f"{result.batch}" if result else "0",
            f"{users / instance.layout.devices:,.0f}",
        ))  # fmt: skip
    names = (
        "<context",
        "<model",
        "cache B a token",
        "GB a request",
        "Gflop a token",
        "TPOT ms",
        "batch",
        "users a device",
    )
    console = Console(width=140)
    console.print(table(f"{asked.mesh} of {asked.cluster}", names, rows))
    for line in crossings(asked):
        console.print(line, highlight=False)


if __name__ == "__main__":
    main()
