"""Steps of a tiny model and of DeepSeek-V3, without weights, and the limits of an executor."""

from layouts import TINY

from dsjax.config import ModelConfig, load_config
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from sharding import MeshSpec

RANKS, PAGES, G = 2, 3, 2


def tiny(mesh, **options):
    """The step of a tiny model."""
    args, spec = EngineArgs(mesh=mesh, dtype="float32", page_size=G, **options), MeshSpec.parse(mesh)
    return make_step(args, ModelConfig.from_dict(TINY), spec, spec.build())


def limits_of(ranks):
    return ExecutorLimits(4, 4, 8, G, PAGES, ranks, 8, TINY["vocab_size"])


def step_of(mesh="dp=1", mtp=False, **options):
    args, spec = EngineArgs(mesh=mesh, dtype="bfloat16", page_size=16, **options), MeshSpec.parse(mesh)
    return make_step(args, load_config("deepseek-v3"), spec, spec.build(), mtp=mtp)
