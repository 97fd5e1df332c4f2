"""`Screen`: a view drawn on the terminal."""

from typing import Any

from rich import box
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

_LATENCIES = {
    "time_to_first_token": "first token",
    "inter_token": "between tokens",
    "time_per_output_token": "per output token",
    "end_to_end": "end to end",
    "queue": "in the queue",
    "step": "step",
}
_BAR = 10


class Screen:
    """Draws a view in the terminal's width and height. `note` is shown when the server does not answer."""

    def __init__(self, url: str, view: dict[str, Any] | None, note: str = ""):
        self._url, self._view, self._note = url, view, note

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts of the screen."""
        if self._note:
            yield Text(self._note, "bold red")
        if self._view is None:
            if not self._note:
                yield Text(f"reading {self._url} …", "dim")
            return
        view = self._view
        yield _summary(self._url, view)
        yield Columns([_latencies(view["latency"]), _experts(view["experts"])], padding=(0, 3))
        # A file or a pipe has no height.
        extra = [view["drafts"], view["balancing"], *(view["cache"][part] for part in ("tiers", "host", "disk"))]
        extra += [view["expert_processes"] or None, _mesh(view["generation"])]
        room = (options.height or console.height) - 18 - sum(part is not None for part in extra)
        yield _ranks(view["ranks"], max(room, 4) if console.is_terminal else len(view["ranks"]))


def _summary(url: str, view: dict[str, Any]) -> Group:
    requests, tokens, steps, cache = view["requests"], view["tokens_per_second"], view["steps"], view["cache"]
    title = Text.assemble(
        (str(view["model"]), "bold"), f" on {view['mesh']}, {view['num_devices']} devices   ", (url, "dim")
    )
    work = (
        f"{requests['running']} running, {requests['waiting']} waiting   {tokens['generation']:,.0f} tokens/s made, "
        f"{tokens['prompt']:,.0f} prompt tokens/s   {steps['per_second']:.1f} steps/s"
    )
    memory = (
        f"pages {_percent(cache['usage'])} used   prefix hits {_percent(cache['hit_share'])}   "
        f"padding {_percent(steps['padding_share'])}"
    )
    host = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in steps["host_seconds"].items())
    lines = [title, Text(work), Text(memory + (f"   ms a step: {host}" if host else ""))]
    if cache["tiers"] is not None:
        lines.append(Text(_tiers(cache["tiers"])))
    for tier, title in (("host", "host memory"), ("disk", "disk")):
        if cache[tier] is not None:
            lines.append(Text(_offload_tier(title, cache[tier])))
    if view["drafts"] is not None:
        lines.append(Text(_drafts(view["drafts"])))
    if view["balancing"] is not None:
        lines.append(Text(_balancing(view["balancing"])))
    if view["expert_processes"]:
        lines.append(_expert_processes(view["expert_processes"]))
    if (mesh := _mesh(view["generation"])) is not None:
        lines.append(Text(mesh, "bold yellow"))
    troubles = {
        "rejected": requests["rejected"],
        "preempted": requests["preempted"],
        "not finite": requests["not_finite"],
        "compiled after warm-up": steps["compilations_after_warm_up"],
    }
    counts = [f"{name} {count:,.0f}" for name, count in troubles.items() if count]
    return Group(*lines, *([Text("   ".join(counts), "bold yellow")] if counts else []), Text(""))


def _balancing(balancing: dict[str, Any]) -> str:
    balance = ", ".join(f"{value:.2f} ({of})" for of, value in balancing["balancedness"].items()) or "no window yet"
    moved = f"{balancing['experts_moved']:,.0f} moved ({balancing['moved_bytes'] / 1e6:,.1f} MB)"
    left = f", {balancing['layers_left']:,.0f} layers left" if balancing["layers_left"] else ""
    return (
        f"experts balanced {balance}   {balancing['rebalances']:,.0f} rebalances, {moved} in "
        f"{balancing['exchange_seconds'] * 1e3:,.0f} ms{left}"
    )


def _expert_processes(processes: list[dict[str, Any]]) -> Text:
    gone = [str(one["process"]) for one in processes if not one["connected"]]
    sent, received = (sum(one[way] for one in processes) / 1e6 for way in ("sent", "received"))
    losses, gap = sum(one["losses"] for one in processes), max(one["last_gap_seconds"] for one in processes)
    line = (
        f"processes with experts: {len(processes) - len(gone)} of {len(processes)} connected   {sent:,.1f} MB/s there, "
        f"{received:,.1f} MB/s back" + (f"   longest last gap {_seconds(gap)}" if gap else "")
    )
    lost = (f", {losses:,.0f} lost" if losses else "") + (f", GONE: {', '.join(gone)}" if gone else "")
    return Text.assemble(line, (lost, "bold yellow"))


def _mesh(generation: dict[str, Any] | None) -> str | None:
    """Return a line on the mesh; None if it has all wanted devices, is not changing, and no request waits for a larger one."""
    if generation is None:
        return None
    found, wanted, waiting = (generation[name] for name in ("devices", "devices_wanted", "requests_waiting"))
    if found >= wanted and not waiting and not generation["changing"]:
        return None
    changing = ", changing" if generation["changing"] else ""
    waits = f", {waiting:,} requests wait for a larger one" if waiting else ""
    return f"mesh {generation['number']}: {found:,} of {wanted:,} devices{changing}{waits}"


def _offload_tier(title: str, pages: dict[str, Any]) -> str:
    failed = f", {pages['failed']:,.0f} FAILED" if pages.get("failed") else ""
    return f"{title}: pages {_percent(pages['usage'])} used, {pages['stored']:,.0f} stored, {pages['fetched']:,.0f} fetched{failed}"


def _tiers(tiers: dict[str, Any]) -> str:
    hits = ", ".join(f"{tier} {_percent(tier_figures['hit_share'])}" for tier, tier_figures in tiers.items())
    waits = ", ".join(
        f"{tier} {_seconds(tier_figures['wait']['p50'])} (P99 {_seconds(tier_figures['wait']['p99'])})"
        for tier, tier_figures in tiers.items()
        if tier_figures["wait"]["count"]
    )
    return f"prefix hits by tier: {hits}" + (f"   waited for {waits}" if waits else "")


def _drafts(drafts: dict[str, Any]) -> str:
    shares = ", ".join(_percent(share) for share in drafts["per_position"])
    length = "–" if drafts["length"] is None else f"{drafts['length']:.2f}"
    return (
        f"drafts {drafts['per_second']:,.0f}/s, accepted {_percent(drafts['acceptance'])} (by position {shares})   "
        f"{length} tokens a row"
    )


def _latencies(latency: dict[str, dict[str, float | None]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="latency", title_justify="left", pad_edge=False)
    table.add_column("")
    for name in ("mean", "p50", "p90", "p99", "n"):
        table.add_column(name, justify="right")
    for key, label in _LATENCIES.items():
        figures = latency[key]
        quantiles = [_seconds(figures[name]) for name in ("mean", "p50", "p90", "p99")]
        table.add_row(label, *quantiles, f"{figures['count']:,.0f}")
    return table


def _experts(experts: dict[str, Any] | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="hottest experts", title_justify="left", pad_edge=False)
    for name in ("expert", "ep rank", "share", "× mean"):
        table.add_column(name, justify="right")
    for each in experts["hottest"] if experts else ():
        times = f"{each['times_mean']:.2f}" if each["times_mean"] is not None else ""
        table.add_row(str(each["expert"]), str(each["ep_rank"]), _percent(each["share"]), times)
    if experts is None:
        table.caption = "not recorded: POST /start_expert_distribution_record"
    elif experts["balancedness"]:
        table.caption = "balancedness " + ", ".join(f"{v:.2f} ({of})" for of, v in experts["balancedness"].items())
    return table


def _ranks(ranks: list[dict[str, Any]], lines: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="ranks", title_justify="left", pad_edge=False)
    table.add_column("rank", justify="right")
    for name in ("running", "waiting", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("pages held")
    table.add_column("cached", justify="right")
    table.add_column("cost", justify="right")
    for load in ranks[:lines]:
        held = load["used_pages"] / load["usable_pages"] if load["usable_pages"] else 0.0
        filled = round(held * _BAR)
        bar = Text.assemble(("█" * filled, "green"), ("·" * (_BAR - filled), "dim"), f" {held:>4.0%}")
        numbers = [f"{load['running']:,}", f"{load['waiting']:,}", f"{load['tokens_per_second']:,.1f}"]
        table.add_row(str(load["rank"]), *numbers, bar, f"{load['cached_pages']:,}", f"{load['cost']:,.0f}")
    if len(ranks) > lines:
        table.caption = f"… {len(ranks) - lines} more ranks; a taller terminal shows them"
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:,.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
