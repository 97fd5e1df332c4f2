"""A step is a description: whatever is traced is made of plain values, wherever the experts are (`dsjax/model/apart.py`)."""

import dataclasses
import enum
import functools
import types
from collections.abc import Iterator, Mapping, Set
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from layouts import TINY

from dsjax.config import ModelConfig
from dsjax.engine.afd.expert_side import ExpertSide, build_both
from dsjax.engine.contract.executor import ExecutorLimits
from dsjax.engine.device import device_state
from dsjax.engine.device.buckets import Rectangle
from dsjax.engine.device.programs import Programs
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step
from dsjax.model.apart import ExpertWork
from dsjax.model.stage import stages_of
from sharding import MeshSpec
from sharding.layer_placement import LayerPlacements

PLAIN = (
    *(type(None), bool, int, float, str, bytes, enum.Enum, range, PurePath, type),
    *(np.dtype, Mesh, PartitionSpec, jax.tree_util.PyTreeDef, nnx.GraphDef, types.BuiltinFunctionType),
)
CONTAINERS = (tuple, list, Set)
SIDES = {"attention_mesh": "dp=2", "expert_mesh": "ep=4"}
OTHER_PROCESSES = {"afd_address": "127.0.0.1:7000,127.0.0.1:7001"}


def not_plain(value: Any, path: str = "step") -> Iterator[str]:
    """Where a value holds anything that is not plain: a socket, thread, lock or array, or what nobody has thought of yet.

    NumPy arrays are the tables of a placement, and nothing else.
    """
    if isinstance(value, PLAIN):
        return
    if isinstance(value, CONTAINERS):
        pieces = {f"[{place}]": one for place, one in enumerate(value)}
    elif isinstance(value, Mapping):
        pieces = {f"[{key!r}]": one for key, one in value.items()} | {f".key({key!r})": key for key in value}
    elif isinstance(value, functools.partial):
        pieces = {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    elif isinstance(value, types.FunctionType):
        pieces = {f".cell{place}": cell.cell_contents for place, cell in enumerate(value.__closure__ or ())}
    elif isinstance(value, LayerPlacements):
        pieces = {f".{name}": one for name, one in vars(value).items() if not isinstance(one, np.ndarray)}
    elif type(value).__module__.split(".")[0] in ("dsjax", "sharding"):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        pieces = {f".{name}": one for name, one in getattr(value, "__dict__", {}).items()}
        pieces |= {f".{name}": getattr(value, name) for name in slots if hasattr(value, name)}
    else:
        yield f"{path} is a {type(value).__module__}.{type(value).__qualname__}"
        return
    for name, one in pieces.items():
        yield from not_plain(one, path + name)


def made(devices=None, **options):
    """The step of a tiny model, of two stages the last one."""
    args, config = EngineArgs(dtype="float32", page_size=4, **options), ModelConfig.from_dict(TINY)
    whole = MeshSpec.parse(args.mesh)
    stage = stages_of(config, whole.pp_size)[-1] if whole.pp_size > 1 else None
    return make_step(args, config, whole.stage, devices or whole.stage.build(), stage=stage)


@pytest.mark.parametrize(
    "name",
    STEPS := {
        "one mesh": {"mesh": "dp=2"},
        "redundant experts": {"mesh": "tp=2", "enable_eplb": True, "eplb_config": {"num_redundant_experts": 2}},
        "a stage": {"mesh": "pp=2"},
        "experts apart": SIDES,
        "experts in other processes": SIDES | OTHER_PROCESSES | {"afd_role": "attention"},
        "a process of experts": SIDES | OTHER_PROCESSES | {"afd_role": "expert", "afd_server_rank": 1},
    },
)
def test_a_step_holds_no_socket_thread_lock_or_array(name):
    assert list(not_plain(made(**STEPS[name]))) == []


def test_what_a_traced_program_leaves_to_the_experts_is_described_in_plain_values():
    attention, experts = build_both(MeshSpec.parse("dp=2"), MeshSpec(dp_size=4))
    step = made(attention, **SIDES)
    side, limits = ExpertSide(step.apart, experts), ExecutorLimits(2, 2, 4, 4, 3, 2, 8, TINY["vocab_size"])
    state = device_state.describe(step, limits)
    programs = Programs(step, step.abstract_parameters(), state, limits, experts=side)
    lowered = programs.lower_step(programs.shape(Rectangle(2, 1), None))
    works = [piece.work for piece in lowered.pieces if piece.work is not None]
    assert [type(work) for work in works] == [ExpertWork]
    assert len({*works, ExpertWork(works[0].passes, works[0].tree)}) == 1
    assert list(not_plain(works)) == []


@pytest.mark.parametrize("held", [jax.numpy.zeros(2), np.zeros(2), object()], ids=["JAX", "NumPy", "an object"])
def test_a_field_with_more_than_plain_values_would_be_seen(held):
    step = made(mesh="dp=2")
    [found] = not_plain(dataclasses.replace(step, kernels=dataclasses.replace(step.kernels, note=[held])))
    assert found.startswith("step.kernels.note[0] is a ")
