"""Cut programs: a function that is traced once and runs as several XLA programs, with work on the host in between.

``outside`` marks work in a traced function that no XLA program can do by itself, such as a computation on other devices. ``lower_cut``
traces the function once, cuts it at this work, and determines which values each piece needs from the pieces before it::

    def step(params, state, x):
        x, state = first_half(params, state, x)
        [x] = outside("experts", [x], [x_described])
        return second_half(params, state, x)

    program = lower_cut(step, params, state, x, donate_argnum=1, worker=experts).compile()
    state = program(params, state, x)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Primitive
from jax.sharding import Sharding

from sharding import jax_internals

Described = jax.ShapeDtypeStruct


Run = Callable[[list[jax.Array]], Sequence[jax.Array]]
Compiler = Callable[[jax.stages.Lowered], jax.stages.Compiled]


class Worker(Protocol):
    """Does the work between two programs."""

    def compile_work(self, work: Hashable, described: Sequence[Described]) -> tuple[Run, Sequence[Sharding]]:
        """Compile a piece of work for the described values. Return a function that does the work, and the shardings of its results.

        work: the description passed to ``outside``. The function takes the values passed to ``outside`` in a list, which it may empty
        to free their memory early.
        """


_outside = Primitive("outside")
_outside.multiple_results = True


@_outside.def_abstract_eval
def _describe_results(*_, results: tuple[tuple[tuple[int, ...], np.dtype], ...], **__):
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in results]


def outside(work: Hashable, values: Sequence[jax.Array], results: Sequence[Described]) -> list[jax.Array]:
    """Return the results of ``work`` on ``values``, with these shapes and dtypes. Call it at the top level of a cut function.

    work: description of the work, in plain values. The ``Worker`` passed to ``lower_cut`` does the work.
    """
    described = tuple((tuple(one.shape), np.dtype(one.dtype)) for one in results)
    return _outside.bind(*values, work=work, results=described)


class _Piece(NamedTuple):
    """A run of equations, or one ``outside``."""

    equations: list
    takes: list  # input variables
    gives: list  # output variables
    donates: tuple[int, ...]  # indices in ``takes`` of values not read afterwards

    @property
    def work(self) -> Hashable | None:
        """Description of the work outside; None if this piece is a program."""
        is_outside = bool(self.equations) and self.equations[0].primitive is _outside
        return self.equations[0].params["work"] if is_outside else None


@dataclass(frozen=True)
class CutLowered:
    """A traced and cut function, the counterpart of ``jax.stages.Lowered``."""

    jaxpr: ClosedJaxpr
    pieces: Sequence[_Piece]
    arguments: Sequence[Described]
    out_tree: Any
    worker: Worker

    def compile(
        self, *, compiler_options: Mapping[str, Any] | None = None, compiler: Compiler | None = None
    ) -> CutCompiled:
        """Compile the pieces in order, each for the shardings of the results of the pieces before it.

        compiler_options: XLA options for each program. compiler: compiles each program instead of ``Lowered.compile`` with these
            options. The worker compiles the work between two programs itself.
        """
        compiler = compiler or partial(jax.stages.Lowered.compile, compiler_options=compiler_options)
        known = dict(zip(self.jaxpr.jaxpr.invars, self.arguments, strict=True))
        constants = dict(zip(self.jaxpr.jaxpr.constvars, self.jaxpr.consts, strict=True))
        runs = []
        for piece in self.pieces:
            described = [known[variable] for variable in piece.takes]
            if piece.work is not None:
                run, shardings = self.worker.compile_work(piece.work, described)
                runs.append(run)
            else:
                run = jax_internals.equations_as_function(
                    self.jaxpr.jaxpr, piece.equations, piece.takes, piece.gives, constants
                )
                program = compiler(jax.jit(run, donate_argnums=piece.donates).lower(*described))
                shardings = program.output_shardings
                runs.append(program)
            for variable, sharding in zip(piece.gives, shardings, strict=True):
                aval = variable.aval
                known[variable] = Described(aval.shape, aval.dtype, sharding=sharding)
        results = [known[variable] for variable in self.jaxpr.jaxpr.outvars]
        return CutCompiled(self, runs, jax.tree.unflatten(self.out_tree, results))


@dataclass(frozen=True)
class MemoryStats:
    """``memory_analysis`` of all programs: temporaries of the program with the most, and results summed over all programs."""

    temp_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int


@dataclass(frozen=True)
class CutCompiled:
    """The programs of a cut function, called as one."""

    lowered: CutLowered
    runs: Sequence[Any]
    out_info: Any  # descriptions of the results, each with its sharding

    @property
    def output_shardings(self) -> Any:
        """Shardings of the results."""
        return jax.tree.map(lambda described: described.sharding, self.out_info)

    @property
    def programs(self) -> list[jax.stages.Compiled]:
        """The programs, without the work between them."""
        return [run for piece, run in zip(self.lowered.pieces, self.runs, strict=True) if piece.work is None]

    def __call__(self, *arguments: Any) -> Any:
        """Return the results of the function; the donated argument's arrays are consumed."""
        lowered = self.lowered
        values = dict(zip(lowered.jaxpr.jaxpr.invars, jax.tree.leaves(arguments), strict=True))
        for piece, run in zip(lowered.pieces, self.runs, strict=True):
            taken = [values[variable] for variable in piece.takes]
            for place in piece.donates:
                del values[piece.takes[place]]
            given = run(*taken) if piece.work is None else run(taken)
            del taken
            values |= zip(piece.gives, given, strict=True)
        return jax.tree.unflatten(lowered.out_tree, [values[variable] for variable in lowered.jaxpr.jaxpr.outvars])

    def memory_analysis(self) -> MemoryStats:
        """Return bytes per device, without the work between programs."""
        stats = [program.memory_analysis() for program in self.programs]
        return MemoryStats(
            max(one.temp_size_in_bytes for one in stats),
            sum(one.output_size_in_bytes for one in stats),
            sum(one.alias_size_in_bytes for one in stats),
        )


