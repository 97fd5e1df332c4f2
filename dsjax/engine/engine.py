"""`EngineParts`: a loaded engine. `attachments_of`: the attachments (engine plugins) that its options ask for."""

import contextlib
from collections.abc import Sequence

from dsjax.engine.contract.executor import CompileRest, Executor, Progress
from dsjax.engine.core import EngineCore
from dsjax.engine.schedule.attachment import Attachment
from dsjax.engine.schedule.draft_choice import DraftChoice
from dsjax.engine.schedule.mesh_changer import MeshChanger
from dsjax.engine.schedule.page_events import EventSink
from dsjax.engine.schedule.page_source import import_page_source
from dsjax.engine.schedule.scheduler_config import SchedulerConfig
from dsjax.engine.setup.args import EngineArgs
from dsjax.engine.text.input_processor import InputProcessor
from dsjax.engine.text.output_processor import OutputProcessor
from dsjax.engine.text.tokenizer import Tokenizer
from dsjax.engine.tiers.event_publisher import EventPublisher, PageEventStream
from dsjax.engine.tiers.offload_tiers import OffloadAttachment
from dsjax.engine.transfer.prefill_links import PrefillLinks
from dsjax.errors import UserError

ENGINE_END = ": "
"""Separates the engine's name from the program's name in progress labels, if prompts have a separate engine."""


class EngineParts:
    """A loaded engine: core, input processor and output processor. `LLMEngine` or `AsyncEngine` drives it.

    Args:
        args: None: the options' defaults.
        eos_token_ids: tokens that end a completion unless it ignores them.
        prefills: links to the prefill engines; None: this engine computes its own prompts.
        event_sink: also receives KV events, in the engine's thread.
        mesh_changer: changes the mesh; None: the mesh is fixed.

    Attributes:
        inputs, outputs: may be used in another thread than the core.
        prefill_links: links to the prefill engines; empty if there are none.
        prefill_engines: the prefill engines of this process, one for each link.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer | None,
        scheduler_config: SchedulerConfig,
        args: EngineArgs | None = None,
        *,
        eos_token_ids: Sequence[int] = (),
        prefills: PrefillLinks | None = None,
        event_sink: EventSink | None = None,
        mesh_changer: MeshChanger | None = None,
    ):
        args = args or EngineArgs()
        self.tokenizer = tokenizer
        with contextlib.ExitStack() as opened:  # closes the publisher if a later line fails
            sinks = [] if event_sink is None else [event_sink]
            events = args.kv_events
            if events is not None and events.publishes:
                publisher = EventPublisher(events, executor.limits.num_ranks)
                opened.callback(publisher.close)
                sinks.append(publisher)
            attachments = attachments_of(scheduler_config, args, sinks)
            if prefills is not None:
                attachments.append(prefills)
            self.core = EngineCore(
                executor,
                scheduler_config,
                async_scheduling=args.async_scheduling,
                attachments=attachments,
                mesh_changer=mesh_changer,
            )
            opened.pop_all()
        self.prefill_links = () if prefills is None else tuple(prefills.links.values())
        self.prefill_engines = [link.engine for link in self.prefill_links]
        self.inputs = InputProcessor(tokenizer, scheduler_config, executor.limits.vocab_size, eos_token_ids, args.seed)
        self.outputs = OutputProcessor(tokenizer, args.stream_interval)

    @property
    def num_ranks(self) -> int:
        """Number of DP ranks of the mesh."""
        return len(self.core.scheduler.ranks)

    def warm_up(self, progress: Progress | None = None, lazily: bool = False) -> CompileRest | None:
        """Compile every shape. With `lazily`, compile those that a server needs first, and return a function that compiles the rest.

        With prefill engines, labels start with the engine's name and `ENGINE_END`.
        """

        def progress_of(kind: str) -> Progress | None:
            if progress is None or not self.prefill_links:
                return progress
            return lambda done, total, label: progress(done, total, f"{kind} engine{ENGINE_END}{label}")

        rest = self.core.executor.warm_up(progress_of("decode"), lazily)
        for link in self.prefill_links:
            link.warm_up(progress_of("prefill"))
        if self.core.mesh_changer is not None:
            self.core.mesh_changer.on_warmed_up()
        return rest


def mesh_changer_of(core: EngineCore) -> MeshChanger:
    """Return the core's mesh changer, or raise a `UserError` that says why its mesh is fixed."""
    if core.mesh_changer is not None:
        return core.mesh_changer
    if core.part(PrefillLinks) is not None:
        raise UserError("the meshes of an engine with --prefill-mesh and --decode-mesh cannot change while it runs")
    raise UserError(
        "the mesh of this engine cannot change while it runs: it has stages in several processes, or it was given its executor"
    )


def attachments_of(
    config: SchedulerConfig, args: EngineArgs | None = None, sinks: Sequence[EventSink] = ()
) -> list[Attachment]:
    """Return the attachments (engine plugins) that the configuration asks for. sinks: receive KV events."""
    args = args or EngineArgs()
    attachments: list[Attachment] = []
    if config.host_pages_per_rank or config.disk_pages:
        attachments.append(OffloadAttachment(config))
    if args.page_source is not None:
        connector = import_page_source(args.page_source).attachment()
        if config.windows_per_rank and not (connector.source and connector.source.keeps_windows):
            raise UserError(
                f"--page-source {args.page_source} keeps pages of one kind, and this model also has window pages, without which the others "
                "are of no use; give a connector with `keeps_windows` (docs/cache-tiers.md), or use --host-cache-bytes"
            )
        attachments.append(connector)
    if sinks:
        attachments.append(PageEventStream(*sinks))
    if config.speculation is not None and config.speculation.measures:
        attachments.append(DraftChoice(config.speculation.num_speculative_tokens))
    if args.eplb is not None:
        from dsjax.engine.experts.expert_balancer import ExpertBalancer  # loads NumPy and SciPy

        attachments.append(ExpertBalancer(args.eplb))
    return attachments
