"""`plan`, `estimate` and `compare`: the Python API of `dsjax plan`, for notebooks and scripts."""

from typing import Any

from dsjax.config import ModelConfig, load_config
from dsjax.plan import comparison
from dsjax.plan.candidate import Candidate, with_intervals
from dsjax.plan.cluster import Cluster, load_cluster
from dsjax.plan.comparison import Comparison
from dsjax.plan.engine import find_engine
from dsjax.plan.question import Question
from dsjax.plan.search import Plan, search
from dsjax.plan.workload import Lengths, Objective, PlanOptions, Workload


def plan(cluster: str | Cluster, **about: Any) -> Plan:
    """Search all layouts of a model on a cluster: `ranked` has those that meet the objectives, best first.

    Keywords are those of `question`.
    """
    return search(question(cluster, **about))


def estimate(cluster: str | Cluster, layout: str, **about: Any) -> Candidate:
    """Estimate the best deployment of one layout: a mesh (`dp=32`), or a prefill and a decode mesh (`tp=8|dp=24`).

    Its `throughput` (tokens/s), `tpot` and `ttft` (s) are floats with `low` and `high`. Keywords are those of `question`.
    """
    return with_intervals(comparison.estimate(question(cluster, **about), layout))


def compare(cluster: str | Cluster, *layouts: str, **about: Any) -> Comparison:
    """Compare the first layout with each of the others: ratios with their own intervals, and what decides them.

    Keywords are those of `question`.
    """
    return comparison.compare(question(cluster, **about), layouts)


def question(
    cluster: str | Cluster,
    *,
    model: str | ModelConfig = "deepseek-v3",
    engine: str = "dsjax",
    input_tokens: float | Lengths,
    output_tokens: float | Lengths,
    concurrency: float | None = None,
    request_rate: float | None = None,
    prefix_hit: float = 0.0,
    ttft: float | None = None,
    tpot: float | None = None,
    throughput: float | None = None,
    **options: Any,
) -> Question:
    """Return the question that a plan answers.

    cluster, model: bundled names, files, or objects. concurrency: requests in flight; request_rate: requests a second; at most
    one of them. ttft, tpot (seconds), throughput (tokens/s): objectives. options: fields of `PlanOptions`.

    Raises:
        UserError: an unknown cluster, model or engine, or incompatible values.
    """
    found = find_engine(engine)
    lengths = (tokens if isinstance(tokens, Lengths) else Lengths(tokens) for tokens in (input_tokens, output_tokens))
    return Question(
        model if isinstance(model, ModelConfig) else load_config(model),
        cluster if isinstance(cluster, Cluster) else load_cluster(cluster),
        Workload(*lengths, concurrency=concurrency, rate=request_rate, prefix_hit=prefix_hit),
        Objective(ttft, tpot, throughput),
        PlanOptions(**{"engine": found, "dispatch": found.dispatch, **options}),
    )
