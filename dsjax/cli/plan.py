"""`dsjax plan`: a cluster, a workload and objectives in, a layout out, with figures that can be checked."""

import dataclasses
import math
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from dsjax.cli.output import report_console, write_json, writing
from dsjax.errors import UserError

_MODES = {"both": ("aggregated", "separated"), "aggregated": ("aggregated",), "separated": ("separated",)}


def plan(
    model: Annotated[str, typer.Option(help="Bundled name, or a directory with config.json.")] = "deepseek-v3",
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Bundled name (configs/clusters), a TOML file, or this-machine with --measured. "
            "Default: the device of --measured, else h100-32."
        ),
    ] = None,
    hosts: Annotated[int | None, typer.Option(help="Another number of hosts than the cluster's.", min=1)] = None,
    input_tokens: Annotated[
        str | None, typer.Option("--input", help="Prompt tokens: mean, or mean:variation.", show_default="2000")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option("--output", help="Output tokens: mean, or mean:variation.", show_default="500")
    ] = None,
    classes: Annotated[
        list[str] | None,
        typer.Option(
            "--class",
            help="NAME=SHARE,INPUT,OUTPUT instead of --input and --output: a mixture of lengths; repeatable: "
            "short=0.8,512:0.2,256.",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="Percentile that must hold, in ms: ttft-p95=370, tpot-p99=60, e2e-p50=9000, or of a class: short:ttft-p95=370; "
            "p50, p90, p95 or p99; repeatable. The best deployments are played (--num-prompts, --seed)."
        ),
    ] = None,
    concurrency: Annotated[float | None, typer.Option(help="Requests in flight; default: as many as pays.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests a second that must be kept up with.")] = None,
    prefix_hit: Annotated[float, typer.Option(help="Share of prompt tokens found in the cache.")] = 0.0,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective: mean time to first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Objective: mean time per output token.")] = None,
    throughput: Annotated[float | None, typer.Option(help="Objective: output tokens a second, all together.")] = None,
    measured: Annotated[
        Path | None, typer.Option(help="JSON of dsjax bench modules: its times in place of published tables.")
    ] = None,
    network: Annotated[
        Path | None,
        typer.Option(help="JSON of dsjax bench network: its times of collectives in place of assumptions about links."),
    ] = None,
    precision: Annotated[
        str,
        typer.Option(
            help="fp8, bf16, int8, nvfp4 or nvfp4-bf16 (bf16 attention); auto: fp8, or what --measured was taken with."
        ),
    ] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="Latent cache: auto, bf16 or fp8.")] = "auto",
    mtp: Annotated[int, typer.Option(help="Tokens drafted by the MTP module a step.")] = 0,
    mtp_acceptance: Annotated[float, typer.Option(help="Chance that a draft is accepted.")] = 0.85,
    redundant_experts: Annotated[int | None, typer.Option(help="Physical minus logical; default: tried.")] = None,
    enable_shared_experts_fusion: Annotated[
        bool,
        typer.Option(
            "--enable-shared-experts-fusion",
            help="The shared expert is one more routed one, with a copy on each device.",
        ),
    ] = False,
    expert_skew: Annotated[
        str,
        typer.Option(
            help="default, uniform, zipf:S, or a JSON file of tokens per expert, as dsjax serve records them; "
            "EARLIER.json,LATER.json: what a balancer has seen, and what it then served."
        ),
    ] = "default",
    engine: Annotated[
        str,
        typer.Option(
            help="dsjax: what dsjax serve can do; published: kernels, overlaps and transfers of SGLang and TensorRT-LLM; vllm, sglang, "
            "tensorrt-llm: the same in layouts that this engine can run, with its own commands."
        ),
    ] = "dsjax",
    dispatch: Annotated[
        str | None,
        typer.Option(
            help="deepep (as published), or dsjax's own: auto, gather, padded, ragged. Default: the engine's."
        ),
    ] = None,
    compiled: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON of dsjax dryrun: its figures in place of assumptions where it is of a layout; repeatable."
        ),
    ] = None,
    operators: Annotated[
        Path | None, typer.Option(help="Folder of your own tables of operations, in the form of configs/operators.")
    ] = None,
    host_scheduling: Annotated[
        str, typer.Option(help="overlapped with the device's work, or serial: the device waits for it.")
    ] = "overlapped",
    two_batch_overlap: Annotated[str, typer.Option(help="auto, on or off.")] = "auto",
    mode: Annotated[
        str, typer.Option(help="aggregated, separated, both; or static, static_ctx, static_gen: one batch.")
    ] = "both",
    batch: Annotated[
        int | None, typer.Option(help="Static modes: requests of a DP rank; default: all that fit.", min=1)
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="--mode static_gen: cached tokens of every request; default: as --input and --output make them.", min=1
        ),
    ] = None,
    prefill_tokens: Annotated[int, typer.Option(help="Most prompt tokens of a DP rank in a step.")] = 16384,
    mesh: Annotated[
        str | None, typer.Option(help="Plan with instances of this mesh only: dp=32, or dp=4,tp=8.")
    ] = None,
    prefill_mesh: Annotated[str | None, typer.Option(help="Separated: mesh of a prefill instance.")] = None,
    decode_mesh: Annotated[str | None, typer.Option(help="Separated: mesh of a decode instance.")] = None,
    prefill_instances: Annotated[int | None, typer.Option(help="Separated: how many of them.")] = None,
    decode_instances: Annotated[int | None, typer.Option(help="Separated: how many of them.")] = None,
    max_devices: Annotated[int | None, typer.Option(help="Use no more devices than this.")] = None,
    max_devices_per_instance: Annotated[
        int | None, typer.Option(help="No instance is wider than this: what one failure takes down.")
    ] = None,
    price_per_hour: Annotated[
        float | None, typer.Option(help="Of one device, in any currency: the cost of a million output tokens follows.")
    ] = None,
    explain: Annotated[
        str | None,
        typer.Option(
            help="Derivation of the best, and which assumptions widen it most: tpot, ttft, throughput or memory."
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="latency, bandwidth, loss-of-hosts, hosts or concurrency, or at your own points: latency=1,10,100; hosts=8:400,16:800 "
            "with so many requests in flight; repeatable."
        ),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Play arrivals through on the best: percentiles, goodput.")
    ] = False,
    num_prompts: Annotated[int, typer.Option(help="--simulate: requests that are measured.", min=1)] = 1000,
    request_rate: Annotated[
        str | None,
        typer.Option(
            help="--simulate: inf starts as benchmarks do, all users at once, and nobody comes after the last. Default: a steady service."
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            help="--simulate: requests left out at the start. Default: none with --request-rate inf, else a stay's.",
            min=0,
        ),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="--simulate: 1 is Poisson, less is burstier, as vllm bench serve has it.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="--simulate: of lengths and arrivals.", min=0)] = 0,
    rows: Annotated[int, typer.Option(help="Rows of the table.", min=1)] = 8,
    pareto: Annotated[Path | None, typer.Option(help="Write the Pareto front: .html, or a picture.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for the sweeps' pictures.")] = None,
    recipe_file: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            help="Write the winner's recipe: FILE.json, FILE.sh with the commands of --engine vllm, sglang or tensorrt-llm, FILE.yaml for "
            "NVIDIA Dynamo's operator, or a folder with a kustomize overlay for Kubernetes.",
        ),
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write JSON to this file instead; - for standard output.")
    ] = None,
) -> None:
    """Find the layout for a cluster, a workload and objectives; every figure with its kind and interval."""
    from dsjax.config import load_config
    from dsjax.plan.compiled import read_dry_run
    from dsjax.plan.engine import PUBLISHED, find_engine
    from dsjax.plan.explain import EXPLAINED
    from dsjax.plan.explain import explain as derive
    from dsjax.plan.measured import read_measured
    from dsjax.plan.measured_network import check_device, read_network
    from dsjax.plan.operator_tables import operator_tables
    from dsjax.plan.own_cluster import choose_precision, find_cluster, with_tables
    from dsjax.plan.question import Question
    from dsjax.plan.recipe import check_recipe, published_beside, recipe, write_script
    from dsjax.plan.report import show, show_sweep, show_usages, to_json
    from dsjax.plan.search import instances, search, usages
    from dsjax.plan.skew import read_skew
    from dsjax.plan.static import STATIC_MODES, no_room, show_static, static_of
    from dsjax.plan.sweep import read_sweep
    from dsjax.plan.sweep import sweep as run_sweep
    from dsjax.plan.workload import Lengths, Objective, Options, Pins, RequestClass, Workload
    from sharding.mesh import MeshSpec

    if mode not in (*_MODES, *STATIC_MODES):
        raise UserError(f"--mode is {mode!r}, expected one of {', '.join((*_MODES, *STATIC_MODES))}")
    if explain is not None and explain not in EXPLAINED:
        raise UserError(f"--explain is {explain!r}, expected one of {', '.join(EXPLAINED)}")
    if not 0 < burstiness < math.inf:
        raise UserError(f"--burstiness is {burstiness:g}, expected a number above 0")
    if burstiness != 1 and (concurrency is not None or request_rate):
        raise UserError(
            "--burstiness is of arrivals at a rate; with --concurrency and --request-rate inf each request follows one that ended"
        )
    if request_rate not in (None, "inf"):
        raise UserError(
            f"--request-rate is {request_rate!r}, expected inf: all users at once; give --rate for requests a second"
        )
    if (request_rate or warmup is not None) and not simulate:
        raise UserError("--request-rate and --warmup are of --simulate; give it too")
    if request_rate and rate is not None:
        raise UserError("--request-rate inf starts a fixed number of users at once; give --concurrency, not --rate")
    if batch is not None and mode not in STATIC_MODES:
        raise UserError(f"--batch is for --mode {', '.join(STATIC_MODES)}; with --mode {mode} give --concurrency")
    if context is not None and mode != "static_gen":
        raise UserError(
            f"--context is of decode steps alone, --mode {mode} follows from --input and --output; give --mode static_gen"
        )
    of_a_service = {
        "--explain": explain, "--pareto": pareto, "--sweep": sweep, "--recipe": recipe_file, "--slo": slo, "--concurrency": concurrency,
        "--rate": rate, "--ttft-ms": ttft_ms, "--tpot-ms": tpot_ms, "--throughput": throughput, "--prefill-mesh": prefill_mesh,
        "--decode-mesh": decode_mesh, "--prefill-instances": prefill_instances, "--decode-instances": decode_instances,
        "--price-per-hour": price_per_hour, "--simulate": simulate or None,
    }  # fmt: skip
    given = next((flag for flag, value in of_a_service.items() if value not in (None, [])), None)
    if mode in STATIC_MODES and given:
        raise UserError(
            f"{given} is of a service, --mode {mode} is one batch of every layout; give aggregated, separated or both"
        )
    if plots and not sweep:
        raise UserError(
            "--plots draws sweeps, and there is none; give --sweep latency or another, or --pareto FILE.png for the front"
        )
    if explain and json_file is not None:
        raise UserError("--explain is for reading, --json writes data in its place; give one of them")
    if classes and (input_tokens or output_tokens):
        raise UserError("--class has lengths of its own, in place of --input and --output; give one or the other")
    serving = find_engine(engine)
    check_recipe(recipe_file, serving.name)
    swept_points = [read_sweep(text) for text in sweep or ()]
    config = load_config(model)
    modules = read_measured(measured, config) if measured else None
    found, tables = find_cluster(cluster, modules), operator_tables(operators)
    if modules is None:
        found, tables = with_tables(found, tables)
    if network is not None:
        timed = read_network(network)
        check_device(timed, found.hardware, found.name)
        found = dataclasses.replace(found, measured=timed)
    if price_per_hour is not None:
        if not 0 < price_per_hour < math.inf:
            raise UserError(f"--price-per-hour is {price_per_hour:g}, expected a number above 0")
        if found.prefill is not None:
            raise UserError(
                f"--price-per-hour is of one kind of device, and {found.name} has two; give price_per_hour in the file of each of them"
            )
        priced = dataclasses.replace(found.hardware, price_per_hour=price_per_hour)
        found = dataclasses.replace(found, hardware=priced)
    load = {"concurrency": concurrency, "rate": rate, "prefix_hit": prefix_hit}
    if classes:
        work = Workload.of_classes([RequestClass.parse(text) for text in classes], **load)
    else:
        work = Workload(
            Lengths.parse(input_tokens or "2000", "--input"), Lengths.parse(output_tokens or "500", "--output"), **load
        )
    objective = Objective(ttft_ms and ttft_ms / 1e3, tpot_ms and tpot_ms / 1e3, throughput)
    if context is not None:
        work = dataclasses.replace(work, decoding_at=float(context))
    slos = []
    if slo:  # what plays requests brings the engine's scheduler in, a third of a second
        from dsjax.plan.percentiles import Slo, guide, show_within, within

        slos = [Slo.parse(text, work) for text in slo]
        objective = guide(objective, slos, work)
    question = Question(
        config,
        found.resized(hosts) if hosts else found,
        work,
        objective,
        Options(
            serving.precision(choose_precision(precision, kv_cache_dtype, modules)),
            mtp,
            mtp_acceptance,
            redundant_experts,
            read_skew(expert_skew),
            two_batch_overlap,
            _MODES.get(mode, _MODES["both"]),
            prefill_tokens,
            max_devices,
            dispatch or serving.dispatch,
            tuple(read_dry_run(path) for path in compiled or ()),
            MeshSpec.parse(mesh) if mesh else None,
            modules,
            tables,
            host_scheduling,
            serving,
            Pins(
                MeshSpec.parse(prefill_mesh) if prefill_mesh else None,
                MeshSpec.parse(decode_mesh) if decode_mesh else None,
                prefill_instances,
                decode_instances,
            ),
            max_devices_per_instance,
            enable_shared_experts_fusion,
        ),
    )
    console = report_console()
    if mode in STATIC_MODES:
        _, fitting, too_large = instances(question)
        results, taken = static_of(fitting, mode, batch), usages(question, fitting + too_large)
        if json_file is None:
            show_usages(console, taken)
            show_static(console, results, mode, rows, "" if results else no_room(fitting, too_large, batch))
        else:
            ranked, read = [r.to_json() for r in results[:rows]], [u.to_json() for u in taken]
            write_json(
                json_file, {"model": model, "cluster": found.name, "mode": mode, "ranked": ranked, "compiled": read}
            )
        return
    answer, kept = search(question), []
    if slos:
        answer, kept = within(answer, slos, num_requests=num_prompts, seed=seed, burstiness=burstiness)
    beside = None
    if serving.name == "dsjax" and not compiled and not measured:
        options = dataclasses.replace(question.options, engine=PUBLISHED, dispatch=dispatch or PUBLISHED.dispatch)
        beside = published_beside(answer.winner, search(dataclasses.replace(question, options=options)).winner)
    best = answer.winner or (answer.missed[0] if answer.missed else None)
    sweeps = [run_sweep(question, best, *points) for points in swept_points] if best else []
    outcomes = []
    if simulate and best:
        from dsjax.plan.simulation.report import show_simulation, simulations

        skipped = 0 if request_rate and warmup is None else warmup
        outcomes = simulations(best, question.bounds, burstiness, num_prompts, seed, skipped, bool(request_rate))
    if pareto:
        from dsjax.plan.pareto import draw_front, write_html

        with writing(pareto):
            (write_html if pareto.suffix == ".html" else draw_front)(answer, pareto)
    if plots:
        from dsjax.plan.pareto import draw_sweep

        with writing(plots):
            plots.mkdir(parents=True, exist_ok=True)
            for swept in sweeps:
                draw_sweep(swept, plots / f"{swept.quantity}.png")
    if recipe_file and not answer.winner:
        why = "no deployment meets the objectives" if best else "nothing fits"
        report_console(stderr=True).print(Text(f"--recipe {recipe_file} is not written: {why}", "yellow"))
    elif recipe_file and recipe_file.suffix == ".json":
        write_json(recipe_file, recipe(model, question, answer.winner))
    elif recipe_file and recipe_file.suffix == ".sh":
        with writing(recipe_file):
            write_script(recipe_file, model, question, answer.winner, shlex.join(["dsjax", *sys.argv[1:]]))
    elif recipe_file:
        from dsjax.plan.dynamo_graph import write_graph
        from dsjax.plan.kubernetes import write_overlay

        write = write_graph if recipe_file.suffix in (".yaml", ".yml") else write_overlay
        with writing(recipe_file):
            write(recipe_file, model, question, answer.winner, shlex.join(["dsjax", *sys.argv[1:]]))
    if json_file is not None:
        write_json(
            json_file,
            {
                **to_json(answer, model, rows, sweeps, outcomes),
                "published": beside,
                "percentiles": [one.to_json(slos) for one in kept],
            },
        )
        return
    if slos:
        show_within(console, kept, slos)
    show(console, answer, model, rows)
    if beside:
        console.print(Text("published: " + beside, "yellow"))
    if explain:
        console.print(
            Text(derive(best, explain)) if best else "nothing fits: there is nothing to explain", soft_wrap=True
        )
    if outcomes:
        show_simulation(console, best, outcomes)
    for swept in sweeps:
        show_sweep(console, swept)
