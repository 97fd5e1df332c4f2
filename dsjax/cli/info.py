"""`dsjax info`: describe a model: its directory, its configuration, its parameters by component."""

import importlib.resources
import os
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dsjax.cli.output import JsonFile, report_console, write_json
from dsjax.tables import table_of


def info(
    model: Annotated[
        str, typer.Option(help="Name of a bundled model, Hugging Face repository id, or model path.")
    ] = "demo",
    mesh: Annotated[str, typer.Option(help="Parallelism sizes, as in dsjax serve.")] = "dp=1",
    redundant_experts: Annotated[int, typer.Option(help="Redundant experts per layer.", min=0)] = 0,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the Hugging Face repository.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Describe a model: parameters by part and in total, bytes per device of a mesh, cache bytes per token, configuration."""
    facts = describe(model, mesh, redundant_experts, revision)
    if json_file is None:
        _show(report_console(), facts)
        return
    write_json(json_file, facts)


ATTENTION = {
    "mla": "attention (MLA)",
    "window": "attention (window)",
    "csa": "attention (window, rate 4)",
    "hca": "attention (window, rate 128)",
}
"""Name of the attention part, by `LayerKind.attention`."""


def describe(model: str, mesh: str = "dp=1", redundant: int = 0, revision: str | None = None) -> dict[str, Any]:
    """Return `{"model", "path", "config", "parameters", "layers", "parts", "device"}`.

    `config` has Hugging Face's field names, `parameters` the keys of `parameter_counts`. `layers`: `{"dense", "moe", "mtp"}`. `parts`:
    disjoint components `{name: {"each", "count", "parameters"}}`, which add up to `parameters["main_model"]`. `device`: for one device of
    `mesh`, `{"mesh", "devices", "stages", "weight_bytes": {precision: {component: bytes}}, "cache_bytes_per_token",
    "window_page_bytes"}`, with a bf16 cache per DP rank; `window_page_bytes` is 0 for models without window pages. With several stages,
    weights and cache are each those of the stage with the most.

    Raises:
        ConfigError: the model does not exist, or its configuration is invalid.
        MeshError: the mesh does not divide the model.
    """
    from dsjax.checkpoint.hub import resolve_config
    from dsjax.config import load_config
    from dsjax.config.weights import WEIGHT_FORMATS
    from dsjax.engine.setup.fitting import check_layout
    from dsjax.model.parameter_counts import parameter_counts
    from dsjax.model.stage import stages_of
    from dsjax.plan.engine import find_engine
    from dsjax.plan.layout import InstanceLayout
    from dsjax.plan.memory import cache_bytes_per_token, weight_bytes, window_page_bytes
    from dsjax.plan.precision import PRECISIONS
    from sharding import MeshSpec

    where = resolve_config(model, revision=revision)
    config = load_config(where)
    counts = parameter_counts(config)
    spec = MeshSpec.parse(mesh)
    check_layout(config, spec, redundant, "bf16")
    layout = InstanceLayout(spec, redundant)
    return {
        "model": model,
        "path": str(_path(where)),
        "config": config.to_dict(),
        "parameters": dict(counts),
        "layers": {
            "dense": config.num_dense_layers,
            "moe": config.num_moe_layers,
            "mtp": config.num_nextn_predict_layers,
        },
        "parts": _parts(config, counts),
        "device": {
            "mesh": str(spec),
            "devices": spec.num_devices,
            "stages": spec.pp_size,
            "weight_bytes": {
                name: weight_bytes(config, layout, find_engine("dsjax").precision(PRECISIONS[name]))
                for name, row in WEIGHT_FORMATS.items()
                if row.listed and (row.packed is None or config.is_moe)
            },
            "window_page_bytes": window_page_bytes(config, PRECISIONS["bf16"]),
            "cache_bytes_per_token": max(
                cache_bytes_per_token(stage.config(config), PRECISIONS["bf16"])
                for stage in stages_of(config, spec.pp_size)
            ),
        },
    }


def _parts(config: Any, counts: dict[str, int]) -> dict[str, dict[str, int]]:
    layers, dense, moe = config.num_hidden_layers, config.num_dense_layers, config.num_moe_layers
    kinds = [kind for run in config.layer_runs for kind in run.kinds * run.count]
    attention, hashed = Counter(kind.attention for kind in kinds), sum(kind.mlp == "hash" for kind in kinds)
    rows = [
        ("embedding", counts["embedding"], 1),
        *((f"{ATTENTION[kind]}, a layer", counts[kind], count) for kind, count in attention.items()),
        ("hyper-connections, a layer", counts.get("hyper_connections", 0), layers),
        ("hyper-connections, at the end", counts.get("hyper_connections_end", 0), 1),
        ("dense MLP, a layer", counts.get("dense_mlp", 0), dense),
        ("routed expert", counts["expert"], moe * (config.n_routed_experts if config.is_moe else 0)),
        ("shared experts, a layer", counts["shared_experts"], moe),
        ("router and its bias, a layer", counts["router"] + counts["router_bias"], moe - hashed),
        ("router and its table of tokens, a layer", counts["router"] + counts.get("hash_table", 0), hashed),
        ("norms, a layer", counts["layer_norms"], layers),
        ("final norm", counts["final_norm"], 1),
        ("head", counts["head"], 1),
    ]
    return {name: {"each": each, "count": n, "parameters": each * n} for name, each, n in rows if each * n}


def _path(model: str | Path) -> Path:
    """Return the directory that `load_config` reads."""
    from dsjax.config import bundled_models

    if str(model) in bundled_models():
        return Path(str(importlib.resources.files("configs") / "models" / str(model)))
    path = Path(os.path.expanduser(model)).resolve()
    return path if path.is_dir() else path.parent


def _show(console: Console, facts: dict[str, Any]) -> None:
    layers, counts, device = facts["layers"], facts["parameters"], facts["device"]
    mtp = f", and {layers['mtp']} MTP of {counts['mtp_module']:,} parameters" if layers["mtp"] else ""
    console.print(f"[bold]{facts['model']}[/bold]  {facts['path']}", highlight=False)
    console.print(f"{layers['dense']} dense layers, {layers['moe']} MoE layers{mtp}", highlight=False)
    table = table_of("parameters: parts that do not overlap, and their sum", "part", "each", "×", "parameters")
    for name, part in facts["parts"].items():
        table.add_row(name, f"{part['each']:,}", f"{part['count']:,}", f"{part['parameters']:,}")
    table.add_section()
    table.add_row("all, without MTP", "", "", f"{counts['main_model']:,}")
    table.add_row("of them active for a token", "", "", f"{counts['active']:,}")
    console.print(table)
    weights = device["weight_bytes"]
    title = f"bytes of weights on one device of {device['mesh']} ({device['devices']} in all)"
    table = table_of(title, "component", *weights)
    for name in dict.fromkeys(name for by_component in weights.values() for name in by_component):
        table.add_row(name, *(f"{by_component.get(name, 0):,}" for by_component in weights.values()))
    table.add_section()
    table.add_row("all", *(f"{sum(by_component.values()):,}" for by_component in weights.values()))
    console.print(table)
    whose = "on each of its devices" if device["stages"] == 1 else "on each device of the stage that has most of them"
    console.print(
        f"latent cache: {device['cache_bytes_per_token']:,} bytes a token of a DP rank in bf16, {whose}",
        highlight=False,
    )
    if device["window_page_bytes"]:
        console.print(
            f"and window pages of {device['window_page_bytes']:,} bytes, a few of each request", highlight=False
        )
    table = Table(title="configuration", title_justify="left", show_header=False)
    table.add_column("name")
    table.add_column("value")
    for name, value in facts["config"].items():
        table.add_row(name, str(value))
    console.print(table)
