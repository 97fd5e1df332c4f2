"""``LLM``: the model as a Python object, for scripts, notebooks and tests."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import numbers
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from dsjax.engine.contract.commands import Score, int32s
from dsjax.engine.contract.sampling_params import OutputKind, SamplingParams, plain
from dsjax.engine.elastic.joining import host_options, join_group
from dsjax.engine.engine import EngineParts
from dsjax.engine.interrupts import deferred_interrupts
from dsjax.engine.llm_engine import LLMEngine
from dsjax.engine.schedule.page_events import EventSink
from dsjax.engine.schedule.request import RequestOptions
from dsjax.engine.schedule.step_writer import clear_command
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.text.input_processor import Prompt
from dsjax.engine.text.outputs import RequestOutput
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.errors import UserError
from dsjax.progress import report_progress
from sharding.mesh import MeshSpec

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from dsjax.engine.contract.executor import Executor
    from dsjax.engine.setup.facts import EngineFacts
    from dsjax.hosts.group import HostGroup


class LLM:
    """A DeepSeek-V3-family model on a mesh; names and meanings follow vLLM's.

    ::

        llm = LLM(model="demo", mesh="dp=8,tp=2", dtype="float32")
        outputs = llm.generate(["def main("], SamplingParams(temperature=0, max_tokens=32))
        outputs[0].outputs[0].text, outputs[0].outputs[0].token_ids
        llm.logits([[1, 2, 3]])  # next-token logits at every position
        llm.close()  # or: with LLM(model="demo") as llm: ...

    Options are ``EngineArgs``'s (``dsjax serve --help-all`` shows them). On the CPU platform the mesh's devices are
    emulated, if JAX has not started yet. Programs compile when first used; ``warm_up()`` compiles them all.
    ``event_sink`` is told which pages can be found. ``group`` is the result of `join_group` for the same options, if already called.

    A mesh may span several processes: run the same script in each of them, with ``coordinator_address``, ``num_processes`` and
    ``process_id``, which Slurm and similar launchers provide. In all but process 0 the constructor does not return: it follows process 0
    and ends the process (``SystemExit``) when process 0 is done. If processes are lost, leave or return, ``generate`` continues the
    prompts on the mesh of the processes that are present.

    Calls from several threads run one at a time. Ctrl-C ends ``generate`` after the current step, and the next call works; a second
    Ctrl-C does not wait for the step, and may leave the engine unusable.

    Raises:
        UserError, MeshError: an option, the model or the mesh is invalid; raised before weights are read.
    """

    def __init__(
        self,
        model: str = "demo",
        *,
        mesh: str | MeshSpec = "dp=1",
        show_progress: bool = False,
        event_sink: EventSink | None = None,
        group: HostGroup | None = None,
        **options: Any,
    ):
        self.args = EngineArgs.from_options(model=str(model), mesh=str(mesh), **options)
        self._lock, self._is_shut_down = threading.RLock(), False
        group = group or join_group(self.args, host_options(self.args))
        from dsjax.engine.device.process import size_memory_pool  # starts JAX, so only after the devices are arranged

        size_memory_pool(self.args.gpu_memory_utilization)
        if self.args.afd_role == "expert":
            raise UserError(
                "a process with experts alone makes no text; dsjax serve --afd-role expert and dsjax.engine.expert_process.load_experts "
                "have it"
            )

        # A kept exception, as in a notebook, must not keep threads, connections and caches alive.
        with contextlib.ExitStack() as cleanup:
            if group is not None:  # the others wait for this process, which may live on
                cleanup.callback(group.leave, "its engine could not be started")
            if group is not None and not group.is_leader:
                from dsjax.engine.elastic.follower import Follower

                Follower(group).run_with(self.args)
                raise SystemExit(0)
            self._load(group, event_sink, show_progress, cleanup)
            cleanup.pop_all()
        self._ids = itertools.count()

    def _load(
        self, group: HostGroup | None, event_sink: EventSink | None, show_progress: bool, cleanup: contextlib.ExitStack
    ) -> None:
        """Load the model and create the engine. cleanup: closes what was opened if loading fails."""
        from dsjax.engine.elastic.generations import Generations
        from dsjax.engine.program_cache.library import ProgramLibrary
        from dsjax.engine.setup.loading import load_model
        from dsjax.engine.transfer.prefill_links import PrefillLinks

        library, prefills = ProgramLibrary(), None
        create_links = partial(
            PrefillLinks, local_tokens=self.args.local_prefill_tokens, timeout=self.args.transfer_timeout
        )
        if self.args.disaggregation_mode == "prefill":
            raise UserError(
                "an engine that computes prompts for others makes no text; dsjax.engine.disaggregated.load_prefill has it"
            )
        if self.args.separated:
            from dsjax.engine.disaggregated import load_separated

            loaded, link = load_separated(self.args, show_progress=show_progress)
            prefills = create_links([link])
            cleanup.callback(link.close)
        else:
            loaded = load_model(self.args, group, library=library, show_progress=show_progress)
        cleanup.callback(loaded.executor.shutdown)
        if self.args.disaggregation_mode == "decode":
            from dsjax.engine.disaggregated import remote_links

            dialer = remote_links(self.args, loaded, group)
            prefills = create_links([], dialer)
            cleanup.callback(dialer.close)
        if loaded.facts.kernels_note and set(loaded.facts.kernels.values()) == {"plain"}:
            _log.warning("Plain kernels are used: %s.", loaded.facts.kernels_note)
        self.group = group
        self.tokenizer, self.config = loaded.tokenizer, loaded.config
        is_fixed = self.args.separated or (group is not None and MeshSpec.parse(self.args.mesh).pp_size > 1)
        self._generations = None if is_fixed else Generations(self.args, group, loaded, library)
        self.parts = EngineParts(
            loaded.executor,
            self.tokenizer,
            self.args.scheduler_config(loaded.executor.limits),
            self.args,
            eos_token_ids=loaded.eos_token_ids,
            prefills=prefills,
            event_sink=event_sink,
            mesh_changer=self._generations,
        )
        self.engine = LLMEngine(self.parts)
        self._facts = loaded.facts

    @property
    def executor(self) -> Executor:
        """The executor on the current mesh."""
        return self.engine.core.executor

    @property
    def facts(self) -> EngineFacts:
        """What was loaded, on the current mesh."""
        return self._facts if self._generations is None else self._generations.facts

    def scale(
        self, mesh: str | MeshSpec | None = None, *, expert_mesh: str | None = None, afd_address: str | None = None
    ) -> None:
        """Continue on another mesh, larger or smaller, with all requests. None: keep that part.

        expert_mesh: the experts' devices in this process, if they are separate; ``mesh`` is then the attention side's.
        expert_mesh, afd_address: without ``mesh``, switch to other expert processes and keep the caches.

        Raises:
            UserError, MeshError: the change is not possible; nothing has changed.
        """
        with self._exclusive():
            self.engine.scale(None if mesh is None else str(mesh), expert_mesh, afd_address)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        session: str | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Generate a completion of each prompt, in the order of the prompts.

        prompts: texts, lists of token ids, or dicts with ``prompt_token_ids``; one or several. sampling_params: for all, or one for each.
        priority: one for each prompt, lower first, with ``scheduling_policy="priority"``. cache_salt: cache pages are
        shared only with prompts of the same salt. session: prompts of one session run on one DP rank. use_tqdm: show on standard error how
        many prompts are done.

        Raises:
            UserError: a prompt or parameter is invalid (nothing is run then), or the engine was shut down.
        """
        expected = "text, {'prompt_token_ids': [...]}, or a list of prompts"
        prompts = [prompts] if isinstance(prompts, str | Mapping) else _as_list("prompts", prompts, expected)
        if prompts and isinstance(prompts[0], numbers.Integral):
            prompts = [prompts]
        params = _params_for(prompts, sampling_params)
        expected = "a list with an integer for each prompt"
        priorities = [0] * len(prompts) if priority is None else _as_list("priority", priority, expected)
        if len(priorities) != len(prompts):
            raise UserError(f"found {len(priorities)} priorities for {len(prompts)} prompts; give one for each")
        ids = [f"generate-{next(self._ids)}" for _ in prompts]
        options = [RequestOptions(plain(value), cache_salt, session) for value in priorities]
        outputs: dict[str, RequestOutput] = {}
        progress = report_progress(Console(stderr=True), use_tqdm, "prompts", len(prompts))
        with self._exclusive(), progress as report, deferred_interrupts() as raise_interrupt:
            try:
                for request in zip(ids, prompts, params, options, strict=True):
                    self.engine.add_request(*request)
                    raise_interrupt()
                while self.engine.has_unfinished():
                    outputs |= {output.request_id: output for output in self.engine.step() if output.finished}
                    report(len(outputs), "")
                    raise_interrupt()
            except BaseException:
                for request_id in ids:
                    self.engine.abort(request_id)
                while self.engine.has_unfinished():
                    self.engine.step()  # discards the last outputs of the aborted requests, and waits for steps in flight
                raise
        return [outputs[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[dict] | Sequence[Sequence[dict]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, prepared as in ``/v1/chat/completions``.

        messages: as in OpenAI's API: dicts with ``role`` and ``content``, ``tool_calls``, ``tool_call_id``. add_generation_prompt: whether
        the model begins an answer; default: unless continue_final_message, which continues the last message. tools: that the model may
        call, in OpenAI's format; calls appear in the text as the model writes them. chat_template_kwargs: variables for the template
        (``thinking``). use_tqdm: as in `generate`.

        Raises:
            UserError: the model has no chat template, or messages or tools are invalid.
        """
        from dsjax.serve.chat_prompt import conversation_prompt

        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise UserError(f"model {self.args.model!r} has no chat template; use generate()")
        fields = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "chat_template_kwargs": chat_template_kwargs,
        }
        conversations = _conversations(messages)
        prompts = [
            conversation_prompt(self.tokenizer, messages=conversation, **fields) for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_tokenizer(self) -> Tokenizer | None:
        """Return the model's tokenizer; None if it has none."""
        return self.tokenizer

    def logits(self, token_ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Return float32 logits ``[tokens, vocab]`` for each sequence: next-token logits at every position, through the paged cache.

        Raises:
            UserError: a sequence is empty or too long, a token id is no integer or outside the vocabulary, or requests are running.
        """
        with self._exclusive(), deferred_interrupts() as raise_interrupt:
            if self.engine.has_unfinished():
                raise UserError("logits() was called while requests are running; finish or abort them first")
            sequences = _as_list("token_ids", token_ids, "a list of lists of token ids")
            sequences = [self._check_sequence(sequence) for sequence in sequences]
            pool = self.engine.core.scheduler.ranks[0].pool
            logits = []
            for sequence in sequences:
                pages = pool.allocate(pool.pages_for(len(sequence)), store=False)
                pages += pool.allocate(self.executor.limits.window_columns, windows=True, store=False)
                try:
                    score = self.executor.launch(Score(int32s(sequence), int32s(pages)))
                    logits.append(self.executor.collect(score))
                    if not np.isfinite(logits[-1]).all():
                        others = [[]] * (self.executor.limits.num_ranks - 1)
                        self.executor.launch(clear_command([pages, *others]))
                finally:
                    pool.release(pages)
                raise_interrupt()
        return logits

    def warm_up(self, progress=None) -> None:
        """Compile every program now, so that no request waits for it."""
        with self._exclusive():
            self.parts.warm_up(progress)

    def shutdown(self) -> None:
        """Free the devices' memory after calls of other threads have ended. The engine cannot be used afterwards."""
        with self._lock:
            self.engine.shutdown()
            self._is_shut_down = True

    close = shutdown

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock the engine for this thread. Raise `UserError` if it was shut down."""
        with self._lock:
            if self._is_shut_down:
                raise UserError("this LLM was shut down; create another one")
            yield

    def _check_sequence(self, sequence: Sequence[int]) -> list[int]:
        try:
            sequence = [operator.index(token) for token in sequence]
        except TypeError:
            raise UserError(
                f"found the sequence {sequence!r}, expected a list of token ids, which are integers"
            ) from None
        most = min(self.executor.limits.max_model_len, self.engine.core.scheduler.config.max_tokens_in_cache)
        if not 1 <= len(sequence) <= most:
            raise UserError(f"found a sequence of {len(sequence)} tokens, expected 1 to {most}")
        outside = [token for token in sequence if not 0 <= token < self.config.vocab_size]
        if outside:
            raise UserError(f"token ids {outside[:5]} are outside the vocabulary, 0 to {self.config.vocab_size - 1}")
        return sequence


def _as_list(name: str, values: object, expected: str) -> list:
    """Convert a sequence to a list, or raise. Bytes would become integers, and sets have no order."""
    if not isinstance(values, str | bytes | bytearray | Mapping | Set):
        with contextlib.suppress(TypeError):
            return list(values)
    raise UserError(f"{name} is {values!r}, expected {expected}")


def _params_for(prompts: list[Prompt], sampling_params: object) -> list[SamplingParams]:
    """Give each prompt its parameters. Only finished outputs are returned, so the intermediate ones need not be made."""
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params or SamplingParams()] * len(prompts)
    all_params = _as_list("sampling_params", sampling_params, "SamplingParams, or a list with one for each prompt")
    if len(all_params) != len(prompts):
        raise UserError(
            f"found {len(all_params)} sampling parameters for {len(prompts)} prompts; give one, or one for each"
        )
    for params in all_params:
        if not isinstance(params, SamplingParams):
            raise UserError(f"sampling_params has {params!r}, expected SamplingParams")
    return [dataclasses.replace(params, output_kind=OutputKind.FINAL_ONLY) for params in all_params]


def _conversations(messages: object) -> list[list]:
    """Return a list of conversations from one or several."""
    expected = "a list of messages such as {'role': 'user', 'content': 'Hello'}"
    items = _as_list("messages", messages, f"{expected}, or a list of such lists")
    conversations = [items] if not items or isinstance(items[0], Mapping) else items
    return [_as_list("a conversation", conversation, expected) for conversation in conversations]
