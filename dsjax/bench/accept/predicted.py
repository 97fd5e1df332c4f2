"""The criteria of `--recipe`: what `dsjax plan` predicted for a deployment, with its intervals."""

from collections.abc import Mapping
from typing import Any

from dsjax.bench.accept.criteria import Checklist, Criterion
from dsjax.bench.accept.kinds.load import LoadMeasurement
from dsjax.errors import UserError
from sharding.mesh import MeshSpec

_STAYS, _LEAST_SECONDS = {False: 20, True: 3}, {False: 300.0, True: 30.0}
"""Length of the load: stays of a request, and at least so many seconds; with `--quick` (True), and without."""
_KEPT_UP = 0.9
"""Share of an offered rate that must come out: what is under way at the end is not counted."""


def predicted_checklist(made: Mapping[str, Any], *, quick: bool = False) -> Checklist:
    """Criteria of a recipe (`dsjax.plan.recipe.read_recipe`): rate, TPOT and TTFT of its workload within the predicted intervals.

    Where the recipe names no load, there are as many sessions as its batches hold. Rate and TPOT have the 90 % intervals that blind
    predictions give, TTFT that of the assumptions.

    Raises:
        UserError: the recipe counts on prefix hits or classes of requests, which the load does not have.
    """
    work, expected, held = made["workload"], made["expected"], made["calibrated"]
    if work["prefix_hit"] or work["classes"]:
        raise UserError("--recipe has prefix hits or classes of requests, and the load has neither; plan without them")
    rate, output = work["requests_per_s"] or 0.0, round(work["output_tokens"])
    most = expected["batch_per_dp_rank"] * MeshSpec.parse(expected["mesh"]).dp_size * expected["instances"]
    sessions = 0 if rate else max(1, round(work["concurrency"] or most))
    stay = expected["ttft_s"]["value"] + output * expected["tpot_s"]["value"]
    load = LoadMeasurement(
        name="load",
        title=f"{rate:g} requests a second" if rate else f"{sessions} sessions at once",
        sessions=sessions,
        request_rate=rate,
        seconds=max(_LEAST_SECONDS[quick], _STAYS[quick] * stay),
        input_tokens=round(work["input_tokens"]),
        output_tokens=output,
        spread=0.0,
    )
    blind = "dsjax plan: 90 % interval by {predictions} blind predictions ({by})"
    bounds = {
        "output_tokens_per_s": (held["output_tokens_per_s"], blind.format_map(held["output_tokens_per_s"])),
        "tpot_p50": (held["tpot_s"], blind.format_map(held["tpot_s"])),
        "ttft_mean": (expected["ttft_s"], "dsjax plan: interval of its assumptions, steady state"),
    }
    criteria = [
        Criterion(name, "load", name, load.UNITS[name], "between", (figure["low"], figure["high"]), source)
        for name, (figure, source) in bounds.items()
    ]
    if rate:
        wanted, name = _KEPT_UP * rate * output, "output_tokens_per_s"
        criteria[0] = Criterion(name, "load", name, "tokens/s", "at_least", wanted, "nine tenths of the offered rate")
    criteria.append(Criterion("error_share", "load", "error_share", "", "at_most", 0.0, "every request is answered"))
    about = f"What dsjax plan predicted for {expected['instances']} × {expected['mesh']} of {made['model']} on {made['cluster']}"
    return Checklist(f"{made['model']} on {made['cluster']}", about, {"load": load}, criteria)
