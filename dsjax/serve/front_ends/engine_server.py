"""`EngineServer`: serves a `SharedEngine` on a private socket that only its front ends can reach."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsjax.engine.engine import EngineParts
from dsjax.errors import UserError
from dsjax.serve.front_ends.messages import Resized, Welcome
from dsjax.serve.front_ends.processes import FrontEnds
from dsjax.serve.server import Server
from dsjax.serve.serving import Serving

if TYPE_CHECKING:
    from dsjax.engine.elastic.generations import Generations


MAX_ADDRESS_BYTES = 103
"""Longest path of a Unix socket in bytes: Linux allows 107, macOS 103."""


def private_listener() -> socket.socket:
    """Bind a Unix socket in a new folder that only this user can enter, inside the first temporary folder that works.

    Raises:
        UserError: no temporary folder is writable with a path short enough for a socket.
    """
    failures: dict[str, str] = {}  # folder → reason; empty: not tried yet
    with contextlib.suppress(FileNotFoundError):  # the error below lists all folders
        failures[tempfile.gettempdir()] = ""
    for parent in (*failures, os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp", "/dev/shm"):
        if not parent or failures.get(parent):
            continue
        folder = None
        try:
            folder = tempfile.mkdtemp(prefix="dsjax-", dir=parent)
            address = str(Path(folder, "engine"))
            if len(os.fsencode(address)) > MAX_ADDRESS_BYTES:
                raise OSError(errno.ENAMETOOLONG, "its path is too long for a socket")
            listener = socket.socket(socket.AF_UNIX)
            try:
                listener.bind(address)
            except OSError:
                listener.close()
                raise
            return listener
        except OSError as error:
            failures[parent] = error.strerror or str(error)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
    reasons = "; ".join(f"{parent}: {reason}" for parent, reason in failures.items())
    raise UserError(
        f"cannot create a socket for the front ends in a temporary folder ({reasons}); set TMPDIR to a writable folder with a short path"
    )


def check_private_listener() -> None:
    """Try `private_listener` before the model is loaded.

    Raises:
        UserError: the same as `private_listener`.
    """
    listener = private_listener()
    shutil.rmtree(Path(listener.getsockname()).parent, ignore_errors=True)
    listener.close()


class EngineServer(Server):
    """The engine process's server on a private socket, for endpoints that need the engine, such as metrics and admin.

    It has the life cycle of a `Server` (warm-up, signals, drain, engine failure) and sends each phase to the front ends.
    """

    _for_clients = False

    def __init__(self, serving: Serving, front_ends: FrontEnds, **options: Any):
        self._front_ends = front_ends
        serving.front_ends = front_ends
        serving.on_phase = front_ends.send_phase
        front_ends.gate = serving.gate
        super().__init__(serving, **options)

    @classmethod
    def create(
        cls,
        serving: Serving,
        parts: EngineParts,
        listeners: Sequence[socket.socket],
        log_json: bool = False,
        **options: Any,
    ) -> EngineServer:
        """Create a server for a `SharedEngine` with one front end per listener. options: arguments of `Server`."""
        create_welcome = _welcome_factory(serving, parts, len(listeners), options.get("log_level", "info"), log_json)
        front_ends = FrontEnds(serving.engine, listeners, create_welcome)
        if serving.metrics is not None:
            serving.metrics.add_front_ends = front_ends.families

        def resize(generations: Generations) -> None:
            front_ends.send_all(Resized(parts.inputs.config, serving.max_model_len, generations.facts.dp_ranks))

        serving.engine.on_change.append(resize)
        return cls(serving, front_ends, **options)

    def serve_privately(self) -> int:
        """Serve on a private socket until shutdown; return the exit code.

        Raises:
            UserError: see `private_listener`.
        """
        listener = private_listener()
        self._address = listener.getsockname()
        try:
            return self.serve_on(listener)
        finally:
            self._front_ends.kill()
            shutil.rmtree(Path(self._address).parent, ignore_errors=True)

    async def _become_ready(self) -> None:
        try:
            await self._front_ends.start(self._address)
        except UserError as error:
            self._warm_up_error = error
            self.should_exit = True
            return
        await super()._become_ready()

    def _exit(self) -> None:
        self._front_ends.kill()
        with contextlib.suppress(OSError):
            os.unlink(self._address)
            os.rmdir(os.path.dirname(self._address))
        super()._exit()


def _welcome_factory(
    serving: Serving, parts: EngineParts, num_front_ends: int, log_level: str, log_json: bool
) -> Callable[[int, str], Welcome]:
    """Return a function that creates the `Welcome` of a front end."""
    inputs, tokenizer = parts.inputs, parts.tokenizer
    options = serving.options
    # The engine process limits the queue, watches for hung steps and profiles, for all front ends. The operating system spreads
    # connections over the front ends, so each gets an equal share of `max_connections`.
    front_end_options = dataclasses.replace(
        options,
        max_queued_requests=0,
        max_queued_tokens=0,
        max_connections=math.ceil(options.max_connections / num_front_ends),
        step_timeout=0.0,
        profile_dir=None,
    )
    num_starts = itertools.count()

    def create(index: int, address: str) -> Welcome:
        return Welcome(
            options=front_end_options,
            scheduler=inputs.config,
            tokenizer=None if tokenizer is None else tokenizer.to_texts(),
            vocab_size=inputs.vocab_size,
            eos_token_ids=list(inputs.eos_token_ids),
            seed=inputs.draw_seed() + next(num_starts),
            stream_interval=parts.outputs.stream_interval,
            model_names=list(serving.model_names),
            model_root=serving.model_root,
            max_model_len=serving.max_model_len,
            num_ranks=parts.num_ranks,
            orders_by_priority=serving.orders_by_priority,
            created=serving.created,
            log_level=log_level,
            log_json=log_json,
            engine_address=address,
        )

    return create
