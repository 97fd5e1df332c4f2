"""A step of one layout, and a plan's options for an engine: what differs from published kernels and from the defaults of a plan."""

import dataclasses

from dsjax.plan.engine import PUBLISHED, Engine, find_engine
from dsjax.plan.precision import PRECISIONS
from dsjax.plan.skew import DEFAULT_SKEW
from dsjax.plan.step import StepModel
from dsjax.plan.workload import PlanOptions

OF_ENGINE = {field.name for field in dataclasses.fields(Engine)}
OF_STEP = {"overlap", "balancing", "dry_runs", "shared"}


def step_model(config, cluster, layout, precision=PRECISIONS["fp8"], skew=DEFAULT_SKEW, kind=StepModel, **how):
    dispatch = {"dispatch": how.pop("dispatch")} if "dispatch" in how else {}
    own = {name: value for name, value in how.items() if name in OF_STEP}
    engine = {"fp8_mla": False} | {name: value for name, value in how.items() if name in OF_ENGINE}
    others = {name: value for name, value in how.items() if name not in OF_ENGINE | OF_STEP} | dispatch
    options = PlanOptions(precision=precision, skew=skew, engine=dataclasses.replace(PUBLISHED, **engine), **others)
    return kind(config, cluster, layout, options, **own)


def options_for(name, **options):
    engine = find_engine(name)
    return PlanOptions(**{"engine": engine, "dispatch": engine.dispatch} | options)
