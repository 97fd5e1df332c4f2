"""Terminal output while a server starts: the mesh, bytes per device, cache capacity, warm-up, the URL."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dsjax.engine.contract import executor
from dsjax.engine.engine import ENGINE_END
from dsjax.engine.setup.facts import EngineFacts
from dsjax.progress import report_progress

_MOST_ROWS = 4
_MOST_COLUMNS = 16


def show_facts(console: Console, facts: EngineFacts) -> None:
    """Print a picture of the mesh, a table of the bytes per device, and the engine's capacity and settings."""
    title = f"{facts.model} on {facts.mesh}: {facts.num_devices} × {facts.device_kind}"
    console.print(
        Panel(Group(_mesh_picture(facts), _layout_line(facts)), title=title, title_align="left", expand=False)
    )
    console.print(_bytes_table(facts))
    console.print(_capacity(facts), highlight=False)
    if facts.expert_mesh is not None:
        console.print(
            f"routed experts are on devices beside these: {facts.expert_mesh}, {facts.physical_experts_per_device} on each, "
            f"{facts.expert_weight_bytes / 1e9:,.2f} GB of weights",
            highlight=False,
        )
    if facts.prefill_sizes is not None:
        console.print(_prefill_lines(facts), highlight=False)
    if facts.speculation is not None:
        console.print(_speculation_line(facts.speculation), highlight=False)
    if facts.kernels:
        names = ", ".join(f"{operation} {name}" for operation, name in facts.kernels.items())
        console.print(f"kernels: {names}{f' ({facts.kernels_note})' if facts.kernels_note else ''}", highlight=False)
    if facts.activation_scheme == "dynamic":
        console.print("products with FP8 weights: activations are quantised to FP8, 1 × 128", highlight=False)


def _capacity(facts: EngineFacts) -> str:
    """Return the capacity of the KV cache and its tiers in tokens, and the number of maximum-length requests that fit a DP rank."""
    of_a_rank = facts.cache_tokens // facts.dp_ranks
    ranks = f", {of_a_rank:,} on each of {facts.dp_ranks} DP ranks" if facts.dp_ranks > 1 else ""
    longest = facts.max_model_len
    below = f"; host memory below it: {facts.host_cache_tokens:,} tokens" if facts.host_cache_tokens else ""
    below += f"; disk: {facts.disk_cache_tokens:,} tokens" if facts.disk_cache_tokens else ""
    return (
        f"latent cache: {facts.cache_tokens:,} tokens in pages of {facts.page_size}{ranks}{below}\n"
        f"up to {facts.max_num_seqs} running requests a rank, up to {longest:,} tokens a request; "
        f"the cache of a rank holds {min(of_a_rank / longest, facts.max_num_seqs):.1f} of that length at once"
    )


def _prefill_lines(facts: EngineFacts) -> str:
    """Return the meshes of the prefill engines and the limits of their steps."""
    sizes = facts.prefill_sizes
    longest = (
        f"; prompts of {sizes.max_model_len:,} tokens or more are computed where they are decoded"
        if sizes.max_model_len < facts.max_model_len
        else ""
    )
    return (
        f"prompts are computed on devices beside these: {', '.join(facts.prefill_meshes)}\n"
        f"there a rank has up to {sizes.max_num_seqs} prompts under way, and a step up to {sizes.max_num_batched_tokens:,} tokens, "
        f"{sizes.prefill_chunk:,} of one prompt; its cache holds {sizes.cache_tokens // sizes.dp_ranks:,}{longest}"
    )


def _speculation_line(speculation: dict[str, Any]) -> str:
    """Return the number of tokens that the MTP module drafts, by load."""
    ranges = speculation["num_speculative_tokens_per_batch_size"]
    if ranges is None or ranges == "auto":
        count = speculation["num_speculative_tokens"]
        most, chosen = ("up to ", ", by step times and acceptance") if ranges else ("", "")
        return (
            f"speculative decoding: the MTP module drafts {most}{count} token{'s' if count > 1 else ''} a row{chosen}"
        )
    *bounded, (most_rows, _, last_count) = ranges
    parts = [f"{count} with {low} to {high}" for low, high, count in bounded]
    parts.append(f"{last_count} with {most_rows} or more")
    return f"speculative decoding: tokens that the MTP module drafts a row: {', '.join(parts)} running on a rank"


def _mesh_picture(facts: EngineFacts) -> Group:
    """Draw the device numbers: one block of lines per copy of the experts, with the `tp` devices of a DP rank joined by dots."""
    copies, *over_ranks, tp = _shape_of_stage(facts)
    ep = math.prod(over_ranks)
    lines: list[Text] = []
    if facts.stages:
        layers = ", ".join(f"{first} to {last}" for first, last in (stage.layers for stage in facts.stages))
        lines.append(Text(f"{len(facts.stages)} stages with layers {layers}, each on devices like these"))
    for copy in range(copies):
        if copy == _MOST_ROWS:
            lines.append(Text(f"… {copies - _MOST_ROWS} more copies of the experts"))
            break
        groups = ["·".join(f"{(copy * ep + e) * tp + t:>2}" for t in range(tp)) for e in range(ep)]
        columns = max(1, _MOST_COLUMNS // tp)
        rows = [groups[start : start + columns] for start in range(0, ep, columns)]
        lines += [Text("  ".join(f"[{group}]" for group in row)) for row in rows]
        if copies > 1:
            lines.append(Text(""))
    return Group(*lines)


def _shape_of_stage(facts: EngineFacts) -> list[int]:
    """Return the sizes of the mesh's axes without `pp`."""
    return [size for axis, size in facts.mesh_shape.items() if axis != "pp"]


def _layout_line(facts: EngineFacts) -> Text:
    copies, *_, tp = _shape_of_stage(facts)
    parts = [f"{facts.dp_ranks} DP ranks of {tp}", f"{facts.physical_experts_per_device} experts a device"]
    parts += [f"{copies} copies of the experts"] if copies > 1 else []
    parts += [f"{facts.num_processes} processes"] if facts.num_processes > 1 else []
    return Text(", ".join(parts), style="dim")


def _bytes_table(facts: EngineFacts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="bytes of one device", title_justify="left")
    table.add_column("what")
    table.add_column("bytes", justify="right")
    rows = [*facts.weight_bytes.items(), ("latent cache", facts.cache_bytes)]
    total = sum(count for _, count in rows)
    unit, size = ("GB", 1e9) if total >= 1e9 else ("MB", 1e6)
    table.add_column(unit, justify="right")
    for name, count in rows:
        table.add_row(name, f"{count:,}", f"{count / size:.2f}")
    table.add_section()
    table.add_row("total", f"{total:,}", f"{total / size:.2f}")
    return table


@contextlib.contextmanager
def warm_up_bar(console: Console) -> Iterator[executor.Progress]:
    """Show the progress of `LLMEngine.warm_up` for each engine: a bar in a terminal, otherwise a line per 10 %."""
    engine, report = None, None
    with contextlib.ExitStack() as bars:

        def progress(done: int, total: int, label: str) -> None:
            nonlocal engine, report
            name, _, shape = label.rpartition(ENGINE_END)
            if report is None or name != engine:
                bars.close()
                title = f"compiling shapes of {name}" if name else "compiling shapes"
                engine = name
                report = bars.enter_context(report_progress(console, True, title, total))
            report(done, shape)

        yield progress


def show_url(console: Console, url: str, names: tuple[str, ...]) -> None:
    """Print the URL for requests, as the last line of the start."""
    console.print(f"serving {', '.join(names)} at [bold]{url}/v1[/bold]  (Ctrl-C ends)", highlight=False)
