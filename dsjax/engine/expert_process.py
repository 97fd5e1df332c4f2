"""``ExpertProcess``: a process that loads only its share of the routed experts and answers expert calls (``--afd-role expert``)."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import msgspec
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from dsjax.addresses import split_address
from dsjax.background import start_thread
from dsjax.checkpoint.expert_reader import ExpertReader
from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.load import load
from dsjax.checkpoint.source import open_checkpoint
from dsjax.engine.afd.expert_side import ExpertSide
from dsjax.engine.afd.expert_slots import SlotWriter, StackLayer
from dsjax.engine.afd.joint_calls import JointCalls, Part
from dsjax.engine.afd.messages import COMPILE, OPEN, PLACE, STAGE, Answered, Call, Compile, Open, Opened, Place, Stage
from dsjax.engine.afd.options import expert_share
from dsjax.engine.device.process import enable_compile_cache, keep_freed_memory
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step, weights_format
from dsjax.engine.setup.spaces import expert_space
from dsjax.errors import UserError
from dsjax.messaging import Endpoint, LinkListener, Peer, PeerLostError, Request
from dsjax.messaging.link import LinkLostError, Message
from dsjax.messaging.wire import decode_value
from dsjax.model.step import ModelStep
from sharding import MeshSpec
from sharding.arrays import put

_log = logging.getLogger(__name__)
_calls = msgspec.msgpack.Decoder(Call)
_MOST_CELLS = 1 << 24
"""Maximum rows per device in a call. A real step has a few thousand."""
_MOST_PROCESSES = 4096
"""Maximum number of processes of an attention side."""
_MOST_SIDES = 256
"""Maximum number of attention sides whose mesh epoch is remembered."""


class Member(NamedTuple):
    """A connected attention process: its control connection, and the calls of its side."""

    peer: Peer
    side: bytes
    generation: int
    calls: JointCalls


class ExpertProcess:
    """Serves routed experts to any number of attention sides. A side that moves experts must be the only one.

    One thread receives, computes and answers calls, one admits attention processes and moves experts, and one compiles.

    step: the model's step; its attention mesh is one placeholder device without parameters. writer: writes the slots of a loaded
    ``ExpertSide``. space: compatibility fingerprint that an attention side must match. endpoint: closed with this object.

    num_calls: calls answered so far. num_rows: rows in these calls. num_products: programs run.
    """

    def __init__(self, step: ModelStep, writer: SlotWriter, space: dict[str, Any], endpoint: Endpoint):
        self._step, self._space, self._writer = step, space, writer
        self._mover: bytes | None = None
        self._generations: dict[bytes, int] = {}  # latest mesh epoch of each attention side
        self._exchange = writer.side.half(step)
        self._empty_row = np.asarray(self._exchange.wire.empty_row(np.int32(0)))
        self._lock = threading.Lock()  # guards members, their calls and programs; not held while computing or waiting
        self._members: dict[str, Member] = {}  # by link name
        self._programs: dict[tuple[str, int, int], Future[Compiled]] = {}
        self._compiled: queue.SimpleQueue[tuple[list[Part], Future[Compiled]]] = queue.SimpleQueue()
        self._moves, self._compiler = (
            ThreadPoolExecutor(1, thread_name_prefix=f"dsjax-experts-{name}") for name in ("moves", "compile")
        )
        self.num_calls = self.num_rows = self.num_products = 0
        self.endpoint, self._listener = endpoint, LinkListener(endpoint)
        hang_up = lambda error: self._disconnect(*self._members)  # noqa: E731
        start_thread("expert calls", self._run, name="dsjax-experts", restarts=True, on_failure=hang_up)
        endpoint.serve(COMPILE, self._compile_for, roles=("attention",), kind=Compile)
        for service, kind, handle in (
            (STAGE, Stage, self._stage),
            (PLACE, Place, self._place),
            (OPEN, Open, self._open),
        ):
            endpoint.serve(service, partial(self._moves.submit, _answer, handle), roles=("attention",), kind=kind)

    @property
    def side(self) -> ExpertSide:
        """The expert devices and their parameters."""
        return self._writer.side

    @property
    def num_connections(self) -> int:
        """Number of connected attention processes."""
        return len(self._members)

    def close(self) -> None:
        """Close all connections and admit no new ones."""
        self.endpoint.close()
        for pool in (self._moves, self._compiler):
            pool.shutdown(wait=False, cancel_futures=True)

    # Members and moves, in a separate thread. These methods raise `UserError` to refuse a request.

    def _open(self, request: Request) -> Opened:
        """Admit an attention process, after placing the experts according to its placement."""
        opening: Open = request.body
        self._check(opening)
        with self._lock:
            members = list(self._members.values())
        calls = self._joint_calls(opening, members)
        self._adopt_placement(opening, alone=all(member.side == opening.side for member in members))
        name = secrets.token_hex(16)
        with self._lock:
            self._members[name] = Member(request.peer, opening.side, opening.generation, calls)
            calls.enter(name, opening.process)
        request.peer.on_lost(partial(self._leave, name))
        return Opened(self._listener.address, self._listener.ticket, name)

    def _leave(self, name: str) -> None:
        with self._lock:
            self._members.pop(name).calls.leave(name)
        self._listener.wake()

    def _check(self, opening: Open) -> None:
        """Check the fields that both sides must agree on."""
        if not opening.side:
            raise UserError("it gives no name of an attention side")
        if not 0 <= opening.process < opening.processes <= _MOST_PROCESSES:
            raise UserError(
                f"it is process {opening.process} of {opening.processes}, expected 1 to {_MOST_PROCESSES}, from 0 on"
            )
        space = opening.space
        differing = sorted(name for name, value in self._space.items() if space.get(name) != value)
        if differing:
            values = ", ".join(f"{name} {self._space[name]!r} here and {space.get(name)!r} there" for name in differing)
            raise UserError(f"both sides must have the same model and options, and differ in {values}")
        if opening.first != self.side.first:
            raise UserError(
                f"it has the experts' devices from {self.side.first} on, and the attention side expects those from {opening.first} on "
                "here; give --afd-address in the same order on both"
            )
        if len(opening.placement) != 4 * self._writer.placement.size:
            raise UserError(
                f"its placement of experts has {len(opening.placement) // 4} slots, expected {self._writer.placement.size}"
            )

    def _joint_calls(self, opening: Open, members: Sequence[Member]) -> JointCalls:
        """Return the call batcher of a side in its mesh epoch. Calls of earlier epochs stop waiting."""
        side, generation = opening.side, opening.generation
        latest = self._generations.pop(side, 0)
        self._generations[side] = max(latest, generation)
        if len(self._generations) > _MOST_SIDES:
            del self._generations[next(iter(self._generations))]
        if generation < latest:
            raise UserError(
                f"this is generation {generation} of the attention side, which goes on with generation {latest}"
            )
        existing = (member.calls for member in members if (member.side, member.generation) == (side, generation))
        calls = next(existing, None) or JointCalls(opening.processes, opening.change)
        if calls.processes != opening.processes:
            raise UserError(
                f"it is one of {opening.processes} processes, and others of this generation are of {calls.processes}"
            )
        if calls.change != opening.change:  # experts may be moved on one expert side without the other knowing
            raise UserError(
                "it is already on a side of experts that this attention side is connected to; start the processes of another side beside "
                "it, at other addresses"
            )
        with self._lock:
            for member in members:
                if member.side == side and member.generation < generation:
                    member.calls.end()
        self._listener.wake()
        return calls

    def _adopt_placement(self, opening: Open, *, alone: bool) -> None:
        """Place experts according to an attention side's placement. alone: whether no other attention side is connected."""
        rows = np.frombuffer(opening.placement, "<i4").reshape(self._writer.placement.shape)
        differs = (rows != self._writer.placement).any()
        if not alone and (self._mover is not None or differs):
            raise UserError(
                "another attention side is connected, which has experts moved (--enable-eplb); it must be alone"
            )
        if alone and self._mover != opening.side:  # a reconnecting side may be in the middle of a move
            self._mover = None
        if differs:
            with self._writer.lock:
                read = self._writer.place_all(rows)
            _log.info("%d experts were read from the checkpoint, as the attention side has them elsewhere.", read)

    def _stage(self, request: Request) -> None:
        stage: Stage = request.body
        moves = [tuple(pair) for pair in np.frombuffer(stage.moves, "<i4").reshape(-1, 2).tolist()]
        if moves:
            self._reserve_for(request.peer)
            self._writer.stage(stage.row, moves)

    def _place(self, request: Request) -> None:
        """Place experts. A side that changes nothing, and only wants to compile, need not be alone."""
        row, experts = request.body.row, np.frombuffer(request.body.experts, "<i4")
        if not np.array_equal(self._writer.placement[row], experts):
            self._reserve_for(request.peer)
        with self._writer.lock:
            self._writer.place(row, experts)

    def _reserve_for(self, peer: Peer) -> None:
        """Reserve this process for one attention side from now on; raise `UserError` if another is connected."""
        with self._lock:
            members = list(self._members.values())
        sides, own_sides = (
            {member.side for member in members},
            {member.side for member in members if member.peer is peer},
        )
        if len(own_sides) != 1 or sides != own_sides:
            raise UserError("another attention side is connected, and experts can be moved for one that is alone")
        [self._mover] = own_sides

    # Compiling.

    def _compile_for(self, request: Request) -> None:
        body: Compile = request.body
        self._check_layer(body.stack, 0)

        def answer(program: Future[Compiled]) -> None:
            if not program.cancelled():
                error = program.exception()
                request.reply() if error is None else request.fail(error)

        self._program(body.stack, body.tokens, body.cells).add_done_callback(answer)

    def _program(self, stack: str, tokens: int, cells: int) -> Future[Compiled]:
        """Return a program, which may still be compiling. A failed compilation is retried."""
        key = stack, tokens, cells
        with self._lock:
            program = self._programs.get(key)
            if program is None or (program.done() and program.exception() is not None):
                program = self._compiler.submit(self.side.compile, self._step, stack, tokens, 1, cells)
                self._programs[key] = program
        return program

    # Calls, in the thread that receives and computes.

    def _run(self) -> None:
        while True:
            try:
                message = self._listener.receive()
            except LinkLostError as error:
                self._disconnect(error.name)
                continue
            except PeerLostError:
                return  # closed
            if message is not None:
                self._receive_call(message)
            with self._lock:
                all_calls = {member.calls for member in self._members.values()}
                ready = [parts for calls in all_calls for parts in calls.take()]
            for parts in ready:
                call = parts[0].call
                program = self._program(call.stack, call.tokens, call.cells)
                if program.done():
                    self._compute(parts, program)
                else:  # other calls need not wait for it
                    program.add_done_callback(partial(self._resume, parts))
            while not self._compiled.empty():
                self._compute(*self._compiled.get())

    def _resume(self, parts: list[Part], program: Future[Compiled]) -> None:
        self._compiled.put((parts, program))
        self._listener.wake()

    def _disconnect(self, *names: str) -> None:
        """Close connections, so that the attention processes reconnect and repeat their calls."""
        with self._lock:
            peers = [member.peer for name, member in self._members.items() if name in names]
        for peer in peers:
            peer.close()

    def _receive_call(self, message: Message) -> None:
        """Queue a call, or answer with the reason for refusing it."""
        try:
            call: Call = decode_value(_calls, message.header)
            self._check_layer(call.stack, call.layer)
            cells, wire = self._cells(call), self._exchange.wire
            rows = np.empty((len(cells), wire.row_words), wire.word)
            message.read_into(rows)
        except Exception as error:  # report any error to the attention side
            _log.warning("A call from an attention process is refused: %s", error)
            self._reply(message.sender, Answered(_error_text(error)))
            return
        with self._lock:
            if message.sender in self._members:
                self._members[message.sender].calls.add(Part(message.sender, call, rows, cells))

    def _compute(self, parts: Sequence[Part], program: Future[Compiled]) -> None:
        """Compute a call and answer all its parts."""
        try:
            with self._writer.lock:  # concurrent programs can deadlock on emulated devices
                answers = self._run_program(program.result(), parts)
        except Exception as error:  # report any error to the attention side
            _log.exception("A call of %s with %d rows failed.", parts[0].call.stack, sum(len(p.rows) for p in parts))
            for part in parts:
                self._reply(part.name, Answered(_error_text(error)))
            return
        for part, own in zip(parts, answers, strict=True):
            self.num_calls, self.num_rows = self.num_calls + 1, self.num_rows + len(own)
            self._reply(part.name, Answered(), own)

    def _reply(self, name: str, answered: Answered, *answers: np.ndarray) -> None:
        with contextlib.suppress(PeerLostError):  # the attention process repeats the call
            self._listener.send(name, msgspec.msgpack.encode(answered), *answers)

    def _run_program(self, program: Compiled, parts: Sequence[Part]) -> list[np.ndarray]:
        exchange, call = self._exchange, parts[0].call
        arrived = np.repeat(self._empty_row, exchange.size * call.cells, axis=0)
        is_filled = np.zeros(len(arrived), bool)
        for part in parts:
            if is_filled[part.cells].any():
                raise ValueError("two processes of the attention side fill the same cells")
            arrived[part.cells], is_filled[part.cells] = part.rows, True
        everywhere = NamedSharding(self.side.mesh, P())
        [described] = exchange.described_arrivals(1, call.cells)
        [answer] = program(self.side.params, [put(arrived, described.sharding)], put(np.int32(call.layer), everywhere))
        answers = np.asarray(answer).reshape(len(arrived), exchange.columns, exchange.wire.width)
        self.num_products += 1
        return [answers[part.cells] for part in parts]

    def _check_layer(self, stack: str, layer: int) -> None:
        """Raise `UserError` for a layer that this process does not have. A program would clamp its index to the nearest layer."""
        stacks = {one.stack for one in self._writer.stack_layers}
        if stack not in stacks:
            raise UserError(f"there is no stack of experts {stack!r}, only {', '.join(sorted(stacks))}")
        if StackLayer(stack, layer) not in self._writer.stack_layers:
            raise UserError(f"{stack} has no experts in layer {layer}")

    def _cells(self, call: Call) -> np.ndarray:
        """Return the indices of the filled cells among all devices' cells. Raise `ValueError` for an invalid call."""
        if not 0 < call.cells <= _MOST_CELLS:
            raise ValueError(f"a call has {call.cells} cells, expected 1 to {_MOST_CELLS}")
        filled = np.frombuffer(call.filled, "<i4").reshape(self._exchange.size, -1)
        room = call.cells // max(1, filled.shape[1])
        if ((filled < 0) | (filled > room)).any():
            raise ValueError(f"a call fills a queue of {room} cells with {filled.max()} rows")
        return np.flatnonzero(np.arange(room) < filled[:, :, None])


