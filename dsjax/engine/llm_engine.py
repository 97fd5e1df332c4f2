"""`LLMEngine`: drives a loaded engine in the caller's thread, a step at a time."""

import time

from dsjax.engine.contract.sampling_params import SamplingParams
from dsjax.engine.engine import EngineParts, mesh_changer_of
from dsjax.engine.engine_thread import EngineThread
from dsjax.engine.schedule.request import DEFAULT_OPTIONS, RequestOptions
from dsjax.engine.schedule.scheduler import Update
from dsjax.engine.stats import StepStats
from dsjax.engine.text.input_processor import Prompt
from dsjax.engine.text.outputs import RequestOutput


class LLMEngine:
    """The engine without threads: `step` runs in the caller's thread. `LLM.generate` and the tests use it."""

    def __init__(self, parts: EngineParts):
        self.core, self.inputs, self.outputs = parts.core, parts.inputs, parts.outputs
        self.tokenizer = parts.tokenizer
        self._thread = EngineThread(parts.core, on_done=self.on_done, on_change=self.on_change)  # never started
        self._ready: list[RequestOutput] = []

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Queue a request. A `UserError` leaves nothing queued; a `ValueError`: an unfinished request has this id."""
        params = params or SamplingParams()
        prepared = self.inputs.prepare(request_id, prompt, params, options, time.monotonic())
        self.outputs.add(prepared)
        for request in prepared.completions:
            self.core.add(request)

    def abort(self, request_id: str) -> None:
        """End a request; the next `step` returns its last output. No-op if it has ended."""
        updates = [self.core.abort(request.request_id) for request in self.outputs.unfinished(request_id)]
        self.on_done([update for update in updates if update])

    def step(self) -> list[RequestOutput]:
        """Compute one step and return the outputs of the changed requests, according to their `output_kind`.

        If a process was lost, leaves or has returned, the mesh changes before the step.
        """
        mesh_changer = self.core.mesh_changer
        if mesh_changer is not None and mesh_changer.poll_change():
            self._thread.look_at_processes()
        self._thread.turn(wait=False)
        ready, self._ready = self._ready, []
        return ready

    def on_done(self, updates: list[Update], stats: StepStats | None = None) -> None:
        """Turn a step's updates into outputs for `step` to return, and end requests whose text has a stop string."""
        outputs, to_abort = self.outputs.process(updates)
        self._ready += outputs
        for completion_id in to_abort:
            self.core.abort(completion_id)

    def on_change(self) -> None:
        """Check further requests against the new mesh's limits."""
        self.inputs.change(self.core.scheduler.config)

    def has_unfinished(self) -> bool:
        """Whether any request waits, runs, or has an output that `step` has not returned."""
        return self.core.has_unfinished or bool(self._ready)

    def scale(self, mesh: str | None, expert_mesh: str | None = None, afd_address: str | None = None) -> None:
        """Continue on another mesh, or with other expert processes; arguments and errors as in ``LLM.scale``."""
        mesh_changer = mesh_changer_of(self.core)
        wanted = mesh_changer.begin_change(mesh, expert_mesh, afd_address)
        try:
            updates = self.core.change(lambda: mesh_changer.change_to(wanted))
        finally:
            mesh_changer.end_change()
        self.on_change()
        self.on_done(updates)
        if mesh_changer.failure is not None:
            raise mesh_changer.failure

    def flush_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self.core.flush_prefix_cache()

    def shutdown(self) -> None:
        """Release the executor's memory and threads."""
        self.core.shutdown()
