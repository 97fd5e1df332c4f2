"""A process of routed experts: it loads its part of them and nothing else, and answers calls (``--afd-role expert``)."""

from __future__ import annotations

import logging
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from dsjax.checkpoint.expert_reader import ExpertReader
from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.load import load
from dsjax.checkpoint.source import open_checkpoint
from dsjax.engine.afd.expert_side import ExpertSide
from dsjax.engine.afd.expert_slots import SlotWriter, StackRow
from dsjax.engine.afd.joint_calls import JointCalls, Part
from dsjax.engine.afd.messages import (
    SERVICE,
    VERSION,
    Answered,
    Call,
    Hello,
    Place,
    Stage,
    Welcome,
    receive,
    send,
)
from dsjax.engine.afd.options import expert_share
from dsjax.engine.device.process import enable_compile_cache, keep_freed_memory
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step, weights_format
from dsjax.engine.setup.loading import expert_space
from dsjax.errors import UserError
from dsjax.hosts.secure_channel import BLOCK_BYTES, RefusedError, SecureChannel
from dsjax.hosts.secure_listener import SecureListener
from dsjax.hosts.wire import split_address
from dsjax.model.step import ModelStep
from sharding import MeshSpec
from sharding.arrays import put

_log = logging.getLogger(__name__)
_GONE_SECONDS = 30
_MOST_CELLS = 1 << 24
"""Rows of a call for one device, of which a step has some thousands."""
_MOST_PROCESSES = 4096
"""Processes of an attention side."""
_MOST_SIDES = 256
"""Attention sides whose generation is remembered."""