def lower_cut(function: Callable, *arguments: Any, donate_argnum: int, worker: Worker) -> CutLowered:
    """Trace a function of described arguments, and cut it at each ``outside``.

    donate_argnum: the argument whose arrays are donated, as in ``jax.jit``. worker: does the work outside.
    """
    jaxpr, results = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves = [jax.tree.leaves(argument) for argument in arguments]
    counts = np.cumsum([0, *map(len, leaves)])
    given_away = set(jaxpr.jaxpr.invars[counts[donate_argnum] : counts[donate_argnum + 1]])
    kept = set(jaxpr.jaxpr.invars) - given_away
    # Each call of the outside work is a run of its own.
    runs = [list(run) for _, run in groupby(jaxpr.jaxpr.eqns, lambda one: one.primitive is _outside and id(one))]
    if not runs or runs[-1][0].primitive is _outside:
        runs.append([])
    constants = set(jaxpr.jaxpr.constvars)
    made = [{out for equation in run for out in equation.outvars} for run in runs]
    read = [_read_by(run, own | constants) for run, own in zip(runs, made, strict=True)]
    pieces, finals = [], [variable for variable in jaxpr.jaxpr.outvars if not isinstance(variable, Literal)]
    if len(finals) < len(jaxpr.jaxpr.outvars):
        raise ValueError("a function that is cut gives a constant; give arrays that it computes")
    for place, run in enumerate(runs):
        later = set().union(*read[place + 1 :], finals)
        is_outside = bool(run) and run[0].primitive is _outside
        takes = list(run[0].invars) if is_outside else list(read[place])
        gives = [out for equation in run for out in equation.outvars if is_outside or out in later]
        donates = tuple(place for place, value in enumerate(takes) if value not in later and value not in kept)
        if not is_outside:
            donates = _usable(takes, gives, donates)
        pieces.append(_Piece(run, takes, gives, donates))
    return CutLowered(jaxpr, pieces, [leaf for some in leaves for leaf in some], jax.tree.structure(results), worker)


def _read_by(equations: list, others: set) -> dict:
    """Return the variables that equations read, except ``others``, in reading order, so that every run gives the same program."""
    read = [value for equation in equations for value in equation.invars if not isinstance(value, Literal)]
    return {value: None for value in read if value not in others}


def _usable(takes: list, gives: list, donates: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ``donates`` whose memory a result of the same shape and dtype can reuse; JAX warns about others."""
    room = Counter(_kind(variable) for variable in gives)
    usable = []
    for place in donates:
        if room[_kind(takes[place])]:
            room[_kind(takes[place])] -= 1
            usable.append(place)
    return tuple(usable)


def _kind(variable: Any) -> tuple:
    return variable.aval.shape, variable.aval.dtype