def load_experts(args: EngineArgs, *, show_progress: bool = False) -> ExpertProcess:
    """Load this process's share of the routed experts, and listen at its ``args.afd_address``. Call `emulate_devices` first.

    Raises:
        UserError, MeshError: incompatible options, model and devices, or an address that this process cannot listen at.
    """
    args = replace(args, afd_role="expert", moe_dense_tp_size=None)  # dense MLPs are only on the attention side
    share = expert_share(args)
    host, port = split_address(share.address)
    credentials = args.credentials(host)
    with _listening_at(host, port):  # fail before loading anything
        _check_port_free(host, port)
    checkpoint = open_checkpoint(resolve(args.model, revision=args.revision))
    mesh = MeshSpec(dp_size=share.devices).build()
    enable_compile_cache()
    if mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    alone = MeshSpec()
    options = {"bf16_experts": checkpoint.bf16_experts, "mtp": args.speculation is not None}
    step = make_step(args, checkpoint.config, alone, alone.arrange(list(mesh.devices.flat)[:1]), **options)
    side = ExpertSide(step.apart, mesh, share.first)
    weights = weights_format(args, checkpoint.config, step.dtype, checkpoint.bf16_experts)
    side.params = load(
        checkpoint.config,
        checkpoint,
        mesh,
        side.rules,
        weights=weights,
        placement=step.with_shared_slots(step.placement),
        mtp=step.has_mtp,
        only=side.infos,
        window=side.window,
        progress=show_progress,
    )
    jax.block_until_ready(side.params)
    reader = ExpertReader(checkpoint.config, checkpoint, weights, mesh.devices.flat[0].platform, mtp=step.has_mtp)
    writer = SlotWriter(side, step.config.layer_runs, step.placement.physical_to_logical, reader.read)
    if args.eplb:
        writer.rehearse()
    space = expert_space(args, step, checkpoint.directory)
    with _listening_at(host, port):  # early `OPEN` requests are held until the process is ready
        endpoint = Endpoint(host, credentials, port=port, silence=args.heartbeat_timeout, holds=(OPEN,))
    return ExpertProcess(step, writer, space, endpoint)


def _answer(handle: Callable[[Request], Any], request: Request) -> None:
    """Execute a request and answer it."""
    try:
        request.reply(handle(request))
    except UserError as error:
        request.refuse(str(error))
    except Exception as error:  # report any error to the attention side
        _log.exception("What an attention process has asked for could not be done.")
        request.fail(error)


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _listening_at(host: str, port: int) -> Iterator[None]:
    """Turn an `OSError` from listening at this address into a `UserError` that says how to fix it."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot listen at {host} port {port} ({error.strerror}), where attention is to find these experts; give an address or a name "
            "of this host in --afd-address, and a port that is free"
        ) from error


def _check_port_free(host: str, port: int) -> None:
    """Check that a port is free, without accepting connections."""
    [(family, kind, _, _, where), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(where)
