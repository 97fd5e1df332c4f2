"""The process of the routed experts: loads them and nothing else, and answers the attention side's calls (``--afd-role expert``)."""

from __future__ import annotations

import logging
import socket
import threading
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from dsjax.checkpoint.hub import resolve
from dsjax.checkpoint.load import load
from dsjax.checkpoint.source import open_checkpoint
from dsjax.engine.afd.expert_side import ExpertSide
from dsjax.engine.afd.messages import SERVICE, VERSION, Answered, Call, Hello, Welcome, receive, send
from dsjax.engine.afd.options import expert_spec
from dsjax.engine.device.process import enable_compile_cache, keep_freed_memory
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.setup.assembly import make_step, weights_format
from dsjax.engine.setup.loading import expert_space
from dsjax.hosts.secure_channel import RefusedError, SecureChannel
from dsjax.hosts.secure_listener import SecureListener
from dsjax.hosts.wire import split_address
from dsjax.model.apart import LayerPass
from dsjax.model.step import ModelStep
from sharding import MeshSpec
from sharding.arrays import put

_log = logging.getLogger(__name__)
_GONE_SECONDS = 30


class ExpertProcess:
    """Routed experts that answer calls until they are closed. Any number of attention sides may call.

    Args:
        step: of the model, its experts on an ``ExpertSide`` that is loaded; of the attention side it has one device without anything.
        space: what an attention side must have alike. listener: socket that is bound.

    Attributes:
        port: at which it listens. num_calls: answered so far.
    """

    def __init__(self, step: ModelStep, space: dict[str, Any], listener: socket.socket, credentials: Any):
        self._step, self._space = step, space
        self._programs: dict[tuple[str, int], tuple[LayerPass, Compiled]] = {}
        self._lock = threading.Lock()
        self.num_calls = 0
        self._listener = SecureListener(listener, credentials, {SERVICE: self._serve}, "dsjax-experts")
        self.port = self._listener.port

    @property
    def side(self) -> ExpertSide:
        """The devices."""
        return self._step.apart

    def close(self) -> None:
        """End all connections, and let nobody in any more."""
        self._listener.close(connections=True)

    def _serve(self, channel: SecureChannel) -> None:
        """Answer one attention side, in a thread of the listener."""
        channel.keep_alive(_GONE_SECONDS, unacknowledged=True)
        hello: Hello = receive(channel, Hello)
        if problem := self._problem(hello):
            send(channel, Welcome(problem))
            raise RefusedError(problem)
        send(channel, Welcome())
        while True:
            call: Call = receive(channel, Call)
            between = LayerPass(self._step, call.stack, 0, 0, (1, call.rows, self._step.config.hidden_size)).between()
            rows = np.empty((call.rows, between.wire.row_words), between.wire.word)
            if call.layer >= 0:
                channel.receive_into(memoryview(rows.view(np.uint8)))
            try:
                with self._lock:  # programs in flight together can deadlock on emulated devices
                    through, program = self._program(call)
                    answer = None if call.layer < 0 else self._compute(through, program, rows, call.layer)
            except Exception as error:  # whatever it is, the attention side must hear of it
                _log.exception("A call of %s for %d rows failed.", call.stack, call.rows)
                send(channel, Answered(f"{type(error).__name__}: {error}"))
                continue
            send(channel, Answered())
            if answer is not None:
                channel.send_bytes(memoryview(answer.view(np.uint8)))
                self.num_calls += 1

    def _problem(self, hello: Hello) -> str:
        if hello.version != VERSION:
            return f"it speaks version {VERSION} of the messages, and the attention side {hello.version}; start the same dsjax on both"
        differing = sorted(name for name, value in self._space.items() if hello.space.get(name) != value)
        if not differing:
            return ""
        told = ", ".join(f"{name} {self._space[name]!r} here and {hello.space.get(name)!r} there" for name in differing)
        return f"both sides must have the same model and options, and differ in {told}"

    def _program(self, call: Call) -> tuple[LayerPass, Compiled]:
        key = call.stack, call.rows
        if key not in self._programs:
            through = LayerPass(self._step, call.stack, 0, 0, (1, call.rows, self._step.config.hidden_size))
            self._programs[key] = through, self.side.compile(through)
        return self._programs[key]

    def _compute(self, through: LayerPass, program: Compiled, rows: np.ndarray, layer: int) -> np.ndarray:
        everywhere = NamedSharding(self.side.mesh, P())
        [answer] = program(self.side.params, [put(rows, everywhere)], put(np.int32(layer), everywhere))
        return np.ascontiguousarray(np.asarray(answer))


def load_experts(args: EngineArgs, *, show_progress: bool = False) -> ExpertProcess:
    """Load the routed experts of a model onto the devices that ``args.expert_mesh`` names, and listen at ``args.afd_address``.

    Where devices are to be emulated, ``sharding.emulation.emulate_devices`` must have been called before JAX started.

    Raises:
        UserError, MeshError: options, model and devices that do not go together; an address that cannot be listened at.
    """
    args = replace(args, afd_role="expert")
    host, port = split_address(args.afd_address)
    credentials = args.credentials.read(host)
    spec = expert_spec(args)
    checkpoint = open_checkpoint(resolve(args.model, revision=args.revision))
    mesh = spec.build()
    enable_compile_cache()
    if mesh.devices.flat[0].platform == "cpu":
        keep_freed_memory()
    alone = MeshSpec()
    options = {"bf16_experts": checkpoint.bf16_experts, "mtp": args.speculation is not None, "expert_mesh": mesh}
    step = make_step(args, checkpoint.config, alone, alone.arrange(list(mesh.devices.flat)[:1]), **options)
    side: ExpertSide = step.apart
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
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
            progress=show_progress,
        )
        jax.block_until_ready(side.params)
        return ExpertProcess(step, expert_space(args, step, checkpoint.directory), listener, credentials)
    except BaseException:
        listener.close()
        raise