class ExpertProcess:
    """Routed experts that answer calls until they are closed. Any number of attention sides may call, and one that moves experts alone.

    What the processes of one attention side ask for at a layer is one program's work (``JointCalls``).

    Args:
        step: of the model; of the attention side it has one device without anything. writer: of the slots of an ``ExpertSide`` that is
            loaded. space: what an attention side must have in common with this process. listener: a bound socket.

    Attributes:
        port: at which it listens. num_calls: answered so far. num_rows: that came with them. num_products: programs that were run.
    """

    def __init__(
        self,
        step: ModelStep,
        writer: SlotWriter,
        space: dict[str, Any],
        listener: socket.socket,
        credentials: Any,
    ):
        self._step, self._space, self._writer = step, space, writer
        self._sides: Counter[bytes] = Counter()  # connections of each attention side
        self._mover: bytes | None = None
        self._generations: dict[bytes, int] = {}  # the latest that each attention side has connected with
        self._half = writer.side.half(step)
        self._empty_row = np.asarray(self._half.wire.empty_row(np.int32(0)))
        self._programs: dict[tuple[str, int, int], Compiled] = {}
        self._lock, self._compiling = writer.lock, threading.Lock()
        self._joint: dict[tuple[bytes, int], JointCalls] = {}  # by attention side and its generation
        self.num_calls = self.num_rows = self.num_products = 0
        self._listener = SecureListener(listener, credentials, {SERVICE: self._serve}, "dsjax-experts")
        self.port = self._listener.port

    @property
    def side(self) -> ExpertSide:
        """The devices."""
        return self._writer.side

    @property
    def num_connections(self) -> int:
        """Open connections of attention sides."""
        return self._listener.num_connections

    def close(self) -> None:
        """End all connections, and let nobody in any more."""
        self._listener.close(connections=True)

    def _serve(self, channel: SecureChannel) -> None:
        """Answer one attention side, in a thread of the listener."""
        channel.keep_alive(_GONE_SECONDS, unacknowledged=True)
        hello: Hello = receive(channel, Hello)
        with self._lock:
            try:
                problem = self._problem(hello) or self._enter(hello)
            except Exception as error:  # whatever it is, the attention side must hear of it
                _log.exception("Experts could not be brought to where the attention side has them.")
                problem = f"{type(error).__name__}: {error}"
            if not problem:  # admit under the same lock, so that no other process of this side is checked in between
                key = hello.side, hello.generation
                joint = self._joint.setdefault(key, JointCalls(hello.processes, hello.change))
                joint.enter(hello.process)
        if problem:
            send(channel, Welcome(problem))
            raise RefusedError(problem)
        try:
            send(channel, Welcome())
            self._answer(channel, hello, joint)
        finally:
            with self._lock:
                self._sides -= Counter([hello.side])
                if joint.leave(hello.process) and self._joint.get(key) is joint:
                    del self._joint[key]

    def _answer(self, channel: SecureChannel, hello: Hello, joint: JointCalls) -> None:
        """Answer what comes over a connection. joint: of the attention side that is connected."""
        while True:
            call: Call | Stage | Place = receive(channel, Call, Stage, Place)
            if not isinstance(call, Call):
                self._move(channel, call, hello.side)
                continue
            cells = self._cells(call)
            rows = self._receive_rows(channel, len(cells))
            problem = self._missing(call)
            if problem:
                _log.warning("A call from %s is refused: %s.", channel.peer, problem)
                send(channel, Answered(problem))
                continue
            try:
                if rows is None:
                    raise MemoryError(f"there is no memory for {len(cells):,} rows")
                if call.layer < 0:
                    self._program(call)
                    answers = None
                else:
                    part = Part(call.number, (call.stack, call.layer, call.tokens, call.cells), rows, cells)
                    have_computed = joint.alone if call.again else joint.together
                    answers = have_computed(hello.process, part, partial(self._compute_parts, call))
            except Exception as error:  # whatever it is, the attention side must hear of it
                _log.exception("A call of %s with %d rows failed.", call.stack, len(cells))
                send(channel, Answered(f"{type(error).__name__}: {error}"))
                continue
            if answers is not None:
                with self._lock:
                    self.num_calls, self.num_rows = self.num_calls + 1, self.num_rows + len(rows)
            self._reply(channel, answers)

    def _reply(self, channel: SecureChannel, answers: np.ndarray | None) -> None:
        """Send what came of a call."""
        send(channel, Answered())
        if answers is not None and answers.size:
            channel.send_bytes(memoryview(answers.view(np.uint8)))

    def _problem(self, hello: Hello) -> str:
        if not hello.side:
            return "it gives no name of an attention side"
        if not 0 <= hello.process < hello.processes <= _MOST_PROCESSES:
            return f"it is process {hello.process} of {hello.processes}, expected 1 to {_MOST_PROCESSES}, from 0 on"
        if hello.version != VERSION:
            return f"it speaks version {VERSION} of the messages, and the attention side {hello.version}; start the same dsjax on both"
        differing = sorted(name for name, value in self._space.items() if hello.space.get(name) != value)
        if not differing:
            return self._misplaced(hello)
        told = ", ".join(f"{name} {self._space[name]!r} here and {hello.space.get(name)!r} there" for name in differing)
        return f"both sides must have the same model and options, and differ in {told}"

    def _misplaced(self, hello: Hello) -> str:
        here, there = self.side.first, hello.first
        if here == there:
            return ""
        return (
            f"it has the experts' devices from {here} on, and the attention side expects those from {there} on here; give --afd-address in "
            "the same order on both"
        )

    def _enter(self, hello: Hello) -> str:
        """Let an attention side in, with experts where it has them; why not, where it cannot be."""
        if len(hello.placement) != 4 * self._writer.rows.size:
            return f"its placement of experts has {len(hello.placement) // 4} slots, expected {self._writer.rows.size}"
        latest = self._generations.pop(hello.side, 0)
        self._generations[hello.side] = max(latest, hello.generation)
        if len(self._generations) > _MOST_SIDES:
            del self._generations[next(iter(self._generations))]
        if hello.generation < latest:
            return (
                f"this is generation {hello.generation} of the attention side, which goes on with generation {latest}"
            )
        joint = self._joint.get((hello.side, hello.generation))
        if joint is not None and joint.processes != hello.processes:
            return f"it is one of {hello.processes} processes, and others of this generation are of {joint.processes}"
        # Of two sides, experts are moved on one, and the other knows nothing of it.
        if joint is not None and joint.change != hello.change:
            return (
                "it is already on a side of experts that this attention side is connected to; start the processes of another side beside "
                "it, at other addresses"
            )
        for (side, generation), joint in self._joint.items():
            if side == hello.side and generation < hello.generation:
                joint.end()
        rows = np.frombuffer(hello.placement, "<i4").reshape(self._writer.rows.shape)
        others = bool(set(self._sides) - {hello.side})
        if not others:
            if self._mover != hello.side:  # one that comes back may be in the midst of a move
                self._mover = None
            if (rows != self._writer.rows).any():
                read = self._writer.adopt(rows)
                _log.info("%d experts were read from the checkpoint, as the attention side has them elsewhere.", read)
        elif self._mover is not None or (rows != self._writer.rows).any():
            return "another attention side is connected, which has experts moved (--enable-eplb); it must be alone"
        self._sides[hello.side] += 1
        return ""

    def _move(self, channel: SecureChannel, what: Stage | Place, side: bytes) -> None:
        """Stage or place experts."""
        try:
            if isinstance(what, Stage):
                moves = [tuple(pair) for pair in np.frombuffer(what.moves, "<i4").reshape(-1, 2).tolist()]
                error = self._stage(what.row, moves, side)
            else:
                error = self._place(what.row, np.frombuffer(what.experts, "<i4"), side)
        except Exception as failure:  # whatever it is, the other side must hear of it
            _log.exception("Experts could not be moved.")
            error = f"{type(failure).__name__}: {failure}"
        send(channel, Answered(error))

    def _stage(self, row: int, moves: list[tuple[int, int]], side: bytes) -> str:
        """Stage experts; return why not if that is not possible."""
        if not moves:
            return ""
        with self._lock:
            problem = self._have_move(side)
        if problem:
            return problem
        self._writer.stage(row, moves)
        return ""

    def _place(self, row: int, experts: np.ndarray, side: bytes) -> str:
        """Place experts; why not, where that cannot be. Whoever changes nothing, to have it compiled, need not be alone."""
        with self._lock:
            changes = not np.array_equal(self._writer.rows[row], experts)
            problem = self._have_move(side) if changes else ""
            if not problem:
                self._writer.place(row, experts)
        return problem

    def _have_move(self, side: bytes) -> str:
        """Let this attention side alone be connected from now on; why not, where another one is. Under the lock."""
        if set(self._sides) - {side}:
            return "another attention side is connected, and experts can be moved for one that is alone"
        self._mover = side
        return ""

    def _cells(self, call: Call) -> np.ndarray:
        """Which of all devices' cells are filled.

        Raises:
            ConnectionError: such a call cannot be.
        """
        devices = self._half.size
        if not 0 < call.cells <= _MOST_CELLS:
            raise ConnectionError(f"a call has {call.cells} cells, expected 1 to {_MOST_CELLS}")
        filled = np.frombuffer(call.filled, "<i4") if len(call.filled) % 4 == 0 else np.full(1, -1)
        if filled.size % devices or filled.size * (call.cells // max(1, filled.size // devices)) > devices * call.cells:
            raise ConnectionError(
                f"a call says how full {filled.size} queues are, of {devices} devices with {call.cells} cells"
            )
        filled = filled.reshape(devices, -1)
        room = call.cells // max(1, filled.shape[1])
        if ((filled < 0) | (filled > room)).any():
            raise ConnectionError(f"a call fills a queue of {room} cells with {filled.max()} rows")
        return np.flatnonzero(np.arange(room) < filled[:, :, None])

    def _receive_rows(self, channel: SecureChannel, count: int) -> np.ndarray | None:
        """The rows behind a call; None where there is no memory for them. They are received all the same, so that it can be answered."""
        wire = self._half.wire
        try:
            rows = np.empty((count, wire.row_words), wire.word)
        except MemoryError:
            block = memoryview(bytearray(BLOCK_BYTES))
            for start in range(0, count * wire.row_bytes, BLOCK_BYTES):
                channel.receive_into(block[: count * wire.row_bytes - start])
            return None
        if rows.size:
            channel.receive_into(memoryview(rows.view(np.uint8)))
        return rows

    def _missing(self, call: Call) -> str:
        """Why a call cannot be answered, whose layer is not here; a program would take the nearest one for it. Empty where it can."""
        stacks = {row.stack for row in self._writer.stack_rows}
        if call.stack not in stacks:
            return f"there is no stack of experts {call.stack!r}, only {', '.join(sorted(stacks))}"
        if call.layer >= 0 and StackRow(call.stack, call.layer) not in self._writer.stack_rows:
            return f"{call.stack} has no experts in layer {call.layer}"
        return ""

    def _program(self, call: Call) -> Compiled:
        key = call.stack, call.tokens, call.cells
        if key not in self._programs:
            with self._compiling:  # a lock of its own, so that other sides' steps continue during a warm-up
                if key not in self._programs:
                    self._programs[key] = self.side.compile(self._step, call.stack, call.tokens, 1, call.cells)
        return self._programs[key]

    def _compute_parts(self, call: Call, parts: Sequence[Part]) -> list[np.ndarray]:
        program = self._program(call)
        with self._lock:  # programs in flight together can deadlock on emulated devices
            return self._compute(program, parts, call)

    def _compute(self, program: Compiled, parts: Sequence[Part], call: Call) -> list[np.ndarray]:
        half = self._half
        arrived = np.repeat(self._empty_row, half.size * call.cells, axis=0)
        is_filled = np.zeros(len(arrived), bool)
        for part in parts:
            if is_filled[part.cells].any():
                raise ValueError("two processes of the attention side fill the same cells")
            arrived[part.cells], is_filled[part.cells] = part.rows, True
        everywhere = NamedSharding(self.side.mesh, P())
        [described] = half.described_arrivals(1, call.cells)
        [answer] = program(self.side.params, [put(arrived, described.sharding)], put(np.int32(call.layer), everywhere))
        answers = np.asarray(answer).reshape(len(arrived), half.columns, half.wire.width)
        self.num_products += 1
        return [answers[part.cells] for part in parts]


def load_experts(args: EngineArgs, *, show_progress: bool = False) -> ExpertProcess:
    """Load this process's routed experts of a model, of those that ``args.expert_mesh`` spreads, and listen at its ``args.afd_address``.

    Where devices are to be emulated, ``sharding.emulation.emulate_devices`` must have been called before JAX started.

    Raises:
        UserError, MeshError: options, model and devices that do not go together; an address that cannot be listened at.
    """
    args = replace(args, afd_role="expert", moe_dense_tp_size=None)  # dense MLPs are on the attention side alone
    share = expert_share(args)
    host, port = split_address(share.address)
    credentials = args.credentials.read(host)
    checkpoint = open_checkpoint(resolve(args.model, revision=args.revision))
    mesh = MeshSpec(dp_size=share.devices).build()
    enable_compile_cache()
    if mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    alone = MeshSpec()
    options = {"bf16_experts": checkpoint.bf16_experts, "mtp": args.speculation is not None}
    step = make_step(args, checkpoint.config, alone, alone.arrange(list(mesh.devices.flat)[:1]), **options)
    side = ExpertSide(step.apart, mesh, share.first)
    listener = _listen(host, port)
    try:
        weights = weights_format(args, checkpoint.config, step.dtype, checkpoint.bf16_experts)
        side.params = load(
            checkpoint.config,
            checkpoint,
            mesh,
            side.rules,
            weights=weights,
            placement=step.stored_placement,
            mtp=step.has_module,
            only=side.infos,
            window=side.window,
            progress=show_progress,
        )
        jax.block_until_ready(side.params)
        reader = ExpertReader(
            checkpoint.config, checkpoint, weights, mesh.devices.flat[0].platform, mtp=step.has_module
        )
        writer = SlotWriter(side, step.placement.physical_to_logical, reader.read)
        if args.eplb:
            writer.rehearse()
        space = expert_space(args, step, checkpoint.directory)
        return ExpertProcess(step, writer, space, listener, credentials)
    except BaseException:
        listener.close()
        raise


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(
            f"cannot listen at {host} port {port} ({error.strerror}), where attention is to find these experts; give an address or a name "
            "of this host in --afd-address, and a port that is free"
        ) from error
